"""Ray actors as their callers hold them: every call ends in time, every failure says whose it is.

Ray is loaded with the first actor, not with this module.
"""

from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from engines.bounded import wait_for, wait_while_moving

STOP_S = 30.0
"""Longest time for an actor to shut down before it is killed."""
_ASKED_BYTES = 2**20
_WATCH = "watch"
"""Ray's concurrency group of the calls that ask how far another call is."""


class ActorError(RuntimeError):
    """An actor did not do what it was asked."""

    def __init__(self, name: str, why: str, cause: BaseException | None = None) -> None:
        """`cause`: error that the actor itself raised."""
        super().__init__(f"{name} {why}")
        self.why = why
        self.cause = cause


class NoAnswer(ActorError):
    """An actor did not answer in time."""


class ActorGone(ActorError):
    """An actor is dead, or its node is."""


class RemoteActor:
    """A Ray actor with a name for people. Needs no CPU of Ray's and is not restarted, unless
    `options` say so."""

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
        """`node_id`: node to start it on; `soft`: on another one when that is not possible;
        `found_by`: its name for other processes; `watched`: `call_while_moving` needs it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=soft)
        if soft:  # Of an actor that asks for nothing, Ray does not heed a soft wish.
            options.setdefault("memory", _ASKED_BYTES)
        options = {"num_cpus": 0, "max_restarts": 0, "name": found_by} | options
        self.name = name
        groups: dict[str, Any] = {"concurrency_groups": {_WATCH: 1}}
        made: Any = ray.remote(**groups)(actor_class) if watched else ray.remote(actor_class)
        self.handle: Any = made.options(**options).remote(*args)

    @classmethod
    def of(cls, name: str, handle: Any) -> "RemoteActor":
        """Hold on an actor that another process has started."""
        actor = cls.__new__(cls)
        actor.name, actor.handle = name, handle
        return actor

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Answer of the actor. Raises `ActorError`."""
        reply = getattr(self.handle, method).remote(*args, **kwargs)
        return await self._answer_in(method, reply, timeout_s)

    async def call_while_moving(
        self, method: str, *args: Any, progress: str, stall_s: float
    ) -> Any:
        """Answer of the actor, waited for while what its method `progress` gives changes, and
        `stall_s` after that. Raises `ActorError`."""
        from ray.exceptions import RayActorError

        handle = getattr(self.handle, progress)
        ask = handle.options(concurrency_group=_WATCH, max_task_retries=0)

        async def how_far() -> Any:
            # One that is dead is told by the call itself, one that starts again is nowhere.
            with suppress(RayActorError):
                return await ask.remote()

        reply = getattr(self.handle, method).remote(*args)
        moving = wait_while_moving(reply, how_far, stall_s)
        return await self._answer(method, moving, f"stood still in {method} for {stall_s:.0f} s")

    async def call_aside(
        self, method: str, *args: Any, timeout_s: float, **kwargs: Any
    ) -> tuple[Any, Any]:
        """First answer of two, and a reference to the second, which stays in the object store."""
        reply, aside = getattr(self.handle, method).options(num_returns=2).remote(*args, **kwargs)
        return await self._answer_in(method, reply, timeout_s), aside

    async def _answer_in(self, method: str, reply: Any, timeout_s: float) -> Any:
        late = f"gave no answer to {method} in {timeout_s:.0f} s"
        return await self._answer(method, wait_for(reply, timeout_s), late)

    async def _answer(self, method: str, answer: Awaitable[Any], late: str) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await answer
        except RayTaskError as error:  # First: it may be a TimeoutError of the actor's own, too.
            cause = error.cause
            why = f"failed in {method}: {type(cause).__name__}: {cause}"
            raise ActorError(self.name, why, cause) from error
        except TimeoutError as error:
            raise NoAnswer(self.name, late) from error
        except RayError as error:
            raise ActorGone(self.name, f"failed in {method}: {type(error).__name__}") from error

    async def stop(self) -> None:
        """Have it shut down, if it still answers, and kill it."""
        try:
            with suppress(ActorError):
                await self.call("shutdown", timeout_s=STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        import ray

        ray.kill(self.handle)

    def restart(self) -> None:
        """Kill it, though it hangs; Ray starts it again as often as its `max_restarts` says."""
        import ray

        ray.kill(self.handle, no_restart=False)
