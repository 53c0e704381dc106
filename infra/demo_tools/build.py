"""Build the data sets and the base model of `make demo-tools`: `python -m infra.demo_tools.build`.

This writes `data/{train,validation}.parquet` (veRL's columns) and `model/` (a Qwen3 of under 2 MB).
The model learns from generated conversations with a calculator. They have the tokens of a run's
conversations, and the loss covers what the policy samples. The same seed gives the same result on
the same kind of CPU.
"""

import string
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

from infra.demo.build import DATA_SOURCE, MODEL_SHAPE
from infra.demo_tools.calculator import calculate
from infra.demo_tools.task import WORDS, SolverTurn, SumOfProducts, draw_problems, solve
from infra.small_model import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    SYSTEM,
    TOOL,
    Batch,
    Corpus,
    build_tokenizer,
    write_model,
    write_parts,
    write_splits,
)

NUM_PROMPTS = {"train": 512, "validation": 128}
CHARACTERS = string.printable[:95] + "\n"
"""All of ASCII that can be printed, because refrain explains faulty calls in English."""
MAX_POSITIONS = 256
BATCH_SIZE = 32
NUM_STEPS = 800

TOOLS_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|system|>' + tools | map(attribute='function.name') | join(' ') + '<|end|>' -}}"
    "{%- endif -%}"
)
"""Template of what comes before a conversation with tools: their names."""
TOOLS = f"{SYSTEM}{calculate.__name__}{END}"
"""What `TOOLS_TEMPLATE` writes."""


def tools_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model that calls tools."""
    tokenizer = build_tokenizer(CHARACTERS, MAX_POSITIONS, WORDS, (SYSTEM, TOOL))
    tokenizer.chat_template = TOOLS_TEMPLATE + CHAT_TEMPLATE
    return tokenizer


def written(conversation: Sequence[SolverTurn]) -> str:
    """Return a conversation after the prompt, as the chat template writes it, without the last end
    token."""
    *calling, final = conversation
    return "".join([*map(_with_answers, calling), final.text])


def corpus_of(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[Corpus[SumOfProducts], Random]:
    """Return the corpus, and the random numbers for its solutions."""
    rng = Random(seed)
    problems = draw_problems("corpus", rng)
    corpus = Corpus(tokenizer, problems, rng, BATCH_SIZE, batches_per_pool=1, before_prompt=TOOLS)
    return corpus, rng


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Yield batches of conversations without end."""
    corpus, rng = corpus_of(tokenizer, seed)
    return corpus.batches(lambda problem: written(solve(problem, rng)))


def _with_answers(turn: SolverTurn) -> str:
    return "".join([turn.text, END, *(f"{TOOL}{one}{END}" for one in turn.answers), ASSISTANT])


PARTS = {
    "data": partial(write_splits, draw_problems, NUM_PROMPTS, DATA_SOURCE),
    "model": partial(write_model, tools_tokenizer(), MODEL_SHAPE, batches, NUM_STEPS),
}

if __name__ == "__main__":
    write_parts(__doc__ or "", Path(__file__).parent, PARTS)
