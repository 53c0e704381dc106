"""Real vLLM engines on Ray generate the same samples on any engine, in any order, with any drafts.

The tests also migrate requests and kill an engine.
"""

import asyncio
import os
import signal
from dataclasses import replace
from shutil import rmtree

import pytest
import torch

from refrain.benchmarks.one_step import fetch
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, shared_dir, write_index
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.shared import SharedLibrary
from refrain.engines.inference.weights.canary import FLOAT32_TOLERANCE
from refrain.engines.learn.learner import Learner
from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.rollout.moves import Migrate, RolloutView
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.rollout import FinishedRollout, RequestId, Rollout
from tests.inference.pace import paced
from tests.inference.real import CONFIG, key, requests, roll_out, tokens_of, weights_of
from tests.inference.switching import finished_on, generate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_two_engines_and_another_order_change_nothing(
    engines, learner, prompts, on_one_engine
):
    todo = [(i % 2, request) for i, request in enumerate(reversed(requests(prompts)))]
    finished, outcome = await roll_out(engines, weights_of(learner, prompts), todo)
    assert all(share.num_rollouts for share in outcome.shares)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert {id: r.finish_reason for id, r in finished.items()} == {
        id: r.finish_reason for id, r in on_one_engine.items()
    }
    for id, rollout in finished.items():
        assert rollout.generated.inference_logprobs == pytest.approx(
            on_one_engine[id].generated.inference_logprobs, abs=1e-4
        )


async def test_another_key_gives_other_samples(engines, learner, prompts, on_one_engine):
    """Negative control: the comparison above can fail."""
    todo = [(0, request) for request in requests(prompts, seed=1)]
    finished, _ = await roll_out(engines, weights_of(learner, prompts), todo)
    same = sum(tokens_of(finished)[id] == tokens_of(on_one_engine)[id] for id in finished)
    assert same < len(finished) / 2


async def test_weights_on_their_way_have_no_name(engines, learner, prompts):
    """A named file would stay when the engine is killed, and other users could read it."""
    before, seen = set(os.listdir("/dev/shm")), {}
    loading = asyncio.create_task(engines[0].load_weights(weights_of(learner, prompts)))
    while not loading.done():
        seen |= {entry.name: entry.is_dir() for entry in os.scandir("/dev/shm")}
        await asyncio.sleep(0.001)
    assert await loading < FLOAT32_TOLERANCE
    # Other engines may start on this machine. Each has a directory, and files with its name.
    others = tuple(name for name, is_dir in seen.items() if is_dir and name not in before)
    named = [name for name in seen.keys() - before if name.startswith("refrain")]
    assert not [name for name in named if not name.startswith(others)]


class SwapEngines:
    """Policy that moves each request once to the other engine, when it has a few tokens."""

    def __init__(self) -> None:
        self.moved: set[RequestId] = set()

    def decide(self, view: RolloutView) -> list[Migrate]:
        moves = [
            Migrate(id, 1 - engine.engine)
            for engine in view.engines
            for id, tokens in engine.progress.items()
            if tokens >= 4 and id not in self.moved
        ][:8]
        self.moved |= {move.id for move in moves}
        return moves


async def test_migration_changes_no_token(engines, learner, prompts, on_one_engine):
    policy = SwapEngines()
    todo = [(i % 2, request) for i, request in enumerate(requests(prompts))]
    async with paced(engines):
        finished, outcome = await roll_out(engines, weights_of(learner, prompts), todo, [policy])
    assert outcome.moves.num_migrated, "no request was moved in the middle of its response"
    continued = [finished[id] for id in policy.moved]
    assert tokens_of(finished) == tokens_of(on_one_engine)
    for rollout in continued:
        assert [span.num_tokens for span in rollout.generated.spans] == [
            len(rollout.generated.token_ids)
        ]


async def test_reported_tokens_are_a_prefix_of_the_response(
    engines, learner, prompts, on_one_engine
):
    """The engine core buffers tokens between reports, so a copy may be shorter, but never wrong."""
    engine, todo = engines[0], requests(prompts)
    await engine.load_weights(weights_of(learner, prompts))
    await engine.submit(todo)
    told, so_far, num_finished = dict.fromkeys(on_one_engine, 0), [], 0
    async with asyncio.timeout(60):
        while num_finished < len(todo):
            so_far += await engine.copy([request.id for request in todo])
            events = await engine.next_events()
            num_finished += len(events.finished)
            for id, num_tokens in events.progress.items():
                assert told[id] <= num_tokens <= on_one_engine[id].num_tokens
                told[id] = num_tokens
    begun = [request for request in so_far if request.generated]
    assert begun
    assert any(told.values())
    for request in begun:
        generated, whole = request.generated, on_one_engine[request.id].generated
        assert list(generated.token_ids) == whole.token_ids[: len(generated.token_ids)]
        assert len(generated.inference_logprobs) == len(generated.token_ids)


