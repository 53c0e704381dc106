"""Room for drafts on the V2 runner: by what was right so far, and only where it pays."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, shared_dir, write_index
from refrain.engines.inference.drafting.room import NONE, OWN, SHARED, DraftRoom
from refrain.schemas.drafting import SpecActorConfig
from refrain.schemas.engine import ALONE
from tests.inference.real import CONFIG, key

pytestmark = pytest.mark.engine
WINDOW, HEAD_WINDOW = 6, 2
VLLM = SimpleNamespace(
    num_speculative_tokens=WINDOW,
    scheduler_config=SimpleNamespace(
        max_num_scheduled_tokens=None, max_num_batched_tokens=512, max_num_seqs=8
    ),
)


def request_of(name: str, prompt: int | None, max_tokens: int = 100) -> SimpleNamespace:
    extra = {"prompt_key": key(prompt), "sample_key": 1} if prompt is not None else None
    return SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(extra_args=extra),
        num_prompt_tokens=10,
        num_output_tokens=1,
        is_prefill_chunk=False,
        num_tokens=11,
        num_output_placeholders=1,
        num_computed_tokens=11,
        max_tokens=max_tokens,
        spec_token_ids=None,
    )


class Engine:
    """A scheduler that decodes. `right`: how many draft tokens of each request are right."""

    def __init__(
        self, history: Path, *, gate: bool = False, learnt: str = "", head: Path | None = None
    ) -> None:
        config = CONFIG.engine.model_copy(
            update={
                "history_dir": history,
                "specactor": SpecActorConfig(head=head, window=HEAD_WINDOW),
                "drafting": CONFIG.engine.drafting.model_copy(update={"gate": gate}),
            }
        )
        self.requests: dict[str, Any] = {}
        setup = ALONE.model_copy(update={"learnt": learnt})
        self.room = DraftRoom(self.requests, VLLM, config, setup)
        # Otherwise slots of the clock have no drafts.
        self.room._measured.plain_is_due = lambda now_s: False  # noqa: ARG005
        self.right: dict[str, int] = {}

    def add(self, name: str, prompt: int | None, right: int = 0, **changes: int) -> Any:
        self.requests[name] = one = request_of(name, prompt, **changes)
        self.right[name] = right
        self.room.begin(one)
        return one

    def step(self) -> dict[str, int]:
        """Run a step. Return how many draft tokens of each request it verified."""
        running = list(self.requests.values())
        self.room.reserve(running)
        drafts = {r.request_id: r.spec_token_ids for r in running if r.spec_token_ids}
        rooms = {r.request_id: len(r.spec_token_ids) for r in running}
        step = SimpleNamespace(
            scheduled_spec_decode_tokens=drafts,
            num_scheduled_tokens={name: 1 + num for name, num in rooms.items()},
        )
        self.room.scheduled(step)
        sampled = [[5] * (1 + min(self.right[name], num)) for name, num in rooms.items()]
        for request, tokens in zip(running, sampled, strict=True):
            request.num_tokens += len(tokens)
            request.num_output_tokens += len(tokens)
            request.num_computed_tokens += len(tokens)
        self.room.updated(step, sampled, {name: i for i, name in enumerate(rooms)})
        return rooms


@pytest.fixture
def history(tmp_path: Path) -> Path:
    for i in (0, 1):
        path = index_path(tmp_path, key(i))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_index(build_index([1, 2, 3], [[4, 5, 6]], [1.0]), key(i), path)
    return tmp_path


def test_requests_without_an_index_get_no_room(history: Path) -> None:
    engine = Engine(history)
    engine.add("drafted", 0)
    engine.add("new prompt", 7)
    engine.add("canary", None)
    assert engine.step() == {"drafted": WINDOW, "new prompt": 0, "canary": 0}


def test_a_head_gets_no_more_room_than_it_drafts(history: Path) -> None:
    engine = Engine(history, head=history / "head")
    engine.add("drafted", 0)
    engine.add("new prompt", 7)
    assert engine.step() == {"drafted": WINDOW, "new prompt": HEAD_WINDOW}


def test_kinds_of_requests(history: Path) -> None:
    room = Engine(history).room
    assert (room._kind_of(key(0)), room._kind_of(key(7)), room._kind_of("")) == (OWN, NONE, NONE)
    shared_dir(history).mkdir(parents=True, exist_ok=True)
    (shared_dir(history) / "some.index").touch()
    assert (room._kind_of(key(7)), room._kind_of("")) == (SHARED, NONE)


def test_drafts_end_where_the_response_must(history: Path) -> None:
    engine = Engine(history)
    engine.add("short", 0, max_tokens=5)
    # One token is there, one in flight, and the step itself yields one.
    assert engine.step() == {"short": 2}


def test_a_prompt_in_prefill_gets_no_room(history: Path) -> None:
    engine = Engine(history)
    engine.add("new", 0).num_output_tokens = 0
    engine.add("preempted", 0).is_prefill_chunk = True
    assert engine.step() == {"new": 0, "preempted": 0}


def test_room_goes_to_requests_whose_drafts_are_right(history: Path) -> None:
    """The budget of a step has room for half of the drafts."""
    engine = Engine(history)
    engine.room._max_step_tokens = 2 + 2 * WINDOW
    engine.add("wrong", 0, right=0)
    engine.add("right", 1, right=WINDOW)
    for _ in range(8):
        rooms = engine.step()
    assert rooms == {"wrong": 0, "right": WINDOW}


def test_new_requests_begin_with_the_share_of_their_kind(history: Path) -> None:
    engine = Engine(history)
    engine.add("first", 0, right=0)
    share = engine.room._kinds[OWN].share
    for _ in range(30):
        engine.step()
    assert engine.room._kinds[OWN].share < 0.3 < share
    assert engine.room._kinds[SHARED].share == share


def test_drafts_that_never_pay_are_switched_off(history: Path) -> None:
    engine = Engine(history, gate=True)
    for i in range(8):
        engine.add(f"r{i}", i % 2, right=0, max_tokens=10_000)
    counts = [sum(engine.step().values()) for _ in range(300)]
    assert max(counts[:50]) > 0
    assert np.mean(counts[-100:]) < 0.5


def test_the_learnt_state_outlives_the_engine(history: Path) -> None:
    engine = Engine(history)
    engine.add("one", 0, right=2)
    for _ in range(20):
        engine.step()
    counts = engine.room.take_counts()
    assert (counts["num_steps"], counts["num_drafting_steps"]) == (20, 20)
    successor = Engine(history, learnt=counts["learnt"]).room
    assert successor._kinds[OWN].share == pytest.approx(engine.room._kinds[OWN].share)
    for damaged in ("", "{}", json.dumps({"history": {}, "step_times": {}}), counts["learnt"][:-9]):
        assert Engine(history, learnt=damaged).room._kinds[OWN].record.tried == 0.0


def test_ended_requests_are_forgotten(history: Path) -> None:
    engine = Engine(history)
    for i in range(3):
        engine.add(f"r{i}", 0)
        engine.step()
        del engine.requests[f"r{i}"]
    engine.add("last", 0)
    engine.step()
    assert list(engine.room._records) == ["last"]
