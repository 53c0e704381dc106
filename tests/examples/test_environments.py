"""Environments in examples/: plain files, and adapters that talk to the real packages.

No package of an adapter is a dependency of refrain, and CI installs none. A test that needs one is
skipped unless its venv is there: `python -m venv ~/.cache/refrain/environments/textarena`, and
likewise `skyrl`, `bfcl` and `verifiers`. docs/adapters.md says what to install.
"""

import ast
import asyncio
import importlib.util
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.pretrained import CACHE
from refrain.engines.environment import hermes
from refrain.engines.environment.pool import EnvironmentPool
from refrain.flows.config_file import load_config
from refrain.schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    TurnText,
)
from refrain.tasks.run.environments import describe
from tests.conftest import REPOSITORY
from tests.environment.test_pool import started

EXAMPLES = REPOSITORY / "examples"
PACKAGES = {
    "bfcl_env.py": "bfcl_eval",
    "calculator.py": None,
    "second_try.py": None,
    "skyrl_gym_env.py": "skyrl_gym",
    "textarena_env.py": "textarena",
    "verifiers_env.py": "verifiers",
    "verl_tool.py": None,
}
"""Package that each environment needs."""
OURS = {"benchmarks", "engines", "flows", "infra", "refrain", "schemas", "tasks"}


def config_of(name: str, venv: str | None = None, **changes: Any) -> EnvironmentConfig:
    python = None if venv is None else python_of(venv)
    given = {"processes": 1, "at_once": 8, "python": python, **changes}
    return EnvironmentConfig(path=EXAMPLES / name, **given)


def python_of(venv: str) -> Path:
    """Return the interpreter of an adapter's venv. Skip the test if there is none."""
    python = CACHE / "environments" / venv / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} does not exist: docs/adapters.md says what to install")
    return python


def task_of(ground_truth: Any = "", seed: int = 1, **extra_info: Any) -> EnvironmentTask:
    return EnvironmentTask("cafe", "mine", ground_truth, extra_info, seed)


def turns_of(*texts: str) -> list[TurnText]:
    return [hermes.parse(text, max_calls=8) for text in texts]


def call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


async def converse(
    pool: EnvironmentPool, sample: str, task: EnvironmentTask, *texts: str
) -> list[EnvironmentAnswer]:
    answers: list[EnvironmentAnswer] = []
    for number in range(1, len(texts) + 1):
        answers.append(await pool.answer(sample, task, turns_of(*texts[:number]), answers))
    return answers


async def played(
    config: EnvironmentConfig, task: EnvironmentTask, *texts: str
) -> list[EnvironmentAnswer]:
    """Return the answers to these turns. Check that a replay elsewhere gives the last one again."""
    async with started(config) as pool:
        answers = await converse(pool, "a", task, *texts)
        await pool.forget(["a"])
        assert await pool.answer("b", task, turns_of(*texts), answers[:-1]) == answers[-1]
    return answers


def contents(answers: list[EnvironmentAnswer]) -> list[str]:
    return [message["content"] for answer in answers for message in answer.messages]


def rows_of(config: EnvironmentConfig, *arguments: object) -> list[dict[str, Any]]:
    """Return the rows that an example writes."""
    command = [str(config.python), str(config.path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_environment_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"minimal_loop.py"} == PACKAGES.keys()
    page = (REPOSITORY / "docs" / "adapters.md").read_text()
    assert [name for name in PACKAGES if f"../examples/{name}" not in page] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_an_environment_imports_nothing_of_refrain(name):
    nodes = list(ast.walk(ast.parse((EXAMPLES / name).read_text())))
    imported = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {one.partition(".")[0] for one in imported} & OURS


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_missing_package_is_named_with_a_way_out(name, package):
    if package is None:
        assert describe(config_of(name), None)
        return
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed beside refrain")
    missing = rf"{name} cannot be imported: .*No module named '{package}'. Install it, or set env"
    with pytest.raises(ValueError, match=missing):
        describe(config_of(name), None)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * -4", "-10"),
        (" (1.5 + 1.5) / 2", "1.5"),
        ("2 ** 9999", "Error: ValueError: 2 ** 9999 is not a number, + - * / or parentheses"),
        ("__import__('os')", "Error: ValueError: __import__('os') is not a number, + - * / or par"),
        ("1 / 0", "Error: ZeroDivisionError: division by zero"),
        ("2 +", "Error: SyntaxError: invalid syntax"),
    ],
)
async def test_the_calculator_knows_numbers_only(expression, result):
    config = config_of("calculator.py")
    (answer,) = await played(config, task_of(), call("calculate", expression=expression))
    assert answer.messages[0]["content"].startswith(result)


async def test_a_tool_of_verl_keeps_its_state_and_scores():
    config = config_of("verl_tool.py")
    turns = (call("check_answer", answer="7"), call("check_answer", answer="8"), "It is 8.")
    *noted, ended = await played(config, task_of("8"), *turns)
    assert contents(noted) == ["Noted: 7", "Noted: 8"]
    assert ended == EnvironmentAnswer(score=0.95, ended=True)


