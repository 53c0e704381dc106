"""A teacher on a server gives the update of the same teacher in the trainer. What servers do wrong
is waited for or refused, within bounds."""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from refrain.engines.learn.gradient import with_teacher_logprobs
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.minibatch import assign_share
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.learn.teacher import client
from refrain.engines.learn.teacher.client import (
    MAX_PAUSE_S,
    TeacherBusy,
    TeacherClient,
    TeacherError,
    pause_s,
)
from refrain.engines.learn.teacher.start_check import check_teacher, common_text
from refrain.engines.learn.trainer import TrainerError, TrainerGroup
from refrain.engines.learn.training_samples import read_training_samples
from refrain.schemas.algorithm import AlgorithmConfig
from refrain.schemas.config import RolloutConfig, TrainConfig
from refrain.schemas.teacher import TeacherServerConfig
from refrain.tasks.run.crashes import is_crash
from tests.learn.conftest import (
    VOCAB_SIZE,
    make_batch,
    on_policy,
    own_logprobs,
    save_model,
    started,
)
from tests.learn.teacher_servers import Change, Reply, SmallServer, serving

MakeConfig = Callable[..., TrainConfig]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), seed=7)


@pytest.fixture(scope="module")
def tokenizer(teacher_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(teacher_dir)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def small(teacher_dir: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[SmallServer]:
    model = AutoModelForCausalLM.from_pretrained(teacher_dir)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    with serving(SmallServer(lambda ids: own_logprobs(model, ids), encode, VOCAB_SIZE)) as server:
        yield server


def of_teacher(make_config: MakeConfig, **algorithm: Any) -> TrainConfig:
    """Return the config of a run at temperature 1."""
    config = make_config()
    changes = {"rollout": RolloutConfig(), "algorithm": AlgorithmConfig(**algorithm)}
    return config.model_copy(update=changes)


def gradients(learner: Learner) -> list[torch.Tensor]:
    found = [one.grad for one in learner._policy.parameters()]
    assert all(one is not None for one in found)
    return found


def ask(config: TeacherServerConfig, ids: Sequence[int] = (1, 2, 3, 4)) -> np.ndarray:
    return TeacherClient(config).score([TokenSequence(np.array(ids, np.int32), 1)])[0]


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"reward_weight": 1.0},
        {"type": "cispo", "tis_cap": 2.0},
        {"type": "dr_grpo", "overlong_filtering": True},
    ],
)
def test_a_server_teaches_as_a_model_in_the_trainer(
    make_config: MakeConfig, teacher_dir: Path, small: SmallServer, algorithm: dict
) -> None:
    local = started(of_teacher(make_config, teacher=teacher_dir, **algorithm))
    remote = started(of_teacher(make_config, teacher_server=small.config(), **algorithm))
    batch = on_policy(make_batch(), local, temperature=1.0)
    expected, found = local.train_step(batch), remote.train_step(batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert abs(found["actor/teacher_kl"]) > 1e-3
    torch.testing.assert_close(gradients(remote), gradients(local), rtol=1e-4, atol=1e-6)
    assert len(small.prompts) == batch.num_rows


def test_a_server_teaches_beside_a_kl_penalty(make_config: MakeConfig, small: SmallServer) -> None:
    given = {"kl_coefficient": 0.1, "reward_kl_coefficient": 0.1, "reward_weight": 1.0}
    learner = started(of_teacher(make_config, teacher_server=small.config(), **given))
    told = learner.train_step(on_policy(make_batch(), learner, temperature=1.0))
    assert {"actor/teacher_kl", "actor/kl_loss", "actor/reward_kl_penalty"} <= told.keys()


def test_only_sampled_tokens_are_learnt_from(small: SmallServer) -> None:
    ids = np.arange(3, 13, dtype=np.int32)
    sampled = np.array([True, False, False, True, True, False, True])
    (found,) = TeacherClient(small.config()).score([TokenSequence(ids, 3, sampled=sampled)])
    assert found == pytest.approx(np.asarray(small.score(ids.tolist()))[2:][sampled])


def test_each_rank_asks_for_its_own_samples(make_config: MakeConfig, small: SmallServer) -> None:
    config = of_teacher(make_config, teacher_server=small.config())
    samples, _ = read_training_samples(read_rollouts(make_batch()), config, 0)
    asked = []
    for rank in range(2):
        share = assign_share(samples, config, rank, 2)
        small.prompts.clear()
        (scored,) = with_teacher_logprobs(config.algorithm.teacher_server, [share])
        lengths = [len(values) for values in scored.teacher_logprobs or []]
        assert lengths == [one.num_response_tokens for one in share.sequences]
        assert len(small.prompts) == len(share.samples)
        asked += small.prompts
    assert sorted(asked) == sorted(one.rollout.token_ids.tolist() for one in samples)


def test_a_resumed_run_learns_the_same(make_config: MakeConfig, small: SmallServer) -> None:
    config = of_teacher(make_config, teacher_server=small.config())
    learner = started(config)
    learner.train_step(make_batch())
    saved = learner.save(1, {})
    small.changes.append(drop)
    learner.train_step(make_batch(1, policy_version=1))
    resumed = started(config, saved)
    resumed.train_step(make_batch(1, policy_version=1))
    assert resumed.weights_buffer() == learner.weights_buffer()


@pytest.mark.engine
@pytest.mark.usefixtures("ray_cluster")
async def test_trainer_processes_ask_the_server(
    make_config: MakeConfig, teacher_dir: Path, small: SmallServer
) -> None:
    config = of_teacher(make_config, teacher_server=small.config(retries=0))
    ranks = {"num_processes": 2, "timeout_s": 120.0}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=ranks)})
    local = started(of_teacher(make_config, teacher=teacher_dir))
    batch = on_policy(make_batch(), local, temperature=1.0)
    group = TrainerGroup(config)
    try:
        await group.start(None)
        metrics = await group.train_step(batch)
        assert metrics == pytest.approx(local.train_step(batch), abs=1e-4)
        assert len(small.prompts) == batch.num_rows
        small.always = drop
        with pytest.raises(
            TrainerError, match=f"TeacherError: the teacher at {small.url}"
        ) as ended:
            await group.train_step(make_batch(1, policy_version=1))
        assert not is_crash(ended.value)
    finally:
        await group.shutdown()


