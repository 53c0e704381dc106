"""rollout: generate all planned samples and store them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from refrain.engines.accounting.metrics import SUMMARISED_COLUMNS, summarise_rollouts
from refrain.engines.control.stage_end import StageEnd
from refrain.engines.environment.client import EnvironmentClient, without_last_answer
from refrain.engines.environment.journal import joined_parts
from refrain.engines.histopipe.sample_queue import SampleQueue
from refrain.engines.rollout.moves import RolloutView
from refrain.engines.rollout.stage import Outcome, joined
from refrain.engines.store.turns import RecordedTurn, by_sample
from refrain.schemas.keys import sample_key, stage_name
from refrain.schemas.progress import Rolling
from refrain.schemas.rollout import DraftSetting, FinishedRollout, RequestId, RolloutRequest, Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import RolloutBatch, RolloutOutcome, SampleName, StepPlan
from refrain.schemas.timeline import Timeline
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.history import last_known
from refrain.tasks.reward import scoring_new
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.artifacts import ProgressPage
from refrain.tasks.run.attach import Run, attach
from refrain.tasks.run.engines import Engines
from refrain.tasks.run.environments import refuse_failed, task_of
from refrain.tasks.run.policies import (
    kv_rule,
    predict_end,
    settings_of,
    step_policies,
    tell_collapses,
)
from refrain.tasks.run.refill import next_batch, refills

_SHOW_EVERY_S = 0.2
"""Seconds between two updates of the progress, which adds up all requests in flight."""


@run_task
async def rollout(
    ref: RunRef,
    plan: StepPlan,
    weights: PolicyWeights,
    engines: Engines,
) -> RolloutBatch:
    """Generate the step's missing samples. Wait until all are finished or deferred.

    Finished rollouts are scored at the same time.
    """
    run = attach(ref)
    done: set[RequestId] = await run.store(
        "finished_ids", plan.split, plan.step, _versions(run, plan)
    )
    carried = await _carried_over(run, plan)
    generation = _Generation(run, engines, weights, done)
    plan, outcome, timeline = await generation.roll_out(plan, carried)
    if run.config.environment:
        ids = await run.store("finished_ids", plan.split, plan.step, _versions(run, plan))
        await EnvironmentClient(run.config.environment).finished(ids)
    moved = RolloutOutcome(
        carried=_names([*(request.id for _, request in carried), *outcome.carried]),
        deferred=_names(outcome.deferred),
    )
    await run.store("add_outcome", plan.split, plan.step, moved)
    rows = await run.store("rollouts", plan.split, plan.step, SUMMARISED_COLUMNS)
    num_expected = len(moved.samples(plan))
    assert rows.num_rows == num_expected, f"{rows.num_rows} of {num_expected} rollouts"
    run.tracker.log_timeline(timeline, stage_name(plan.split, plan.step))
    await tell_collapses(run, plan)
    drafted = await engines.drafters.take_counts()
    last = await last_known(run, plan.step)
    before = last.switches if last else None
    batch = summarise_rollouts(plan, rows, outcome, timeline, drafted, before)
    await run.store("add_stage", batch)
    learnt = {s.engine: s.drafting.learnt for s in outcome.shares if s.drafting.learnt}
    await run.store("add_learnt", plan.step, learnt)
    return batch


@dataclass(frozen=True, slots=True)
class _Generation:
    """The rollouts of a stage: one batch, or several when the algorithm replaces prompts without a
    training signal."""

    run: Run
    engines: Engines
    weights: PolicyWeights
    done: Collection[RequestId]
    """Rollouts that were finished before the stage began."""

    async def roll_out(
        self, plan: StepPlan, carried: Sequence[tuple[int, RolloutRequest]]
    ) -> tuple[StepPlan, Outcome, Timeline]:
        """Generate all batches, and score at the same time. The returned plan has the prompts of
        all batches."""
        if not refills(self.run, plan):
            return plan, *await self._only_batch(plan, carried)
        since_s = self.engines.open_timeline()
        outcomes = [await self._batch(plan, carried, first=True)]
        while batch := await self._next(plan, len(outcomes)):
            plan = plan.refilled(batch)
            await self.run.store("add_plan", plan)
            outcomes.append(await self._batch(batch))
        outcome = joined(outcomes)
        timeline = self.engines.timeline(outcome, since_s)
        self.run.tracker.log_plan(plan)
        return plan, outcome, timeline

    async def _next(self, plan: StepPlan, num_batches: int) -> StepPlan | None:
        return await next_batch(self.run, self.engines.living, plan, num_batches, self.done)

    async def _only_batch(
        self, plan: StepPlan, carried: Sequence[tuple[int, RolloutRequest]]
    ) -> tuple[Outcome, Timeline]:
        async with scoring_new(self.run, plan.split, plan.step) as wake_scorer:
            page, running = await self._queue(plan, carried, wake_scorer, first=True)
            with page:
                outcome = await running
                # Take the timeline before any other await, because the next stage may begin then.
                timeline = self.engines.timeline(outcome)
                page.show(1.0)
        return outcome, timeline

    async def _batch(
        self,
        plan: StepPlan,
        carried: Sequence[tuple[int, RolloutRequest]] = (),
        *,
        first: bool = False,
    ) -> Outcome:
        async with scoring_new(self.run, plan.split, plan.step) as wake_scorer:
            page, running = await self._queue(plan, carried, wake_scorer, first=first)
            with page:
                outcome = await running
                page.show(1.0)
        return outcome

    async def _queue(
        self,
        plan: StepPlan,
        carried: Sequence[tuple[int, RolloutRequest]],
        wake_scorer: Callable[[], None],
        *,
        first: bool,
    ) -> tuple[ProgressPage, "asyncio.Future[Outcome]"]:
        """Queue the missing samples at the engines. The next step may then follow. If it does
        before a further batch, that batch goes back to this step's weights."""
        run, engines = self.run, self.engines
        policies = await step_policies(run, engines, plan)
        queued = any(isinstance(policy, SampleQueue) for policy in policies)
        planned = await asyncio.to_thread(_planned, run, plan, queued=queued)
        requests = [*carried, *planned]
        left = _left(requests, self.done)
        left = await _with_turns(run, left, self.weights.policy_version)
        about = f"{plan.split} step {plan.step}: rollouts finished, in %"
        page = ProgressPage(run.config.name, about, run.failures)
        watch = _Watch(run, engines, plan, page, len(requests) - len(left), wake_scorer)
        run.progress.phase(f"{plan.split} step {plan.step}: rolling out")
        running = engines.coordinator.roll_out(
            left,
            watch.keep,
            watch.show,
            weights=self.weights,
            policies=policies,
            min_rollouts=_min_rollouts(run, plan, len(carried), len(self.done)),
            in_flight=queued and first and run.config.rollout.weight_update == "in_flight",
            moves_kv=await kv_rule(run, engines, plan),
            recover=partial(_recovered, run, self.weights.policy_version),
            label=f"{plan.split}/{plan.step}",
        )
        if first and plan.split is Split.TRAIN:
            await engines.queued.reach(plan.step, None)
        # The engines have begun, so this delays none of them.
        watch.end = await predict_end(run, plan)
        return page, running


