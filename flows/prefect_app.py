"""Prefect's server for a run's own SQLite database: it repeats requests that SQLite refuses.

SQLite refuses a write when another write came after its read. Prefect's server then answers 503,
and a client waits 2, 4, 8 s before it tries again. In a pipeline several flows write at once, so
steps stood still for up to 25 s. The server itself can repeat such a request at once, because its
transaction was rolled back.
"""

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REFUSED = 503
PAUSE_S = 0.05
"""Seconds before a request is repeated."""
PATIENCE_S = 10.0
"""Seconds after which the client gets the refusal."""


def create_app() -> ASGIApp:
    """Return Prefect's app."""
    from prefect.server.api.server import create_app as prefect_app

    return PatientApp(prefect_app())


class PatientApp:
    """An ASGI app that repeats requests which the app inside answers with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = await _received(receive)
        until_s = time.monotonic() + PATIENCE_S
        while await self._is_refused(scope, received, receive, send, time.monotonic() > until_s):
            await asyncio.sleep(PAUSE_S)

    async def _is_refused(
        self, scope: Scope, received: list[Message], receive: Receive, send: Send, last: bool
    ) -> bool:
        """Pass a request on. Return True if it was refused, unless this is the `last` try."""
        messages = iter(received)
        refused = False

        async def again() -> Message:
            return next(messages, None) or await receive()

        async def unless_refused(message: MutableMapping[str, Any]) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == REFUSED:
                refused = not last
            if not refused:
                await send(message)

        try:
            # Apps add to the scope, and a second try must not see it.
            await self._app(dict(scope), again, unless_refused)
        except Exception:
            # Starlette raises an error after it has sent a response for it.
            if not refused:
                raise
        return refused


async def _received(receive: Receive) -> list[Message]:
    """Return the messages of a whole request."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages
