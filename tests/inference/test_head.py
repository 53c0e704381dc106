"""A draft head in a real engine changes no token, and drafts right where it knows the policy."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.schemas.drafting import HEAD
from refrain.schemas.rollout import DraftSetting, RequestId, Rollout, RolloutRequest
from refrain.schemas.weights import PolicyWeights
from tests.inference.heads import memoryless, right_head
from tests.inference.pace import dial
from tests.inference.real import requests, weights_of
from tests.inference.switching import assert_as_before, generate
from tests.inference.test_engine import drafts_of, history_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

DRAFTING = DraftSetting(HEAD, 4)


def drafted(todo: list[RolloutRequest]) -> list[RolloutRequest]:
    return [replace(request, drafting=DRAFTING) for request in todo]


def accepted_share(finished: Mapping[RequestId, Rollout]) -> float:
    _, num_drafted, num_accepted = drafts_of(dict(finished))
    assert num_drafted > 100
    return num_accepted / num_drafted


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def forgetful(engines, tp2, learner, prompts, tmp_path_factory):
    """Give all engines a policy that sees the last token alone, and yield a right head for it."""
    policy, scale = memoryless()
    for engine in (*engines, tp2):
        await engine.load_weights(weights_of(policy, prompts))
    yield right_head(tmp_path_factory.mktemp("right"), scale)
    for engine in (*engines, tp2):
        await engine.load_weights(weights_of(learner, prompts))


@pytest.mark.parametrize(("temperature", "tp_degree"), [(1.0, 1), (0.6, 1), (0.0, 1), (1.0, 2)])
async def test_right_and_wrong_heads_change_no_token(
    engines, tp2, forgetful: Path, head_dir: Path, prompts, temperature: float, tp_degree: int
):
    """Negative control: the right head drafts wrong tokens with the noise of other positions."""
    todo = [replace(one, max_response_tokens=64) for one in requests(prompts[:4])]
    reference, drafting = engines[0], engines[1] if tp_degree == 1 else tp2
    await dial((reference, drafting), temperature)
    expected = await generate(reference, todo)
    shares = {}
    for name, head, is_own in [("right", forgetful, True), ("wrong", head_dir, True),
                               ("other noise", forgetful, False)]:  # fmt: skip
        await drafting.load_draft_head(head)
        await drafting.actor.call_drafting.remote("set_draft_noise", is_own)
        finished = await generate(drafting, drafted(todo))
        assert_as_before(finished, expected)
        shares[name] = accepted_share(finished)
    await drafting.actor.call_drafting.remote("set_draft_noise", True)
    await dial((reference, drafting), 1.0, gate=True)
    assert shares["right"] > 0.75  # An end of a response wastes the rest of a draft.
    assert shares["wrong"] < 0.5
    if temperature:
        assert shares["other noise"] < 0.7


@pytest.mark.parametrize("tp_degree", [1, 2])
async def test_a_head_follows_the_weights_of_its_policy(
    engines, tp2, learner, prompts, tmp_path: Path, tp_degree: int
):
    drafting = engines[1] if tp_degree == 1 else tp2
    todo = drafted([replace(one, max_response_tokens=64) for one in requests(prompts[:4])])
    await dial((drafting,), 1.0)
    shares = []
    for shift in (7, 0):
        policy, scale = memoryless(shift, 3.0)
        await drafting.load_weights(weights_of(policy, prompts))
        if not shares:
            await drafting.load_draft_head(right_head(tmp_path, scale))
        shares.append(accepted_share(await generate(drafting, todo)))
    await dial((drafting,), 1.0, gate=True)
    await drafting.load_weights(weights_of(learner, prompts))
    assert min(shares) > 0.75


@pytest.mark.usefixtures("ungated")
async def test_a_head_and_history_together_change_no_token(
    engines: list[RayEngine], learner, prompts, on_one_engine, history: Path
):
    """A new engine drafts from a head at once, from history where it knows more."""
    await history_of(engines[0], learner, prompts[:8], history)
    weights: PolicyWeights = weights_of(learner, prompts)
    await engines[1].load_weights(weights)
    todo = requests(prompts[:16])
    by_history = await generate(engines[1], todo)
    by_both = await generate(engines[1], drafted(todo))
    for finished in (by_history, by_both):
        assert_as_before(finished, {id: on_one_engine[id] for id in finished})
    without = [one for one in by_both.values() if not by_history[one.id].generated.num_draft_tokens]
    assert without
    assert all(one.generated.num_draft_tokens for one in without)
    assert drafts_of(by_history)[2] > 0
