"""Metrics of a run: names, units and meanings.

Braces stand for a name that the run brings along, for example `critic/{part}/mean`.
"""

from typing import NamedTuple

SAME = "same"
"""Says that veRL has the same name."""


class Metric(NamedTuple):
    """A metric, or several that differ in the last part only: `critic/score/mean, max, min`."""

    names: str
    unit: str
    meaning: str
    verl: str = ""
    """veRL's name of the same figure. Empty: veRL has none."""

    @property
    def each(self) -> tuple[str, ...]:
        """Whole names."""
        first, *others = self.names.split(", ")
        prefix = first.rpartition("/")[0]
        return (first, *(f"{prefix}/{other}" for other in others))


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("critic/score/mean, max, min", "reward", "score as your scorer gives it", SAME),
        Metric("critic/score/std", "reward", "standard deviation of the scores"),
        Metric(
            "critic/score/best_of_group", "reward", "best score of each group, mean over groups"
        ),
        Metric(
            "critic/rewards/mean, max, min",
            "reward",
            "scores minus the penalties for length and KL, over the samples trained on",
            SAME,
        ),
        Metric("critic/rewards/std", "reward", "standard deviation of the rewards"),
        Metric("critic/advantages/mean, max, min", "", "advantages of the tokens trained on", SAME),
        Metric("critic/advantages/std", "", "standard deviation of the advantages"),
        Metric("critic/zero_variance_share", "share", "groups whose scores are all equal"),
        Metric("critic/{part}/mean", "", "a number that your scorer returns beside the score"),
        Metric("critic/num_retried", "responses", "responses scored again after an error"),
        Metric(
            "critic/num_unscored",
            "responses",
            "responses scored 0 after an error (`on_error` of `reward` or `environment`)",
        ),
    ),
    "Sources and curriculum": (
        Metric("source/{source}/share", "share", "prompts of the step from this source"),
        Metric("source/{source}/score", "reward", "mean score of its responses"),
        Metric(
            "source/{source}/pass_rate",
            "share",
            "its responses with a score of at least `data.pass_score`",
        ),
        Metric("source/{source}/response_length", "tokens", "mean length of its responses"),
        Metric("curriculum/skipped_share", "share", "prompts that the step's epoch skips"),
    ),
    "Training": (
        Metric("actor/pg_loss", "", "policy part of the loss", SAME),
        Metric(
            "actor/kl_loss",
            "",
            "KL estimate, aggregated like the loss (with `kl_coefficient`)",
            SAME,
        ),
        Metric(
            "actor/reward_kl_penalty",
            "nats",
            "mean of log pi - log pi_ref over tokens (with `reward_kl_coefficient`)",
            SAME,
        ),
        Metric(
            "actor/teacher_kl",
            "nats",
            "mean of log pi - log pi_teacher over tokens (with a teacher)",
        ),
        Metric(
            "actor/entropy",
            "nats",
            "mean entropy of the sampling distributions",
            SAME,
        ),
        Metric("actor/grad_norm", "", "gradient norm before clipping", SAME),
        Metric("actor/lr", "", "learning rate of the last update", SAME),
        Metric(
            "actor/pg_clipfrac",
            "share",
            "tokens whose gradient was clipped away (CISPO: whose weight was clipped)",
            SAME,
        ),
        Metric(
            "actor/clipfrac_low",
            "share",
            "tokens of negative advantage beyond the lower bound, such as 1 - clip_low",
        ),
        Metric(
            "actor/clipfrac_high",
            "share",
            "tokens of positive advantage beyond the upper bound, such as 1 + clip_high",
        ),
        Metric("actor/pg_clipfrac_lower", "share", "tokens beyond `dual_clip` (with it)", SAME),
        Metric(
            "actor/ppo_kl",
            "nats",
            "mean of log pi_old - log pi; without `tis_cap`, pi_old is the engine's",
            SAME,
        ),
        Metric("actor/ratio_mean", "", "mean ratio to the old policy"),
        Metric("actor/ratio_max", "", "largest ratio of the step"),
        Metric("actor/tis_mean", "", "mean importance weight as used (with `tis_cap`)"),
        Metric(
            "actor/tis_truncated",
            "share",
            "tokens whose weight was truncated or rejected (with `tis_cap`)",
        ),
        Metric(
            "actor/skipped_updates",
            "updates",
            "updates skipped because loss or gradient was not finite",
        ),
        Metric("actor/staleness_mean", "versions", "mean staleness of a token"),
        Metric(
            "staleness/{versions}/tokens",
            "share",
            "tokens of this staleness (this and the next two with `staleness` of 1 or more)",
        ),
        Metric("staleness/{versions}/k1", "nats", "`mismatch/k1` of its tokens"),
        Metric("staleness/{versions}/clipfrac", "share", "`actor/pg_clipfrac` of its tokens"),
        Metric(
            "actor/filtered_samples",
            "share",
            "samples that dynamic sampling left out (if it is on)",
        ),
        Metric(
            "actor/overlong_samples",
            "share",
            "samples that `overlong_filtering` left out (if it is on)",
        ),
        Metric(
            "actor/lora_arrived",
            "share",
            "part of the adapters' update that survives rounding in merged weights (with `lora`)",
        ),
        Metric("actor/rollout_logprob_diff", "nats", "mean of \\|log pi_old - log pi_inference\\|"),
        Metric(
            "mismatch/k1",
            "nats",
            "KL(pi_inference, pi_old) of a token, estimated by k1",
            "rollout_corr/kl",
        ),
        Metric("mismatch/k3", "nats", "the same KL, estimated by k3", "rollout_corr/k3_kl"),
        Metric(
            "mismatch/ratio_mean",
            "",
            "mean of pi_old / pi_inference before truncation and rejection",
        ),
        Metric("mismatch/ratio_max, ratio_min", "", "largest and smallest of these ratios"),
        Metric(
            "mismatch/effective_share",
            "share",
            "effective sample size of these ratios, over the number of tokens",
        ),
        Metric(
            "routing/replayed_share",
            "share",
            "tokens trained with the engine's experts (with `routing_replay`)",
        ),
        Metric(
            "routing/changed_share",
            "share",
            "choices of these experts that the trainer would have made otherwise",
        ),
        Metric("training/epoch", "", "epoch of the step, from 0", SAME),
    ),
    "Responses": (
        Metric("response_length/mean, max", "tokens", "response lengths", SAME),
        Metric("response_length/clip_ratio", "share", "responses cut at the limit", SAME),
        Metric(
            "rollout/tokens_per_s", "tokens/s", "response tokens over the seconds of generation"
        ),
        Metric("rollout/idle_share", "share", "engines' time without a request during generation"),
        Metric(
            "rollout/bubble_share",
            "share",
            "the same since the last phase ended, so with training and waits",
        ),
        Metric("rollout/busy_s", "s", "time in which engines had requests, summed over engines"),
        Metric(
            "rollout/staleness",
            "versions",
            "policy versions by which the engines' weights lag behind",
        ),
        Metric(
            "rollout/canary_error",
            "nats",
            "largest mean difference from the trainer's log-probabilities after the sync",
        ),
        Metric("rollout/num_restarts", "", "engines that died and were restarted"),
        Metric("rollout/num_gone", "", "engines that died and found no place in the cluster again"),
        Metric(
            "rollout/num_failed",
            "responses",
            "conversations whose environment failed (`environment.on_error`)",
        ),
        Metric(
            "rollout/num_refills",
            "prompts",
            "prompts drawn to replace prompts that teach nothing (dynamic sampling)",
        ),
        Metric("rollout/num_migrated", "requests", "requests moved to another engine"),
        Metric("rollout/num_deferred", "requests", "requests deferred to the next step"),
        Metric("rollout/num_switches", "", "switches of GPUs to another TP degree"),
        Metric("rollout/num_raced", "requests", "copies started on other engines"),
        Metric("rollout/num_raced_with_kv", "requests", "copies that came with keys and values"),
        Metric("rollout/num_races_won", "requests", "requests whose copy finished first"),
        Metric("rollout/wasted_tokens", "tokens", "tokens generated by copies that lost"),
        Metric(
            "rollout/num_diverged",
            "",
            "copies that finished with different tokens; always 0 in float32",
        ),
    ),
    "Environments": (
        Metric(
            "environment/turns/mean, max",
            "turns",
            "turns of a response (this and the next ones with an `environment`)",
        ),
        Metric("environment/observed_tokens/mean", "tokens", "observed tokens of a response"),
        Metric("environment/calls/mean", "calls", "tool calls of a response"),
        Metric("environment/failed_calls/mean", "calls", "those that raised or were wrong"),
        Metric("environment/wait_s/mean, max", "s", "time that a response waits for answers"),
        Metric("environment/wait_share", "share", "the mean wait over the time of generation"),
        Metric(
            "environment/cut/turns, time, context",
            "share",
            "responses cut by `max_turns`, by `max_wait_s`, or by an observation that did not fit",
        ),
        Metric(
            "environment/accept_rate/first_turns, later_turns",
            "share",
            "accepted over drafted tokens, before and after the first answer of an environment",
        ),
    ),
    "Drafting and history": (
        Metric("rollout/spec_accept_rate", "share", "accepted over drafted tokens"),
        Metric(
            "rollout/spec_accept_length",
            "tokens",
            "tokens per verification, the bonus token included",
        ),
        Metric("rollout/speculation_rate", "share", "response tokens that came from drafts"),
        Metric("rollout/spec_gated_share", "share", "engine steps without drafts"),
        Metric("rollout/spec_draft_share", "share", "engines' busy time spent on drafting"),
        Metric(
            "rollout/spec_shared_accept_rate",
            "share",
            "acceptance rate of drafts from other prompts' histories",
        ),
        Metric(
            "drafter/{name}/wasted_share",
            "share",
            "tokens drafted after a wrong draft or after the response's end",
        ),
        Metric("drafter/{name}/max_wasted", "tokens", "most tokens wasted by one failure"),
        Metric(
            "draft_head/loss",
            "nats",
            "KL(policy, head) of a draft token (this and the next ones with `train_head`)",
        ),
        Metric(
            "draft_head/skipped_updates",
            "updates",
            "updates with nothing to draft, or without a finite loss",
        ),
        Metric(
            "draft_head/accept_length_before, accept_length_after",
            "tokens",
            "expected tokens per verification of the head before and after training on the step",
        ),
        Metric("history/num_indexed", "prompts", "prompts of the step that have an index"),
        Metric("history/index_bytes", "bytes", "size of all index files"),
        Metric("history/num_damaged", "files", "damaged indexes that were rebuilt"),
        Metric("history/num_evicted", "files", "indexes deleted to free space"),
        Metric("history/num_restored", "files", "compressed indexes that were decompressed"),
        Metric("history/num_copied", "files", "indexes copied from another node"),
        Metric(
            "history/num_blind_engines",
            "engines",
            "engines that found no index although prompts have some",
        ),
        Metric("history/wait_s", "s", "time that the step waited for indexes"),
        Metric("saved_s/{technique}", "s", "generation time that a technique saved in the step"),
        Metric("saved_s/{technique}_uncertainty", "s", "uncertainty of this estimate"),
    ),
    "Time": (
        Metric(
            "timing_s/step",
            "s",
            "time since the step was planned or the last step reported, whichever was later",
            SAME,
        ),
        Metric("timing_s/gen", "s", "generation", SAME),
        Metric(
            "timing_s/history, sync, reward, train, publish",
            "s",
            "waiting for indexes, weight sync, scoring, training, publishing (part of training)",
        ),
        Metric("perf/total_num_tokens", "tokens", "prompt and response tokens", SAME),
        Metric("perf/time_per_step", "s", "the whole step", SAME),
        Metric(
            "perf/throughput",
            "tokens/s",
            "prompt and response tokens per GPU, over the whole step",
            SAME,
        ),
        Metric("system/{name}", "", "load of the driver's machine, named by MLflow"),
    ),
    "Validation and evaluation": (
        Metric("validation/reward", "reward", "mean over all responses"),
        Metric(
            "validation/{source}/mean_at_{n}",
            "reward",
            "mean over the n responses to a prompt, and over prompts",
        ),
        Metric(
            "validation/{source}/std_error_at_{n}",
            "reward",
            "standard error of the mean, over prompts",
        ),
        Metric("validation/{source}/best_at_{n}", "reward", "best of n"),
        Metric(
            "validation/{source}/pass_at_{k}",
            "share",
            "prompts with a right response among k, estimated without bias (rewards of 0 and 1)",
        ),
        Metric(
            "validation/{source}/maj_at_{n}",
            "reward",
            "reward of the most frequent answer (if the scorer returns answers)",
        ),
        Metric(
            "evaluation/{data}/{figure}",
            "",
            "the same figures from `refrain evaluate --log-to-run`",
        ),
    ),
    "Summary of a run": (
        Metric("summary/steps, num_rollouts", "", "number of steps and rollouts"),
        Metric("summary/reward_first, reward_last", "reward", "mean of the first and last epoch"),
        Metric(
            "summary/validation_first, validation_last, validation_best",
            "reward",
            "mean reward of a validation",
        ),
        Metric(
            "summary/tokens_per_second",
            "tokens/s",
            "response tokens over the seconds of generation",
        ),
        Metric("summary/acceptance_rate_last", "share", "draft tokens accepted in the last epoch"),
        Metric("summary/speculation_rate_last", "share", "tokens from drafts in the last epoch"),
        Metric("summary/timing_s/{phase}", "s", "time of the phase over all steps"),
    ),
}
"""Metrics by topic."""