def drop(reply: Reply) -> None:
    reply.drop = True


def late(reply: Reply) -> None:
    reply.wait_s = 1.5


def status(number: int, **headers: str) -> Change:
    def change(reply: Reply) -> None:
        reply.status, reply.headers = number, headers
        reply.value = {"error": {"message": "no room"}}

    return change


def replaced(change: Callable[[list], None]) -> Change:
    return lambda reply: change(reply.entries)


def with_body(body: bytes) -> Change:
    def change(reply: Reply) -> None:
        reply.body = body

    return change


def without_logprobs(reply: Reply) -> None:
    reply.value = {"choices": [{"text": ""}]}


def logprob(value: Any) -> Change:
    def change(reply: Reply) -> None:
        reply.entries[2] = {"3": {"logprob": value}}

    return change


@pytest.mark.parametrize(
    "failed",
    [drop, late, status(429), status(503), status(500), status(408)],
    ids=["drop", "late", "429", "503", "500", "408"],
)
def test_a_request_is_repeated(small: SmallServer, failed: Change, caplog: Any) -> None:
    small.changes = [failed] * 2
    found = ask(small.config(timeout_s=0.5, retries=2))
    assert found == pytest.approx(small.score([1, 2, 3, 4]))
    assert "2 requests to the teacher were repeated" in caplog.text


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        (drop, "gave no answer"),
        (late, "no answer in 0.3 s"),
        (status(429), "status 429: no room"),
        (status(502), "status 502: no room"),
    ],
)
def test_retries_end(small: SmallServer, failed: Change, why: str) -> None:
    small.always = failed
    with pytest.raises(TeacherError, match=f"{why}.*This was attempt 3 of 3") as raised:
        ask(small.config(timeout_s=0.3, retries=2))
    assert small.url in str(raised.value)
    assert len(small.prompts) == 3


def test_an_answer_that_trickles_is_late(small: SmallServer) -> None:
    """Each byte arrives in time, and the whole answer does not."""

    def trickle(reply: Reply) -> None:
        reply.byte_s = 0.05

    small.always = trickle
    began = time.monotonic()
    with pytest.raises(TeacherError, match=r"no answer in 0.4 s"):
        ask(small.config(timeout_s=0.4, retries=0))
    assert time.monotonic() - began < 1.4


