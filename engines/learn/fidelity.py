"""Check, on a small copy of the model, that the trainer computes what transformers computes.

    transformers' own forward pass, in eager mode, one sample a row   ◄─┐
    the trainer's: alone, with others in a row, twice, as on GPUs     ◄─┴─ equal in float32?

Features that the trainer does not know make a difference here, in any model. Examples are a mask, a
sink, router noise, or a rope that depends on the row's length.
"""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from refrain.engines.learn.context import CARRIES_STATE
from refrain.engines.learn.determinism import check_steady
from refrain.engines.learn.loading import Loading, attention_of, give_memory, prepared
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.sample_isolation import keeps_samples_apart
from refrain.engines.learn.small_copy import SmallCopy, small_copy
from refrain.engines.learn.weights_fit import quiet
from refrain.engines.user_files import first_line

TOLERANCE = 1e-4
"""Largest difference between a sample's log-probabilities: the mean over its tokens, in nats."""
ROUNDING = 5.0
"""The same, as a multiple of how much rounding changes transformers' own log-probabilities. Some
models amplify rounding."""
MAX_ROUNDING = 2e-3
"""Rounding, in nats, beyond which a copy proves nothing."""
SEEDS = (0, 1)
"""Seeds of weights and tokens. A model is refused only if every seed shows a difference: rounding
alone may send one token to another expert."""
MAX_SECONDS = 60.0
"""Seconds after which no other copy is tried."""
MAX_PARAMETERS = 100_000_000
"""Most parameters of a copy: 400 MB of weights, four times."""
_Logprobs = list[NDArray[np.float32]]


@quiet()
@torch.no_grad()
@torch.random.fork_rng(devices=[])
def check_fidelity(
    config: PretrainedConfig,
    max_tokens: int,
    *,
    trust_remote_code: bool = False,
    shares_rows: bool = False,
) -> str | None:
    """Compare the trainer's log-probabilities with transformers' own, and raise ValueError if they
    differ. `max_tokens`: tokens of the run's longest sample. `shares_rows`: raise ValueError too if
    ranks cannot share a row of this model (`trainer.context_parallel`).

    Returns None, or why no small copy works.
    """
    why, began = "", time.monotonic()
    for narrow, in_order in product((True, False), (False, True)):
        try:
            copy = small_copy(
                config,
                max_tokens,
                narrow=narrow,
                in_order=in_order,
                trust_remote_code=trust_remote_code,
            )
            _try(copy, trust_remote_code)
        except Exception as error:  # Each model checks its sizes in its own way.
            why = why or first_line(error)
            if time.monotonic() - began > MAX_SECONDS:
                return why
            continue
        differences = (_difference(copy, seed, trust_remote_code) for seed in SEEDS)
        if (found := next(differences)) and all(differences):
            raise ValueError(_refusal(copy, found))
        if (
            shares_rows
            and _policy(copy, _filled(copy, SEEDS[0], trust_remote_code), trust_remote_code).alone
        ):
            raise ValueError(CARRIES_STATE)
        return None
    return why


def _try(copy: SmallCopy, trust: bool) -> None:
    """Raise an error if transformers itself cannot run the copy."""
    with torch.device("meta"):
        made = _made(copy, trust, "eager")
    if (number := sum(one.numel() for one in made.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"its smallest copy has {number / 1e9:.1f} billion parameters")
    samples, model = _samples(copy, SEEDS[0]), _filled(copy, SEEDS[0], trust)
    rounding = _rounding(model, samples, expected := _own_logprobs(model, samples))
    again = _largest(_own_logprobs(model, samples), expected)
    if again <= TOLERANCE and not rounding <= MAX_ROUNDING:
        raise ValueError(f"rounding changes its small copy by {rounding:.2g} nats")


def _rounding(
    model: PreTrainedModel, samples: Sequence[TokenSequence], expected: _Logprobs
) -> float:
    """Return how much other rounding of the weights changes transformers' own log-probabilities."""
    other = deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter))
    return _largest(_own_logprobs(other, samples), expected)


def _largest(found: _Logprobs, expected: _Logprobs) -> float:
    """Return the largest mean difference of any sample."""
    differences = (np.abs(one - two).mean() for one, two in zip(found, expected, strict=True))
    return float(np.max(list(differences)))


def _difference(copy: SmallCopy, seed: int, trust: bool) -> str | None:
    """Return the first difference that is too large, with weights and samples of this seed."""
    samples, model = _samples(copy, seed), _filled(copy, seed, trust)
    expected = _own_logprobs(model, samples)
    if (again := _largest(_own_logprobs(model, samples), expected)) > TOLERANCE:
        return f"transformers' own forward pass differs by {again:.2g} nats when it is run twice"
    most = max(TOLERANCE, ROUNDING * _rounding(model, samples, expected))
    try:
        for between, found, other in _pairs(copy, model, samples, expected, trust):
            if not (worst := _largest(found, other)) <= most:
                nats = np.concatenate(
                    [np.abs(one - two) for one, two in zip(found, other, strict=True)]
                )
                places = np.concatenate([np.arange(len(one)) for one in found])
                where = _place(copy, int(places[~(nats <= most)].min()))
                return f"{between} differ by {worst:.2g} nats in the mean, from {where}"
    except Exception as error:  # A model may fail in any way on the trainer's inputs.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"the trainer's forward pass fails: {kind}{first_line(error)}"
    return None


