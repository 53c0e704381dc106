"""HTTP on the loopback, for agents that use OpenAI's client or plain HTTP.

    POST /v1/chat/completions     the next turn of the conversation that the API key names
    GET /v1/models                the policy

A connection serves one request. Errors have OpenAI's shape, and its client does not try again.
Workers import this module: see `engines/user_code/importing.py`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

from ..user_code.importing import UserFault, as_text
from .completions import MODEL

HOST = "127.0.0.1"
MAX_HEAD_BYTES = 2**16
MAX_BODY_BYTES = 2**24
"""Largest size of a request. It has all messages of a conversation."""
TRANSFER_S = 30.0
"""Longest time in seconds to receive a request, or to send an answer."""
BACKLOG = 1024
"""Most connections that wait to be accepted."""
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
METHODS = {COMPLETIONS: "POST", MODELS: "GET"}
THE_MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "refrain"}],
}
Ask = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Function that answers a request for a completion. Raises UserFault."""


class HttpFault(Exception):
    """A request that cannot be served."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpRequest(NamedTuple):
    """A request, its body not read yet."""

    method: str
    path: str
    headers: dict[str, str]
    """Values by name in lower case."""

    @property
    def api_key(self) -> str:
        return self.headers.get("authorization", "").partition("Bearer ")[2].strip()


class Endpoint:
    """Server of this process. Each conversation has an API key."""

    def __init__(self) -> None:
        self.base_url = ""
        self._server: asyncio.AbstractServer | None = None
        self._conversations: dict[str, Ask] = {}

    async def start(self) -> None:
        """Listen on a free port."""
        # Each call that waits has two connections in this process: the client's and its own.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        listening = socket.create_server((HOST, 0), backlog=BACKLOG)
        self.base_url = f"http://{HOST}:{listening.getsockname()[1]}/v1"
        self._server = await asyncio.start_server(
            self._serve, sock=listening, limit=MAX_HEAD_BYTES, backlog=BACKLOG
        )

    def add(self, ask: Ask) -> str:
        """Return the API key of a new conversation."""
        key = secrets.token_urlsafe(24)
        self._conversations[key] = ask
        return key

    def remove(self, key: str) -> None:
        """Refuse this API key from now on."""
        self._conversations.pop(key, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, content = HTTPStatus.OK, await self._content(reader)
        except HttpFault as fault:
            status, content = fault.status, error_of(fault.status, str(fault))
        except ConnectionError:
            writer.close()
            return
        try:
            writer.write(response_of(status, content))
            await asyncio.wait_for(writer.drain(), TRANSFER_S)
        except (asyncio.TimeoutError, ConnectionError):  # noqa: UP041 (before Python 3.11)
            # The client has gone or does not read. It may ask again.
            writer.transport.abort()
        finally:
            writer.close()

    async def _content(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        """Return the answer to a connection's request. Raises HttpFault, or ConnectionError if the
        client has gone."""
        try:
            request, body = await asyncio.wait_for(read_request(reader), TRANSFER_S)
        except asyncio.TimeoutError:  # noqa: UP041 (before Python 3.11)
            reason = f"the request did not arrive within {TRANSFER_S:g} s: send it at once"
            raise HttpFault(HTTPStatus.REQUEST_TIMEOUT, reason) from None
        ask = self._conversations.get(request.api_key)
        if ask is None:
            reason = "the API key names no conversation that goes on: use model.api_key"
            raise HttpFault(HTTPStatus.UNAUTHORIZED, reason)
        if request.path == MODELS:
            return THE_MODELS
        return await _asked(ask, json_object(body), reader)


async def _asked(
    ask: Ask, request: Mapping[str, Any], reader: asyncio.StreamReader
) -> dict[str, Any]:
    """Return the answer to a request. Raises ConnectionError if the client does not wait for it."""
    asking = asyncio.ensure_future(ask(request))
    gone = asyncio.ensure_future(_left(reader))
    try:
        await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise ConnectionAbortedError("the client has gone")
        return asking.result()
    except UserFault as fault:
        raise HttpFault(HTTPStatus.BAD_REQUEST, str(fault)) from fault
    except asyncio.CancelledError:
        if not asking.cancelled():
            raise
        raise HttpFault(HTTPStatus.BAD_REQUEST, "the conversation is over") from None
    finally:
        asking.cancel()
        gone.cancel()


async def _left(reader: asyncio.StreamReader) -> None:
    """Wait until the client has closed the connection."""
    with suppress(ConnectionError):
        while await reader.read(MAX_HEAD_BYTES):
            pass


async def read_request(reader: asyncio.StreamReader) -> tuple[HttpRequest, bytes]:
    """Return a request and its body. Raises HttpFault, or ConnectionError if it is not whole."""
    try:
        request = request_of(await reader.readuntil(b"\r\n\r\n"))
        return request, await reader.readexactly(body_size(request))
    except asyncio.IncompleteReadError as error:
        raise ConnectionAbortedError("the client has gone") from error
    except asyncio.LimitOverrunError:
        reason = f"the headers have over {MAX_HEAD_BYTES} bytes: send fewer"
        raise HttpFault(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason) from None


def request_of(head: bytes) -> HttpRequest:
    """Return the request of a head, which ends with an empty line. Raises HttpFault."""
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words, fields = first.split(" "), [line.partition(":") for line in lines]
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpFault(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    method, path = words[0], words[1].partition("?")[0]
    if path not in METHODS:
        served = " and ".join(METHODS)
        raise HttpFault(HTTPStatus.NOT_FOUND, f"there is no {path[:80]}: use {served}")
    if method != METHODS[path]:
        raise HttpFault(HTTPStatus.METHOD_NOT_ALLOWED, f"use {METHODS[path]} for {path}")
    return HttpRequest(
        method, path, {name.strip().lower(): value.strip() for name, _, value in fields}
    )


def body_size(request: HttpRequest) -> int:
    """Return the size of a request's body in bytes. Raises HttpFault if it is too large or
    unknown."""
    size = request.headers.get("content-length", "0" if request.method == "GET" else "")
    if not (size.isascii() and size.isdigit()):
        raise HttpFault(HTTPStatus.LENGTH_REQUIRED, "send the body with its Content-Length")
    if len(size) > 18 or int(size) > MAX_BODY_BYTES:
        reason = f"the request has {size[:18]} bytes: send at most {MAX_BODY_BYTES}"
        raise HttpFault(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
    return int(size)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the object of a body. Raises HttpFault."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpFault(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise HttpFault(HTTPStatus.BAD_REQUEST, "the body is no JSON object")
    return found


def error_of(status: HTTPStatus, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "authentication_error" if status is HTTPStatus.UNAUTHORIZED else "invalid_request_error"
    return {"error": {"message": as_text(message), "type": kind, "param": None, "code": None}}


def response_of(status: HTTPStatus, content: Mapping[str, Any]) -> bytes:
    """Return an HTTP response."""
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {int(status)} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nx-should-retry: false\r\n\r\n"
    )
    return head.encode() + body
