"""Handles of Ray actors. Every call has a time limit, and every error names the actor.

This module imports Ray with the first actor only.
"""

from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from refrain.engines.bounded import wait_for, wait_while_moving

STOP_S = 30.0
"""Longest time for an actor to shut down before we kill it."""
_ASKED_BYTES = 2**20
_WATCH = "watch"
"""Ray's concurrency group for calls that check the progress of another call."""


class ActorError(RuntimeError):
    """A call to an actor failed."""

    def __init__(self, name: str, why: str, cause: BaseException | None = None) -> None:
        """`cause`: the error that the actor itself raised, if any."""
        super().__init__(f"{name} {why}")
        self.why = why
        self.cause = cause


class NoAnswer(ActorError):
    """An actor did not answer in time."""


class ActorGone(ActorError):
    """An actor or its node is dead."""


class RemoteActor:
    """A Ray actor with a readable name.

    By default it reserves no CPU in Ray and is not restarted. `options` can change that.
    """

    def __init__(
        self,
        name: str,
        actor_class: type,
        *args: Any,
        node_id: str | None = None,
        soft: bool = False,
        found_by: str | None = None,
        watched: bool = False,
        **options: Any,
    ) -> None:
        """Start an actor.

        Args:
            name: name in error messages.
            actor_class: class of the actor.
            args: arguments of its constructor.
            node_id: Ray node to start it on.
            soft: use another node if that one is not possible.
            found_by: Ray name under which other processes find the actor.
            watched: set this to use `call_while_moving`.
            options: Ray's options of the actor.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=soft)
        if soft:  # Ray ignores a soft preference of an actor that requests no resources.
            options.setdefault("memory", _ASKED_BYTES)
        options = {"num_cpus": 0, "max_restarts": 0, "name": found_by} | options
        self.name = name
        groups: dict[str, Any] = {"concurrency_groups": {_WATCH: 1}}
        made: Any = ray.remote(**groups)(actor_class) if watched else ray.remote(actor_class)
        self.handle: Any = made.options(**options).remote(*args)

    @classmethod
    def of(cls, name: str, handle: Any) -> "RemoteActor":
        """Wrap the handle of an actor that another process has started."""
        actor = cls.__new__(cls)
        actor.name, actor.handle = name, handle
        return actor

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Return the actor's answer. Raise `ActorError` if the call fails or takes too long."""
        reply = getattr(self.handle, method).remote(*args, **kwargs)
        return await self._answer_in(method, reply, timeout_s)

    async def call_while_moving(
        self, method: str, *args: Any, progress: str, stall_s: float
    ) -> Any:
        """Return the actor's answer. Wait as long as the call makes progress.

        Poll the actor's method `progress`. Raise `ActorError` if the call fails, or if the value of
        `progress` stays the same for `stall_s` seconds.
        """
        from ray.exceptions import RayActorError

        handle = getattr(self.handle, progress)
        ask = handle.options(concurrency_group=_WATCH, max_task_retries=0)

        async def how_far() -> Any:
            # If the actor is dead, the call itself raises. If it restarts, it has no progress.
            with suppress(RayActorError):
                return await ask.remote()

        reply = getattr(self.handle, method).remote(*args)
        moving = wait_while_moving(reply, how_far, stall_s)
        return await self._answer(method, moving, f"stood still in {method} for {stall_s:.0f} s")

    async def call_with_reference(
        self, method: str, *args: Any, timeout_s: float, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Call a method with two return values. Return the first, and a reference to the second.

        The second one stays in Ray's object store.
        """
        reply, rest = getattr(self.handle, method).options(num_returns=2).remote(*args, **kwargs)
        return await self._answer_in(method, reply, timeout_s), rest

    async def _answer_in(self, method: str, reply: Any, timeout_s: float) -> Any:
        late = f"gave no answer to {method} in {timeout_s:.0f} s"
        return await self._answer(method, wait_for(reply, timeout_s), late)

    async def _answer(self, method: str, answer: Awaitable[Any], late: str) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await answer
        except RayTaskError as error:  # First, because it may be a TimeoutError of the actor too.
            cause = error.cause
            why = f"failed in {method}: {type(cause).__name__}: {cause}"
            raise ActorError(self.name, why, cause) from error
        except TimeoutError as error:
            raise NoAnswer(self.name, late) from error
        except RayError as error:
            raise ActorGone(self.name, f"failed in {method}: {type(error).__name__}") from error

    async def stop(self) -> None:
        """Shut the actor down if it still answers, then kill it."""
        try:
            with suppress(ActorError):
                await self.call("shutdown", timeout_s=STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        import ray

        ray.kill(self.handle)

    def restart(self) -> None:
        """Kill the actor, even if it hangs. Ray restarts it up to `max_restarts` times."""
        import ray

        ray.kill(self.handle, no_restart=False)
