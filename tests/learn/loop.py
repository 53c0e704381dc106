"""A reference loss for tests: a plain loop over samples and tokens, in float64.

It uses nothing from `engines.learn`, only rows of a batch and a Hugging Face model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from refrain.schemas.algorithm import AlgorithmConfig
from refrain.schemas.config import TrainConfig

Rows = Sequence[dict[str, Any]]


def logprobs_of(model: Any, row: dict[str, Any], temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probability of each response token, and entropy of the distribution there."""
    prompt, response = row["prompt_token_ids"], row["response_token_ids"]
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    distributions = logits[len(prompt) - 1 : -1].log_softmax(-1)
    entropies = -(distributions.exp() * distributions).sum(-1)
    return distributions[range(len(response)), response], entropies


def advantages_of(rows: Rows, config: TrainConfig) -> list[float]:
    """Return the advantage of each response."""
    algorithm, limit = config.algorithm, config.data.max_response_tokens

    def punished(reward: float, length: int) -> float:
        buffer = algorithm.overlong_buffer_tokens
        if not buffer or length <= limit - buffer:
            return reward
        return reward - algorithm.overlong_penalty * (length - (limit - buffer)) / buffer

    found = []
    for row in rows:
        pairs = zip(row["group_rewards"], row["group_lengths"], strict=True)
        group = [punished(reward, length) for reward, length in pairs]
        own = punished(row["reward"], len(row["response_token_ids"]))
        if algorithm.baseline == "group_mean":
            own -= fmean(group)
        elif algorithm.baseline == "length_weighted":
            tokens = row["group_lengths"]
            own -= sum(r * n for r, n in zip(group, tokens, strict=True)) / sum(tokens)
        elif algorithm.baseline == "leave_one_out":
            own -= (sum(group) - own) / (len(group) - 1)
        if algorithm.scale_rewards == "group":
            own /= stdev(group) + 1e-6
        elif algorithm.scale_rewards == "mean" and sum(group):
            own /= fmean(group)
        found.append(own)
    if algorithm.scale_rewards == "batch":
        of_tokens = [
            advantage
            for advantage, row in zip(found, rows, strict=True)
            if takes_part(row, algorithm)
            for _ in row["response_token_ids"]
        ]
        mean = fmean(of_tokens)
        deviation = math.sqrt(fmean([(one - mean) ** 2 for one in of_tokens]))
        found = [(one - mean) / (deviation + 1e-6) for one in found]
    return found


def takes_part(row: dict[str, Any], algorithm: AlgorithmConfig) -> bool:
    return not algorithm.dynamic_sampling or len(set(row["group_rewards"])) > 1


def token_loss(log_ratio: Tensor, advantage: float, algorithm: AlgorithmConfig) -> Tensor:
    """Return the clipped loss of a token, case by case as in figure 1 of the PPO paper."""
    rho = log_ratio.clamp(-20.0, 20.0).exp()
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    if advantage >= 0.0:
        return -advantage * (rho if rho <= high else log_ratio.new_tensor(high))
    if algorithm.dual_clip is not None and rho > algorithm.dual_clip:
        return -advantage * log_ratio.new_tensor(algorithm.dual_clip)
    return -advantage * (rho if rho >= low else log_ratio.new_tensor(low))


def gate(rho: Tensor, advantage: float, algorithm: AlgorithmConfig) -> Tensor:
    """Return SAPO's f(rho), as in its paper, without a sigmoid function."""
    tau = algorithm.tau_pos if advantage > 0.0 else algorithm.tau_neg
    return (4.0 / tau) / (1.0 + (-tau * (rho - 1.0)).exp())