@dataclass
class _Watch:
    """Callbacks of a batch, which store finished rollouts and show its progress."""

    run: Run
    engines: Engines
    plan: StepPlan
    page: ProgressPage
    num_done: int
    """Rollouts that were finished before the stage."""
    wake_scorer: Callable[[], None]
    end: StageEnd | None = None
    """Forecast of the end. None: not known."""
    _counts: Counter[str] = field(default_factory=Counter)
    _shown_s: float = 0.0

    async def keep(self, rollouts: Sequence[FinishedRollout]) -> None:
        # Before they are stored, so that --resume generates them again.
        await refuse_failed(self.run.config, rollouts)
        await self.run.store_client.add_finished(rollouts, self.plan.epoch)
        for rollout in rollouts:
            self._counts["tokens"] += rollout.num_tokens
            self._counts["drafted"] += rollout.num_draft_tokens
            self._counts["accepted"] += rollout.num_accepted_tokens
        self.wake_scorer()

    def show(self, view: RolloutView) -> None:
        is_last = view.num_finished == view.num_rollouts
        if view.elapsed_s < self._shown_s + _SHOW_EVERY_S and not is_last:
            return
        self._shown_s = view.elapsed_s
        left_s = None
        if self.end:
            with self.run.failures.contained("predicting the end of rollouts"):
                left_s = self.end.left_s(view)
        num_engines = len(self.engines.living)
        rolling = _rolling(self.plan, view, self.num_done, self._counts, num_engines, left_s)
        self.page.show(rolling.num_finished / max(1, rolling.num_rollouts))
        self.run.progress.rolling(rolling)


