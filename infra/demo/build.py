"""Builds the demo's data sets, base model and drafter from nothing: `python infra/demo/build.py`.

Writes `data/{train,validation}.parquet` (veRL's columns), `model/` (a Qwen3 of under 2 MB with
a character tokenizer) and `drafter/` (a smaller one that drafts for it). The model is trained on
generated solutions in two stages: careful ones teach it to calculate, then a population of careful
and hasty solvers teaches it bad habits, which are what reinforcement learning is to cure. One seed
gives one result on one kind of CPU; the model takes about six minutes on one core, the drafter
three and a half.

The drafter has the model's tokens, so that it can draw with the model's noise
(`engines.inference.sampling.noise`). It learns from the model's own probabilities of mixed
solutions: it is to imitate the model, not to be right. Of the tokens of 512 responses to the
validation prompts, drawn by the model at temperature 1, it drafts 93.6 % with the model's noise,
89.0 % with noise of its own and 91.8 % greedily. Learning from the solutions alone takes half the
time a step and gets less far: after 500 steps 76.1 % with the model's noise, against 77.2 %.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from task import CAREFUL, NAMES, Problem, draw_habits, draw_problems, solve
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

DATA_SOURCE = "refrain/arithmetic"
PARTS = ("data", "model", "drafter")
NUM_PROMPTS = {"train": 256, "validation": 128}

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
CHARACTERS = "0123456789+-=?# \n" + NAMES
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
MAX_POSITIONS = 1024

MODEL_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""0.45 million parameters."""
DRAFTER_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""76,000 parameters. One layer cannot find what comes after a name in the prompt: after 500 steps
it drafts 66.7 % with the model's noise, two layers 77.2 %."""

BATCH_SIZE = 32
NUM_CAREFUL_STEPS = 700
NUM_MIXED_STEPS = 600
NUM_DRAFTER_STEPS = 1500
MATRIX_LEARNING_RATE = 0.02
VECTOR_LEARNING_RATE = 0.003
WARMUP_STEPS = 30
BATCHES_PER_POOL = 32
"""Batches are cut from a pool sorted by length, so that little of a batch is padding."""
IGNORED = -100
"""The label that cross-entropy leaves out."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; decoding joins them again, so text round-trips exactly."""
    specials = [PAD, UNKNOWN, END, USER, ASSISTANT]
    vocab = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int]) -> Qwen3ForCausalLM:
    """An untrained Qwen3; head size 32 suits vLLM's CPU attention."""
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def build_rows(split: str, num_prompts: int, rng: Random) -> pa.Table:
    """The prompts of one split in veRL's columns."""
    problems = islice(draw_problems(split, rng), num_prompts)
    return pa.Table.from_pylist(
        [
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": problem.prompt}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
                "extra_info": {"split": split, "index": index},
            }
            for index, problem in enumerate(problems)
        ]
    )


Batch = tuple[Tensor, Tensor]
"""Token ids and labels."""


