"""A small real HTTP server that scores prompts as vLLM does, and fails as a test asks."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from refrain.schemas.teacher import TeacherServerConfig

KEY = "sesame"
NAME = "big"
Change = Callable[["Reply"], None]


@dataclass
class Reply:
    """An answer on its way, which a test may spoil."""

    value: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Sent in place of `value`."""
    wait_s: float = 0.0
    byte_s: float = 0.0
    """Seconds before each byte of the answer."""
    drop: bool = False
    """Close the connection without an answer."""

    @property
    def entries(self) -> list[Any]:
        return self.value["choices"][0]["prompt_logprobs"]


@dataclass
class SmallServer:
    """State of a server."""

    score: Callable[[Sequence[int]], Sequence[float]]
    """Log-probabilities of all tokens but the first."""
    encode: Callable[[str], list[int]]
    num_rows: int
    context: int | None = 256
    changes: list[Change] = field(default_factory=list)
    """What happens to the next answers; those after them are right."""
    always: Change = lambda _: None
    prompts: list[list[int]] = field(default_factory=list)
    most_at_once: int = 0
    num_now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def config(self, **given: Any) -> TeacherServerConfig:
        return TeacherServerConfig.model_validate(
            {"urls": self.url, "model": NAME, "api_key": KEY} | given
        )

    def answer(self, path: str, asked: Any) -> Reply:
        if path == "/v1/models":
            return Reply({"data": [{"id": NAME, "max_model_len": self.context}]})
        if path != "/v1/completions":
            return Reply({"detail": "Not Found"}, 404)
        prompt = asked["prompt"]
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        with self.lock:
            self.prompts.append(ids)
            change = self.changes.pop(0) if self.changes else self.always
        if max(ids) >= self.num_rows:
            return Reply({"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}, 400)
        scored = zip(ids[1:], self.score(ids), strict=True)
        entries = [None, *({str(id): {"logprob": float(value)}} for id, value in scored)]
        assert asked["prompt_logprobs"] == 0
        assert asked["max_tokens"] == 1
        reply = Reply({"choices": [{"text": "", "prompt_logprobs": entries}]})
        change(reply)
        return reply


def handler(server: SmallServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(server.answer(self.path, None))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.num_now += 1
                server.most_at_once = max(server.most_at_once, server.num_now)
            self._reply(server.answer(self.path, asked))
            with server.lock:
                server.num_now -= 1

        def _reply(self, reply: Reply) -> None:
            if self.headers["Authorization"] != f"Bearer {KEY}":
                reply = Reply({"error": "Unauthorized"}, 401)
            time.sleep(reply.wait_s)
            if reply.drop:
                self.close_connection = True
                return
            body = json.dumps(reply.value).encode() if reply.body is None else reply.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for at in range(len(body)) if reply.byte_s else ():
                time.sleep(reply.byte_s)
                self.wfile.write(body[at : at + 1])
            self.wfile.write(b"" if reply.byte_s else body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class QuietServer(ThreadingHTTPServer):
    """A client that has given up is no error of a test."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        pass


@contextmanager
def serving(server: SmallServer) -> Iterator[SmallServer]:
    """Serve on the loopback, and set the server's address."""
    with QuietServer(("127.0.0.1", 0), handler(server)) as listening:
        server.url = f"http://127.0.0.1:{listening.server_port}/v1"
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield server
        listening.shutdown()
        thread.join()