def _rolling(
    plan: StepPlan,
    view: RolloutView,
    num_done: int,
    counts: Counter[str],
    num_engines: int,
    left_s: float | None,
) -> Rolling:
    """Return the progress of a stage. `num_done`: rollouts finished before the stage. `counts`:
    tokens of rollouts that finished in it."""
    drafted = counts["drafted"]
    return Rolling(
        label=f"{plan.split} step {plan.step}",
        num_finished=num_done + view.num_finished,
        num_rollouts=num_done + view.num_rollouts,
        num_in_flight_tokens=view.num_tokens,
        num_finished_tokens=counts["tokens"],
        acceptance_rate=counts["accepted"] / drafted if drafted else None,
        num_busy_engines=sum(bool(engine.progress) for engine in view.engines),
        num_engines=num_engines,
        elapsed_s=view.elapsed_s,
        left_s=left_s,
    )


def _versions(run: Run, plan: StepPlan) -> list[int]:
    """Return the policy versions that may have generated samples of the plan, also in an earlier
    process of the run."""
    if plan.split is Split.VALIDATION:
        return [plan.policy_version]
    return list(range(max(0, plan.step - 1 - run.config.staleness), plan.step))


def _min_rollouts(run: Run, plan: StepPlan, num_carried: int, num_done: int) -> int | None:
    """Return how many more rollouts the step must finish. It may defer the others. None: all."""
    if plan.split is Split.VALIDATION or not run.config.defers:
        return None
    full = run.config.prompts_per_step * plan.group_size
    return max(0, min(full, plan.num_planned) + num_carried - num_done)


def _planned(run: Run, plan: StepPlan, *, queued: bool) -> list[tuple[int | None, RolloutRequest]]:
    """Return (engine, request) for every sample of the plan. `queued`: no engine yet."""
    samples = [(group, i) for group in plan.groups for i in range(plan.group_size)]
    return [
        (
            None if queued else group.engine,
            _request(run, RequestId(plan.split, plan.step, group.prompt_key, i), drafting),
        )
        for (group, i), drafting in zip(samples, settings_of(run, plan), strict=True)
    ]


def _left(
    requests: Iterable[tuple[int | None, RolloutRequest]], done: Collection[RequestId]
) -> list[tuple[int | None, RolloutRequest]]:
    """Return the requests that have no finished rollout."""
    return [(engine, request) for engine, request in requests if request.id not in done]


async def _with_turns(
    run: Run, requests: Sequence[tuple[int | None, RolloutRequest]], policy_version: int
) -> Sequence[tuple[int | None, RolloutRequest]]:
    """Return a stage's requests with the turns that an earlier process of the run has recorded.

    `policy_version`: that of the stage.
    """
    if (setup := run.inputs.environment) is None or not setup.goes_on:
        return requests
    recorded = await _recorded(run, [request for _, request in requests])
    mixes = run.config.rollout.weight_update == "in_flight"
    return [
        (engine, _continued(each, recorded.get(each.origin, ()), policy_version, mixes=mixes))
        for engine, each in requests
    ]


