"""Requests enter vLLM in the right order, and with the right parameters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from refrain.engines.inference.engine import admission
from refrain.engines.inference.engine.admission import admit, admitted
from refrain.engines.inference.engine.arguments import engine_args
from refrain.engines.inference.engine.extra_args import TURN_START
from refrain.engines.inference.engine.running import Running
from refrain.schemas.drafting import SpecActorConfig
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import Generated, SavedKV, Split, Turn, VersionSpan
from tests.inference.real import CONFIG, requests

FIRST, SECOND, THIRD = requests([(5, 6, 7)])[:3]


class Core:
    """Fake of vLLM's engine core that records its calls."""

    def __init__(self, on_add=None) -> None:
        self.told, self.on_add = [], on_add

    async def add_request_async(self, request) -> None:
        self.told.append(("add", request.request_id))
        if self.on_add:
            self.on_add()

    async def abort_requests_async(self, ids) -> None:
        self.told += [("abort", id) for id in ids]


class FrontEnd:
    """Fake of vLLM's front end that records the requests it knows."""

    def __init__(self) -> None:
        self.request_states = {}

    def add_request(self, request, *_) -> None:
        self.request_states[request.request_id] = request


@pytest.fixture
def llm(monkeypatch):
    """Fake of vLLM's `AsyncLLM`. It does not validate requests."""
    monkeypatch.setattr(
        admission, "_core_request", lambda _, request, __: SimpleNamespace(request_id=request.name)
    )
    return SimpleNamespace(output_processor=FrontEnd(), engine_core=Core())


def admitted_of(*of):
    return [admitted(Running(request, 3, 1.0), CONFIG.engine, print) for request in of]


async def test_all_requests_are_registered_before_the_core_starts(llm):
    known = []
    llm.engine_core.on_add = lambda: known.append(len(llm.output_processor.request_states))
    await admit(llm, admitted_of(FIRST, SECOND))
    assert known == [2, 2]
    assert llm.engine_core.told == [("add", str(FIRST.id)), ("add", str(SECOND.id))]


async def test_request_withdrawn_in_transit_leaves_the_core(llm):
    """The core must receive it all the same: the rest of the batch waits for it."""
    known = llm.output_processor.request_states
    llm.engine_core.on_add = lambda: known.pop(str(SECOND.id), None)
    await admit(llm, admitted_of(FIRST, SECOND, THIRD))
    added = [("add", str(request.id)) for request in (FIRST, SECOND, THIRD)]
    assert llm.engine_core.told == [*added, ("abort", str(SECOND.id))]


def test_generated_tokens_are_part_of_the_prompt():
    before = Generated([8, 9], [-0.1, -0.2], (VersionSpan(2, 2),))
    moved = replace(FIRST, generated=before, kv=SavedKV("there", 4, 1))
    (request,) = admitted_of(moved)
    assert request.token_ids == [5, 6, 7, 8, 9]
    assert request.params["max_tokens"] == FIRST.max_response_tokens - 2
    assert request.params["extra_args"]["kv"] == ("there", 4, 1, str(FIRST.id), 3)


@pytest.mark.parametrize(
    ("pooled", "races", "moves"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_engines_that_pool_or_race_take_keys_and_values(pooled, races, moves):
    changed = {"pooled": pooled, "races_with_kv": races}
    config = CONFIG.engine.model_copy(update=changed)
    assert config.moves_kv is moves
    moved = replace(FIRST, kv=SavedKV("there", 2, 1))
    kv = admitted(Running(moved, 3, 1.0), config, print).params["extra_args"]["kv"]
    assert (kv is not None) is moves
    assert ("kv_transfer_config" in engine_args(config, 0, on_cpu=True)) is moves
    alone = config.model_copy(update={"pooled": False, "specactor": SpecActorConfig()})
    assert not alone.moves_kv, "without a draft model there are no races"


@pytest.mark.parametrize("split", Split)
def test_stop_strings_go_along_with_where_a_response_begins(split):
    """Tokens from another engine belong to the response. Validation uses stop strings too."""
    own = CONFIG.rollout.model_copy(update={"stop": ("x=", "y")})
    config = CONFIG.engine.model_copy(update={"rollout": own})
    moved = replace(
        FIRST,
        id=replace(FIRST.id, split=split),
        generated=Generated([8, 9], [-0.1, -0.2], (VersionSpan(2, 2),)),
    )
    stopping = admitted(Running(moved, 3, 1.0), config, print)
    assert stopping.params["extra_args"]["stop"] == (3, "x=", "y")
    (request,) = admitted_of(moved)
    assert request.params["extra_args"]["stop"] is None


@pytest.mark.parametrize("trusted", [False, True])
def test_engines_trust_code_as_configured_without_pickles(trusted):
    model = CONFIG.model.model_copy(update={"trust_remote_code": trusted})
    config = CONFIG.model_copy(update={"model": model})
    args = engine_args(config.engine, 0, on_cpu=True)
    assert args["trust_remote_code"] is trusted
    assert args["load_format"] == "safetensors", "with another format vLLM may load pickles"
    (drafter,) = config.engine.drafter_processes
    assert drafter.trust_remote_code is trusted


@pytest.mark.parametrize(
    ("turns", "num_tokens", "start"),
    [((), 0, 0), ((), 4, 0), ((Turn(2, 3),), 5, 8), ((Turn(2, 3),), 7, 8), ((Turn(2, 0),), 2, 5)],
)
def test_a_later_turn_is_known_also_when_it_was_moved(turns, num_tokens, start):
    """The prompt has three tokens. Then come the ended turns, and tokens of the current one."""
    spans = (VersionSpan(3, num_tokens),)
    generated = Generated(range(num_tokens), [0.0] * num_tokens, spans, turns=turns)
    (found,) = admitted_of(replace(FIRST, generated=generated if num_tokens else None))
    assert found.params["extra_args"][TURN_START] == start


def test_a_returning_turn_goes_before_conversations_that_came_later(tmp_path):
    first, second = Running(FIRST, 3, 1.0), Running(SECOND, 3, 1.0)
    turn = first.with_answer(replace(FIRST, generated=Generated([8], [-0.1], (), turns=(Turn(1),))))
    config = CONFIG.model_copy(update={"environment": EnvironmentConfig(path=tmp_path)}).engine
    numbers = [admitted(one, config, print).priority for one in (first, turn, second)]
    assert numbers[0] == numbers[1] < numbers[2]
    assert engine_args(config, 0, on_cpu=True)["scheduling_policy"] == "priority"
    assert "scheduling_policy" not in engine_args(CONFIG.engine, 0, on_cpu=True)
