"""A real run's config in a paper's setting, so that its techniques are put together as there."""

from collections.abc import Sequence
from typing import Any

from engines.control.controller import Controller
from engines.rollout.moves import Move, Policy, RolloutView
from schemas.config import PatConfig, TrainConfig
from schemas.rollout import DraftSetting, Split
from schemas.step import PromptGroup, StepPlan


def bare_plan(
    step: int, prompt_keys: Sequence[str], group_size: int, drafting: DraftSetting | None = None
) -> StepPlan:
    """Plan of a step without ranking groups; who generates what is not said."""
    groups = [PromptGroup(prompt_key=key, engine=0, expected_tokens=None) for key in prompt_keys]
    return step_plan(step, groups, group_size, drafting=drafting)


def step_plan(step: int, groups: Sequence[PromptGroup], group_size: int, **known: Any) -> StepPlan:
    """`known`: its other fields, where something is known of them."""
    fields: dict[str, Any] = {"epoch": 0, "policy_version": 0} | known
    return StepPlan(
        split=Split.TRAIN,
        step=step,
        created_s=0.0,
        group_size=group_size,
        groups=tuple(groups),
        **fields,
    )


NOTHING, ALL = "nothing", "joint"
DRAFTS, RESHAPE, HISTOPIPE, SPECACTOR = "history drafts", "reshape", "HistoPipe", "SpecActor"
"""Techniques of a run: drafts from history, other TP degrees, placement of prompts by their lengths
in the epoch before and migration, reconfiguration and races."""


def switched_on(config: TrainConfig) -> tuple[str, ...]:
    """Techniques of this config."""
    specactor = config.specactor
    on = {
        DRAFTS: config.drafting.enabled,
        RESHAPE: bool(config.pat.tp_degrees),
        HISTOPIPE: config.ranks_prompts and config.histopipe.migrate,
        SPECACTOR: bool(specactor.draft_models) and specactor.race,
    }
    return tuple(name for name, is_on in on.items() if is_on)


def only(config: TrainConfig, technique: str) -> TrainConfig:
    """The same with this one alone, with `ALL` or with `NOTHING` of what it switches on."""
    off = {
        DRAFTS: {"drafting": config.drafting.model_copy(update={"enabled": False})},
        RESHAPE: {"pat": PatConfig()},
        HISTOPIPE: {"histopipe": config.histopipe.model_copy(update={"migrate": False})},
        SPECACTOR: {"specactor": config.specactor.model_copy(update={"race": False})},
    }
    changes = [change for name, change in off.items() if technique not in (name, ALL)]
    return config.model_copy(update={k: v for change in changes for k, v in change.items()})


class AskedSeldom:
    """A policy that is asked at most every so many seconds, where others are at every event: 64
    engines have hundreds of events in which nothing grows."""

    def __init__(self, policy: Policy, every_s: float) -> None:
        self._policy, self._every_s = policy, every_s
        self._next_s = 0.0

    def decide(self, view: RolloutView) -> Sequence[Move]:
        if view.elapsed_s < self._next_s:
            return ()
        self._next_s = view.elapsed_s + self._every_s
        return self._policy.decide(view)


def asked_seldom(policies: Sequence[Policy], every_s: float) -> tuple[Policy, ...]:
    """All but controllers, which look at a view only when that is due."""
    return tuple(
        policy if isinstance(policy, Controller) else AskedSeldom(policy, every_s)
        for policy in policies
    )
