"""Evaluate any model like a training run does in its validations."""

from typing import Any

from prefect import flow

from refrain.engines.failures import Failures
from refrain.flows.evaluation_config import find_subject
from refrain.flows.prepare import evaluation_plan
from refrain.flows.subflow import is_retried
from refrain.schemas.evaluation import EvaluateConfig, EvaluationReport
from refrain.tasks.evaluate import (
    add_to_training_run,
    open_evaluation,
    report_evaluation,
)
from refrain.tasks.reward import reward
from refrain.tasks.rollout import rollout
from refrain.tasks.run.end_killed import end_killed
from refrain.tasks.schedule import plan_validation


def _on_cancellation(flow: Any, flow_run: Any, state: Any) -> None:
    """End a cancelled evaluation in the same way as a training run."""
    del flow, state
    given = EvaluateConfig.model_validate(flow_run.parameters["config"])
    end_killed(find_subject(given).config.run_dir, given.runs_dir)


@flow(flow_run_name="{config.checkpoint}", on_cancellation=[_on_cancellation])
async def evaluate(
    config: EvaluateConfig, resume: bool = False, overwrite: bool = False
) -> EvaluationReport:
    """Sample a model's responses to prompts, score them, and report mean@n, best@n and maj@n.

    Args:
        config: The model, the data and the sampling.
        resume: Continue an evaluation that was stopped. Prefect's Retry does so too.
        overwrite: Delete an earlier evaluation of the same name first.
    """
    resume = resume or is_retried(find_subject(config).config.run_dir)
    subject, plan = evaluation_plan(config, resume, overwrite=overwrite)
    async with open_evaluation(plan, subject.policy_version) as live:
        run, weights = live.ref, live.milestones.published.last
        plan = await plan_validation(run, subject.policy_version, live.engines.living)
        batch = await rollout(run, plan, weights, live.engines)
        rewarded = await reward(run, batch)
        report = await report_evaluation(run, batch, rewarded)
    if config.log_to_run and subject.run_dir:
        with Failures(subject.config.run_dir).contained("adding figures to the training run"):
            await add_to_training_run(report, subject.run_dir)
    return report