def geometric_mean(rhos: Sequence[Tensor], advantage: float, algorithm: AlgorithmConfig) -> Tensor:
    """Return the product of the GMPO paper's objective, to the power of 1 / |o|."""
    sign = 1 if advantage > 0.0 else -1
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    bounds = (low, high) if sign > 0 else (1.0 / high, 1.0 / low if low else math.inf)
    product = torch.ones((), dtype=torch.float64)
    for rho in rhos:
        near = (rho**sign).clamp(*bounds)
        product = product * torch.minimum(rho**sign, near) ** sign
    return product ** (1.0 / len(rhos))


def has_left(new: float, old: float, advantage: float, algorithm: AlgorithmConfig) -> bool:
    """Return whether DPPO's mask is 0: the token leaves the trust region."""
    pi, mu = math.exp(new), math.exp(old)
    if algorithm.divergence == "tv":
        divergence = abs(pi - mu)
    else:
        divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    away = pi > mu if advantage > 0.0 else pi < mu and advantage < 0.0
    return away and divergence > algorithm.max_divergence


@dataclass
class Token:
    """Loss of one token, the ratio to bound, and whether a lower or an upper bound acts."""

    loss: Tensor
    ratio: float
    low: bool = False
    high: bool = False


def response_losses(
    new: Tensor, old: Tensor, advantage: float, algorithm: AlgorithmConfig
) -> list[Token]:
    """Return the loss of each token of a response, all of which count. GMPO's loss of a response
    stands at each of its tokens, and GSPO's ratio too."""
    kind, log_ratios = algorithm.policy_loss, new - old
    rhos = [one.clamp(-20.0, 20.0).exp() for one in log_ratios]
    if kind == "gspo":
        log_ratios = log_ratios.mean().detach() + new - new.detach()
        rhos = [log_ratios[0].exp()] * len(new)
    found = []
    for at, rho in enumerate(rhos):
        ratio = rho.item()
        low = ratio < 1.0 - algorithm.clip_low and advantage < 0.0
        high = ratio > 1.0 + algorithm.clip_high and advantage > 0.0
        if kind == "sapo":
            found.append(Token(-gate(rho, advantage, algorithm) * advantage, ratio))
        elif kind == "reinforce":
            found.append(Token(-advantage * new[at], ratio))
        elif kind == "dppo":
            left = has_left(new[at].item(), old[at].item(), advantage, algorithm)
            loss = 0.0 * new[at] if left else -rho * advantage
            found.append(Token(loss, ratio, left and advantage < 0.0, left and advantage > 0.0))
        elif kind == "cispo":
            weight = max(min(ratio, 1.0 + algorithm.clip_high), 1.0 - algorithm.clip_low)
            found.append(Token(-weight * advantage * new[at], ratio, low, high))
        elif kind == "gmpo":
            loss = -advantage * geometric_mean(rhos, advantage, algorithm)
            found.append(Token(loss, ratio, low, high))
        else:
            found.append(Token(token_loss(log_ratios[at], advantage, algorithm), ratio, low, high))
    return found


def token_kl(new: Tensor, reference: Tensor, estimator: str) -> Tensor:
    d = (new - reference).clamp(-20.0, 20.0)
    k3 = ((-d).exp() - 1.0 + d).clamp(max=10.0)
    return {"k1": d, "k2": 0.5 * d**2, "k3": k3}[estimator]


def weight_of(
    old: Tensor, inference: Tensor, counted: Sequence[bool], algorithm: AlgorithmConfig
) -> list[float]:
    """Return the importance sampling weight of each token of one response."""
    cap = algorithm.tis_cap
    if cap is None:
        return [1.0] * len(old)
    differences = (old - inference).tolist()
    level, _, beyond = algorithm.tis_mode.partition("_")
    if level != "token":
        own = [one for one, counts in zip(differences, counted, strict=True) if counts]
        together = sum(own) / (len(own) if level == "geometric" else 1)
        differences = [together] * len(differences)
    ratios = [math.exp(min(max(one, -20.0), 20.0)) for one in differences]
    if beyond == "truncate":
        return [min(ratio, cap) for ratio in ratios]
    floor = 1.0 / cap if algorithm.tis_floor is None else algorithm.tis_floor
    kept = [floor <= ratio <= cap for ratio in ratios]
    if level == "geometric":
        return [float(keep) for keep in kept]
    return [ratio if keep else 0.0 for ratio, keep in zip(ratios, kept, strict=True)]


