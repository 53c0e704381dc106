"""Plans, outcomes and reports of a run's steps."""

from collections.abc import Mapping

from refrain.engines.store import queries
from refrain.engines.store.file import StoreFile
from refrain.schemas.rollout import Split
from refrain.schemas.step import RolloutBatch, RolloutOutcome, StepPlan, StepReport

LEARNT_STEPS = 128
"""Steps whose drafting states the store keeps. A run that resumes from an older checkpoint starts
drafting without them."""


class StepRecords(StoreFile):
    """The tables of a store with one row per step."""

    def add_plan(self, plan: StepPlan) -> None:
        """Store a plan, in place of an earlier one of its step."""
        self._replace("plans", str(plan.split), plan.step, plan.model_dump_json())

    def plan(self, split: Split, step: int) -> StepPlan | None:
        query = "SELECT plan FROM plans WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return StepPlan.model_validate_json(rows[0][0]) if rows else None

    def add_outcome(self, split: Split, step: int, outcome: RolloutOutcome) -> None:
        """Store an outcome, in place of an earlier one of its step."""
        self._replace("outcomes", str(split), step, outcome.model_dump_json())

    def outcome(self, split: Split, step: int) -> RolloutOutcome:
        """Return the outcome of a step; without a stored one, everything went as planned."""
        query = "SELECT outcome FROM outcomes WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return RolloutOutcome.model_validate_json(rows[0][0]) if rows else RolloutOutcome()

    def add_stage(self, batch: RolloutBatch) -> None:
        """Store a finished stage, in place of an earlier one of its step."""
        self._replace("stages", str(batch.split), batch.step, batch.model_dump_json())

    def stage(self, split: Split, step: int) -> RolloutBatch | None:
        """Return a step's finished stage, or None."""
        query = "SELECT batch FROM stages WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return RolloutBatch.model_validate_json(rows[0][0]) if rows else None

    def add_learnt(self, step: int, learnt: Mapping[int, str]) -> None:
        """Store each engine's drafting state after the rollouts of a step.

        States older than `LEARNT_STEPS` steps are deleted.
        """
        with self._transaction() as con:
            for engine, state in learnt.items():
                con.execute("INSERT OR REPLACE INTO learnt VALUES (?, ?, ?)", (step, engine, state))
            con.execute("DELETE FROM learnt WHERE step <= ?", [step - LEARNT_STEPS])

    def learnt(self) -> dict[int, str]:
        """Return the last drafting state of each engine."""
        return dict(self._fetch(queries.LEARNT))

    def add_step(self, report: StepReport) -> None:
        """Store a step's report, in place of an earlier one of its step."""
        row = (report.step, report.epoch, report.reward_mean, report.timing_s.get("step"))
        self._replace("steps", *row, report.model_dump_json())

    def steps(self) -> list[StepReport]:
        rows = self._fetch("SELECT report FROM steps ORDER BY step")
        return [StepReport.model_validate_json(report) for (report,) in rows]

    def last_step(self) -> int | None:
        """Return the last step that has a report, or None."""
        return self._fetch("SELECT max(step) FROM steps")[0][0]
