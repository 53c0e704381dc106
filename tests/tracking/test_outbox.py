"""The outbox delivers records in order once the server answers, whatever fails in between."""

import errno
import threading
import time

import pytest

import refrain.engines.tracking.outbox
from refrain.engines.failures import Failures
from refrain.engines.tracking.outbox import MAX_TRIES, Outbox, ServerAway
from tests.failing_disks import Disk, full_disk


class Server:
    """A server that takes records. It can be away, and it refuses the kind `bad`."""

    def __init__(self, away=False):
        self.away = away
        self.got = []

    def __call__(self, record):
        if self.away:
            raise ServerAway("nobody listens")
        if record.kind == "bad":
            raise ValueError("never")
        self.got.append((record.kind, record.values, record.file and record.file.read_bytes()))


@pytest.fixture
def said():
    return []


@pytest.fixture
def open_outbox(tmp_path, said):
    opened = []

    def open_one(server, is_up=lambda: False, **options):
        failures = Failures(tmp_path, said.append)
        opened.append(Outbox(tmp_path / "outbox", server, "MLflow", failures, is_up, **options))
        return opened[-1]

    yield open_one
    for outbox in opened:
        outbox.close(0.0)


def test_records_are_delivered_in_order_and_deleted(open_outbox, tmp_path):
    server = Server()
    outbox = open_outbox(server)
    for i in range(20):
        outbox.add("metrics", {"i": i}, ("t.json", b"x" * i) if i % 2 else None)
    assert outbox.flush(20.0)
    assert [values["i"] for _, values, _ in server.got] == list(range(20))
    assert server.got[3] == ("metrics", {"i": 3}, b"xxx")
    assert list((tmp_path / "outbox").iterdir()) == []
    assert outbox.missing() == []


def test_pending_records_survive_and_are_delivered_first(open_outbox, said):
    first = open_outbox(Server(away=True))
    first.add("metrics", {"i": 0})
    first.add("metrics", {"i": 1})
    assert not first.flush(0.2)
    (sentence,) = first.missing()
    assert "2 records for MLflow wait" in sentence
    assert "resume" in sentence
    assert len(said) == 1
    assert "does not answer" in said[0]
    first.close(0.0)
    server = Server()
    second = open_outbox(server)
    second.add("metrics", {"i": 2})
    assert second.flush(20.0)
    assert [values["i"] for _, values, _ in server.got] == [0, 1, 2]


def test_outbox_delivers_records_of_other_processes(open_outbox):
    server = Server()
    outbox = open_outbox(server)
    other = open_outbox(Server(), delivers=False)
    outbox.add("metrics", {"i": 0})
    assert outbox.flush(20.0)
    for i in (1, 2):
        other.add("metrics", {"i": i})
    deadline_s = time.monotonic() + 20.0
    while len(server.got) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [values["i"] for _, values, _ in server.got] == [0, 1, 2]
    outbox.close(0.0)
    away = open_outbox(Server(away=True))
    for i in (3, 4):
        (away if i == 3 else other).add("metrics", {"i": i})
    assert len(list(away._directory.glob("[0-9]*"))) == 2, "both must not use one number"


def test_a_server_that_comes_back_gets_everything(open_outbox, said, monkeypatch):
    monkeypatch.setattr(refrain.engines.tracking.outbox, "FIRST_PAUSE_S", 0.01)
    server = Server(away=True)
    outbox = open_outbox(server)
    for i in range(3):
        outbox.add("metrics", {"i": i})
    assert not outbox.flush(0.2)
    server.away = False
    assert outbox.flush(20.0)
    assert [values["i"] for _, values, _ in server.got] == [0, 1, 2]
    outbox.close(0.0)
    assert ["is back" in sentence for sentence in said] == [False, True]


def test_a_refused_record_is_kept_apart_and_holds_up_no_other(
    open_outbox, tmp_path, said, record_failures
):
    server = Server()
    outbox = open_outbox(server)
    outbox.add("bad", {})
    outbox.add("good", {})
    assert outbox.flush(20.0)
    assert [kind for kind, *_ in server.got] == ["good"]
    (sentence,) = outbox.missing()
    assert "1 records that MLflow refused" in sentence
    outbox.add("bad", {})
    assert outbox.flush(20.0)
    assert ["ValueError: never" in sentence for sentence in said] == [True], "must be reported once"
    outbox.close(0.0)
    again = open_outbox(server)
    again.add("bad", {})
    assert again.flush(20.0)
    assert len(list((tmp_path / "outbox" / "refused").iterdir())) == 3
    assert {what for what, _ in record_failures} == {"delivering bad to MLflow"}
    assert len(record_failures) == 5, "refused records must be tried again once"
    record_failures.clear()
    assert "ValueError: never" in (tmp_path / "record.log").read_text()


def test_an_outage_does_not_fill_the_disk(open_outbox, monkeypatch):
    monkeypatch.setattr(refrain.engines.tracking.outbox, "LIMIT_BYTES", 1000)
    server = Server(away=True)
    outbox = open_outbox(server)
    outbox.add("file", {}, ("first.png", b"x" * 700))
    outbox.add("file", {}, ("second.png", b"x" * 700))
    outbox.add("metrics", {"loss": 0.5})
    assert outbox.num_waiting == 2
    assert any("1 files for MLflow were left out" in sentence for sentence in outbox.missing())
    server.away = False
    assert outbox.flush(20.0)
    assert [kind for kind, *_ in server.got] == ["file", "metrics"]
    outbox.add("file", {}, ("third.png", b"x" * 700))
    assert outbox.flush(20.0)
    assert len(server.got) == 3