@dataclass
class Loop:
    """Loss of a minibatch and its expected metrics."""

    loss: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def token_weight(num_tokens: int, num_rows: int, length: int, config: TrainConfig) -> float:
    """Return the weight of a token of a response with `length` tokens that count."""
    return {
        "token_mean": 1.0 / num_tokens,
        "sequence_mean": 1.0 / (num_rows * length),
        "fixed_length": 1.0 / (num_rows * config.data.max_response_tokens),
    }[config.algorithm.loss_aggregation]


def minibatch_loss(
    model: Any,
    reference: Any,
    rows: Rows,
    advantages: Sequence[float],
    old: Sequence[Tensor],
    counted: Sequence[Sequence[bool]],
    config: TrainConfig,
) -> Loop:
    """Return loss and metrics of a minibatch. `rows`: the responses that are trained on. `old`:
    log-probabilities of their tokens by the policy before the step. `counted`: which tokens
    count."""
    algorithm, temperature = config.algorithm, config.rollout.temperature
    num_tokens = sum(sum(own) for own in counted)
    policy, kl, bonus = torch.zeros(3, dtype=torch.float64)
    ratios: list[float] = []
    kls, entropies_seen, clipped, mismatches = [], [], [], []
    for row, advantage, old_logprobs, counts in zip(rows, advantages, old, counted, strict=True):
        new, entropies = logprobs_of(model, row, temperature)
        inference = torch.tensor(row["inference_logprobs"], dtype=torch.float64)
        behind = inference if algorithm.tis_cap is None else old_logprobs
        chosen = [at for at, one in enumerate(counts) if one]
        scale = token_weight(num_tokens, len(rows), len(chosen), config)
        with torch.no_grad():
            held = new if reference is None else logprobs_of(reference, row, temperature)[0]
        weights = weight_of(old_logprobs, inference, counts, algorithm)
        tokens = response_losses(new[chosen], behind[chosen], advantage, algorithm)
        for at, token in zip(chosen, tokens, strict=True):
            policy = policy + scale * weights[at] * token.loss
            kl = kl + scale * token_kl(new[at], held[at], algorithm.kl_estimator)
            bonus = bonus + scale * entropies[at]
            ratios.append(token.ratio)
            kls.append((behind[at] - new[at]).item())
            clipped.append((token.low, token.high))
            mismatches.append((old_logprobs[at] - inference[at]).item())
        entropies_seen += entropies[chosen].tolist()
    loss = policy + algorithm.kl_coefficient * kl - algorithm.entropy_coefficient * bonus
    seen = [math.exp(one) for one in mismatches]
    metrics = {
        "actor/pg_loss": policy.item(),
        "actor/entropy": fmean(entropies_seen),
        "actor/ratio_mean": fmean(ratios),
        "actor/ratio_max": max(ratios),
        "actor/ppo_kl": fmean(kls),
        "actor/clipfrac_low": fmean(low for low, _ in clipped),
        "actor/clipfrac_high": fmean(high for _, high in clipped),
        "actor/pg_clipfrac": fmean(low or high for low, high in clipped),
        "actor/rollout_logprob_diff": fmean(map(abs, mismatches)),
        "mismatch/k1": -fmean(mismatches),
        "mismatch/k3": fmean(math.exp(one) - 1.0 - one for one in mismatches),
        "mismatch/ratio_mean": fmean(seen),
        "mismatch/ratio_max": max(seen),
        "mismatch/ratio_min": min(seen),
    }
    if reference is not None:
        metrics["actor/kl_loss"] = kl.item()
    return Loop(loss, metrics)
