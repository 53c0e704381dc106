"""Real draft models ahead of real verification, on Ray: no token changes."""

import asyncio
import os
import signal

import pytest

from engines.data.dataset import load_dataset, load_tokenizer
from engines.learn.learner import Learner
from engines.rollout.coordinator import Coordinator
from engines.rollout.drafters import Drafters
from engines.rollout.moves import Race, Redraft, RolloutView
from engines.rollout.ray_engine import RayEngine
from schemas.config import TrainConfig
from schemas.keys import sample_key
from schemas.rollout import DraftSetting, RequestId, Rollout, RolloutRequest, Split
from schemas.weights import PolicyWeights
from tests.conftest import DEMO

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CONFIG = TrainConfig.model_validate(
    {
        "model": {"path": str(DEMO / "model"), "dtype": "float32"},
        "data": {
            "train": [str(DEMO / "data" / "train.parquet")],
            "max_prompt_tokens": 128,
            "max_response_tokens": 256,
        },
        "rollout": {"num_engines": 2},
        "drafting": {"enabled": False},
        "specactor": {"draft_models": [{"name": "small", "path": str(DEMO / "drafter")}]},
    }
)
WINDOW = 4
COUPLED = DraftSetting("small", WINDOW, coupled=True)
DECOUPLED = DraftSetting("small", WINDOW, coupled=False)
OWN_TEXT = DraftSetting("ngram", WINDOW)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    dataset = load_dataset(CONFIG.data.train, load_tokenizer(CONFIG.model.path), 128)
    return [prompt.token_ids for prompt in dataset.prompts[:12]]


@pytest.fixture(scope="module")
def weights(prompts) -> PolicyWeights:
    learner = Learner(CONFIG)
    learner.restore(None)
    return PolicyWeights(0, learner.weights_buffer(), learner.canaries(prompts[:4]))


@pytest.fixture(scope="module")
async def cluster(ray_cluster):
    assert ray_cluster.is_initialized()
    engines = [RayEngine(i, CONFIG.engine, num_gpus=0) for i in range(2)]
    said: list[str] = []
    drafters = Drafters(CONFIG.engine.drafter_processes, engines, 3, said.append)
    await asyncio.gather(drafters.start(), *(engine.start() for engine in engines))
    yield engines, drafters, said
    await drafters.shutdown()
    for engine in engines:
        await engine.shutdown()


def requests(prompts, setting: DraftSetting | None) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            id=RequestId(Split.TRAIN, 1, f"{i:032x}", j),
            prompt_token_ids=prompt,
            sample_key=sample_key(0, 1, "train", f"prompt-{i}", j),
            max_response_tokens=CONFIG.data.max_response_tokens,
            drafting=setting,
        )
        for i, prompt in enumerate(prompts)
        for j in range(4)
    ]


async def roll_out(cluster, weights, assignments, policies=(), on_progress=None):
    """Tokens by request, the rollouts, the outcome and what the drafters counted."""
    engines, drafters, _ = cluster
    coordinator = Coordinator(engines, policies)
    await coordinator.load_weights(weights)
    await drafters.take_counts()
    finished: dict[RequestId, Rollout] = {}

    async def keep(rollouts):
        for rollout in rollouts:
            assert rollout.request.id not in finished
            finished[rollout.request.id] = rollout

    outcome = await asyncio.wait_for(coordinator.roll_out(assignments, keep, on_progress), 300)
    counts = (await drafters.take_counts())["small"]
    tokens = {id: rollout.generated.token_ids for id, rollout in finished.items()}
    return tokens, finished, outcome, counts


@pytest.fixture(scope="module")
async def plain(cluster, weights, prompts):
    """The reference: nobody drafts."""
    todo = [(i % 2, request) for i, request in enumerate(requests(prompts, None))]
    tokens, finished, _, counts = await roll_out(cluster, weights, todo)
    assert len(tokens) == len(todo)
    assert not sum(rollout.generated.num_draft_tokens for rollout in finished.values())
    assert counts.num_drafted == 0
    return tokens


@pytest.mark.parametrize("setting", [COUPLED, DECOUPLED, OWN_TEXT])
async def test_no_drafter_changes_a_token(cluster, weights, prompts, plain, setting):
    todo = [(i % 2, request) for i, request in enumerate(requests(prompts, setting))]
    tokens, finished, _, counts = await roll_out(cluster, weights, todo)
    assert tokens == plain
    generated = [rollout.generated for rollout in finished.values()]
    drafted = sum(g.num_draft_tokens for g in generated)
    accepted = sum(g.num_accepted_tokens for g in generated)
    assert drafted
    if setting.drafter == "small":
        assert accepted > 0.5 * drafted
        assert counts.num_drafted >= drafted
        assert counts.num_failures
        bound = WINDOW if setting.coupled else 2 * WINDOW - 1
        assert counts.max_wasted <= bound


class RaceAll:
    """Everything on engine 0 is raced on engine 1, once it has begun."""

    def __init__(self) -> None:
        self.raced: set[RequestId] = set()

    def decide(self, view: RolloutView) -> list[Race]:
        origin = next((e for e in view.engines if e.engine == 0), None)
        if origin is None or len(view.engines) < 2:
            return []
        new = [id for id, num in origin.progress.items() if num >= 8 and id not in self.raced]
        self.raced.update(new)
        return [Race(id, 1, DECOUPLED) for id in new]


async def test_a_race_changes_no_token(cluster, weights, prompts, plain):
    todo = [(0, request) for request in requests(prompts, None)]
    policy = RaceAll()
    tokens, finished, outcome, _ = await roll_out(cluster, weights, todo, [policy])
    assert tokens == plain
    assert outcome.num_raced > 0
    assert len(finished) == len(todo)


class RedraftAll:
    """Every request changes its drafting once it has begun."""

    def __init__(self, setting: DraftSetting) -> None:
        self.setting = setting
        self.seen: set[RequestId] = set()

    def decide(self, view: RolloutView) -> list[Redraft]:
        moves = []
        for engine in view.engines:
            for id, num in engine.progress.items():
                if num >= 8 and id not in self.seen:
                    self.seen.add(id)
                    moves.append(Redraft(id, engine.engine, self.setting))
        return moves


async def test_redrafting_changes_no_token(cluster, weights, prompts, plain):
    todo = [(i % 2, request) for i, request in enumerate(requests(prompts, COUPLED))]
    other = DraftSetting("small", 2, coupled=False)
    tokens, finished, _, _ = await roll_out(cluster, weights, todo, [RedraftAll(other)])
    assert tokens == plain
    assert any(rollout.request.drafting == other for rollout in finished.values())


async def test_a_killed_drafter_changes_nothing(cluster, weights, prompts, plain):
    engines, drafters, said = cluster
    address = engines[0]._drafters["small"]
    pid = await drafters._drafters[0]._actor.__ray_call__.remote(lambda _: os.getpid())
    killed = []

    def kill_once(view: RolloutView) -> None:
        if not killed and view.num_finished > 2:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    todo = [(i % 2, request) for i, request in enumerate(requests(prompts, DECOUPLED))]
    tokens, _, _, _ = await roll_out(cluster, weights, todo, on_progress=kill_once)
    assert killed
    assert tokens == plain
    async with asyncio.timeout(300):
        while engines[0]._drafters["small"] == address:
            await asyncio.sleep(0.5)
    assert any("died" in text for text in said)
    tokens, finished, _, counts = await roll_out(cluster, weights, todo)
    assert tokens == plain
    assert counts.num_drafted
    assert sum(rollout.generated.num_draft_tokens for rollout in finished.values())

