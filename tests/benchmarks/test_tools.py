"""The bench of tools: its figures of known laps, and one run on an engine."""

from argparse import ArgumentParser, Namespace
from array import array
from typing import Any

import pytest
from rich.console import Console

from refrain.benchmarks import tools
from refrain.benchmarks.talks import TURNS, Talk, TalkLap, kv_tokens, make_talks
from refrain.benchmarks.tools import KINDS, add_arguments, figures, measure, read_arguments, show
from refrain.benchmarks.turn_engine import SlotWatch, Usage, num_full_blocks
from refrain.engines.inference.engine.running import Running
from refrain.schemas.bench import BenchReport
from refrain.schemas.data import Prompt
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    Turn,
)
from tests.conftest import DEMO


def given(*more: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(DEMO / "train.yaml"), *more])


def test_slot_seconds_are_summed_over_requests() -> None:
    """3 requests for 2 s, none for 5 s, 1 request for 4 s. The next lap begins with it."""
    clock, running = [10.0], [0]
    watch = SlotWatch(lambda: running[0], lambda: clock[0])
    schedule = watch.after(lambda num: running.__setitem__(0, num))
    for num, seconds in ((3, 2.0), (0, 5.0), (1, 4.0)):
        schedule(num)
        clock[0] += seconds
    assert watch.take() == 3 * 2.0 + 4.0
    clock[0] += 0.5
    assert watch.take() == 0.5


@pytest.mark.parametrize(
    ("num_prompt", "turns", "expected"),
    [(30, (Turn(34, 7),), 1), (30, (Turn(35, 7),), 2), (30, (Turn(20, 8), Turn(7, 90)), 2)],
)
def test_the_last_sampled_token_has_no_keys_and_values(num_prompt, turns, expected: int) -> None:
    """Blocks of 32 tokens. What was observed last has none either."""
    num_tokens = sum(turn.num_tokens for turn in turns)
    generated = Generated(array("i", range(num_tokens)), array("f"), (), turns=turns)
    id = RequestId(Split.TRAIN, 1, "p", 0)
    request = RolloutRequest(id, (1,) * num_prompt, 0, 999, generated)
    assert num_full_blocks(Running(request, 0, 0.0), 32) == expected


def test_the_same_conversations_begin_every_lap() -> None:
    prompts = [Prompt(key, (1, 2), "sums", "", {}) for key in "abc"]
    talks = make_talks(prompts, 8, 9, seed=3)
    assert talks[:4] == make_talks(prompts, 4, 9, seed=3)
    assert talks != make_talks(prompts, 8, 9, seed=4)
    assert len({(talk.prompt.key, talk.sample) for talk in talks}) == 8
    assert {n for talk in talks for n in talk.turn_tokens} <= set(range(5, 14))
    assert all((len(talk.turn_tokens), len(talk.tool_s)) == (TURNS, TURNS - 1) for talk in talks)


def lap(in_use: float, turns: tuple[Turn, ...] = ()) -> TalkLap:
    """Return a lap of two responses, from second 5 to 25, on 4 slots."""
    generated = Generated(array("i", range(9)), array("f", range(9)), (), turns=turns)
    rollouts = [
        Rollout(
            RolloutRequest(RequestId(Split.TRAIN, 1, "p", sample), (1,), 0, 9),
            generated, FinishReason.STOP, 0, 5.0 + sample, 15.0 + 10.0 * sample,
        )
        for sample in (0, 1)
    ]  # fmt: skip
    return TalkLap(rollouts, Usage(in_use * 4 * 20.0, 19, 20), 4)


def test_the_end_of_a_lap_counts_and_waits_are_of_tools() -> None:
    talked = lap(0.5, (Turn(3, 1, 0.4), Turn(4, 1, 0.8), Turn(0, waited_s=7.0)))
    assert (talked.seconds, talked.in_use) == (20.0, 0.5)
    assert talked.turn_s == 40.0 / (2 * TURNS)
    assert talked.tool_s == pytest.approx(0.6)
    assert lap(0.5).tool_s == 0.0


def test_one_different_token_is_found() -> None:
    same, other = lap(0.5), lap(0.5)
    assert same.share_identical(other) == 1.0
    other.rollouts[0].generated.token_ids[-1] += 1
    assert same.share_identical(other) == 0.0


