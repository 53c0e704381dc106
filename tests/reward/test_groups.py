"""`reward.group`: one call scores all responses to a prompt. Failed conversations get 0 unseen."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from refrain.engines.reward.pool import RewardActor
from refrain.engines.reward.results import MAX_GROUP_BYTES
from refrain.engines.reward.scorer import Response, Scorer, check_reward
from refrain.engines.store.tables import SCORING
from refrain.schemas.data import Prompt
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.reward import BuiltinReward, EnvironmentReward, FunctionReward, RewardConfig
from tests.conftest import DEMO

ARGUMENTS = "data_source{0}, solution_str{0}, ground_truth{0}, extra_info{0}"
LENGTHS = "[float(len(text)) for text in solution_strs]"
Write = Callable[..., FunctionReward]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a scorer of groups with this body, and returns its config."""

    def write(body: str, *, define: str = "def", head: str = "", **changes: Any) -> FunctionReward:
        path = tmp_path / "mine.py"
        path.write_text(f"{head}\n{define} compute_score({ARGUMENTS.format('s')}):\n    {body}\n")
        return FunctionReward(path=path, **{"group": True, "timeout_s": 20.0} | changes)

    return write


def response(prompt: str, index: int, text: str) -> Response:
    return Response(prompt, index, "mine", text, f"truth of {prompt}", {"index": index})


RESPONSES = [
    response("a", 0, "x"),
    response("a", 2, "xx"),
    response("b", 0, "xxx"),
    response("c", 0, ""),
    response("c", 1, "xxxxx"),
    response("c", 3, "xxxx"),
]


def scored(config: FunctionReward, responses: Sequence[Response] = RESPONSES) -> list[Any]:
    scorer = Scorer(config, num_processes=1)
    try:
        return scorer.score(responses)
    finally:
        for process in scorer.processes:
            process.close()


@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_call_has_all_responses_of_one_prompt(write: Write, define: str) -> None:
    body = (
        "return [{'score': max(map(len, solution_strs)) - len(text), 'all': solution_strs, 'truth':"
        " truth, 'own': extra} for text, truth, extra in zip(solution_strs, ground_truths,"
        " extra_infos)]"
    )
    found = scored(write(body, define=define))
    assert [score for score, _ in found] == [1.0, 0.0, 0.0, 5.0, 0.0, 1.0]
    for one, (_, extra) in zip(RESPONSES, found, strict=True):
        texts = [other.solution_str for other in RESPONSES if other.prompt_key == one.prompt_key]
        assert extra == {"all": texts, "truth": one.ground_truth, "own": one.extra_info}


def test_scores_may_be_an_array(write: Write) -> None:
    config = write(f"return numpy.array({LENGTHS}, numpy.float32)", head="import numpy")
    assert [score for score, _ in scored(config)] == [1.0, 2.0, 3.0, 0.0, 5.0, 4.0]


BAD = {
    "return [1.0] * (len(solution_strs) + 1)": "3 scores for 2 responses: return one for each",
    "return solution_strs.pop() and [1.0]": "1 scores for 2 responses",
    "return 1.0": r"'1.0' \(float\), not a list of 2 scores",
    "return [0.0, float('nan')]": "place 1 of its list .* not a finite number",
    "return [None] * len(solution_strs)": "place 0 of its list .*'None'",
    "raise OSError('503')": "OSError: 503",
    f"return [{{'score': 0, 'x': 'x' * {MAX_GROUP_BYTES // 2 - 20}}}] * 2": "a group take 131",
}


@pytest.mark.parametrize(("body", "reason"), BAD.items())
def test_a_bad_result_names_the_group(write: Write, body: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"samples 0, 2 of prompt a .*{reason}"):
        scored(write(body))


def test_a_group_that_hangs_is_named(write: Write) -> None:
    body = f"return time.sleep(60 * (len(solution_strs) == 3)) or {LENGTHS}"
    with pytest.raises(ValueError, match=r"samples 0, 1, 3 of prompt c .*no score within 0\.5 s"):
        scored(write(body, head="import time", timeout_s=0.5))


def test_a_failed_group_scores_zero_alone(write: Write) -> None:
    config = write(f"return {LENGTHS} if len(solution_strs) != 2 else 1 / 0", on_error="zero")
    found = scored(config)
    assert [score for score, _ in found] == [0.0, 0.0, 3.0, 0.0, 5.0, 4.0]
    assert ["error" in extra for _, extra in found] == [True] * 2 + [False] * 4


