"""A synthetic policy of known entropy, and the trace of its rollouts.

The policy is a Markov chain of second order over `VOCABULARY` tokens, with a table of logits for
each class of prompts. It samples as an engine does at temperature 1: the token at a position is the
argmax of logits plus the sample's own noise. It learns from epoch to epoch. Every transition has a
value. A response is right if its mean value is above the median of the first epoch. Logits grow by
`LEARNING_RATE` times the value.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numba import njit

from refrain.engines.inference.sampling.cpu import gumbel, philox, stream_of
from refrain.engines.simulate.trace import Trace
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import Split

VOCABULARY = 36
CLASSES = 16
LEARNING_RATE = 0.1
"""Growth of logits per epoch and unit of value. Values are standard normal."""
PROMPT_TOKENS = 4
LENGTHS = (60, 180)
"""Fewest and most tokens of a response. Lengths do not depend on tokens."""
SEED = 0


@dataclass(frozen=True, slots=True)
class DrawnRollouts:
    """Rollouts, and facts about the policy that generated them."""

    trace: Trace
    entropies: tuple[float, ...]
    """Nats per token, by epoch, averaged over generated tokens."""
    right_shares: tuple[float, ...]
    """Share of right responses, by epoch."""


def draw(
    entropy: float, num_epochs: int, num_prompts: int, group_size: int, step_prompts: int
) -> DrawnRollouts:
    """Return rollouts of a policy whose first epoch has about this entropy in nats per token, below
    `log(VOCABULARY)`. Sample keys are those of a run with seed `SEED`."""
    rng = np.random.default_rng(SEED)
    shape = (CLASSES, VOCABULARY, VOCABULARY, VOCABULARY)
    logits = _sharpen(rng.standard_normal(shape), entropy)
    values = rng.standard_normal(shape)
    prompts = [_prompt(number) for number in range(num_prompts)]
    lengths = rng.integers(*LENGTHS, size=(num_prompts, group_size), endpoint=True)
    columns: dict[str, list] = {
        name: [] for name in ("step", "epoch", "prompt_key", "sample_index")
    }
    responses: list[np.ndarray] = []
    means: list[float] = []
    entropies: list[float] = []
    for epoch in range(num_epochs):
        table = logits + epoch * LEARNING_RATE * values
        of_rows = _entropies(table)
        found: list[float] = []
        for number, prompt in enumerate(prompts):
            key, kind = f"prompt-{number}", number % CLASSES
            step = 1 + (epoch * num_prompts + number) // step_prompts
            for index in range(group_size):
                noise = sample_key(SEED, step, Split.TRAIN, key, index)
                response = _generate(table[kind], prompt, int(lengths[number, index]), noise)
                places = _transitions(prompt, response)
                found.append(float(of_rows[kind][places[:2]].mean()))
                means.append(float(values[kind][places].mean()))
                responses.append(response)
                for name, value in zip(columns, (step, epoch, key, index), strict=True):
                    columns[name].append(value)
        entropies.append(float(np.mean(found)))
    right = np.array(means) > np.median(means[: num_prompts * group_size])
    ids = [prompts[int(key.rpartition("-")[2])] for key in columns["prompt_key"]]
    table = columns | {
        "prompt_tokens": [PROMPT_TOKENS] * len(responses),
        "response_tokens": [len(response) for response in responses],
        "reward": right.astype(float),
        "prompt_token_ids": ids,
        "response_token_ids": responses,
    }
    shares = right.reshape(num_epochs, -1).mean(1)
    trace = Trace(pa.table(table), f"a synthetic policy of {entropy} nats")
    return DrawnRollouts(trace, tuple(entropies), tuple(shares.tolist()))


def _sharpen(normal: np.ndarray, entropy: float) -> np.ndarray:
    """Scale logits until the mean entropy of their rows is `entropy`."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if _entropies(middle * normal[:4]).mean() > entropy:
            low = middle
        else:
            high = middle
    return low * normal


def _entropies(logits: np.ndarray) -> np.ndarray:
    """Return the nats of each row, [..., tokens] to [...]."""
    shifted = logits - logits.max(-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(-1)
    return np.log(total) - (weights * shifted).sum(-1) / total


def _prompt(number: int) -> np.ndarray:
    """Return a prompt: its class first, then tokens that are unique within the class."""
    rest = number // CLASSES
    tokens = [number % CLASSES, rest % VOCABULARY, rest // VOCABULARY % VOCABULARY, VOCABULARY - 1]
    return np.array(tokens, np.int32)


def _transitions(prompt: np.ndarray, response: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the two tokens before each token of a response, and the token itself."""
    tokens = np.concatenate([prompt[-2:], response])
    return tokens[:-2], tokens[1:-1], tokens[2:]


@njit
def _generate(table, prompt, num_tokens, key):
    """Return a response of `num_tokens` tokens; int32."""
    tokens = np.empty(num_tokens, np.int32)
    before, last = prompt[-2], prompt[-1]
    for i in range(num_tokens):
        stream, second = stream_of(np.uint64(key), np.uint64(len(prompt) + i))
        best, chosen = -np.inf, 0
        for token in range(table.shape[2]):
            high, low = philox(stream, np.uint64(token), second)
            score = table[before, last, token] + gumbel(high, low)
            if score > best:
                best, chosen = score, token
        tokens[i] = chosen
        before, last = last, chosen
    return tokens
