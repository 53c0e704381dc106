"""Metrics of a run: names, units and what they mean.

What is in braces stands for names that a run brings along: `critic/{part}/mean`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

SAME = "same"
"""veRL's name where it is ours."""


class Metric(NamedTuple):
    """A metric, or several whose last parts alone differ: `critic/score/mean, max, min`."""

    names: str
    unit: str
    meaning: str
    verl: str = ""
    """veRL's name of the same figure; empty: it has none."""

    @property
    def each(self) -> tuple[str, ...]:
        """Whole names."""
        first, *others = self.names.split(", ")
        prefix = first.rpartition("/")[0]
        return (first, *(f"{prefix}/{other}" for other in others))


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("critic/score/mean, max, min", "reward", "as scored", SAME),
        Metric("critic/score/std", "reward", "their standard deviation"),
        Metric("critic/score/best_of_group", "reward", "mean over groups of their best"),
        Metric(
            "critic/rewards/mean, max, min",
            "reward",
            "scores less the punishment for length, over the samples trained on",
            SAME,
        ),
        Metric("critic/rewards/std", "reward", "their standard deviation"),
        Metric("critic/advantages/mean, max, min", "", "over the tokens trained on", SAME),
        Metric("critic/advantages/std", "", "their standard deviation"),
        Metric("critic/zero_variance_share", "share", "groups whose scores are all equal"),
        Metric("critic/{part}/mean", "", "a number that your scorer gives beside the score"),
        Metric("critic/num_retried", "responses", "scored again after an error"),
        Metric("critic/num_unscored", "responses", "scored 0 after an error (`reward.on_error`)"),
    ),
    "Training": (
        Metric("actor/pg_loss", "", "the policy's part of the loss", SAME),
        Metric(
            "actor/kl_loss",
            "",
            "the KL estimate, aggregated as the loss is (with `kl_coefficient`)",
            SAME,
        ),
        Metric(
            "actor/entropy",
            "nats",
            "mean entropy of the distributions that tokens were drawn from",
            SAME,
        ),
        Metric("actor/grad_norm", "", "norm of the gradient before it is clipped", SAME),
        Metric("actor/lr", "", "learning rate of the last update", SAME),
        Metric("actor/pg_clipfrac", "share", "tokens whose gradient the clip took away", SAME),
        Metric("actor/clipfrac_low", "share", "those below 1 - clip_low, of negative advantage"),
        Metric("actor/clipfrac_high", "share", "those above 1 + clip_high, of positive advantage"),
        Metric("actor/pg_clipfrac_lower", "share", "tokens beyond `dual_clip` (with it)", SAME),
        Metric(
            "actor/ppo_kl",
            "nats",
            "mean of log pi_old - log pi; pi_old is the engine's without `tis_cap`",
            SAME,
        ),
        Metric("actor/ratio_mean", "", "mean ratio to the old policy"),
        Metric("actor/ratio_max", "", "largest ratio of the step"),
        Metric("actor/tis_mean", "", "mean importance weight as it was used (with `tis_cap`)"),
        Metric(
            "actor/tis_truncated",
            "share",
            "tokens whose weight was cut or rejected (with `tis_cap`)",
        ),
        Metric(
            "actor/skipped_updates", "updates", "left out, as their loss or gradient was not finite"
        ),
        Metric("actor/staleness_mean", "versions", "mean age of a token"),
        Metric(
            "actor/filtered_samples", "share", "samples that dynamic sampling left out (with it)"
        ),
        Metric(
            "actor/overlong_samples",
            "share",
            "samples that `overlong_filtering` left out (with it)",
        ),
        Metric(
            "actor/lora_arrived",
            "share",
            "of the adapters' update that rounding merged weights leaves (with `lora`)",
        ),
        Metric("actor/rollout_logprob_diff", "nats", "mean of \\|log pi_old - log pi_inference\\|"),
        Metric(
            "mismatch/k1",
            "nats",
            "estimates KL(pi_inference, pi_old) of a token by k1",
            "rollout_corr/kl",
        ),
        Metric("mismatch/k3", "nats", "the same by k3", "rollout_corr/k3_kl"),
        Metric(
            "mismatch/ratio_mean", "", "mean of pi_old / pi_inference, neither cut nor rejected"
        ),
        Metric("mismatch/ratio_max, ratio_min", "", "largest and smallest of them"),
        Metric(
            "mismatch/effective_share",
            "share",
            "effective sample size of these weights, over the number of tokens",
        ),
        Metric("training/epoch", "", "epoch of the step, from 0", SAME),
    ),
    "Responses": (
        Metric("response_length/mean, max", "tokens", "lengths", SAME),
        Metric("response_length/clip_ratio", "share", "responses cut at the limit", SAME),
        Metric(
            "rollout/tokens_per_s", "tokens/s", "response tokens over the seconds of generation"
        ),
        Metric("rollout/idle_share", "share", "engines' time in generation without a request"),
        Metric(
            "rollout/bubble_share",
            "share",
            "the same since the phase before ended: training and waits included",
        ),
        Metric("rollout/busy_s", "s", "time in which engines had requests, added up"),
        Metric(
            "rollout/staleness", "versions", "policy versions that the engines' weights are behind"
        ),
        Metric(
            "rollout/canary_error",
            "nats",
            "largest mean difference of log-probabilities from the trainer's after the sync",
        ),
        Metric("rollout/num_restarts", "", "engines that died and were restarted"),
        Metric("rollout/num_gone", "", "engines that were given up"),
        Metric(
            "rollout/num_refills",
            "prompts",
            "drawn in place of those that teach nothing (dynamic sampling)",
        ),
        Metric("rollout/num_migrated", "requests", "went on on another engine"),
        Metric("rollout/num_deferred", "requests", "left to the next step"),
        Metric("rollout/num_switches", "", "switches of GPUs to another TP degree"),
        Metric("rollout/num_raced", "requests", "copies begun on further engines"),
        Metric("rollout/num_raced_with_kv", "requests", "of these with their keys and values"),
        Metric("rollout/num_races_won", "requests", "of which such a copy finished first"),
        Metric("rollout/wasted_tokens", "tokens", "generated by copies that lost"),
        Metric(
            "rollout/num_diverged", "", "copies that finished with other tokens: none in float32"
        ),
    ),
    "Drafting and history": (
        Metric("rollout/spec_accept_rate", "share", "draft tokens that were accepted"),
        Metric(
            "rollout/spec_accept_length",
            "tokens",
            "gained by a verification, the bonus token included",
        ),
        Metric("rollout/speculation_rate", "share", "tokens of responses that came from drafts"),
        Metric("rollout/spec_gated_share", "share", "engines' steps without drafts"),
        Metric("rollout/spec_draft_share", "share", "engines' busy time that drafting took"),
        Metric(
            "rollout/spec_shared_accept_rate",
            "share",
            "accepted of the drafts from other prompts' histories",
        ),
        Metric(
            "drafter/{name}/wasted_share",
            "share",
            "tokens drafted ahead after a wrong one or the response's end",
        ),
        Metric("drafter/{name}/max_wasted", "tokens", "most that one failure wasted"),
        Metric("history/num_indexed", "prompts", "of the step that have an index"),
        Metric("history/index_bytes", "bytes", "all index files"),
        Metric("history/num_damaged", "files", "indexes refused as damaged, and built again"),
        Metric("history/num_evicted", "files", "indexes deleted for want of room"),
        Metric("history/num_restored", "files", "compressed indexes made whole again"),
        Metric("history/num_copied", "files", "indexes that came from another node"),
        Metric("history/num_blind_engines", "engines", "found no index though prompts have some"),
        Metric("history/wait_s", "s", "wait of the step for indexes"),
        Metric("saved_s/{technique}", "s", "what a technique saved of the step's generation"),
        Metric("saved_s/{technique}_uncertainty", "s", "how far the estimate may be off"),
    ),
    "Time": (
        Metric(
            "timing_s/step", "s", "since the step before was reported, or this one planned", SAME
        ),
        Metric("timing_s/gen", "s", "generation", SAME),
        Metric(
            "timing_s/history, sync, reward, train, publish",
            "s",
            "wait for indexes, weights into engines, scoring, training, its part of publishing",
        ),
        Metric("perf/total_num_tokens", "tokens", "of prompts and responses", SAME),
        Metric("perf/time_per_step", "s", "the whole step", SAME),
        Metric(
            "perf/throughput",
            "tokens/s",
            "of prompts and responses, by GPU, over the whole step",
            SAME,
        ),
        Metric("system/{name}", "", "what the driver's machine is busy with, as MLflow names it"),
    ),
    "Validation and evaluation": (
        Metric("validation/reward", "reward", "mean over all responses"),
        Metric(
            "validation/{source}/mean_at_{n}",
            "reward",
            "mean over the n responses to a prompt, and over prompts",
        ),
        Metric(
            "validation/{source}/std_error_at_{n}", "reward", "standard error of it, over prompts"
        ),
        Metric("validation/{source}/best_at_{n}", "reward", "best of n"),
        Metric(
            "validation/{source}/pass_at_{k}",
            "share",
            "prompts of which one of k responses is right, without bias (rewards of 0 and 1)",
        ),
        Metric(
            "validation/{source}/maj_at_{n}",
            "reward",
            "of the answer that most give (where the scorer tells it)",
        ),
        Metric("evaluation/{data}/{figure}", "", "the same of `refrain evaluate --log-to-run`"),
    ),
    "Summary of a run": (
        Metric("summary/steps, num_rollouts", "", "counts"),
        Metric("summary/reward_first, reward_last", "reward", "mean of the first and last epoch"),
        Metric(
            "summary/validation_first, validation_last, validation_best",
            "reward",
            "mean of a validation",
        ),
        Metric(
            "summary/tokens_per_second",
            "tokens/s",
            "response tokens over the seconds of generation",
        ),
        Metric("summary/acceptance_rate_last", "share", "draft tokens accepted in the last epoch"),
        Metric("summary/speculation_rate_last", "share", "tokens from drafts in the last epoch"),
        Metric("summary/timing_s/{phase}", "s", "of all steps"),
    ),
}
"""Metrics by what they are about."""


def described_as(logged: Iterable[str]) -> dict[str, str | None]:
    """The name under which each metric is described; None: it is not."""
    names = [name for metrics in SECTIONS.values() for metric in metrics for name in metric.each]
    patterns = {name: _pattern(name) for name in sorted(names, key=_num_open)}
    return {
        one: next((name for name, pattern in patterns.items() if pattern.fullmatch(one)), None)
        for one in logged
    }


def _num_open(name: str) -> tuple[int, int]:
    """Order in which names are tried: a plain one is meant rather than one with braces, and a
    longer one rather than a shorter."""
    return name.count("{"), -len(name)


def _pattern(name: str) -> re.Pattern[str]:
    plain = re.split(r"\{\w+\}", name)
    return re.compile(".+".join(map(re.escape, plain)))
