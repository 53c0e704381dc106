"""Common parts of the shipped tasks: data sets, character tokenizers and small Qwen3 models.

The models learn generated solutions on a CPU. The same seed gives the same result on the same kind
of CPU.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
USER, ASSISTANT, SYSTEM, TOOL = "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

MATRIX_LEARNING_RATE = 0.02
VECTOR_LEARNING_RATE = 0.003
WARMUP_STEPS = 30
BATCHES_PER_POOL = 32
"""Batches in a pool. A pool is sorted by length before it is cut, so that batches have little
padding. In a batch of short examples each token counts more. So if the first token of a response
decides how long it is, take one batch per pool."""
IGNORED = -100
"""Label that cross-entropy ignores."""

Batch = tuple[Tensor, Tensor]
"""Token ids and labels."""


class Stated(Protocol):
    """A problem with its prompt and its answer."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> object: ...


AnyStated = TypeVar("AnyStated", bound=Stated)


def build_tokenizer(
    characters: str, max_tokens: int, words: Sequence[str] = (), roles: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character. Decoding an encoded text gives exactly the
    same text.

    `words`: texts that are one token each, such as `<tool_call>`. `roles`: tokens of roles beside
    user and assistant.
    """
    roles = [USER, ASSISTANT, *roles]
    vocab = {token: i for i, token in enumerate([PAD, UNKNOWN, END, *roles, *words, *characters])}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int]) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3, whose context is the tokenizer's maximum length. The head size is
    32, which vLLM's CPU attention supports."""
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
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


def write_data(path: Path, data_source: str, problems: Iterator[Stated], num_prompts: int) -> None:
    """Write prompts in veRL's columns. The file's name is the name of the split."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, problem in enumerate(islice(problems, num_prompts))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"wrote {path}: {num_prompts} prompts")


class Corpus(Generic[AnyStated]):
    """An endless stream of batches of solved problems, without repeats."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        problems: Iterator[AnyStated],
        rng: Random,
        batch_size: int,
        *,
        batches_per_pool: int = BATCHES_PER_POOL,
        before_prompt: str = "",
    ) -> None:
        """`rng`: shuffles the batches. Problems and solutions should be drawn from it too.
        `before_prompt`: what the chat template writes before each conversation."""
        self._tokenizer = tokenizer
        self._problems = problems
        self._rng = rng
        self._batch_size = batch_size
        self._pool_size = batch_size * batches_per_pool
        self._before_prompt = before_prompt
        ids = tokenizer.get_vocab()
        self._observed_from = {ids[token] for token in (USER, SYSTEM, TOOL) if token in ids}
        self._sampled_after = ids[ASSISTANT]

    def batches(self, solve: Callable[[AnyStated], str]) -> Iterator[Batch]:
        """Yield token ids and labels, padded on the right. Only what the policy samples has labels.
        Cut examples that are longer than the model's context.

        `solve`: returns a response. Tools' answers and generation prompts may be in it.
        """
        size = self._batch_size
        while True:
            pool = list(islice(self._problems, self._pool_size))
            examples = [self.encode(problem.prompt, solve(problem)) for problem in pool]
            examples.sort(key=_length)
            batches = [examples[i : i + size] for i in range(0, len(pool), size)]
            self._rng.shuffle(batches)
            yield from map(self._pad, batches)

    def encode(self, prompt: str, solution: str) -> tuple[list[int], list[int]]:
        """Return the token ids and the labels of a solved problem."""
        text = f"{self._before_prompt}{USER}{prompt}{END}{ASSISTANT}{solution}{END}"
        ids = self._tokenizer.encode(text)[: self._tokenizer.model_max_length]
        return ids, self._labels(ids)

    def _labels(self, ids: list[int]) -> list[int]:
        """Return the ids without those that the policy does not sample: from another role's token
        to the next generation prompt."""
        labels, observed = [], False
        for id in ids:
            observed = observed or id in self._observed_from
            labels.append(IGNORED if observed else id)
            observed = observed and id != self._sampled_after
        return labels

    def _pad(self, examples: list[tuple[list[int], list[int]]]) -> Batch:
        width = max(map(_length, examples))
        pad = self._tokenizer.pad_token_id
        ids = [ids + [pad] * (width - len(ids)) for ids, _ in examples]
        labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in examples]
        return torch.tensor(ids), torch.tensor(labels)


class Optimizer:
    """Muon for the layers' matrices and AdamW for the rest, with warm-up and linear decay."""

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
        """Apply the gradients, clear them, and update the learning rates."""
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[Batch],
    num_steps: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Train a model in place."""
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
    """Return the logits of the response's tokens, shape [tokens, vocabulary]. Padding is on the
    right, where causal attention does not look, so there is no mask."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[labels[:, 1:] != IGNORED])


def response_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the response's tokens."""
    targets = labels[:, 1:]
    targets = targets[targets != IGNORED]
    return torch.nn.functional.cross_entropy(response_logits(model, ids, labels), targets)


def save(directory: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model and its tokenizer as a Hugging Face directory."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    size_bytes = sum(file.stat().st_size for file in directory.iterdir())
    print(f"wrote {directory}: {model.num_parameters():,} parameters, {size_bytes:,} bytes")


def write_splits(
    draw_problems: Callable[[str, Random], Iterator[Stated]],
    num_prompts: Mapping[str, int],
    data_source: str,
    out: Path,
    seed: int,
) -> None:
    """Write one Parquet file per split. `num_prompts`: number of prompts by split."""
    for split, num in num_prompts.items():
        write_data(
            out / "data" / f"{split}.parquet", data_source, draw_problems(split, Random(seed)), num
        )


def write_model(
    tokenizer: PreTrainedTokenizerFast,
    shape: dict[str, int],
    batches: Callable[[PreTrainedTokenizerFast, int], Iterator[Batch]],
    num_steps: int,
    out: Path,
    seed: int,
) -> None:
    """Train a base model, and write it with its tokenizer. `batches`: makes the training batches
    from the tokenizer and the seed."""
    torch.manual_seed(seed)
    model = build_model(tokenizer, shape)
    train(model, batches(tokenizer, seed), num_steps, partial(response_loss, model))
    save(out / "model", model, tokenizer)


def write_parts(
    description: str, out: Path, parts: Mapping[str, Callable[[Path, int], None]]
) -> None:
    """Run the command line of a task: write all parts, or the part given by --only.

    `out`: default directory of the parts' folders.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, help="directory of the folders")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument(
        "--only", choices=tuple(parts), help="write only this part, from the others in --out"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in [arguments.only] if arguments.only else parts:
        parts[name](arguments.out, arguments.seed)


def _length(example: tuple[list[int], list[int]]) -> int:
    return len(example[0])
