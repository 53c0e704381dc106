"""Choose the prompts of each RL step: a pure function of the seed, the step's number and, with a
curriculum, the pass rates that the step's epoch knows.

The loader has no state to lose. A resumed run asks for step n and gets the same prompts as before,
also across epochs. Steps count from 1, epochs from 0. The last step of an epoch takes the prompts
that are left.

A step may draw more prompts (refills) when some of its own teach nothing. Refills are a pure
function of the same. They take no prompts away from other steps, and leave the number of steps of
an epoch unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from refrain.engines.data.mixture import Mixture, Portion, skipped, stable_hash
from refrain.schemas.data import PassRate
from refrain.schemas.inputs import CurriculumConfig

Rates = Mapping[str, PassRate]
"""Pass rates by prompt. Prompts without a rate are never skipped."""
NO_RATES: Rates = MappingProxyType({})


class PromptLoader:
    """Order of the prompts over a run."""

    def __init__(
        self,
        prompt_keys: Sequence[str],
        *,
        prompts_per_step: int,
        num_epochs: int,
        shuffle: bool,
        seed: int,
        max_steps: int | None = None,
        portions: Sequence[Portion] = (),
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        """Raises ValueError when there are no prompts, or as `Mixture` does. The keys must be
        distinct. `max_steps`: upper limit for the steps of the run. `portions`: the same keys by
        source; without them there is one source."""
        if not prompt_keys:
            raise ValueError("there are no training prompts: check the files in data.train")
        assert len(set(prompt_keys)) == len(prompt_keys), "prompt keys must be distinct"
        assert prompts_per_step > 0
        assert num_epochs > 0
        self.prompts_per_step = prompts_per_step
        self.num_epochs = num_epochs
        self.max_steps = max_steps
        self.shuffle = shuffle
        self.seed = seed
        self.curriculum = curriculum
        self._keys = tuple(prompt_keys)
        self.mixture = Mixture(portions or [Portion("", self._keys)], prompts_per_step)
        self._last_order: tuple[tuple[int, frozenset[str]] | None, tuple[str, ...]] = (None, ())

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._keys) / self.prompts_per_step)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        of_epochs = self.steps_per_epoch * self.num_epochs
        return min(of_epochs, self.max_steps or of_epochs)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step. Raises ValueError when the run has no such step."""
        if not 1 <= step <= self.num_steps:
            raise ValueError(f"step {step} is outside the run, whose steps are 1..{self.num_steps}")
        return (step - 1) // self.steps_per_epoch

    @property
    def num_prompts(self) -> int:
        return len(self._keys)

    def first_step(self, epoch: int) -> int:
        return 1 + epoch * self.steps_per_epoch

    def skipped(self, step: int, rates: Rates) -> frozenset[str]:
        """Return the prompts that the curriculum skips in the step's epoch."""
        if self.curriculum is None:
            return frozenset()
        return skipped(rates, self.curriculum, self.epoch_of(step))

    def prompts_of(self, step: int, rates: Rates = NO_RATES) -> tuple[str, ...]:
        """Return the step's prompt keys, in order. `rates`: those known when the step's epoch
        began. Raises ValueError as `epoch_of` does."""
        order = self._order_of(step, rates)
        start = (step - 1) % self.steps_per_epoch * self.prompts_per_step
        return order[start : start + self.prompts_per_step]

    def refills_of(self, step: int, rates: Rates = NO_RATES) -> tuple[str, ...]:
        """Return all prompts of the epoch but the step's own, in the order in which the step draws
        refills.

        The order is that of the epoch, from half an epoch after the step. So refills do not return
        in the next step, and steps draw different ones. Raises ValueError as `epoch_of` does.
        """
        order, own = self._order_of(step, rates), set(self.prompts_of(step, rates))
        at = (step - 1) % self.steps_per_epoch * self.prompts_per_step + len(order) // 2
        start = at % len(order)
        later = dict.fromkeys(order[start:] + order[:start])
        return tuple(key for key in later if key not in own)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that a checkpoint of `step` saves. `check_state` uses it to detect
        changed data."""
        return {"step": step, **self._identity()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError when a run with this `state` cannot continue with these data.

        `num_epochs` and `max_steps` may differ, so that you can prolong a run.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint of step {state['step']} was made with {name} = "
                    f"{state[name]!r}, but now it is {value!r}. Use the run's former data and "
                    "seed (and data.date, if its chat template shows a date), or start a new run "
                    "under another name"
                )

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "prompts_per_step": self.prompts_per_step,
            "num_prompts": len(self._keys),
            "prompts_hash": stable_hash("/".join(self._keys)),
        }

    def _order_of(self, step: int, rates: Rates) -> tuple[str, ...]:
        epoch, skips = self.epoch_of(step), self.skipped(step, rates)
        if self._last_order[0] != (epoch, skips):
            repeats = self.curriculum.max_repeats if self.curriculum else 1
            order = self.mixture.order(
                epoch, self.seed, shuffle=self.shuffle, skipped=skips, max_repeats=repeats
            )
            self._last_order = ((epoch, skips), order)
        return self._last_order[1]