async def test_withdrawn_requests_return_and_the_others_continue(
    engines, learner, prompts, on_one_engine
):
    """A batch begins when all its requests arrived, even if some were withdrawn by then."""
    engine, todo = engines[0], requests(prompts)
    await engine.load_weights(weights_of(learner, prompts))
    leaving = [request.id for request in todo[::2]]
    _, withdrawn = await asyncio.gather(engine.submit(todo), engine.withdraw(leaving))
    withdrawn += await engine.withdraw(leaving)
    finished = await finished_on(engine, len(todo) - len(withdrawn))
    assert finished.keys().isdisjoint(request.id for request in withdrawn)
    assert len(withdrawn) > len(leaving) // 2
    finished |= await generate(engine, withdrawn)
    assert tokens_of(finished) == tokens_of(on_one_engine)


async def test_an_abandoned_call_loses_no_rollout(engines, learner, prompts):
    """A stage that ends leaves a cancelled call. It must not take the next stage's rollouts."""
    await engines[1].load_weights(weights_of(learner, prompts))
    abandoned = asyncio.create_task(engines[1].next_events())
    await asyncio.sleep(0.05)
    abandoned.cancel()
    todo = [replace(request, max_response_tokens=1) for request in requests(prompts)[:4]]
    await engines[1].submit(todo)
    await asyncio.sleep(1.0)
    finished: list[FinishedRollout] = []
    async with asyncio.timeout(30):
        while len(finished) < len(todo):
            finished += (await engines[1].next_events()).finished
    fetched = await fetch(finished)
    assert [(r.id, r.request.prompt_token_ids) for r in fetched] == [
        (request.id, request.prompt_token_ids) for request in todo
    ]


async def test_inference_logprobs_are_the_trainers(learner, on_one_engine):
    for rollout in list(on_one_engine.values())[:16]:
        prompt, response = rollout.request.prompt_token_ids, rollout.generated.token_ids
        (logprobs,) = learner.logprobs([[*prompt, *response]])
        trainer = torch.as_tensor(logprobs)[-len(response) :].tolist()
        assert rollout.generated.inference_logprobs == pytest.approx(trainer, abs=1e-4)


