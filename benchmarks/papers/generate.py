"""Traces with the length distributions that the papers print. Same spec and seed, same rows.

    log(response tokens) = mu(step) + sigma_prompts * p + sigma_samples * s,   p, s ~ N(0, 1)

p belongs to the prompt, s to the sample. Lengths are rounded up and cut at `max_response_tokens`.
From one epoch to the next p <- rho p + sqrt(1 - rho^2) N. A few prompts have a low rho and the
others a high one, so most prompts keep their rank. mu(step) follows from the mean of cut lengths,

    E[min(X, c)] = e^(mu + sigma^2 / 2) Phi((ln c - mu - sigma^2) / sigma) + c P(X > c).

Each spec says what is assumed because its paper does not print it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from scipy.optimize import brentq
from scipy.stats import norm

from refrain.engines.simulate.trace import Trace
from refrain.schemas.base import Frozen

K = 1024


class TraceSpec(Frozen):
    """A training run, as far as its lengths go."""

    name: str
    num_steps: PositiveInt
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    num_prompts: PositiveInt
    """Prompts in the data set; an epoch takes each once, in a new order."""
    max_response_tokens: PositiveInt
    first_mean_tokens: PositiveFloat
    """Mean response length at the first step; it grows linearly."""
    last_mean_tokens: PositiveFloat
    """Mean response length at the last step, in tokens."""
    mean_cut_tokens: PositiveInt | None = None
    """Maximum under which the means hold; None: `max_response_tokens`. With another maximum the
    same responses are cut elsewhere."""
    runaways_per_step: NonNegativeInt = 0
    """Responses of a step that run to the maximum whatever their prompt."""
    sigma_prompts: NonNegativeFloat
    """Spread of log lengths between prompts."""
    sigma_samples: NonNegativeFloat
    """Spread of log lengths within a group."""
    moving_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the prompts that change their rank much in each epoch."""
    moving_rho: float = Field(default=0.8, ge=0.0, le=1.0)
    staying_rho: float = Field(default=0.998, ge=0.0, le=1.0)
    prompt_tokens: PositiveInt = 256
    """Mean; half to one and a half times that, evenly. Assumed: no paper prints prompt lengths."""

    @property
    def sigma(self) -> float:
        return math.hypot(self.sigma_prompts, self.sigma_samples)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_prompts // self.prompts_per_step


def cut_mean(mu: float, sigma: float, cut: float) -> float:
    """Mean of a log-normal cut at `cut`."""
    z = (math.log(cut) - mu) / sigma
    whole = math.exp(mu + sigma**2 / 2) * norm.cdf(z - sigma)
    return float(whole + cut * norm.sf(z))


