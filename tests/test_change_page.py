"""The diffs of docs/change.md apply to a copy of the tree, and what they add works there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.answers.builtin import compute_score
from refrain.engines.data.dataset import read_rows
from tests.conftest import REPOSITORY
from tests.examples.test_minimal_loop import steps_of

PAGE = REPOSITORY / "docs" / "change.md"
SECTION = re.compile(r"^## (.+?)\n.*?^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOLDERS = ("engines", "examples", "flows", "infra", "refrain", "schemas", "tasks", "tests")
ESTIMATOR, DRAFTER, SOURCE = "An advantage estimator", "A drafter", "A data source"

ADVANTAGES = """
import json
import numpy as np
from refrain.engines.learn.rollouts import ScoredRollout
from refrain.engines.learn.training_samples import read_training_samples
from refrain.flows.config_file import load_config

def rollout(group, at, rewards):
    return ScoredRollout(
        token_ids=np.array([5, 6, 7], np.int32),
        num_prompt_tokens=1,
        origin_step=1,
        prompt_key=str(group),
        sample_index=at,
        inference_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        reward=rewards[at],
        group_rewards=rewards,
        group_lengths=np.full(len(rewards), 2, np.int32),
        truncated=False,
    )

groups = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
rollouts = [rollout(g, at, rewards) for g, rewards in enumerate(groups) for at in range(4)]
samples, _ = read_training_samples(rollouts, load_config("infra/demo/train.yaml"), 0)
print(json.dumps([sample.advantage for sample in samples]))
"""
DRAFTS = """
import json
import numpy as np
from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.inference.drafting.request_drafting import DraftedRow, RequestDrafting
from refrain.schemas.drafting import SpecActorConfig
from refrain.schemas.rollout import DraftSetting

name = SpecActorConfig(drafter="recent").drafter
drafting = RequestDrafting(0, 100, Acceptance())
texts = [5, 1, 2, 5, 3, 4, 5], [1, 2, 3]
rows = []
for row, text in enumerate(texts):
    drafting.begin(str(row), DraftSetting(name, 2), sample_key=1, max_tokens=60)
    rows.append(DraftedRow(row, str(row), 1, np.array(text, np.int32)))
drafts = drafting.propose(rows, len(rows))
print(json.dumps([row[:n] for row, n in zip(drafts.tokens.tolist(), drafts.num)]))
"""


def diffs() -> dict[str, str]:
    return dict(SECTION.findall(PAGE.read_text()))


def patched(diff: str, directory: Path) -> Path:
    """Return a copy of the tree with the diff."""
    for folder in FOLDERS:
        # With `__pycache__`: numba would need half a minute to compile everything again.
        shutil.copytree(REPOSITORY / folder, directory / folder, symlinks=True)
    subprocess.run(
        ["git", "apply", "-"], input=diff, text=True, cwd=directory, check=True, timeout=60.0
    )
    return directory


def run(directory: Path, *arguments: str) -> str:
    """Run Python in a copy of the tree, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240.0,
        cwd=directory,
        # Compiled code would be compiled anew for each copy.
        env={**os.environ, "PYTHONPATH": str(directory), "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(directory: Path, code: str) -> Any:
    return json.loads(run(directory, "-c", code))


def test_the_page_has_three_diffs_and_few_words() -> None:
    assert list(diffs()) == [ESTIMATOR, DRAFTER, SOURCE]
    rest = re.sub(r"```diff\n.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    assert len(rest.split()) < 900


@pytest.mark.parametrize("section", [ESTIMATOR, DRAFTER, SOURCE])
def test_a_diff_of_another_tree_is_refused(section: str, tmp_path: Path) -> None:
    """Negative control: if a line that a diff changes or stands beside is another one, the tests
    of this file fail."""
    diff = diffs()[section]
    lines = [line for line in diff.splitlines() if line.startswith(" ")]
    other = diff.replace(lines[0], f"{lines[0]}?", 1)
    with pytest.raises(subprocess.CalledProcessError):
        patched(other, tmp_path)


def test_the_estimator_divides_by_the_mean(tmp_path: Path) -> None:
    diff = diffs()[ESTIMATOR]
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert diff.count("new file mode") == 1
    assert added[-1].startswith("+algorithm:"), "one line outside the new file"
    found = printed(patched(diff, tmp_path), ADVANTAGES)
    none, one, two = [0.0] * 4, [3.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0]
    assert found == [*none, *one, *two]


def test_the_drafter_drafts_what_followed_the_last_token(tmp_path: Path) -> None:
    assert printed(patched(diffs()[DRAFTER], tmp_path), DRAFTS) == [[3, 4], []]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_drafter_changes_no_token(tmp_path: Path) -> None:
    copy = patched(diffs()[DRAFTER], tmp_path)
    (drafted,) = steps_of("--steps=1", "--drafter=recent", directory=copy)
    (plain,) = steps_of("--steps=1", "--drafter=none", directory=copy)
    assert drafted.num_drafted > drafted.num_accepted > 0
    assert plain.num_drafted == 0
    assert drafted.tokens == plain.tokens


def test_the_data_source_makes_prompts(tmp_path: Path) -> None:
    copy = patched(diffs()[SOURCE], tmp_path / "copy")
    rows = [
        {"question_concat": "Dan had 4 and spent 3. How much is left?", "Answer": "1.0"},
        {"question_concat": "290 bananas in 2 groups. How big is each?", "Answer": "145"},
    ]
    raw, out = tmp_path / "train.jsonl", tmp_path / "data"
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(copy, "-m", "refrain.flows.cli", "data", "svamp", "--from", str(raw), "--out", str(out))
    first, second = read_rows(out / "train.parquet")
    assert first["prompt"][0]["content"].startswith(rows[0]["question_concat"])
    for row, answer in ((first, 1), (second, 145)):
        truth = row["reward_model"]["ground_truth"]
        scores = [
            compute_score(row["data_source"], f"so\n#### {given}", truth)["score"]
            for given in (answer, answer + 1)
        ]
        assert scores == [1.0, 0.0]
