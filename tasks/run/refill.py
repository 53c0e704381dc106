"""More batches for a step, to replace prompts without a training signal (DAPO, dynamic sampling).

    own prompts ──► rollout ──► reward ──► too few groups with different rewards? ─┐
        ▲                                                                          │
        └──────────── draw the missing number from `PromptLoader.refills_of` ◄─────┘

The draw depends on the step and on the rewards of complete batches, never on the timing. So a
resumed step draws the same prompts. In a pipelined run, the next step is queued behind the first
batch, and engines generate it while this step is scored. A step that may draw more defers no
request.
"""

from collections.abc import Collection, Sequence

from refrain.engines.data.sources import with_sources
from refrain.engines.histopipe.placement import Placement, deal_groups
from refrain.engines.learn.refill import num_to_draw, num_useful
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.step import StepPlan
from refrain.tasks.history import index_drawn, known_before, pass_rates
from refrain.tasks.reward import score_new
from refrain.tasks.run.attach import Run


def refills(run: Run, plan: StepPlan) -> bool:
    """Return whether this stage may draw more prompts than planned."""
    return plan.split is Split.TRAIN and run.config.algorithm.refills


async def next_batch(
    run: Run,
    engines: Sequence[int],
    plan: StepPlan,
    num_batches: int,
    done: Collection[RequestId],
) -> StepPlan | None:
    """Plan the next batch of a step on these engines. None: the step has enough groups, or may draw
    no more.

    `plan`: all prompts so far, drawn in `num_batches` batches. `done`: rollouts that an earlier
    process of the run has finished.
    """
    await score_new(run, plan.split, plan.step)
    rates = await pass_rates(run, plan.step)
    left = run.inputs.loader.refills_of(plan.step, rates)[plan.num_refills :]
    num = await _num_missing(run, plan, num_batches) or _num_begun(plan, left, done)
    if not (keys := left[:num]):
        return None
    run.progress.phase(f"{plan.split} step {plan.step}: drawing {len(keys)} more prompts")
    if run.config.drafting.enabled:
        await index_drawn(run, plan.step, keys)
    lengths = await run.store("length_history", list(keys), known_before(run, plan.step))
    medians = {key: length.median_tokens for key, length in lengths.items()}
    placed = Placement(deal_groups(keys, medians, len(engines))).on(engines).groups
    groups = with_sources(placed, run.inputs.prompts_of(plan.split))
    unranked = {"ranking_groups": (), "expected_s": None, "equal_s": None, "length_growth": None}
    drawn = {"groups": groups, "num_refills": len(groups), "trials": {}}
    return plan.model_copy(update=drawn | unranked)


async def _num_missing(run: Run, plan: StepPlan, num_batches: int) -> int:
    if num_batches >= run.config.algorithm.max_num_gen_batches:
        return 0
    drawn = [group.prompt_key for group in plan.groups]
    rewards = await run.store("rewards", plan.split, plan.step)
    num_own = len(drawn) - plan.num_refills
    wanted = min(run.config.prompts_per_step, num_own)
    return num_to_draw(num_useful(rewards, drawn), len(drawn), wanted, num_own)


def _num_begun(plan: StepPlan, left: Sequence[str], done: Collection[RequestId]) -> int:
    """Return how many prompts to draw to include all that an earlier process has begun. It may have
    drawn more, if its rewards were different."""
    drawn = {group.prompt_key for group in plan.groups}
    begun = {id.prompt_key for id in done if id.sample_index >= 0} - drawn
    return max((at + 1 for at, key in enumerate(left) if key in begun), default=0)
