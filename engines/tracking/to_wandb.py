"""Log to Weights & Biases. Without a login, it writes files that `wandb sync` uploads later."""

import os
from collections.abc import Mapping

import wandb

from refrain.engines.tracking.forward import TrackedRun

STEP = "step"
"""Metric that is the x-axis. wandb's own step cannot go back, as it must after a resume."""


class WandbWriter:
    def __init__(self, run: TrackedRun) -> None:
        # Without a login, wandb would ask on the terminal and wait for an answer.
        is_known = wandb.login(prompt=False, verify=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if is_known else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.directory,
            config=dict(run.settings),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        self._run.log({**metrics, STEP: step, "_timestamp": at_s})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


open_writer = WandbWriter
