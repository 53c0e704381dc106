"""Plans and policies of a real run, for a paper's setting."""

from collections.abc import Sequence
from typing import Any

from refrain.engines.control.controller import Controller
from refrain.engines.rollout.moves import Move, Policy, RolloutView
from refrain.schemas.rollout import DraftSetting, Split
from refrain.schemas.step import PromptGroup, StepPlan


def bare_plan(
    step: int, prompt_keys: Sequence[str], group_size: int, drafting: DraftSetting | None = None
) -> StepPlan:
    """Return the plan of a step without ranking groups. It places all prompts on engine 0."""
    groups = [PromptGroup(prompt_key=key, engine=0, expected_tokens=None) for key in prompt_keys]
    return step_plan(step, groups, group_size, drafting=drafting)


def step_plan(step: int, groups: Sequence[PromptGroup], group_size: int, **known: Any) -> StepPlan:
    """Return the plan of a training step. `known` sets further fields of `StepPlan`."""
    fields: dict[str, Any] = {"epoch": 0, "policy_version": 0} | known
    return StepPlan(
        split=Split.TRAIN,
        step=step,
        created_s=0.0,
        group_size=group_size,
        groups=tuple(groups),
        **fields,
    )


class ThrottledPolicy:
    """A policy that decides at most every `every_s` seconds. With 64 engines most events change
    nothing, and deciding at each would take hours."""

    def __init__(self, policy: Policy, every_s: float) -> None:
        self._policy, self._every_s = policy, every_s
        self._next_s = 0.0

    def decide(self, view: RolloutView) -> Sequence[Move]:
        if view.elapsed_s < self._next_s:
            return ()
        self._next_s = view.elapsed_s + self._every_s
        return self._policy.decide(view)


def throttled(policies: Sequence[Policy], every_s: float) -> tuple[Policy, ...]:
    """Wrap all policies but controllers, which limit their decisions themselves."""
    return tuple(
        policy if isinstance(policy, Controller) else ThrottledPolicy(policy, every_s)
        for policy in policies
    )
