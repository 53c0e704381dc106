"""A drafter handles the messages of several engines. A fake stands in for its model."""

import ray.util
import zmq

from refrain.engines.inference.drafting.draft_link import Feedback, encode
from refrain.engines.inference.drafting.vllm_drafter import VLLMDrafter
from refrain.engines.inference.engine.plugin import PRIVATE_DIR
from refrain.engines.specactor.streams import Opened, Verified
from tests.inference.real import CONFIG


class CountingUp:
    """Fake of a model's live sequences: each next token is the last one plus 1."""

    vocab_size = 1000

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def open(self, name, token_ids, **_):
        self.texts[name] = list(token_ids)

    def close(self, name):
        del self.texts[name]

    def set_back(self, name, keep, token_ids):
        self.texts[name][keep:] = token_ids

    def go_on(self, names):
        for name in names:
            self.texts[name].append(self.texts[name][-1] + 1)
        return {name: self.texts[name][-1] for name in names}


class Drafter(VLLMDrafter):
    def __init__(self) -> None:
        super().__init__(CONFIG.engine.drafter_processes[0])
        self._live, self._ends, self._socket = CountingUp(), frozenset({999}), self
        self.sent: list[tuple[bytes, bytes]] = []

    def receive(self, verifier: bytes, feedback: Feedback) -> None:
        self._receive(verifier, encode(feedback))

    def draft(self) -> None:
        """Draft until no stream wants more tokens."""
        while self._wanting:
            self._draft()

    def send_multipart(self, parts):
        self.sent.append(tuple(parts))

    @property
    def texts(self) -> dict[tuple[bytes, str], list[int]]:
        return {id: self._live.texts[name] for name, id in self._names.items()}


def opened(id: str, **given) -> Opened:
    return Opened(
        **{"id": id, "token_ids": [5, 6, 7], "sample_key": 1, "window": 2}
        | {"coupled": True, "max_tokens": 50}
        | given
    )


def test_lost_message_ends_only_drafts_of_its_request():
    drafter = Drafter()
    drafter.receive(b"one", Feedback(opened=[opened("a"), opened("b")]))
    drafter.receive(b"two", Feedback(opened=[opened("a")]))
    drafter.draft()
    assert list(drafter.texts.values()) == [[5, 6, 7, 8, 9]] * 3
    # Each engine gets one message per step, however many requests it has.
    assert sorted(verifier for verifier, _ in drafter.sent) == [b"one"] * 2 + [b"two"] * 2
    drafter.receive(b"one", Feedback(verified=[Verified("a", 5, [9]), Verified("b", 3, [8])]))
    drafter.receive(b"two", Feedback(verified=[Verified("a", 3, [11])]))
    assert set(drafter._streams) == {(b"one", "b"), (b"two", "a")}
    drafter.draft()
    assert drafter.texts == {
        (b"one", "b"): [5, 6, 7, 8, 9, 10],
        (b"two", "a"): [5, 6, 7, 11, 12, 13],
    }


def test_restarted_engine_leaves_no_open_sequences():
    drafter = Drafter()
    drafter.receive(b"one", Feedback(opened=[opened("a")]))
    drafter.receive(b"two", Feedback(opened=[opened("a")]))
    drafter.receive(b"one", Feedback(fresh=True))
    assert set(drafter.texts) == {(b"two", "a")}
    drafter.receive(b"two", Feedback(closed=["a", "unknown"]))
    assert drafter._live.texts == {}


def test_tokens_and_lengths_beyond_limits_get_no_drafts():
    """The policy's vocabulary may have more rows than the drafter's, because of padding."""
    drafter = Drafter()
    beyond = drafter._config.max_model_len
    drafter.receive(
        b"one",
        Feedback(
            opened=[
                opened("rows", token_ids=[5, 1000]),
                opened("long", token_ids=[5] * beyond, max_tokens=2 * beyond),
                opened("a"),
                opened("ends", token_ids=[998]),
            ]
        ),
    )
    drafter.draft()
    assert {id for _, id in drafter.texts} == {"a", "ends"}
    assert drafter.texts[b"one", "ends"] == [998, 999]
    drafter.receive(b"one", Feedback(verified=[Verified("a", 3, [1000])]))
    assert {id for _, id in drafter.texts} == {"ends"}


def test_unrequested_token_is_rolled_back():
    """vLLM continues a preempted sequence even if it has drafted enough already."""
    drafter = Drafter()
    drafter.receive(b"one", Feedback(opened=[opened("rests"), opened("goes on")]))
    drafter.draft()
    drafter.receive(b"one", Feedback(verified=[Verified("goes on", 3, [8])]))
    (rests, _), go_on = drafter._names, drafter._live.go_on
    drafter._live.go_on = lambda names: go_on({*names, rests})
    drafter.draft()
    assert drafter.texts[b"one", "rests"] == [5, 6, 7, 8, 9]
    assert drafter.texts[b"one", "goes on"] == [5, 6, 7, 8, 9, 10]
    drafter.receive(b"one", Feedback(verified=[Verified("rests", 3, [8, 9])]))
    drafter.draft()
    assert drafter.texts[b"one", "rests"] == [5, 6, 7, 8, 9, 10, 11]


def test_on_a_cluster_it_serves_where_other_machines_reach_it(monkeypatch):
    """Machines may join later, so the drafter always serves on the node's address."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    config = CONFIG.engine.drafter_processes[0]
    assert VLLMDrafter(config, on_cluster=True)._host == "10.0.0.7"
    assert VLLMDrafter(config)._host is None


def test_on_one_machine_no_other_user_reaches_it(monkeypatch, tmp_path):
    monkeypatch.setenv(PRIVATE_DIR, str(tmp_path))
    drafter = VLLMDrafter(CONFIG.engine.drafter_processes[0])
    with zmq.Context() as context, context.socket(zmq.ROUTER) as drafter._socket:
        address = drafter._bind()
        assert (address, (tmp_path / "drafts").is_socket()) == (f"ipc://{tmp_path}/drafts", True)
        with context.socket(zmq.DEALER) as engine:
            engine.connect(address)
            engine.send(b"verified")
            assert drafter._socket.poll(10_000)
            assert drafter._socket.recv_multipart()[-1] == b"verified"
