"""Serve pages about a run's rollouts to a browser on this machine. Nothing can be written.

    browser ── GET /SECRET/... ──► a thread: one query at a time ──► page

Only this machine reaches the address, and only who knows the secret in it gets a page: other users
of the machine do not. The server refuses other names of the host, so that no other site's page can
reach it (DNS rebinding).
"""

import secrets
import threading
from collections.abc import Mapping
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socket import socket
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl

from refrain.engines.reports.samples_page import (
    PAGE_SIZE,
    POLICY,
    error_page,
    list_page,
    prompt_page,
    read_view,
    response_page,
)
from refrain.flows.samples import RunSamples

HOST = "127.0.0.1"
MAX_REQUESTS = 16
"""Most requests at a time; further connections are closed."""
IDLE_S = 10.0
"""Longest wait for a browser to send its request or to take the page."""
_MAX_FIELDS = 32
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
Reply = tuple[HTTPStatus, str]


class SamplesSite:
    """Replies to requests for pages about one run."""

    def __init__(self, samples: RunSamples) -> None:
        self.secret = secrets.token_urlsafe(16)
        self._samples = samples
        # A DuckDB file that is open twice in a process shares its settings.
        self._querying = threading.Lock()

    def reply(self, target: str) -> Reply:
        """Return the page at a path with its query."""
        path, _, query = target.partition("?")
        secret, _, name = path.removeprefix("/").partition("/")
        pages = {"": self._list, "response": self._response, "prompt": self._prompt}
        if not compare_digest(secret.encode(), self.secret.encode()) or name not in pages:
            return HTTPStatus.NOT_FOUND, "not found"
        try:
            values = dict(parse_qsl(query, max_num_fields=_MAX_FIELDS))
            return HTTPStatus.OK, pages[name](values)
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, error_page(self._samples.name, str(error))

    def _list(self, values: Mapping[str, str]) -> str:
        view = read_view(values)
        page = self._find(view.wanted, view.grep, view.offset)
        return list_page(self._samples.name, values, view, page, self._samples.decoder.pieces)

    def _prompt(self, values: Mapping[str, str]) -> str:
        view = read_view(values, sort="epoch")
        page = self._find(view.wanted, "", view.offset)
        return prompt_page(self._samples.name, values, view, page, self._samples.decoder.pieces)

    def _response(self, values: Mapping[str, str]) -> str:
        view = read_view(values)
        found = self._find(view.wanted, "", 0).samples
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} samples are at this address: name split, step, prompt and sample"
            )
        return response_page(self._samples.name, found[0], view, self._samples.decoder.pieces)

    def _find(self, wanted: Any, grep: str, offset: int) -> Any:
        if not self._querying.acquire(timeout=self._samples.timeout_s):
            raise ValueError("other requests keep the store busy: reload the page")
        try:
            return self._samples.page(wanted, grep, PAGE_SIZE, offset)
        finally:
            self._querying.release()


class SamplesServer(ThreadingMixIn, TCPServer):
    """The HTTP server, on the loopback address."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_REQUESTS

    def __init__(self, site: SamplesSite, port: int) -> None:
        """Raise ValueError when the port cannot be used. Port 0: any free one."""
        self.site = site
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}): stop what uses it, or give "
                "another --serve"
            ) from error
        self.port: int = self.server_address[1]
        self.hosts = {f"{HOST}:{self.port}", f"localhost:{self.port}"}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.site.secret}/"

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket | tuple[bytes, socket], client_address: Any
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "refrain", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        assert isinstance(self.server, SamplesServer)
        if self.headers.get("Host") in self.server.hosts:
            status, page = self.server.site.reply(self.path)
        else:
            status, page = HTTPStatus.FORBIDDEN, "open the address that refrain printed"
        body = page.encode()
        self.send_response(status)
        for name, value in (*_HEADERS.items(), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: their addresses have the secret."""


def serve_samples(samples: RunSamples, port: int) -> None:
    """Serve until interrupted. Raise ValueError when the port cannot be used."""
    with SamplesServer(SamplesSite(samples), port) as server:
        print(f"samples of {samples.name}: {server.url}")
        print("Ctrl-C stops it. The address is a secret, as who has it can read.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
