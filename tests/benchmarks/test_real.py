"""The bench that drafts with a real model: its arguments, its figures, and one run on engines."""

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refrain.benchmarks.real import (
    COMPARED,
    OF_HEAD,
    add_arguments,
    figures,
    read_arguments,
    share_identical,
)
from refrain.benchmarks.temperature_engines import DialTurn
from refrain.engines.draft_head.files import save
from refrain.engines.draft_head.model import DraftHead
from tests.conftest import DEMO, REPOSITORY

MODEL, DATA = DEMO / "model", DEMO / "data" / "train.parquet"


def given(*more: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(MODEL), str(DATA), "--prompt-tokens=128", *more])


def lap(engine: str, temperature: float, epoch: int, number: int, speed: float) -> dict[str, Any]:
    row = {"engine": engine, "temperature": temperature, "epoch": epoch, "lap": number}
    row |= {"tokens_per_s": speed}
    measured = {"on": COMPARED, "head": OF_HEAD}.get(engine, ())
    return row | dict.fromkeys(measured, 0.5)


def test_a_lap_is_compared_with_the_one_beside_it() -> None:
    """In the second lap the machine is twice as fast. The third lap is disturbed."""
    speeds = {"stock": (90.0,), "off": (100.0, 200.0, 100.0), "on": (95.0, 190.0, 30.0)}
    rows = [lap(name, 1.0, 1, i, one) for name, own in speeds.items() for i, one in enumerate(own)]
    rows += [lap(name, 1.0, 2, 0, 100.0) for name in speeds]
    rows += [lap(name, 0.4, 1, 0, 100.0) for name in speeds]
    rows += [lap(name, 0.4, 2, 0, 130.0 if name == "on" else 100.0) for name in speeds]
    found = figures(rows)
    assert found["on_over_off_t10_epoch_1"] == pytest.approx(0.95)
    assert found["on_over_stock_t10_epoch_1"] == pytest.approx(0.95 / 0.9)
    assert found["on_over_off_where_useless"] == pytest.approx(0.95)
    assert found["on_over_off_t04"] == pytest.approx(1.3)
    assert found["nats_t04_epoch_2"] == 0.5
    assert not any("head" in name for name in found)
    rows = [row for row in rows if (row["temperature"], row["epoch"]) == (1.0, 1)]
    rows.append(lap("head", 1.0, 1, 1, 150.0))
    assert figures(rows)["head_over_off_t10_epoch_1"] == pytest.approx(0.75)


def test_one_different_token_is_found() -> None:
    def turn(engine: str, tokens: list[int]) -> Any:
        return DialTurn(engine, 1.0, 1, 0, SimpleNamespace(tokens={"a": [1, 2], "b": tokens}))

    off = turn("off", [3, 4])
    assert share_identical([off, turn("on", [3, 4])]) == 1.0
    assert share_identical([off, turn("on", [3, 5])]) == 0.5
    assert share_identical([off, turn("on", [3, 4, 5])]) == 0.5
    assert share_identical([off, turn("on", [3, 4]), turn("head", [3, 5])]) == 0.75


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--temperatures=warm", "--temperatures warm: give numbers, as in 1.0,0.6"),
        ("--temperatures=1.0,0", "--temperatures 1.0,0: give different ones from 0.05 to 5"),
        ("--temperatures=nan", "--temperatures nan: give different ones"),
        ("--temperatures=0.4,0.41", "give different ones from 0.05 to 5, to a tenth"),
        ("--samples=1", "--samples 1: give at least 2"),
        ("--epochs=0", "--epochs 0: give at least 1"),
        ("--prompts=100000", r"--prompts 100000: .* has \d+ usable ones"),
        ("--tokens=1000000", "has a context of"),
        ("--head=nowhere", "specactor.head: nowhere has no head.json"),
        ("--plot=plot.txt", "--plot plot.txt: give a name that ends in .png"),
    ],
)
def test_bad_arguments_are_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_arguments(given(option))


def test_invalid_model_is_refused(tmp_path: Path) -> None:
    args = given()
    args.model = tmp_path
    with pytest.raises(ValueError, match="MODEL"):
        read_arguments(args)


def test_the_defaults_are_read() -> None:
    config, temperatures, prompts = read_arguments(given())
    assert temperatures == [1.0, 0.8, 0.6, 0.4]
    assert len(prompts) == config.prompts_per_step == 16
    assert config.rollout.max_num_seqs == 128


@pytest.mark.engine
@pytest.mark.slow
def test_tokens_equal_those_without_drafts(tmp_path: Path) -> None:
    size = ["--prompts=4", "--samples=4", "--tokens=48", "--prompt-tokens=128", "--epochs=2"]
    dial = ["--temperatures=1.0,0.2", "--first-laps=1", f"--plot={tmp_path / 'real.png'}"]
    save(DraftHead(128, torch.arange(36)), tmp_path / "head", vocab_size=36, window=4)
    dial += [f"--head={tmp_path / 'head'}", "--ungated"]
    bench = [sys.executable, "-m", "refrain.flows.cli", "bench", "real", str(MODEL), str(DATA)]
    # In a process of its own: this one may have a Ray cluster already.
    done = subprocess.run(
        [*bench, *size, *dial, f"--json={tmp_path / 'real.json'}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "real.json").read_text())
    assert found["figures"]["identical"] == 1.0
    assert found["figures"]["nats_t02_epoch_1"] < found["figures"]["nats_t10_epoch_1"]
    first, second = (found["figures"][f"own_t02_epoch_{epoch}"] for epoch in (1, 2))
    assert first == 0.0 < second
    assert {row["engine"] for row in found["rows"]} == {"stock", "off", "on", "head"}
    assert found["figures"]["head_gated_t10_epoch_1"] < 0.5
    assert found["figures"]["head_acceptance_rate_t10_epoch_1"] > 0.0
    assert (tmp_path / "real.png").stat().st_size > 10_000