def test_a_group_is_scored_again(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refrain.engines.reward.scorer.FIRST_WAIT_S", 0.01)
    note = tmp_path / "tried"
    head = "from pathlib import Path"
    body = (
        f"note = Path({str(note)!r})\n"
        "    if len(solution_strs) == 1 and not note.exists():\n"
        "        note.write_text('x')\n"
        "        raise OSError('503')\n"
        f"    return {LENGTHS}"
    )
    found = scored(write(body, head=head, on_error="retry"))
    assert [score for score, _ in found] == [1.0, 2.0, 3.0, 0.0, 5.0, 4.0]
    assert [extra.get("num_retries") for _, extra in found] == [None, None, 1, None, None, None]


@pytest.mark.parametrize(("group", "plural"), [(True, ""), (False, "s")])
def test_a_function_of_the_other_kind_is_refused(tmp_path: Path, group: bool, plural: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def compute_score({ARGUMENTS.format(plural)}): return 1.0\n")
    wanted = ARGUMENTS.format("s" if group else "")
    with pytest.raises(ValueError, match=f"cannot be called with {wanted}"):
        check_reward(FunctionReward(path=path, group=group), ["mine"])


PROMPTS = {key: Prompt(key, (1,), "mine", "4") for key in "ab"}


def rows_of(*samples: tuple[str, int, str]) -> pa.Table:
    """Return rows of these prompts, samples and finish reasons."""
    names = ("prompt_key", "sample_index", "finish_reason")
    more = {"response_token_ids": [5, 6], "turns": [{"num_sampled": 2}]}
    rows = [dict(zip(names, sample, strict=True)) | more for sample in samples]
    return pa.Table.from_pylist(rows, SCORING)


@pytest.mark.parametrize("group", [False, True])
def test_a_failed_conversation_gets_zero_and_no_scorer_sees_it(tmp_path: Path, group: bool) -> None:
    path = tmp_path / "mine.py"
    plural, result = ("s", "[7.0] * len(solution_strs)") if group else ("", "7.0")
    path.write_text(f"def compute_score({ARGUMENTS.format(plural)}): return {result}\n")
    rows = rows_of(("a", 0, "stop"), ("a", 1, "failed"), ("b", 0, "failed"), ("b", 1, "failed"))
    found = rewards(FunctionReward(path=path, group=group), rows)
    assert found == {("a", 0): 7.0, ("a", 1): 0.0, ("b", 0): 0.0, ("b", 1): 0.0}


def test_a_failed_conversation_needs_no_score_of_its_environment() -> None:
    rows = rows_of(("a", 0, "stop"), ("a", 1, "failed"))
    scores = pa.array([0.5, None], pa.float64())
    at = rows.column_names.index("environment_score")
    rows = rows.set_column(at, "environment_score", scores)
    assert rewards(EnvironmentReward(), rows) == {("a", 0): 0.5, ("a", 1): 0.0}


def rewards(config: RewardConfig, rows: pa.Table) -> dict[tuple[str, int], float]:
    table = RewardActor(ModelConfig(path=DEMO / "model"), config).score(rows, PROMPTS).to_pylist()
    for row in table:
        reason = json.loads(row["extra"]).get("error")
        failed = row["reward"] == 0.0
        assert reason == ("its environment failed" if failed else None)
    return {(row["prompt_key"], row["sample_index"]): row["reward"] for row in table}


def test_each_source_has_its_own_reward(tmp_path: Path) -> None:
    """Its prompts go to the function, the other prompts to the built-in scorer."""
    path = tmp_path / "mine.py"
    path.write_text(f"def compute_score({ARGUMENTS.format('')}): return 7.0\n")
    prompts = {
        "a": Prompt("a", (1,), "openai/gsm8k", "4", source="math"),
        "b": Prompt("b", (1,), "mine", "", source="code"),
        "c": Prompt("c", (1,), "mine", "", source="judged"),
    }
    rows = rows_of(("a", 0, "stop"), ("b", 0, "stop"), ("c", 0, "failed"), ("b", 1, "stop"))
    own = {"code": FunctionReward(path=path), "judged": EnvironmentReward()}
    actor = RewardActor(ModelConfig(path=DEMO / "model"), BuiltinReward(), None, own)
    scored = actor.score(rows, prompts).to_pylist()
    found = {(row["prompt_key"], row["sample_index"]): row["reward"] for row in scored}
    assert found == {("a", 0): 0.0, ("b", 0): 7.0, ("b", 1): 7.0, ("c", 0): 0.0}
    assert actor.num_done() == 3 + 3