async def test_textarenas_guess_the_number_gives_hints_and_a_reward():
    config = config_of("textarena_env.py", "textarena", kwargs={"game": "GuessTheNumber-v0"})
    rows = rows_of(config, "GuessTheNumber-v0", 0, 2)
    assert [row["extra_info"] for row in rows] == [{"seed": 0}, {"seed": 1}]
    assert "guess the number between 1 and 20" in rows[0]["prompt"][0]["content"]
    number = random.Random(1).randint(1, 20)
    turns = (f"[{number - 1}]", f"Perhaps {number + 1}", f"[{number + 1}]", f"[{number}]")
    *hints, ended = await played(config, task_of(seed=1), *turns)
    assert contents(hints)[0] == "The target number is higher."
    assert contents(hints)[1].startswith("You attempted an invalid move.")
    assert contents(hints)[2] == "The target number is lower."
    assert ended == EnvironmentAnswer(score=1.0, ended=True)


async def test_games_of_textarena_do_not_disturb_each_other():
    """Blackjack draws a card in a step, from Python's global random numbers."""
    config = config_of("textarena_env.py", "textarena", kwargs={"game": "Blackjack-v0"})
    tasks = {f"game {seed}": task_of(seed=seed) for seed in range(8)}
    turns = ["[hit]", "[stand]"] * 2
    async with started(config) as pool:
        alone = [await converse(pool, *one, *turns) for one in tasks.items()]
        await pool.forget(tasks)
        at_once = await asyncio.gather(*(converse(pool, *one, *turns) for one in tasks.items()))
    assert len({answers[-1] for answers in map(tuple, map(contents, alone)) if answers}) > 1
    assert at_once == alone


async def test_skyrls_gsm8k_asks_again_and_adds_up_its_rewards():
    config = config_of("skyrl_gym_env.py", "skyrl", kwargs={"id": "gsm8k_multi_turn"})
    first, ended = await played(config, task_of("72", max_turns=5), "#### 70", "So #### 72")
    assert "reasoning" in contents([first])[0]
    assert first.score == pytest.approx(0.04)
    assert ended == EnvironmentAnswer(score=pytest.approx(1.04), ended=True)


async def test_bfcls_own_solution_gets_the_whole_score():
    config = config_of("bfcl_env.py", "bfcl")
    row = rows_of(config)[0]
    task = task_of(row["reward_model"]["ground_truth"])
    solution = [
        (call("ls", a=True),),
        (call("cd", folder="workspace"), call("mv", source="log.txt", destination="archive")),
        (call("cd", folder="archive"), call("grep", file_name="log.txt", pattern="Error")),
        (call("tail", file_name="log.txt", lines=20),),
    ]
    turns = [text for calls in solution for text in ("".join(calls), "Done.")]
    *answers, ended = await played(config, task, *turns)
    assert [one.num_failed_calls for one in answers] == [0] * 7
    assert '"matching_lines": ["This is a log file' in contents(answers)[6]
    assert ended == EnvironmentAnswer(score=1.0, ended=True)
    *_, idle = await played(config, task, *["Done."] * 4)
    assert idle == EnvironmentAnswer(score=0.0, ended=True)


VERIFIERS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b

def right(completion, answer):
    return float(completion[-1].content == answer)

def load_environment(answer="5"):
    rows = [{"question": f"What is {n} + 3?", "answer": answer} for n in (2, 2)]
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], max_turns=4)
'''


@pytest.mark.slow  # verifiers takes 10 s to import, in two processes.
async def test_an_environment_of_verifiers_runs_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "sums_env.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = config_of(
        "verifiers_env.py",
        "verifiers",
        kwargs={"id": "sums-env"},
        variables=("PYTHONPATH",),
        timeout_s=60.0,
    )
    row = rows_of(config, "sums-env", 1)[0]
    assert '"name":"add"' in row["prompt"][0]["content"]
    task = task_of(row["reward_model"]["ground_truth"], **row["extra_info"])
    turns = (f"I add. {call('add', a=2, b=3)}", "<tool_call>{</tool_call>", "5")
    observed, corrected, ended = await played(config, task, *turns)
    assert observed.messages == ({"role": "tool", "content": "5"},)
    assert "not valid JSON" in contents([corrected])[0]
    assert ended == EnvironmentAnswer(score=1.0, ended=True)


def test_the_config_of_guess_the_number_is_complete(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = load_config(EXAMPLES / "smollm2" / "guess.yaml")
    assert config.environment is not None
    assert config.environment.path.resolve() == EXAMPLES / "textarena_env.py"
    assert config.environment.max_turns > 10, "the game ends by itself after 10 guesses"
    assert config.reward.type == "environment"
