"""Commands refuse hostile input drawn at random. HOSTILE_SEED repeats a failure: the message names
the seed."""

import os
import random
import secrets
from pathlib import Path

import pytest

from tests.hostile.cases import COMMANDS, Hostile, cases
from tests.hostile.driver_client import Driver
from tests.hostile.judge import complaints
from tests.hostile.place import HostilePlace

NUM_VALUES, NUM_DAMAGED = 200, 100
READERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train.yaml", ("config", "train.yaml")),
    ("train.yaml", ("train", "train.yaml", "--check", "data.train=[nowhere.parquet]")),
    ("rows.jsonl", ("data", "rows.jsonl", "--out", "made")),
    ("validation.parquet", ("data", "validation.parquet", "--out", "made")),
    (
        "trace.parquet",
        ("simulate", "trace.parquet", "--engines=2", "--hardware=H100", "--shape=none"),
    ),
    ("profile.json", ("simulate", "trace.parquet", "--engines=2", "--profile=profile.json")),
    ("runs/demo/config.json", ("show", "demo")),
    ("runs/demo/steps.jsonl", ("show", "demo")),
    ("runs/demo/progress.json", ("runs",)),
    ("runs/demo/summary.json", ("show", "demo")),
    ("runs/demo/changes.jsonl", ("show", "demo")),
    ("runs/demo/timelines/train-00001.json", ("export", "demo", "--trace", "out.json")),
    ("runs/demo/checkpoints/global_step_2/state.json", ("evaluate", "demo", "nowhere.parquet")),
    ("runs/demo/refrain.duckdb", ("export", "demo", "out.parquet")),
)
"""Each file with a command that reads it."""


def damaged(content: bytes, drawn: random.Random) -> bytes:
    """Return the content cut short, with changed bytes, or with more bytes at its end."""
    at = drawn.randrange(len(content) or 1)
    match drawn.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + drawn.randbytes(drawn.randrange(1, 20)) + content[at + 1 :]
        case 2:
            return content[:at] + bytes([content[at] ^ 1 << drawn.randrange(8)]) + content[at + 1 :]
        case _:
            return content + drawn.randbytes(20)


@pytest.mark.slow
def test_inputs_drawn_at_random_are_refused(
    place: HostilePlace, driver: Driver, shim: Path | None
) -> None:
    seed = int(os.environ.get("HOSTILE_SEED") or secrets.randbits(32))
    print(f"HOSTILE_SEED={seed}")
    drawn = random.Random(seed)
    known = [case for command in COMMANDS for case in cases(place, command)]
    usable = [case for case in known if shim or not case.fault]
    wrong = []
    for case in drawn.sample(usable, NUM_VALUES):
        answer = driver.ask(*case.args, fault=case.fault, **case.request)
        wrong += [f"{case.what}: {said}" for said in complaints(case, answer, place.changed())]
    for number in range(NUM_DAMAGED):
        file, args = drawn.choice(READERS)
        case = Hostile(f"{number}: {file} damaged", args, file, file, may_pass=True)
        content = damaged((place.good / file).read_bytes(), drawn)
        with place.instead(file, "missing"):
            (place.directory / file).write_bytes(content)
            place.changes_are_meant()
            answer = driver.ask(*case.args)
            wrong += [f"{case.what}: {said}" for said in complaints(case, answer, place.changed())]
    assert not wrong, f"HOSTILE_SEED={seed}: {len(wrong)} are not refused:\n" + "\n".join(wrong)
