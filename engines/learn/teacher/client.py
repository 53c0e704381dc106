"""Ask a teacher's servers for log-probabilities over HTTP."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from refrain.engines.bounded import together
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.teacher.answers import read_logprobs, shortened
from refrain.schemas.teacher import SETTING, TeacherServerConfig

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
_BUSY = (408, 425, 429)
"""Statuses of a server that may answer later. So may one with a status of 500 or more."""


class TeacherError(RuntimeError):
    """A teacher's server gave no answer, or one that cannot be used. The message names it."""


class TeacherBusy(TeacherError):
    """A request without an answer, which may have one when it is tried again."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        """`after_s`: seconds that the server asked to wait."""
        super().__init__(why)
        self.after_s = after_s


def pause_s(attempt: int, after_s: float) -> float:
    """Return the seconds before another attempt, after `attempt` that failed (1 or more): 1, 2, 4
    and so on, or what the server asked for if that is longer, and 60 at most."""
    doubled = FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10)
    return min(max(doubled, after_s), MAX_PAUSE_S)


class TeacherClient:
    """The connection of one process to a teacher's servers. It keeps nothing between calls."""

    def __init__(self, config: TeacherServerConfig) -> None:
        self._config = config
        self.urls = [url.rstrip("/") for url in config.urls]
        self._repeated: list[str] = []
        """Why each attempt of this call that was repeated had failed."""

    def score(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Return the teacher's log-probabilities of each sequence's sampled tokens, at temperature
        1. At most `at_once` requests are in flight.

        Raises TeacherError when a request has no answer after all retries, when a server refuses
        it, or when an answer is short, not finite or of other tokens.
        """
        self._repeated.clear()
        found = asyncio.run(self._score_all(sequences))
        if num := len(self._repeated):
            logger.warning("%d requests to the teacher were repeated: %s", num, self._repeated[-1])
        return found

    async def _score_all(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        room = asyncio.Semaphore(self._config.at_once)
        async with self.connect() as http:

            async def score(at: int, sequence: TokenSequence) -> NDArray[np.float32]:
                async with room:
                    logprobs = await self.ask(http, sequence.token_ids.tolist(), at)
                return logprobs[sequence.response_at - 1]

            async with together() as group:
                tasks = [group.create_task(score(*one)) for one in enumerate(sequences)]
        return [task.result() for task in tasks]

    def connect(self) -> httpx.AsyncClient:
        """Return an open client for `ask` and `call`. The caller closes it."""
        key = self._config.api_key
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
            timeout=self._config.timeout_s,
            # A request that waited for a connection would be late before it is sent.
            limits=httpx.Limits(max_keepalive_connections=self._config.at_once),
        )

    async def ask(
        self, http: httpx.AsyncClient, token_ids: Sequence[int], first: int = 0
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of all tokens but the first. `first`: number of the server
        that is asked first. Raises TeacherError as `score` does."""
        url, answer = await self._patiently(http, self.request(list(token_ids)), first)
        return self.read(answer, token_ids, url)

    def request(self, prompt: list[int] | str) -> dict[str, Any]:
        """Return the body of a request that scores a prompt."""
        return {
            "model": self._config.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }

    def read(self, answer: Any, token_ids: Sequence[int], url: str) -> NDArray[np.float32]:
        """Return the log-probabilities in an answer. Raise TeacherError that names the server."""
        try:
            return read_logprobs(answer, token_ids)
        except ValueError as error:
            raise TeacherError(
                f"the answer of {url} for the teacher {self._config.model} cannot be used: {error}"
            ) from error

    async def _patiently(
        self, http: httpx.AsyncClient, body: dict[str, Any], first: int
    ) -> tuple[str, Any]:
        """Return the address of the server that answered, and its answer. Each attempt asks the
        next server."""
        num = 1 + self._config.retries
        for attempt in range(1, num + 1):
            url = self.urls[(first + attempt - 1) % len(self.urls)]
            try:
                return url, await self.call(http, "POST", f"{url}/completions", body)
            except TeacherBusy as error:
                if attempt == num:
                    raise TeacherError(
                        f"the teacher at {error}. This was attempt {num} of {num}. Look at the "
                        "server's log, and resume the run when it answers. If it is only slow, "
                        f"raise {SETTING}.timeout_s or {SETTING}.retries"
                    ) from error
                self._repeated.append(str(error))
                await asyncio.sleep(pause_s(attempt, error.after_s))
        raise AssertionError("there is at least one attempt")

    async def call(self, http: httpx.AsyncClient, method: str, url: str, body: Any = None) -> Any:
        """Return the JSON value that a server answers to one request. Raises TeacherBusy when it
        may answer later, and TeacherError when it refuses the request or answers no JSON."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                reply = await http.request(method, url, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise TeacherBusy(f"{url} gave no answer in {self._config.timeout_s:g} s") from error
        except httpx.RequestError as error:
            why = str(error) or type(error).__name__
            raise TeacherBusy(f"{url} gave no answer ({why})") from error
        except httpx.InvalidURL as error:
            raise TeacherError(f"{url} is no address: {error}") from error
        if (status := reply.status_code) != 200:
            said = f"{url} answered with status {status}: {shortened(_message(reply))}"
            if status in _BUSY or status >= 500:
                raise TeacherBusy(said, _asked_to_wait_s(reply))
            raise TeacherError(said)
        try:
            return reply.json()
        except ValueError as error:
            raise TeacherError(f"{url} answered no JSON: {shortened(reply.text)}") from error


def _message(reply: httpx.Response) -> str:
    """Return the server's own words about an error, or its whole answer."""
    try:
        match reply.json():
            case {"error": {"message": str(text)}} | {"message": str(text)}:
                return text
    except ValueError:
        pass
    return reply.text


def _asked_to_wait_s(reply: httpx.Response) -> float:
    """Return the seconds in `Retry-After`; 0 without it, or with a date."""
    text = reply.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0