def row(kind: str, number: int, end: str = "", **values: float) -> dict[str, Any]:
    about = {"kind": kind, "conversations": number, "kv": end, "kv_bytes": 7, "turn_s": 2.0}
    about |= {"in_use": 0.8, "seconds": 10.0, "tool_s": 1.0, "num_cached": 1, "num_full": 2}
    about |= {"journal_s": 0.25}
    return about | ({"identical": 1.0} if kind == "tools" else {}) | values


def test_figures_are_medians_of_ratios() -> None:
    """A lap is compared with the better of the two beside it."""
    rows: list[dict[str, Any]] = [
        {"kind": "answers", "answers": 900, "seconds": 3.0, "journal_s": 0.06},
        *(row("without", 1, in_use=one, seconds=8.0) for one in (0.8, 0.5, 0.8)),
        *(row("instant", 1, in_use=one) for one in (0.5, 0.8, 0.8)),
        row("tools", 1, in_use=0.2, seconds=12.0, journal_s=6.0),
        *(row("tools", 1, in_use=one, seconds=12.0) for one in (0.4, 0.8)),
        row("without", 4),
        row("instant", 4),
        row("tools", 4, tool_s=0.5, num_cached=19, num_full=20, identical=0.75, journal_s=0.4),
        row("without", 4, "_half"),
        row("instant", 4, "_half"),
        row("tools", 4, "_half"),
    ]
    expected = {"slots_in_use_1": 0.5, "seconds_1": 1.2, "instant_seconds_1": 1.25}
    expected |= {"wait_over_turn_1": 0.5, "wait_over_turn_4": 0.25}
    expected |= {"slots_in_use_4": 1.0, "seconds_4": 1.0, "instant_seconds_4": 1.0}
    expected |= {"cached_share": 0.95, "cached_share_half": 0.5}
    expected |= {"kv_bytes": 7, "kv_bytes_half": 7, "identical": 0.75, "answers_per_s": 300.0}
    expected |= {"journal_share": 0.04}
    assert figures(rows) == pytest.approx(expected)


def test_the_kv_cache_has_room_for_whole_blocks() -> None:
    """4 conversations of 2 + 3 * 10 + 2 * 40 tokens take 4 blocks of 32 each."""
    prompt = Prompt("a", (1, 2), "sums", "", {})
    talks = [Talk(prompt, sample, (10,) * 3, (1.0,) * 2) for sample in range(4)]
    assert kv_tokens(talks, 1.0, 112) == (4 * 4 + 1) * 32
    assert kv_tokens(talks, 0.5, 112) == (2 * 4 + 1) * 32
    assert kv_tokens(talks[:1], 0.5, 112) == 112 + 32, "vLLM refuses less than one sequence"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slots=0", "--slots 0: give at least 1"),
        ("--answers=0", "--answers 0: give at least 1"),
    ],
)
def test_bad_numbers_are_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_arguments(given(option))


@pytest.mark.parametrize("text", ["", "0", "1,x", "2,2", "1,,2"])
def test_bad_lists_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given(f"--conversations={text}")
    assert "must list different numbers" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of 5 turns on two slots, with tools as slow as turns."""
    with pytest.raises(ValueError, match=r"--tokens 1000: give fewer, .* a context of"):
        read_arguments(given("--tokens=1000"))
    monkeypatch.setattr(tools, "KV_SHARES", {"": 1.0})
    args = given(
        "--slots=2", "--conversations=1,3", "--tokens=24", "--answers=200", "--wait=100", "--laps=1"
    )
    console = Console(record=True)
    found, rows = measure(args, console)
    assert 0.2 < found["slots_in_use_1"] < found["slots_in_use_3"] < 1.1
    assert (found["cached_share"] > 0.95, found["identical"]) == (True, 1.0)
    assert found["answers_per_s"] > 50
    assert 0.2 < found["wait_over_turn_1"] < 5.0
    assert [row["kind"] for row in rows] == ["answers", *KINDS, *KINDS]
    assert [row["num_full"] for row in rows[1::3]] == [0, 0]
    assert len({row["num_tokens"] for row in rows[1:4]}) == 1
    report = BenchReport(name="tools", figures=found, rows=tuple(rows), command="", versions={})
    show(report, console)
    assert "answers_per_s" in console.export_text()
