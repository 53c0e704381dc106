"""Build the long-tail task's data sets and base model: `python -m infra.long_tail.build`.

This writes `data/{train,validation}.parquet` (veRL's columns) and `model/` (a Qwen3 of under 2 MB
with a character tokenizer). The model learns from generated solutions: first of short chains, then
of longer ones. Part of the solutions are hasty. The same seed gives the same result on the same
kind of CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

from infra.demo.build import DATA_SOURCE, MODEL_SHAPE
from infra.long_tail.task import NAMES, draw_problem, draw_problems, solve
from infra.small_model import (
    Batch,
    Corpus,
    build_tokenizer,
    write_model,
    write_parts,
    write_splits,
)
from infra.splits import draw_distinct

NUM_PROMPTS = {"train": 128, "validation": 64}
CHARACTERS = "0123456789+-=?;# \n" + NAMES
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Stage:
    """A stage of the training: a number of steps on chains of a given length."""

    num_steps: int
    batch_size: int
    careful_share: float
    max_terms: int | None = None
    """The number of terms is uniform from 2 to this. None: drawn like the task's."""


STAGES = (
    Stage(num_steps=600, batch_size=16, careful_share=0.5, max_terms=10),
    Stage(num_steps=300, batch_size=12, careful_share=0.5, max_terms=20),
    Stage(num_steps=450, batch_size=8, careful_share=0.7, max_terms=40),
    Stage(num_steps=400, batch_size=8, careful_share=0.3),
)
"""Chains grow stage by stage. If all were long at once, the model would forget what it learnt on
short ones. The last stage has few careful solutions, so that reinforcement learning can still
improve the model."""


def batches_in_stages(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Yield the batches of all stages in order."""
    rng = Random(seed)

    def batches(stage: Stage) -> Iterator[Batch]:
        problems = draw_problems("corpus", rng)
        if (most := stage.max_terms) is not None:
            problems = draw_distinct("corpus", lambda: draw_problem(rng, rng.randint(2, most)))
        corpus = Corpus(tokenizer, problems, rng, stage.batch_size)
        return corpus.batches(lambda chain: solve(chain, rng.random() < stage.careful_share, rng))

    for stage in STAGES:
        yield from islice(batches(stage), stage.num_steps)


PARTS = {
    "data": partial(write_splits, draw_problems, NUM_PROMPTS, DATA_SOURCE),
    "model": partial(
        write_model,
        build_tokenizer(CHARACTERS, MAX_POSITIONS),
        MODEL_SHAPE,
        batches_in_stages,
        sum(stage.num_steps for stage in STAGES),
    ),
}

if __name__ == "__main__":
    write_parts(__doc__ or "", Path(__file__).parent, PARTS)
