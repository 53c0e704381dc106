"""Scoring with a user's function: which results count as a score, and how failures are reported."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refrain.engines.reward.process import ScorerProcess
from refrain.engines.reward.results import checked_score
from refrain.engines.reward.scorer import Response, Scorer, check_reward
from refrain.schemas.reward import BuiltinReward, FunctionReward

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"


@pytest.fixture
def user_file(tmp_path) -> Callable[..., FunctionReward]:
    """Return a function that writes a scorer with this body and returns its config."""

    def write(body: str, *, define="def", head="", timeout_s=20.0, **changes) -> FunctionReward:
        path = tmp_path / "my_reward.py"
        path.write_text(f"{head}\n{define} compute_score{SIGNATURE}:\n    {body}\n")
        return FunctionReward(path=path, timeout_s=timeout_s, **changes)

    return write


def make_response(text="four", index=0, ground_truth: object = "4", data_source="mine") -> Response:
    return Response("cafe", index, data_source, text, ground_truth, {"hint": 1})


@contextmanager
def scoring(config, num_processes=1) -> Iterator[Scorer]:
    scorer = Scorer(config, num_processes)
    try:
        yield scorer
    finally:
        for process in scorer.processes:
            process.close()


def score(config, responses, num_processes=1):
    with scoring(config, num_processes) as scorer:
        return scorer.score(responses)


def test_builtin_scorers():
    responses = [
        make_response(text, data_source="refrain/arithmetic")
        for text in ("#### 4", "#### 5", r"\boxed{\frac{8}{2}}")
    ]
    assert score(BuiltinReward(), responses) == [
        (1.0, {"pred": "4"}),
        (0.0, {"pred": "5"}),
        (1.0, {"pred": r"\frac{8}{2}"}),
    ]


def test_endless_builtin_comparison_scores_zero_with_a_reason(tmp_path, monkeypatch):
    path = tmp_path / "slow.py"
    path.write_text(f"import time\ndef compute_score{SIGNATURE}: time.sleep(60)\n")
    monkeypatch.setattr("refrain.engines.answers.builtin.__file__", str(path))
    (one,) = score(BuiltinReward(timeout_s=0.5), [make_response(data_source="openai/gsm8k")])
    assert one == (0.0, {"pred": None, "error": "no score within 0.5 s (reward.timeout_s)"})


FLAKY = """
import os
FAILS = {fails!r}
tries = {{}}
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    note = {note!r} + solution_str
    tries = open(note).read() if os.path.exists(note) else ""
    open(note, "w").write(tries + "x")
    if len(tries) < FAILS.get(solution_str, 0):
        {how}
    return 1.0
