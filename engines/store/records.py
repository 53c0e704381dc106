"""Plans of a run's steps and what became of them."""

from collections.abc import Mapping

from engines.store import queries
from engines.store.file import StoreFile
from schemas.rollout import Split
from schemas.step import RolloutBatch, RolloutOutcome, StepPlan, StepReport

LEARNT_STEPS = 128
"""Steps for which what engines had learnt is kept: resumed from an earlier checkpoint, they learn
anew."""


class StepRecords(StoreFile):
    """The part of a store that has a row a step."""

    def add_plan(self, plan: StepPlan) -> None:
        """Keep a plan; a later one of the same step replaces it."""
        self._replace("plans", str(plan.split), plan.step, plan.model_dump_json())

    def plan(self, split: Split, step: int) -> StepPlan | None:
        query = "SELECT plan FROM plans WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return StepPlan.model_validate_json(rows[0][0]) if rows else None

    def add_outcome(self, split: Split, step: int, outcome: RolloutOutcome) -> None:
        """Keep an outcome; a later one of the same step replaces it."""
        self._replace("outcomes", str(split), step, outcome.model_dump_json())

    def outcome(self, split: Split, step: int) -> RolloutOutcome:
        """Outcome of a step; as planned, where nothing else is known."""
        query = "SELECT outcome FROM outcomes WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return RolloutOutcome.model_validate_json(rows[0][0]) if rows else RolloutOutcome()

    def add_stage(self, batch: RolloutBatch) -> None:
        """Keep a finished stage; a later one of the same step replaces it."""
        self._replace("stages", str(batch.split), batch.step, batch.model_dump_json())

    def stage(self, split: Split, step: int) -> RolloutBatch | None:
        """A finished stage; None where there is none."""
        query = "SELECT batch FROM stages WHERE split = $split AND step = $step"
        rows = self._fetch_of(step, query, split)
        return RolloutBatch.model_validate_json(rows[0][0]) if rows else None

    def add_learnt(self, step: int, learnt: Mapping[int, str]) -> None:
        """Keep what drafting of each engine knew after the rollouts of a step, for some steps."""
        with self._transaction() as con:
            for engine, state in learnt.items():
                con.execute("INSERT OR REPLACE INTO learnt VALUES (?, ?, ?)", (step, engine, state))
            con.execute("DELETE FROM learnt WHERE step <= ?", [step - LEARNT_STEPS])

    def learnt(self) -> dict[int, str]:
        """Drafting's last state, by engine."""
        return dict(self._fetch(queries.LEARNT))

    def add_step(self, report: StepReport) -> None:
        """Keep a step's report; a later one of the same step replaces it."""
        row = (report.step, report.epoch, report.reward_mean, report.timing_s.get("step"))
        self._replace("steps", *row, report.model_dump_json())

    def steps(self) -> list[StepReport]:
        rows = self._fetch("SELECT report FROM steps ORDER BY step")
        return [StepReport.model_validate_json(report) for (report,) in rows]

    def last_step(self) -> int | None:
        """The last step with a report; None before the first."""
        return self._fetch("SELECT max(step) FROM steps")[0][0]