def fit_shares(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(mu, sigma) of the log-normal with these (tokens, share of responses beyond)."""
    (tokens_1, share_1), (tokens_2, share_2) = first, second
    z_1, z_2 = float(norm.isf(share_1)), float(norm.isf(share_2))
    sigma = (math.log(tokens_2) - math.log(tokens_1)) / (z_2 - z_1)
    return math.log(tokens_1) - sigma * z_1, sigma


def pat(max_response_tokens: int = 32 * K) -> TraceSpec:
    """Return LLaMA3.1-8B on DeepScaleR (PAT 2.3, Fig. 3b): 10.85 % beyond 8K, 2.18 % beyond 16K.

    The two shares fix the log-normal (mu 7.92, sigma 0.886). 128 responses a step (2.3). Assumed:
    groups of 8 independent samples, 40,000 prompts, and one distribution for all steps and maxima.
    """
    mu, sigma = fit_shares((8 * K, 0.1085), (16 * K, 0.0218))
    mean = cut_mean(mu, sigma, max_response_tokens)
    return TraceSpec(
        name="pat",
        num_steps=100,
        prompts_per_step=16,
        group_size=8,
        num_prompts=40000,
        max_response_tokens=max_response_tokens,
        first_mean_tokens=mean,
        last_mean_tokens=mean,
        sigma_prompts=0.0,
        sigma_samples=sigma,
    )


def rhymerl(max_response_tokens: int = 16 * K) -> TraceSpec:
    """Return math, groups of 16, 8K prompts (RhymeRL 7): means of 1K to 10K over 320 steps (3.1).

    Spreads and rhos give the rank stability of the table in 6.3, between its Math-1 and Math-2:
    some 86 % of the prompts do not rise to a higher one of 8 ranking groups (85.7 and 83.2
    printed), 78 % with 16 groups (79.7 and 76.9). Deviation: the table counts responses, this
    counts prompts by their median. Assumed: means of runs with a maximum of 32K, a spread between
    prompts of 0.8, and 512 prompts a step, so 20 epochs in 320 steps (6.1: "300-1000 steps").
    """
    return TraceSpec(
        name="rhymerl",
        num_steps=320,
        prompts_per_step=512,
        group_size=16,
        num_prompts=8 * K,
        max_response_tokens=max_response_tokens,
        first_mean_tokens=1 * K,
        last_mean_tokens=10 * K,
        mean_cut_tokens=32 * K,
        sigma_prompts=0.8,
        sigma_samples=0.12,
        moving_share=0.25,
        staying_rho=1.0,
    )


def specactor(max_response_tokens: int = 20 * K) -> TraceSpec:
    """Return DAPO-32B-20K (SpecActor 5.1): 16,384 responses a step, at most 20K tokens.

    The paper prints no other length. Assumed: groups of 16, 17K prompts (DAPO's data set), 200
    steps, and spreads and means with which engines idle for the "averagely 50 %" of 2.2.
    """
    return TraceSpec(
        name="specactor",
        num_steps=200,
        prompts_per_step=K,
        group_size=16,
        num_prompts=17 * K,
        max_response_tokens=max_response_tokens,
        first_mean_tokens=1 * K,
        last_mean_tokens=3.5 * K,
        sigma_prompts=0.9,
        sigma_samples=0.2,
        moving_share=0.2,
    )


def generate(spec: TraceSpec, seed: int, steps: Sequence[int] | None = None) -> Trace:
    """The trace of a spec, or some of its steps: each has the same rows whatever else is asked for.

    Raises ValueError when the spec has no such step, or too few prompts for one.
    """
    steps = range(1, spec.num_steps + 1) if steps is None else steps
    if not steps or not 1 <= min(steps) <= max(steps) <= spec.num_steps:
        raise ValueError(f"{spec.name} has steps 1 to {spec.num_steps}: ask for some of these")
    if spec.steps_per_epoch == 0:
        raise ValueError(
            f"{spec.name} has {spec.num_prompts} prompts, fewer than the "
            f"{spec.prompts_per_step} of a step: lower prompts_per_step"
        )
    epochs = _epochs(spec, seed, (max(steps) - 1) // spec.steps_per_epoch + 1)
    tables = [_step(spec, seed, step, epochs) for step in sorted(set(steps))]
    return Trace(pa.concat_tables(tables), f"{spec.name} of seed {seed}")


def _epochs(spec: TraceSpec, seed: int, num_epochs: int) -> np.ndarray:
    """p of every prompt in every epoch."""
    num = spec.num_prompts
    values = [np.random.default_rng([seed, 0]).standard_normal(num)]
    for epoch in range(1, num_epochs):
        rng = np.random.default_rng([seed, 0, epoch])
        moving = rng.random(num) < spec.moving_share
        rho = np.where(moving, spec.moving_rho, spec.staying_rho)
        values.append(rho * values[-1] + np.sqrt(1 - rho**2) * rng.standard_normal(num))
    return np.array(values)


def _step(spec: TraceSpec, seed: int, step: int, epochs: np.ndarray) -> pa.Table:
    epoch, position = divmod(step - 1, spec.steps_per_epoch)
    order = np.random.default_rng([seed, 1, epoch]).permutation(spec.num_prompts)
    first = position * spec.prompts_per_step
    prompts = np.repeat(order[first : first + spec.prompts_per_step], spec.group_size)
    num = len(prompts)
    rng = np.random.default_rng([seed, 2, step])
    log = spec.sigma_prompts * epochs[epoch, prompts]
    log += spec.sigma_samples * rng.standard_normal(num)
    tokens = np.ceil(np.exp(_mu(spec, step) + log))
    tokens[rng.choice(num, spec.runaways_per_step, replace=False)] = spec.max_response_tokens
    prompt_tokens = np.random.default_rng([seed, 3]).integers(
        spec.prompt_tokens // 2, 3 * spec.prompt_tokens // 2, spec.num_prompts, endpoint=True
    )
    return pa.table(
        {
            "step": np.full(num, step),
            "epoch": np.full(num, epoch),
            "prompt_key": pa.array([f"{spec.name}-{prompt}" for prompt in prompts.tolist()]),
            "sample_index": np.tile(np.arange(spec.group_size), spec.prompts_per_step),
            "prompt_tokens": np.maximum(1, prompt_tokens[prompts]),
            "response_tokens": np.minimum(tokens, spec.max_response_tokens).astype(np.int64),
        }
    )


@lru_cache
def _mu(spec: TraceSpec, step: int) -> float:
    grown = (step - 1) / max(1, spec.num_steps - 1)
    mean = spec.first_mean_tokens + grown * (spec.last_mean_tokens - spec.first_mean_tokens)
    cut = spec.mean_cut_tokens or spec.max_response_tokens
    if mean >= cut:
        raise ValueError(f"{spec.name}: a mean of {mean:.0f} tokens is not below the cut at {cut}")
    low, high = math.log(mean) - spec.sigma**2, math.log(cut) + 8 * spec.sigma
    return float(brentq(lambda mu: cut_mean(mu, spec.sigma, cut) - mean, low, high))
