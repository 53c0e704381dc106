"""Test every example: check its config on made-up data, its memory on the GPUs that its page names,
and run its reward."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.engines.reward.scorer import Response, Scorer
from refrain.flows.cli import main
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.reward import FunctionReward
from refrain.tasks.run.machine import plan_training
from tests.conftest import DEMO, REPOSITORY
from tests.examples.test_first_day import SMALL
from tests.flows.commands import Command
from tests.flows.test_train import query
from tests.tasks.test_memory_plan import write_model

EXAMPLES = REPOSITORY / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/train.yaml"))
FAILS = 0.3
"""Share of calls that the judge fails."""


def refrain(*args: object) -> str:
    done = CliRunner().invoke(main, [*map(str, args)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """Convert rows in GSM8K's format, and return their directory."""
    rows = [
        {
            "question": f"Tom has {n} apples and eats 2. How many are left?",
            "answer": f"#### {n - 2}",
        }
        for n in range(3, 83)
    ]
    for split in ("train", "test"):
        file = tmp_path / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "data"
    refrain("data", "gsm8k", "--from", file.with_stem("train"), "--from", file, "--out", out)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_example_config_passes_the_check(name, gsm8k, tmp_path, monkeypatch, request):
    monkeypatch.chdir(REPOSITORY)
    if name == "smollm2":
        request.getfixturevalue("with_reasoning_gym")
    for variable in ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_API_KEY"):
        monkeypatch.setenv(variable, "x")
    checked = refrain(
        "train",
        EXAMPLES / name / "train.yaml",
        f"model.path={DEMO / 'model'}",
        f"data.train={gsm8k / 'train.parquet'}",
        f"data.validation={gsm8k / 'test.parquet'}",
        "data.max_prompt_tokens=256",
        "data.max_response_tokens=512",
        "algorithm.overlong_buffer_tokens=128",
        f"runs_dir={tmp_path / 'runs'}",
        "placement=auto",
        "--check",
    )
    assert "80 train" in checked
    assert "All is well" in checked


@pytest.mark.parametrize(
    ("name", "model", "gpus"),
    [
        ("gsm8k", "Qwen3-1.7B", "1xH100-80GB"),
        ("dapo17k", "Qwen3-8B", "8xH100-80GB"),
        ("lora_24gb", "Qwen3-1.7B", "1xRTX4090-24GB"),
    ],
)
def test_example_fits_on_the_gpus_of_its_page(name, model, gpus, tmp_path):
    page = (EXAMPLES / name / "README.md").read_text()
    assert f"--check --gpus {gpus}" in page
    directory = write_model(tmp_path / model, model)
    config = load_config(EXAMPLES / name / "train.yaml", [f"model.path={directory}"])
    assert plan_training(config, gpus).needs