def _place(copy: SmallCopy, first: int) -> str:
    """Name the first token that differs, and the copy's fields with lengths up to it."""
    text = copy.config.get_text_config().to_dict()
    within = [length for length in copy.lengths if length <= first]
    beyond = [f"{k}={v}" for k, v in text.items() if type(v) is int and v in within]
    return f"token {first + 1} on" + (f", beyond its {' and '.join(beyond)}" if beyond else "")


def _pairs(
    copy: SmallCopy,
    model: PreTrainedModel,
    samples: Sequence[TokenSequence],
    expected: _Logprobs,
    trust: bool,
) -> Iterator[tuple[str, _Logprobs, _Logprobs]]:
    loading, policy = _loading(copy), _policy(copy, model, trust)
    check_steady(policy, torch.float32)
    room = sum(one.num_input_tokens for one in samples)
    packed = score_sequences(policy, samples, room, 1.0)
    yield "samples scored once and again", score_sequences(policy, samples, room, 1.0), packed
    alone = [score_sequences(policy, [one], room, 1.0)[0] for one in samples]
    yield "samples alone in their rows and transformers' own forward pass", alone, expected
    yield "samples packed into one row and alone in theirs", packed, alone
    with torch.device("meta"):
        sharded = prepared(_made(copy, trust, attention_of(copy.config)), loading)
    give_memory(sharded, loading.device)
    sharded.model.load_state_dict(model.state_dict())
    sharded.alone = policy.alone
    made = score_sequences(sharded, samples, room, 1.0)
    yield "samples of a model loaded as on GPUs and as on a CPU", made, packed


def _loading(copy: SmallCopy) -> Loading:
    return Loading(torch.device("cpu"), max_tokens=copy.max_tokens)


def _policy(copy: SmallCopy, model: PreTrainedModel, trust: bool) -> PolicyModel:
    """Return the trainer's policy with the weights of a model."""
    policy = prepared(_made(copy, trust, attention_of(copy.config)), _loading(copy))
    policy.model.load_state_dict(model.state_dict())
    policy.alone = not keeps_samples_apart(policy, torch.float32)
    return policy


def _samples(copy: SmallCopy, seed: int) -> list[TokenSequence]:
    """Return samples around every length of the copy that a run can reach, shorter and longer."""
    longest = copy.max_tokens
    lengths = {7, longest, longest - 3}
    lengths |= {near for one in copy.lengths for near in (one - 3, one + 5) if near <= longest}
    rng = np.random.default_rng(seed)
    vocabulary = copy.config.vocab_size
    return [
        TokenSequence(rng.integers(vocabulary, size=length + 1).astype(np.int32), 1)
        for length in sorted(lengths)
    ]


def _made(copy: SmallCopy, trust: bool, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        deepcopy(copy.config),
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=trust,
    )


def _filled(copy: SmallCopy, seed: int, trust: bool) -> PreTrainedModel:
    """Return a model as transformers runs it, with weights that make every part of it matter."""
    torch.manual_seed(seed)
    model = _made(copy, trust, "eager").eval()
    saved = model.state_dict()
    biases = (one for name, one in model.named_buffers() if name in saved and one.dim() < 2)
    for tensor in (*model.parameters(), *biases):
        if tensor.is_floating_point():
            _fill(tensor, copy.num_layers)
    return model


def _fill(tensor: Tensor, num_layers: int) -> None:
    """Fill a tensor. Biases, sinks and norms get noise, because those of a new model are
    constant."""
    scale = max(0.5, min(1.0, 4 / num_layers))  # Many layers amplify rounding.
    if tensor.dim() < 2:
        tensor.add_(0.3 * scale * torch.randn_like(tensor))
    else:
        tensor.normal_(0, 1.6 * scale / max(64, min(tensor.shape[-2:])) ** 0.5)


def _own_logprobs(model: PreTrainedModel, samples: Sequence[TokenSequence]) -> _Logprobs:
    """Return transformers' log-probabilities, with one sample a row. All rows are as long as the
    longest sample, so that a rope which depends on the row's length is the same for all. Padding
    behind a token does not change its value."""
    longest = max(one.num_input_tokens for one in samples)
    rows = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in zip(rows, samples, strict=True):
        row[: sample.num_input_tokens] = torch.from_numpy(sample.token_ids[:-1])
    logits = model(input_ids=rows, use_cache=False).logits
    logprobs = logits.log_softmax(-1)
    return [
        logprobs[at, range(one.num_input_tokens), one.token_ids[1:]].numpy()
        for at, one in enumerate(samples)
    ]


def _refusal(copy: SmallCopy, found: str) -> str:
    return (
        f"the trainer does not compute a {copy.config.model_type} model as transformers does. In a "
        f"small copy of its config.json, {found}. Switch that feature off in config.json if the "
        "model works without it, or train another kind of model"
    )