def test_another_server_takes_over(small: SmallServer) -> None:
    config = small.config(urls=["http://127.0.0.1:9/v1", small.url, small.url + "/"])
    found = TeacherClient(config).score([TokenSequence(np.arange(n + 2), 1) for n in range(9)])
    assert [len(one) for one in found] == list(range(1, 10))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replaced(lambda entries: entries.pop()), "of 3 tokens, and the prompt has 4"),
        (replaced(lambda entries: entries.append({"1": {}})), "of 5 tokens, and the prompt has 4"),
        (replaced(lambda entries: entries.__setitem__(2, None)), "no log-probability of token 2"),
        (logprob(float("nan")), "token 2 of the prompt is nan"),
        (logprob(float("-inf")), "token 2 of the prompt is -inf"),
        (logprob(None), "token 2 of the prompt is None"),
        (logprob("-1"), "token 2 of the prompt is -1"),
        (logprob(12.5), "is 12.5, which is above 0: start the server without --logprobs-mode"),
        (replaced(lambda entries: entries.reverse()), "is 2 for the policy and 3 for the teacher"),
        (
            replaced(lambda entries: entries.__setitem__(2, {"9": {"decoded_token": "no"}})),
            "is 3 for the policy and 9 \\('no'\\) for the teacher",
        ),
        (without_logprobs, "no prompt_logprobs: the teacher needs a server"),
        (with_body(b"[]"), "no completion: \\[\\]"),
        (with_body(b"<html>"), "answered no JSON: <html>"),
        (status(400), "status 400: no room"),
        (status(404), "status 404: no room"),
        (status(307, Location="/v2"), "status 307"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(
    small: SmallServer, change: Change, why: str
) -> None:
    small.always = change
    with pytest.raises(TeacherError, match=why) as raised:
        ask(small.config())
    assert small.url in str(raised.value)
    assert len(small.prompts) == 1, "a wrong answer is not asked for again"


def test_one_bad_answer_ends_all_requests(small: SmallServer) -> None:
    small.changes = [logprob(float("nan"))]
    small.always = late
    began = time.monotonic()
    with pytest.raises(TeacherError, match="is nan"):
        TeacherClient(small.config(at_once=2)).score([TokenSequence(np.arange(1, 5), 1)] * 20)
    assert time.monotonic() - began < 5.0
    assert len(small.prompts) < 20


def test_several_requests_are_in_flight_and_no_more_than_allowed(small: SmallServer) -> None:
    def slow(reply: Reply) -> None:
        reply.wait_s = 0.05

    small.always = slow
    TeacherClient(small.config(at_once=3)).score([TokenSequence(np.arange(1, 5), 1)] * 12)
    assert small.most_at_once == 3


def test_pauses_double_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 1.0)
    assert [pause_s(attempt, 0.0) for attempt in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]
    assert pause_s(1, 20.0) == 20.0
    assert pause_s(1, 1e9) == MAX_PAUSE_S


def test_a_server_may_ask_for_a_pause(small: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(client, "pause_s", lambda _, after_s: asked.append(after_s) or 0.0)
    after = {"Retry-After": "7"}, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}
    small.changes = [status(429, **one) for one in after]
    ask(small.config())
    assert asked == [7.0, 0.0]


def test_errors_travel_between_processes() -> None:
    for error in (TeacherError("why"), TeacherBusy("why", 3.0)):
        assert str(pickle.loads(pickle.dumps(error))) == "why"


def test_a_server_that_can_teach_passes(
    small: SmallServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    check_teacher(small.config(urls=[small.url] * 2), tokenizer, VOCAB_SIZE, MAX_TOKENS)
    assert len(small.prompts) == 4
    assert max(small.prompts[1]) == VOCAB_SIZE - 1
    assert all(2 <= len(prompt) <= MAX_TOKENS for prompt in small.prompts)


@pytest.mark.parametrize("max_tokens", [8, 20, 60, 300])
def test_the_common_text_fits(tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
    text, ids = common_text(tokenizer, max_tokens)
    assert 2 <= len(ids) <= max_tokens
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def drops_last(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    return lambda text: [*encode(text)[:-1], 2]


@pytest.mark.parametrize(
    ("given", "changes", "why"),
    [
        ({"model": "bigger"}, {}, "has no model 'bigger', but big: set"),
        ({"api_key": None}, {}, "status 401"),
        ({"api_key": "wrong"}, {}, "status 401"),
        ({}, {"context": MAX_TOKENS}, "context of 64 tokens .* --max-model-len 65"),
        ({}, {"num_rows": VOCAB_SIZE - 1}, "status 400: Token id 63 is out of vocabulary"),
        ({}, {"encode": lambda _: [1, 2, 3]}, "of 3 tokens, and the prompt has"),
        ({}, {"always": without_logprobs}, "no prompt_logprobs"),
        ({}, {"always": status(503)}, "status 503: no room"),
        ({"timeout_s": 0.3}, {"always": late}, "no answer in 0.3 s"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(
    small: SmallServer,
    tokenizer: PreTrainedTokenizerBase,
    given: dict,
    changes: dict,
    why: str,
) -> None:
    for name, value in changes.items():
        setattr(small, name, value)
    with pytest.raises(ValueError, match=f"algorithm.teacher_server: .*{why}"):
        check_teacher(small.config(**given), tokenizer, VOCAB_SIZE, MAX_TOKENS)


def test_another_tokenizer_is_refused(
    small: SmallServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Two tokens have changed places."""
    encode, swapped = small.encode, {7: 8, 8: 7}
    small.encode = lambda text: [swapped.get(id, id) for id in encode(text)]
    with pytest.raises(ValueError, match="is 7 for the policy and 8 for the teacher: their token"):
        check_teacher(small.config(), tokenizer, VOCAB_SIZE, 200)


@pytest.mark.parametrize("path", ["", "/v1/v1"])
def test_another_address_is_refused(
    small: SmallServer, tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    url = small.url.removesuffix("/v1") + path
    with pytest.raises(ValueError, match="/models answered with status 404"):
        check_teacher(small.config(urls=url), tokenizer, VOCAB_SIZE, MAX_TOKENS)
    with pytest.raises(
        ValueError, match=r"127\.0\.0\.1:9/v1/models gave no answer .* Start the server"
    ):
        check_teacher(
            small.config(urls=[small.url, "http://127.0.0.1:9/v1"]),
            tokenizer,
            VOCAB_SIZE,
            MAX_TOKENS,
        )