class KillInMidMove(SwapEngines):
    """Policy that kills engine 1 while requests move to it."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid
        self.killed = False

    def decide(self, view: RolloutView) -> list[Migrate]:
        moves = super().decide(view)
        if not self.killed and any(move.to_engine == 1 for move in moves):
            os.kill(self.pid, signal.SIGKILL)
            self.killed = True
        return moves


async def test_an_engine_killed_in_mid_migration_is_restarted_and_the_phase_completes(
    engines, learner, prompts, on_one_engine
):
    before = engines[1]._actor
    policy = KillInMidMove(await before.handle.__ray_call__.remote(lambda _: os.getpid()))
    todo = [(i % 2, request) for i, request in enumerate(requests(prompts))]
    weights = weights_of(learner, prompts)
    async with paced(engines):
        finished, outcome = await roll_out(engines, weights, todo, [policy])
    assert policy.killed
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert outcome.shares[1].num_restarts == 1
    assert engines[1]._actor is not before
    again, outcome = await roll_out(engines, weights, todo)
    assert outcome.shares[1].num_rollouts > 0
    assert tokens_of(again) == tokens_of(on_one_engine)


async def test_new_weights_reach_the_engine_and_wrong_ones_fail_closed(engines, prompts):
    """The embeddings are tied, so the packed output head must change with them."""
    changed = Learner(CONFIG)
    changed.restore(None)
    with torch.no_grad():
        for parameter in changed._policy.parameters():
            parameter.mul_(1.05)
    good = weights_of(changed, prompts)
    assert await engines[0].load_weights(replace(good, policy_version=1)) < 1e-4
    original = Learner(CONFIG)
    original.restore(None)
    stale = replace(good, policy_version=2, source=original.weights_buffer())
    with pytest.raises(WeightSyncError, match=r"engine 0 after .* differs from the trainer"):
        await engines[0].load_weights(stale)


async def history_of(engine, learner, prompts, history_dir) -> None:
    """Write indexes of samples with another seed, like those of an earlier epoch."""
    for history in await earlier(engine, learner, prompts):
        path = index_path(history_dir, history.prompt_key)
        index = build_index(history.prompt_token_ids, history.responses, history.rewards)
        write_index(index, history.prompt_key, path)


async def earlier(engine, learner, prompts) -> list[PromptHistory]:
    """Return samples with another seed, like those of an earlier epoch."""
    todo = [(engine.index, request) for request in requests(prompts, seed=1)]
    finished, _ = await roll_out([engine], weights_of(learner, prompts), todo)
    groups = [
        [r.generated.token_ids for r in finished.values() if r.id.prompt_key == key(i)]
        for i in range(len(prompts))
    ]
    assert all(len(group) == 4 for group in groups)
    return [
        PromptHistory(key(i), 1, prompt, group, [0.0, 1.0, 0.5, 1.0])
        for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]


def drafts_of(finished: dict[RequestId, Rollout]) -> tuple[int, int, int]:
    """Return the numbers of verifications, draft tokens and accepted tokens."""
    generated = [rollout.generated for rollout in finished.values()]
    return (
        sum(g.num_verifications for g in generated),
        sum(g.num_draft_tokens for g in generated),
        sum(g.num_accepted_tokens for g in generated),
    )


@pytest.mark.usefixtures("ungated")
async def test_drafts_change_no_token(engines, learner, prompts, on_one_engine, history):
    """Right and wrong drafts give the tokens of engine 0, which does not draft.

    So do requests that move in the middle of a response, and indexes that vanish or are damaged.
    """
    await history_of(engines[0], learner, prompts, history)
    weights, todo = weights_of(learner, prompts), [(1, r) for r in requests(prompts)]
    finished, outcome = await roll_out(engines, weights, todo)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    for id, rollout in finished.items():
        expected = on_one_engine[id].generated.inference_logprobs
        assert rollout.generated.inference_logprobs == pytest.approx(expected, abs=1e-4)
    num_verifications, num_drafted, num_accepted = drafts_of(finished)
    assert num_accepted > 1000
    assert num_drafted > num_accepted + 200
    assert num_verifications < num_accepted
    assert outcome.shares[1].drafting.num_drafting_steps > 10
    assert outcome.shares[0].drafting.num_steps == 0
    assert 0.0 < outcome.shares[1].drafting.draft_s < outcome.shares[1].busy_s

    moving = [(i % 2, request) for i, request in enumerate(requests(prompts))]
    policy = SwapEngines()
    async with paced(engines):
        finished, _ = await roll_out(engines, weights, moving, [policy])
    assert policy.moved
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert drafts_of(finished)[2] > 100

    def spoil(view: RolloutView) -> None:
        """Delete all indexes once all requests have begun."""
        if all(num_tokens for engine in view.engines for num_tokens in engine.progress.values()):
            for path in history.iterdir():
                path.unlink()

    for i in range(0, len(prompts), 2):
        path = index_path(history, key(i))
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    finished, outcome = await roll_out(engines, weights, todo, on_progress=spoil)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert outcome.shares[1].drafting.num_damaged == len(prompts) // 2
    assert not list(history.glob("*.index"))
    finished, outcome = await roll_out(engines, weights, todo)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert outcome.shares[1].drafting.num_without_index == len(todo)


@pytest.mark.usefixtures("ungated")
async def test_shared_index_changes_no_token(engines, learner, prompts, on_one_engine, history):
    """Draft for prompts without history from the responses of other prompts.

    Then damage the shared files, and delete them.
    """
    weights, todo = weights_of(learner, prompts), [(1, r) for r in requests(prompts)]
    shared = SharedLibrary(history, DraftingConfig())
    shared.add(await earlier(engines[0], learner, prompts))
    finished, outcome = await roll_out(engines, weights, todo)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    drafting = outcome.shares[1].drafting
    assert drafting.num_without_index == len(todo)
    # The engine does not count shared drafts in a request's last step: the request has ended.
    _, num_drafted, num_accepted = drafts_of(finished)
    assert num_accepted > 10
    assert 0.5 * num_drafted < drafting.num_shared_draft_tokens <= num_drafted
    assert 0 < drafting.num_shared_accepted_tokens < drafting.num_shared_draft_tokens

    known = set(shared_dir(history).glob("*.index"))
    shared.add([PromptHistory(key(0), 2, prompts[0], [[5] * 9], [1.0])])
    (path,) = set(shared_dir(history).glob("*.index")) - known
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    finished, outcome = await roll_out(engines, weights, todo)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert outcome.shares[1].drafting.num_damaged == 1
    rmtree(shared_dir(history))
    finished, outcome = await roll_out(engines, weights, todo)
    assert tokens_of(finished) == tokens_of(on_one_engine)
    assert outcome.shares[1].drafting.num_drafting_steps == 0


@pytest.mark.parametrize("index", [0, 1])
async def test_most_steps_go_past_vllms_scheduler(engines, learner, prompts, index):
    """Engine 1 drafts."""
    actor = engines[index].actor
    await actor.count_steps.remote()
    todo = [(index, request) for request in requests(prompts)]
    await roll_out(engines, weights_of(learner, prompts), todo)
    counts = await actor.take_step_counts.remote()
    assert counts["steps"] > 0.8 * (counts["steps"] + counts["steps of vLLM"])
    assert counts["rows"] > 0.8 * (counts["rows"] + counts["rows of vLLM"])


async def test_garbage_collection_skips_objects_of_the_start(engines):
    """A full garbage collection would pause a step by 0.2 s now and then."""
    num_frozen, enabled = await engines[0].actor.__ray_call__.remote(_garbage)
    assert num_frozen > 100_000
    assert enabled


def _garbage(_: object) -> tuple[int, bool]:
    import gc

    return gc.get_freeze_count(), gc.isenabled()
