"""Run a scorer in its own process, so that refrain can kill a scorer that hangs, with all processes
that it started. refrain checks each reply (`channel.py`): a scorer can only score its own calls."""

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refrain.engines.reward.channel import Channel, NoReplyError, ReplyLine
from refrain.engines.reward.results import Scored, checked_score, checked_scores
from refrain.engines.reward.worker import Call, Reply, Setup, num_in_group
from refrain.engines.user_code.importing import UserFault
from refrain.engines.user_code.launch import (
    end_guarded,
    how_it_ended,
    start_guarded,
    variables_for,
    worker_command,
)
from refrain.engines.user_code.values import to_json
from refrain.schemas.reward import FunctionReward

START_TIMEOUT_S = 300.0
"""Time limit for importing the user's file, which may import large libraries."""


class Failed(NamedTuple):
    """A call without a score."""

    reason: str


Outcome = Scored | list[Scored] | Failed
"""Outcome of a call, which scores one response or a group."""


class CallError(Exception):
    """The call at `index` failed, ended the process or took too long."""

    def __init__(self, index: int, reason: str, suspects: Sequence[int] = ()) -> None:
        """`suspects`: concurrent calls, any of which may have ended the process."""
        super().__init__(index, reason)
        self.index = index
        self.reason = reason
        self.suspects = suspects