def test_every_example_has_a_page_and_is_listed():
    listed = re.findall(r"\| \[(\w+)\]\(\w+/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == NAMES
    assert all((EXAMPLES / name / "README.md").is_file() for name in NAMES)


def reward_of(name: str, **changes: object) -> FunctionReward:
    config: TrainConfig = load_config(EXAMPLES / name / "train.yaml")
    assert isinstance(config.reward, FunctionReward)
    return config.reward.model_copy(update={"path": EXAMPLES / name / "reward.py"} | changes)


def scored(config: FunctionReward, responses: list[tuple[str, str]]) -> list:
    scorer = Scorer(config, 2)
    try:
        return scorer.score(
            [
                Response("cafe", index, "code", text, truth, {"question": "1 + 1?"})
                for index, (text, truth) in enumerate(responses)
            ]
        )
    finally:
        for process in scorer.processes:
            process.close()


class Judge(BaseHTTPRequestHandler):
    """A judge that fails a share of its calls, and otherwise returns grades."""

    chance = random.Random(0)
    calls: list[bool] = []
    """For each call, whether it failed."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fails = self.chance.random() < FAILS
        self.calls.append(fails)
        if fails:
            self.send_error(503)
            return
        assert body["model"] == "judge"
        asked = body["messages"][0]["content"]
        correct = 8 if "TWO" in asked else 100 if "GREED" in asked else 0
        grade = f"CORRECT={correct} CLEAR=5"
        reply = json.dumps({"choices": [{"message": {"content": grade}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def judge(monkeypatch) -> Iterator[type[Judge]]:
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    monkeypatch.setattr(Judge, "calls", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    monkeypatch.setenv("JUDGE_API_KEY", "none")
    monkeypatch.setattr("refrain.engines.reward.scorer.FIRST_WAIT_S", 0.01)
    yield Judge
    server.shutdown()


def test_failed_judge_calls_are_retried_and_counted(judge):
    texts = ["TWO" if index % 2 else "three" for index in range(60)]
    results = scored(reward_of("judge"), [(text, "2") for text in texts])
    assert [score for score, _ in results] == pytest.approx(
        [0.77 if text == "TWO" else 0.05 for text in texts]
    )
    num_failed = sum(judge.calls)
    assert num_failed > 5
    assert sum(extra.get("num_retries", 0) for _, extra in results) == num_failed
    assert len(judge.calls) == 60 + num_failed
    assert results[1][1]["correct"] == 0.8


def test_grades_over_ten_are_rejected(judge, monkeypatch):
    """A response may persuade the judge to give such a grade."""
    monkeypatch.setattr("refrain.engines.reward.scorer.MAX_RETRIES", 1)
    monkeypatch.setattr("tests.examples.test_examples.FAILS", 0.0)
    del judge
    with pytest.raises(ValueError, match="the judge gave no grade: 'CORRECT=100 CLEAR=5'"):
        scored(reward_of("judge"), [("GREED", "2")])


def test_a_judge_that_always_fails_stops_the_run(judge, monkeypatch):
    monkeypatch.setattr("tests.examples.test_examples.FAILS", 1.0)
    monkeypatch.setattr("refrain.engines.reward.scorer.MAX_RETRIES", 2)
    with pytest.raises(ValueError, match="3 tries, the last one: HTTPStatusError"):
        scored(reward_of("judge"), [("TWO", "2")])
    assert judge.calls == [True] * 3


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_judge_fails_ends_well(judge, gsm8k, tmp_path):
    files = (f"data.train={gsm8k / 'train.parquet'}", f"runs_dir={tmp_path / 'runs'}")
    Command("train", EXAMPLES / "judge" / "train.yaml", *SMALL, *files).finish()
    scored = query(tmp_path / "runs" / "judge", "SELECT reward, extra FROM rewards")
    steps = query(tmp_path / "runs" / "judge", "SELECT report FROM steps")
    retries = [json.loads(extra or "{}").get("num_retries", 0) for _, extra in scored]
    assert len(scored) == 128
    assert all(json.loads(extra)["clear"] == 0.5 for _, extra in scored)
    # If a scorer's process ends before it reports, the call is made again and not counted.
    assert 20 < sum(retries) <= sum(judge.calls)
    metrics = [json.loads(report)["metrics"]["critic/num_retried"] for (report,) in steps]
    assert sum(metrics) == sum(map(bool, retries))


def test_code_is_run_against_its_tests():
    tests = json.dumps([{"input": "1 2", "output": "3\n"}, {"input": "5 5", "output": "10"}])
    programs = {
        "print(sum(map(int, input().split())))": 1.0,
        "print(3)": 0.5,
        "while True: pass": 0.0,
        "1 / 0": 0.0,
        "import os; print(len(os.environ.get('HOME', '')) + 3)": 0.5,
        "x = bytearray(4_000_000_000); print(3)": 0.0,
        "open('big', 'wb').write(b'0' * 20_000_000); print(3)": 0.0,
    }
    config = reward_of("code_tests").model_copy(update={"kwargs": {"seconds_per_test": 2.0}})
    responses = [(f"Here:\n```python\n{code}\n```", tests) for code in programs]
    results = scored(config, [*responses, ("no code", tests)])
    assert [extra["passed"] for _, extra in results[:-1]] == list(programs.values())
    assert [score for score, _ in results] == [1.0] + [0.0] * len(programs)
    assert results[-1][1]["has_code"] is False


def test_the_notebook_is_one_and_uses_what_the_library_has():
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    import refrain

    for source in code:
        compile(source, "notebook", "exec", flags=1 << 13)  # Top-level await.
        for name in re.findall(r"refrain\.(\w+)", source):
            assert name in refrain.__all__
    assert asyncio.iscoroutinefunction(refrain.train)