async def _recovered(
    run: Run, policy_version: int, requests: Sequence[RolloutRequest]
) -> Sequence[RolloutRequest]:
    """Return requests of a dead engine with the turns that it has recorded in this stage.

    `policy_version`: that of the stage. If an actor of the environments does not answer soon, its
    conversations start with the tokens that they brought to the engine.
    """
    setup, environment = run.inputs.environment, run.config.environment
    if setup is None or environment is None or not setup.goes_on:
        return requests
    known: set[str] = set()
    with run.failures.contained("getting the turns of a dead engine's conversations"):
        known = await EnvironmentClient(environment).written([each.id for each in requests])
    found = await _recorded(run, [each for each in requests if str(each.origin) in known])
    # A conversation that has just begun anew has other turns in the store.
    recorded = {id: turns for id, turns in found.items() if str(id) in known}
    mixes = run.config.rollout.weight_update == "in_flight"
    return [
        _continued(
            each, recorded.get(each.origin, ()), policy_version, mixes=mixes, keeps_times=True
        )
        for each in requests
    ]


async def _recorded(
    run: Run, requests: Sequence[RolloutRequest]
) -> dict[RequestId, list[RecordedTurn]]:
    """Return the recorded turns of the steps of these requests."""
    recorded: dict[RequestId, list[RecordedTurn]] = {}
    for split, step in {(each.origin.split, each.origin_step) for each in requests}:
        recorded |= by_sample(await run.store("open_turns", split, step))
    return recorded


def _continued(
    request: RolloutRequest,
    turns: Sequence[RecordedTurn],
    policy_version: int,
    *,
    mixes: bool,
    keeps_times: bool = False,
) -> RolloutRequest:
    """Return the request with its recorded turns. The last one is answered again: by the record.

    A request has tokens of an older version only if it was deferred to this stage, or if `mixes`:
    stages of this run have requests of several versions. Otherwise it starts from the beginning.
    It keeps its own tokens if it has more. `keeps_times`: see `joined_parts`.
    """
    versions = {span.policy_version for turn in turns for span in turn.part.spans}
    allowed = versions == {policy_version} or mixes or request.deferred_from is not None
    if not (versions and allowed):
        return request
    parts = [turn.part for turn in turns]
    generated = without_last_answer(joined_parts(parts, keeps_times=keeps_times))
    if request.generated and len(request.generated.token_ids) >= len(generated.token_ids):
        return request
    return replace(request, generated=generated, kv=None)


async def _carried_over(run: Run, plan: StepPlan) -> list[tuple[int, RolloutRequest]]:
    """Return the requests that an earlier process deferred to this process's first step. They start
    from the beginning, or after their recorded turns. For later steps, the engines keep deferred
    requests themselves."""
    if plan.split is Split.VALIDATION or plan.step != run.ref.first_version + 1:
        return []
    step, num_engines = plan.step - 1, run.config.rollout.num_engines
    before: RolloutOutcome = await run.store("outcome", plan.split, step)
    ids = [RequestId(plan.split, step, n.prompt_key, n.sample_index) for n in before.deferred]
    return [(i % num_engines, _request(run, id).deferred()) for i, id in enumerate(ids)]


def _request(run: Run, id: RequestId, drafting: DraftSetting | None = None) -> RolloutRequest:
    prompt = run.inputs.prompts_of(id.split)[id.prompt_key]
    return RolloutRequest(
        id=id,
        prompt_token_ids=prompt.token_ids,
        sample_key=sample_key(run.config.seed, id.step, id.split, id.prompt_key, id.sample_index),
        max_response_tokens=run.config.data.max_response_tokens,
        drafting=drafting,
        task=task_of(run.config, id, prompt),
    )


def _names(ids: Iterable[RequestId]) -> tuple[SampleName, ...]:
    return tuple(SampleName(prompt_key=i.prompt_key, sample_index=i.sample_index) for i in ids)