class ScorerProcess:
    """Process that runs one function. It starts on first use, and again after an error."""

    def __init__(
        self, config: FunctionReward, surroundings: Mapping[str, str] | None = None
    ) -> None:
        """`surroundings`: the run's `LOCALE` variables, used instead of this machine's."""
        self._config = config
        self._surroundings = surroundings
        self.num_scored = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._group: int | None = None

    def start(self) -> None:
        """Start the process unless it is ready. Raises ValueError when the user's file cannot be
        used."""
        if self._is_ready():
            return
        # A process that died while idle lost no score: replace it.
        self.close()
        variables = variables_for(
            self._config.environment, self._surroundings, "reward.environment"
        )
        own, theirs = socket.socketpair()
        self._channel = Channel(own)
        with theirs:
            descriptor = theirs.fileno()
            command = worker_command(sys.executable, "reward", descriptor)
            self._process = start_guarded(command, descriptor, variables)
        try:
            self._load(self._channel)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        """Whether the process is alive and has sent nothing since its last reply."""
        alive = self._process is not None and self._process.poll() is None
        return alive and self._channel is not None and self._channel.is_silent()

    def score(self, calls: Sequence[Call]) -> list[Outcome | None]:
        """Return the outcome of each call. None: another call ended the process first.

        A call fails if it raises, returns no finite number for each of its responses, ends the
        process or takes more than `timeout_s` seconds. With `on_error` = `stop`, the first failure
        raises CallError.
        """
        self.start()
        assert self._channel is not None
        try:
            return self._outcomes(self._channel, calls)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process with everything it started."""
        if self._process is None or self._channel is None:
            return
        # The guard notices the closed socket and kills them.
        self._channel.close()
        end_guarded(self._process, self._group)
        self._process = self._channel = self._group = None

    def _load(self, channel: Channel) -> None:
        path = self._config.path
        try:
            # This line is from the guard, because no code of the user runs yet.
            self._group = int(channel.receive_line(START_TIMEOUT_S))
            channel.send(self._setup(), START_TIMEOUT_S)
            line = channel.receive(START_TIMEOUT_S)
        except TimeoutError as error:
            raise ValueError(f"{path} was not imported within {START_TIMEOUT_S:.0f} s") from error
        except NoReplyError as error:
            raise ValueError(f"{path} writes to refrain's socket: {error}") from error
        except (EOFError, OSError) as error:
            raise ValueError(f"{path} ends the process that imports it") from error
        if line.reply != Reply.READY:
            raise ValueError(str(line.content))

    def _setup(self) -> Setup:
        config = self._config
        return {
            "path": str(config.path),
            "name": config.function,
            "kwargs": config.arguments,
            "search_path": [str(entry) for entry in sys.path],
            "max_memory_bytes": config.max_memory_bytes,
            "group": config.group,
        }

    def _outcomes(self, channel: Channel, calls: Sequence[Call]) -> list[Outcome | None]:
        outcomes: dict[int, Outcome] = {}
        chunk = secrets.token_hex(16)
        try:
            self._send(channel, chunk, calls)
            self._collect(channel, chunk, calls, outcomes)
        except CallError as error:
            if len(error.suspects) > 1:
                self.close()
                self._score_alone(calls, error.suspects, outcomes)
            elif self._stops:
                raise
            else:
                self.close()
                outcomes[error.index] = Failed(error.reason)
        return [outcomes.get(index) for index in range(len(calls))]

    def _score_alone(
        self, calls: Sequence[Call], suspects: Sequence[int], outcomes: dict[int, Outcome]
    ) -> None:
        """Score calls one by one, to find the call that ends the process."""
        for index in suspects:
            try:
                (outcome,) = self.score([calls[index]])
            except CallError as error:
                raise CallError(index, error.reason) from error
            assert outcome is not None, "nothing else ran"
            outcomes[index] = outcome

    @property
    def _stops(self) -> bool:
        return self._config.on_error == "stop"

    def _send(self, channel: Channel, chunk: str, calls: Sequence[Call]) -> None:
        message = {"chunk": chunk, "calls": [to_json(call) for call in calls]}
        try:
            channel.send(message, self._config.timeout_s)
        except TimeoutError as error:
            stood = f"its process stood still for {self._config.timeout_s:g} s (reward.timeout_s)"
            raise CallError(0, stood) from error
        except OSError as error:
            raise CallError(0, self._how_it_ended()) from error

    def _collect(
        self,
        channel: Channel,
        chunk: str,
        calls: Sequence[Call],
        outcomes: dict[int, Outcome],
    ) -> None:
        """Read replies into `outcomes` until each call has one. Raise CallError for a call that
        ended the process or must be killed with it. With `on_error` = `stop`, raise it for any
        call that fails."""
        timeout_s, num_calls = self._config.timeout_s, len(calls)
        started_s: dict[int, float] = {}
        num_repeated = 0
        while len(outcomes) < num_calls:
            oldest = min(started_s, key=started_s.__getitem__, default=None)
            running = _first_without(outcomes, num_calls) if oldest is None else oldest
            # If no call has started, the process is still receiving: that is limited too.
            since_s = time.monotonic() if oldest is None else started_s[oldest]
            wait_s = since_s + timeout_s - time.monotonic()
            line = self._receive(channel, wait_s, running, list(started_s))
            index, starts = line.index, line.reply == Reply.STARTED
            if line.chunk == chunk and index in outcomes:
                # Only the first reply counts. Give up on a process that keeps repeating replies.
                num_repeated += 1
                if num_repeated > num_calls:
                    self.close()
                    return
                continue
            waiting = 0 <= index < num_calls and index not in started_s
            if line.chunk != chunk or not (waiting if starts else index in started_s):
                stray = "its process replied for a response that was not running"
                raise CallError(running, stray, list(started_s))
            if starts:
                started_s[index] = time.monotonic()
                continue
            del started_s[index]
            outcomes[index] = self._outcome(line, num_in_group(calls[index]))
            self.num_scored += 1

    def _receive(
        self, channel: Channel, timeout_s: float, running: int, suspects: Sequence[int]
    ) -> ReplyLine:
        try:
            return channel.receive(timeout_s)
        except TimeoutError as error:
            limit = f"no score within {self._config.timeout_s:g} s (reward.timeout_s)"
            raise CallError(running, limit) from error
        except NoReplyError as error:
            wrote = f"its process wrote to refrain's socket: {error}"
            raise CallError(running, wrote, suspects) from error
        except (EOFError, OSError) as error:
            raise CallError(running, self._how_it_ended(), suspects) from error

    def _outcome(self, line: ReplyLine, num: int | None) -> Outcome:
        if line.reply == Reply.FAILED:
            reason = str(line.content)
        else:
            try:
                content = line.content
                return checked_score(content) if num is None else checked_scores(content, num)
            except UserFault as error:
                reason = str(error)
        if self._stops:
            raise CallError(line.index, reason)
        return Failed(reason)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        return how_it_ended(self._process, "the scorer")


def _first_without(outcomes: Mapping[int, Any], num_calls: int) -> int:
    return next(index for index in range(num_calls) if index not in outcomes)
