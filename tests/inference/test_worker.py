"""A worker saves keys and values only of requests that still own their blocks.

A fake stands in for vLLM's model runner.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import refrain.engines.inference.engine.worker
from refrain.engines.inference.engine.worker import WorkerExtension


class Runner:
    """Fake of vLLM's runner: the batch holds exactly the requests of the last step."""

    def __init__(self):
        self.requests = {}
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, int))
        self.input_batch = SimpleNamespace(
            req_id_to_index={}, num_computed_tokens_cpu=np.zeros(8, int)
        )

    def _update_states(self, scheduler_output):
        taken = scheduler_output.tokens
        for name in taken:
            blocks = SimpleNamespace(block_ids=[[len(self.requests)]])
            self.requests.setdefault(name, blocks)
        self.input_batch.req_id_to_index = {name: row for row, name in enumerate(taken)}
        self.query_start_loc.np[1 : 1 + len(taken)] = np.cumsum(list(taken.values()))


class Connector:
    """Fake of the KV connector. It records requests that lost their blocks, and checks saves."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def forget(self, ids) -> None:
        self.lost |= set(ids)

    def save_ahead(self, directory, blocks, num_tokens, policy_version) -> Path:
        assert blocks.keys() == num_tokens.keys()
        return directory / f"{sorted(blocks)}-{policy_version}"

    def save(self, directory, blocks, num_tokens, policy_version, names, with_ahead) -> int:
        assert blocks.keys() == num_tokens.keys() == names.keys()
        assert (policy_version, with_ahead) == (7, True)
        if directory == Path("full"):
            raise OSError("no space")
        return len(blocks)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Connector:
    connector = Connector()
    monkeypatch.setattr(WorkerExtension, "_kv_connector", connector)
    return connector


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, connector: Connector) -> WorkerExtension:
    assert WorkerExtension._kv_connector is connector
    monkeypatch.setattr(refrain.engines.inference.engine.worker, "submitted_as", lambda name: name)
    worker = WorkerExtension()
    worker.model_runner, worker.use_v2_model_runner = Runner(), False
    worker.install_kv_saving()
    return worker


def step(worker: WorkerExtension, **tokens: int) -> dict[str, tuple[int, list[int]]]:
    """Run a step. Return the requests that could be saved after it."""
    worker.model_runner._update_states(step_of(tokens))
    return worker._kv.held()


def step_of(tokens: dict[str, int], finished=(), preempted=None, resumed=()) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


class PreparingRunner:
    """Fake of vLLM's runner, which prepares for drafts whenever speculation is configured."""

    def __init__(self, has_inner_state: bool) -> None:
        self.model_config = SimpleNamespace(has_inner_state=has_inner_state)
        self.speculative_config = "speculation"

    def _prepare_inputs(self, _, num_scheduled_tokens):
        if num_scheduled_tokens is None:
            raise ValueError("bad step")
        return self.speculative_config


@pytest.mark.parametrize(
    ("drafts", "has_inner_state", "prepared"),
    [({}, False, None), ({"a": [1]}, False, "speculation"), ({}, True, "speculation")],
)
def test_a_step_without_drafts_is_a_plain_one(drafts, has_inner_state, prepared):
    worker = WorkerExtension()
    worker.model_runner = runner = PreparingRunner(has_inner_state)
    worker._sample_without_drafts()
    step = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    assert runner._prepare_inputs(step, 1) == prepared
    with pytest.raises(ValueError, match="bad step"):
        runner._prepare_inputs(step, None)
    assert runner.speculative_config == "speculation"


def test_requests_of_the_last_step_can_be_saved(worker):
    assert step(worker, a=5, b=3) == {"a": (5, [0]), "b": (3, [1])}


def test_request_left_out_of_a_step_was_preempted(worker):
    """A step that runs other requests and leaves one out has preempted it."""
    step(worker, a=5, b=3)
    assert step(worker, b=1).keys() == {"b"}
    assert step(worker).keys() == {"b"}


def test_empty_step_preempts_no_request(worker):
    """vLLM runs such a step to report finished requests while the engine is paused."""
    before = step(worker, a=5, b=3)
    assert step(worker) == before
    assert step(worker) == before
    assert step(worker, b=1).keys() == {"b"}


def test_only_long_requests_are_saved(worker):
    """Only requests with at least the wanted number of computed tokens are saved."""
    step(worker, a=5, b=3, c=1)
    wanted = {"a": 5, "b": 4, "d": 1}
    assert worker.save_kv_ahead("there", wanted, 7) == "there/['a']-7"
    assert worker.save_kv("there", wanted, 7, True) == (["a"], 1, "")
    assert worker.save_kv("full", wanted, 7, True) == ([], 0, "no space")


@pytest.mark.parametrize("lost", [{"finished": {"a"}}, {"preempted": {"a"}}, {"resumed": {"a"}}])
def test_lost_blocks_are_reported_before_their_reuse(worker, connector, lost):
    step(worker, a=5, b=3)
    assert not connector.lost
    update = worker.model_runner._update_states
    update(step_of({"b": 1}, **lost))
    assert connector.lost == {"a"}


class SlotRunner:
    """Fake of vLLM's V2 runner: each request has a slot until it ends or is preempted."""

    def __init__(self):
        self.req_states = SimpleNamespace(
            req_id_to_index={"a": 2, "b": 0},
            num_computed_tokens=SimpleNamespace(gpu=torch.tensor([3, 9, 5])),
        )
        table = torch.tensor([[7, 99, 99], [8, 8, 8], [4, 6, 99]])
        self.block_tables = SimpleNamespace(
            num_blocks=SimpleNamespace(np=np.array([[1, 3, 2]])),
            block_tables=[SimpleNamespace(gpu=table)],
        )
        self.lost_before: list[set[str]] = []

    def finish_requests(self, step):
        self.lost_before.append(set(WorkerExtension._kv_connector.lost))
        for id in step.finished_req_ids | (step.preempted_req_ids or set()):
            del self.req_states.req_id_to_index[id]


@pytest.fixture
def slot_worker(worker) -> WorkerExtension:
    worker.model_runner, worker.use_v2_model_runner = SlotRunner(), True
    worker.install_kv_saving()
    return worker


def test_requests_in_slots_can_be_saved(slot_worker):
    assert slot_worker._kv.held() == {"a": (5, [4, 6]), "b": (3, [7])}
    assert slot_worker.save_kv("there", {"a": 5, "b": 4}, 7, True) == (["a"], 1, "")


@pytest.mark.parametrize("lost", [{"finished": {"a"}}, {"preempted": {"a"}}])
def test_lost_slots_are_reported_before_their_reuse(slot_worker, connector, lost):
    runner = slot_worker.model_runner
    runner.finish_requests(step_of({}, **lost))
    assert connector.lost == {"a"}
    assert runner.lost_before == [{"a"}]
    assert slot_worker._kv.held().keys() == {"b"}
    runner.finish_requests(step_of({}, finished={"b"}))
    assert slot_worker._kv.held() == {}