"""


@pytest.fixture
def flaky(tmp_path, monkeypatch):
    """Return a function that writes a scorer and returns its config. The scorer fails the first
    `fails[response]` times."""
    monkeypatch.setattr("refrain.engines.reward.scorer.FIRST_WAIT_S", 0.01)

    def write(fails: dict[str, int], how: str, **changes) -> FunctionReward:
        path = tmp_path / "flaky.py"
        path.write_text(FLAKY.format(fails=fails, how=how, note=str(tmp_path / "tries-")))
        return FunctionReward(path=path, **{"timeout_s": 20.0} | changes)

    return write


@pytest.mark.parametrize(
    "how", ["raise OSError('503')", "os._exit(3)", "return float('nan')", "return 'good'"]
)
def test_failed_responses_are_retried_and_counted(flaky, tmp_path, how):
    config = flaky({"1": 2, "3": 1}, how, on_error="retry")
    scored = score(config, [make_response(str(i), i) for i in range(5)])
    assert scored == [
        (1.0, {}), (1.0, {"num_retries": 2}), (1.0, {}), (1.0, {"num_retries": 1}), (1.0, {}),
    ]  # fmt: skip
    if "exit" not in how:
        assert (tmp_path / "tries-4").read_text() == "x", "a scored response is not scored again"


def test_hung_scoring_is_retried(flaky):
    config = flaky({"1": 1}, "import time; time.sleep(60)", on_error="retry", timeout_s=0.5)
    scored = score(config, [make_response(str(i), i) for i in range(3)])
    assert scored == [(1.0, {}), (1.0, {"num_retries": 1}), (1.0, {})]


def test_retries_have_an_end_and_name_the_response(flaky, monkeypatch):
    monkeypatch.setattr("refrain.engines.reward.scorer.MAX_RETRIES", 2)
    config = flaky({"1": 9}, "raise OSError('503')", on_error="retry")
    with pytest.raises(ValueError, match=r"sample 1 of .*3 tries, the last one: OSError: 503"):
        score(config, [make_response(str(i), i) for i in range(3)])


@pytest.mark.parametrize("how", ["raise OSError('503')", "os._exit(3)"])
def test_on_error_zero_scores_zero_with_a_reason(flaky, how):
    config = flaky({"1": 9}, how, on_error="zero")
    scored = score(config, [make_response(str(i), i) for i in range(3)])
    reason = "OSError: 503" if "raise" in how else "the scorer ended its process (exit code 3)"
    assert (scored[0], scored[2]) == ((1.0, {}), (1.0, {}))
    assert scored[1][0] == 0.0
    assert scored[1][1]["error"].startswith(reason)


def test_a_plain_function_gets_everything(user_file):
    config = user_file(
        "return {'score': kwargs['bonus'], 'seen': [data_source, solution_str, ground_truth, "
        "extra_info, kwargs['key']]}",
        kwargs={"bonus": 0.5, "key": "sk-1"},
    )
    (one,) = score(config, [make_response(ground_truth=["4", "IV"])])
    assert one == (0.5, {"seen": ["mine", "four", ["4", "IV"], {"hint": 1}, "sk-1"]})


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("define", ["def", "async def"])
def test_scores_keep_their_order(user_file, define, num_processes):
    config = user_file("return float(solution_str)", define=define)
    responses = [make_response(str(i), i) for i in range(100)]
    scored = score(config, responses, num_processes)
    assert scored == [(float(i), {}) for i in range(100)]
    assert score(config, []) == []


@pytest.mark.parametrize("data_source", ["mine", "refrain/arithmetic"])
def test_scorer_reports_its_progress(user_file, data_source):
    config = BuiltinReward() if data_source == "refrain/arithmetic" else user_file("return 1")
    responses = [make_response(index=i, data_source=data_source) for i in range(7)]
    with scoring(config, 2) as scorer:
        for num_scored in (7, 14):
            scorer.score(responses)
            assert scorer.num_scored == num_scored


def test_an_async_function_runs_concurrently(user_file):
    config = user_file(
        "await asyncio.sleep(0.5); return 1", define="async def", head="import asyncio"
    )
    with scoring(config) as scorer:
        scorer.score([make_response()])
        started = time.monotonic()
        assert scorer.score([make_response(index=i) for i in range(16)]) == [(1.0, {})] * 16
        assert time.monotonic() - started < 4.0


def test_a_plain_function_may_use_asyncio_itself(user_file):
    head = "import asyncio\nasync def ask(): return 0.25\n"
    assert score(user_file("return asyncio.run(ask())", head=head), [make_response()])[0][0] == 0.25
    assert score(user_file("return ask()", head=head), [make_response()])[0][0] == 0.25


@pytest.mark.parametrize(
    ("result", "score"), [(1, 1.0), (True, 1.0), (-0.5, -0.5), ({"score": 2, "acc": True}, 2.0)]
)
def test_valid_results_count_as_scores(result, score):
    import numpy as np

    assert checked_score(result)[0] == score
    assert checked_score(np.float32(0.5)) == (0.5, {})
    assert checked_score({"score": np.int64(1), "path": Path("a")}) == (1.0, {"path": "a"})


@pytest.mark.parametrize(
    "result",
    [math.nan, math.inf, None, "1.0", [1.0], 1j, {}, {"acc": 1}, {"score": None}, {"score": "1"}],
)
def test_invalid_results_are_refused(result):
    with pytest.raises(ValueError, match="the scorer returned"):
        checked_score(result)


@pytest.mark.parametrize("define", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return float('nan')", "'nan' (float), not a finite number"),
        ("return None", "'None' (NoneType), not a finite number"),
        ("return 'good'", "'good' (str), not a finite number"),
        ("raise KeyError('tests')", "KeyError: 'tests'"),
        ("import os; os._exit(3)", "the scorer ended its process (exit code 3)"),
    ],
)
def test_a_failure_names_the_response(user_file, define, body, reason):
    config = user_file(f"if solution_str != 'bad': return 1\n    {body}", define=define)
    responses = [make_response(index=0), make_response("bad", 1), make_response(index=2)]
    with pytest.raises(ValueError, match="no reward for") as caught:
        score(config, responses)
    message = str(caught.value)
    assert reason in message
    assert "sample 1 of prompt cafe (data_source 'mine')" in message
    assert "The response begins: 'bad'" in message


@pytest.mark.parametrize(
    ("define", "hang"),
    [
        ("def", "time.sleep(60)"),
        ("def", "sum(iter(int, 1))"),
        ("async def", "await asyncio.sleep(60)"),
        ("async def", "time.sleep(60)"),
    ],
)
def test_a_function_that_hangs_is_killed(user_file, tmp_path, define, hang):
    note = tmp_path / "pid"
    config = user_file(
        f"if solution_str != 'bad': return 1\n    open({str(note)!r}, 'w').write(str(os.getpid()))"
        f"\n    {hang}",
        define=define,
        head="import asyncio, os, time",
        timeout_s=0.5,
    )
    with scoring(config) as scorer:
        scorer.score([make_response()])
        started = time.monotonic()
        with pytest.raises(ValueError, match=r"sample 1 .*no score within 0\.5 s"):
            scorer.score([make_response(index=0), make_response("bad", 1)])
        assert time.monotonic() - started < 5.0
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)
        assert scorer.score([make_response()]) == [(1.0, {})], "a new process must take over"


def test_the_time_limit_is_per_response(user_file):
    config = user_file("time.sleep(0.2); return 1", head="import time", timeout_s=1.0)
    assert len(score(config, [make_response(index=i) for i in range(8)])) == 8


def test_check_reward_wants_a_builtin_scorer_for_each_data_source():
    check_reward(BuiltinReward(), {"openai/gsm8k", "aime_2024"})
    with pytest.raises(ValueError, match=r"'mine'.*reward\.type=function"):
        check_reward(BuiltinReward(), {"openai/gsm8k", "mine"})


def test_check_reward_loads_the_users_file(user_file):
    good = user_file("return 1", kwargs={"bonus": 1})
    check_reward(good, {"anything"})
    for changes, message in [
        ({"function": "score"}, r"no function 'score' \(it has compute_score\)"),
        ({"function": "__name__"}, "is a str, not a function"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_reward(good.model_copy(update=changes), set())


def test_no_process_is_started_for_a_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(ScorerProcess, "start", None)
    with pytest.raises(ValueError, match=r"reward\.path: there is no file .*none\.py"):
        check_reward(FunctionReward(path=tmp_path / "none.py"), set())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError"),
        ("this is not python at all", "SyntaxError"),
        ("raise SystemExit", "ends the process that imports it"),
    ],
)
def test_a_file_that_cannot_be_imported(user_file, head, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_reward(user_file("return 1", head=head), set())
    assert "my_reward.py" in str(caught.value)


def test_a_function_with_other_arguments_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(prompt, response): return 1\n")
    with pytest.raises(
        ValueError, match=r"compute_score\(prompt, response\) in .* cannot be called"
    ):
        check_reward(FunctionReward(path=path), set())