class Corpus:
    """Batches of solved problems from the corpus split, without end and without repeats."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._problems = draw_problems("corpus", self._rng)

    def batches(self, careful: bool) -> Iterator[Batch]:
        """Token ids and labels, right-padded; only the response is labelled."""
        while True:
            pool = list(islice(self._problems, BATCH_SIZE * BATCHES_PER_POOL))
            examples = sorted((self._encode(problem, careful) for problem in pool), key=_length)
            batches = [examples[i : i + BATCH_SIZE] for i in range(0, len(pool), BATCH_SIZE)]
            self._rng.shuffle(batches)
            yield from map(self._pad, batches)

    def _encode(self, problem: Problem, careful: bool) -> tuple[list[int], list[int]]:
        habits = CAREFUL if careful else draw_habits(self._rng)
        prompt = self._tokenizer.encode(f"{USER}{problem.prompt}{END}{ASSISTANT}")
        response = self._tokenizer.encode(solve(problem, habits, self._rng) + END)
        return prompt + response, [IGNORED] * len(prompt) + response

    def _pad(self, examples: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        width = max(map(_length, examples))
        pad = self._tokenizer.pad_token_id
        ids = [ids + [pad] * (width - len(ids)) for ids, _ in examples]
        labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in examples]
        return torch.tensor(ids), torch.tensor(labels)


class Optimizer:
    """Muon for the layers' matrices and AdamW for the rest, on one warm-up and linear decay."""

    def __init__(self, model: Qwen3ForCausalLM, num_steps: int) -> None:
        layers = list(model.model.layers.parameters())
        matrices = [p for p in layers if p.ndim == 2]
        vectors = [p for p in layers if p.ndim != 2]
        others = [model.model.embed_tokens.weight, model.model.norm.weight]
        self._optimizers = (
            torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.0),
            torch.optim.AdamW(
                [*vectors, *others], lr=VECTOR_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
            ),
        )

        def scale(step: int) -> float:
            return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / num_steps)

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in self._optimizers]

    def step(self) -> None:
        """Applies the gradients, clears them and moves the learning rates on."""
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def in_stages(corpus: Corpus) -> Iterator[Batch]:
    """First to calculate, then to work in mixed habits."""
    yield from islice(corpus.batches(careful=True), NUM_CAREFUL_STEPS)
    yield from islice(corpus.batches(careful=False), NUM_MIXED_STEPS)


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[Batch],
    num_steps: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Trains in place."""
    optimizer = Optimizer(model, num_steps)
    started_s = time.monotonic()
    for step, (ids, labels) in enumerate(islice(batches, num_steps), start=1):
        loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            spent_s = time.monotonic() - started_s
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}  {spent_s:.0f} s", flush=True)


def response_logits(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Logits of the response's tokens, [tokens, vocabulary]. Padding stands on the right, where
    causal attention never looks: no mask is needed."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[labels[:, 1:] != IGNORED])


def response_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the response's tokens."""
    targets = labels[:, 1:]
    targets = targets[targets != IGNORED]
    return torch.nn.functional.cross_entropy(response_logits(model, ids, labels), targets)


def distillation_loss(
    drafter: Qwen3ForCausalLM, model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor
) -> Tensor:
    """Mean divergence KL(model || drafter) over the response's tokens, in nats."""
    with torch.no_grad():
        wanted = response_logits(model, ids, labels).log_softmax(-1)
    drafted = response_logits(drafter, ids, labels).log_softmax(-1)
    return torch.nn.functional.kl_div(drafted, wanted, reduction="batchmean", log_target=True)


def _length(example: tuple[list[int], list[int]]) -> int:
    return len(example[0])


def write_data(directory: Path, seed: int) -> None:
    """Writes one Parquet file per split."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, num_prompts in NUM_PROMPTS.items():
        path = directory / f"{split}.parquet"
        pq.write_table(build_rows(split, num_prompts, Random(seed)), path)
        print(f"wrote {path}: {num_prompts} prompts")


def write_model(directory: Path, seed: int) -> None:
    """Trains the base model and writes it with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, MODEL_SHAPE)
    batches = in_stages(Corpus(tokenizer, seed))
    train(model, batches, NUM_CAREFUL_STEPS + NUM_MIXED_STEPS, partial(response_loss, model))
    save(directory, model, tokenizer)


def write_drafter(directory: Path, model_directory: Path, seed: int) -> None:
    """Trains the drafter on the base model's logits and writes it with the same tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(model_directory, local_files_only=True)
    drafter = build_model(tokenizer, DRAFTER_SHAPE)
    batches = Corpus(tokenizer, seed).batches(careful=False)
    train(drafter, batches, NUM_DRAFTER_STEPS, partial(distillation_loss, drafter, model))
    save(directory, drafter, tokenizer)


def save(directory: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes both as Hugging Face's loaders want them."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    size_bytes = sum(file.stat().st_size for file in directory.iterdir())
    print(f"wrote {directory}: {model.num_parameters():,} parameters, {size_bytes:,} bytes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where the folders go"
    )
    parser.add_argument("--seed", type=int, default=0, help="one seed, one result (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument(
        "--only", choices=PARTS, help="write this one; a drafter learns from the model in --out"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    out, seed = arguments.out, arguments.seed
    parts = [arguments.only] if arguments.only else PARTS
    if "data" in parts:
        write_data(out / "data", seed)
    if "model" in parts:
        write_model(out / "model", seed)
    if "drafter" in parts:
        write_drafter(out / "drafter", out / "model", seed)


if __name__ == "__main__":
    main()