def test_half_a_record_is_ignored(open_outbox, tmp_path):
    for name in (".unfinished", ".delivered"):
        (tmp_path / "outbox" / name).mkdir(parents=True)
        (tmp_path / "outbox" / name / "t.json").write_text("half")
    server = Server()
    outbox = open_outbox(server)
    outbox.add("metrics", {})
    assert outbox.flush(20.0)
    assert server.got == [("metrics", {}, None)]


def test_visible_record_is_complete_on_disk(open_outbox, tmp_path, monkeypatch):
    """Otherwise a crash could leave half a record. The server would refuse it forever, and the
    resumed run would end."""
    outbox, disk = open_outbox(Server(), delivers=False), Disk(monkeypatch)
    for i in range(3):
        outbox.add("file", {"i": i}, ("t.json", b"x"))
        assert len(list((tmp_path / "outbox").glob("[0-9]*/record.json"))) == i + 1
        assert not disk.named_too_early
        assert not disk.unsettled


def test_unwritable_record_leaves_no_file(open_outbox, tmp_path, said, record_failures):
    outbox = open_outbox(Server(), delivers=False)
    with full_disk(room=100):
        for _ in range(2):
            outbox.add("metrics", {"text": "x" * 1000}, ("t.json", b"x"))
    ((what, error), _) = record_failures
    record_failures.clear()
    assert (what, "File too large" in str(error)) == ("writing metrics for MLflow", True)
    assert len(said) == 1
    assert not list((tmp_path / "outbox").glob("[0-9]*"))
    outbox.add("metrics", {})
    assert outbox.num_waiting == 1


def test_closing_does_not_wait_for_a_server_that_is_away(open_outbox):
    outbox = open_outbox(Server(away=True))
    outbox.add("metrics", {})
    started_s = time.monotonic()
    outbox.close(0.1)
    assert time.monotonic() - started_s < 5.0
    assert outbox.num_waiting == 1


def test_a_record_that_a_server_never_takes_is_set_aside(open_outbox, monkeypatch, record_failures):
    """The server answers other requests, so the outbox delivers the later records in order. It
    tries the next record of this kind once, and tries all again when the run is resumed."""
    monkeypatch.setattr(refrain.engines.tracking.outbox, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(refrain.engines.tracking.outbox, "MAX_PAUSE_S", 0.002)
    tried = []

    def deliver(record):
        tried.append(record.values["i"])
        if record.kind == "file":
            raise ServerAway("500: cannot write artifacts")

    outbox = open_outbox(deliver, is_up=lambda: True)
    for i, kind in enumerate(("metrics", "file", "metrics", "file", "metrics")):
        outbox.add(kind, {"i": i})
    assert outbox.flush(20.0)
    assert tried == [0, *[1] * MAX_TRIES, 2, 3, 4]
    assert ["500" in str(error) for _, error in record_failures] == [True, True]
    record_failures.clear()
    (sentence,) = outbox.missing()
    assert sentence.startswith("2 records that MLflow refused")
    outbox.close(0.0)
    server = Server()
    assert open_outbox(server).flush(20.0)
    assert [values["i"] for _, values, _ in server.got] == [1, 3]


def test_closing_outbox_reads_no_more_records(open_outbox, tmp_path):
    """The process that opens the outbox next moves records then. The file here is no valid
    record."""
    outbox = open_outbox(Server())
    (tmp_path / "outbox" / "0").write_text("")
    outbox.close(0.0)
    outbox._thread.join(20.0)
    assert not outbox._thread.is_alive()


@pytest.mark.parametrize("why", ["", "sqlite3.OperationalError: database or disk is full"])
def test_nothing_is_set_aside_while_a_server_is_away(open_outbox, monkeypatch, why):
    """The same holds while a server answers but has no room."""
    monkeypatch.setattr(refrain.engines.tracking.outbox, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(refrain.engines.tracking.outbox, "MAX_PAUSE_S", 0.002)
    num_tries, enough = [], threading.Event()

    def deliver(record):
        num_tries.append(record)
        if len(num_tries) > 3 * MAX_TRIES:
            enough.set()
        raise ServerAway(why)

    outbox = open_outbox(deliver, is_up=lambda: bool(why))
    for _ in range(2):
        outbox.add("metrics", {})
    assert enough.wait(20.0)
    assert outbox.num_waiting == 2


def test_a_disk_that_fails_does_not_end_the_thread(open_outbox, monkeypatch, record_failures):
    server = Server()
    outbox = open_outbox(server)
    with monkeypatch.context() as broken:
        broken.setattr(refrain.engines.tracking.outbox.shutil, "rmtree", _input_output_error)
        outbox.add("metrics", {"i": 0})
        assert outbox.flush(20.0)
    outbox.add("metrics", {"i": 1})
    assert outbox.flush(20.0)
    assert [values["i"] for _, values, _ in server.got] == [0, 1]
    assert [what for what, _ in record_failures] == ["clearing the outbox for MLflow"]
    record_failures.clear()


def _input_output_error(*_):
    raise OSError(errno.EIO, "Input/output error")
