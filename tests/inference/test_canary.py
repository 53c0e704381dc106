"""The canary check accepts right weights and refuses wrong ones.

`smollm2.json` holds log-probabilities of a real engine and its trainer in bfloat16, with right and
wrong weights. `tests.inference.smollm2` writes it.
"""

import json
import os
import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refrain.engines.inference.weights.canary import (
    MAX_ROUNDING,
    PIECE,
    CanaryCheck,
    check_canaries,
    check_pieces,
)
from refrain.schemas.weights import Canary
from tests.conftest import REPOSITORY

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "smollm2.json").read_text())
WRONG = {
    "q and k swapped in one layer",
    "epsilon 1e-3 for 1e-5",
    "noise of 0.1 in one layer",
    "learning rate 0.001: all of the version before",
    "learning rate 0.001: one layer of the version before",
    "learning rate 0.001: one rank of the version before",
    "learning rate 0.001: a stale tied head",
}
RIGHT = {"right", "right again", "learning rate 1e-05: right", "learning rate 0.001: right"}


def canaries_of(case: dict[str, Any]) -> list[Canary]:
    values = zip(case["exact"], case["rounded"], strict=True)
    return [Canary((0,) * (1 + len(own)), tuple(own), tuple(other)) for own, other in values]


def checks_of(name: str, dtype: str = "bfloat16") -> list[CanaryCheck]:
    case = RECORDED[name]
    return check_canaries(canaries_of(case), case["engine"], dtype)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_real_model_in_bfloat16_passes_with_room(name: str) -> None:
    for check in checks_of(name):
        assert check.holds
        assert check.error < 0.85 * check.max_error
        assert abs(check.shift) < 0.85 * check.max_shift


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_weights_of_a_real_model_in_bfloat16_are_refused(name: str) -> None:
    assert not all(check.holds for check in checks_of(name))


def test_an_epsilon_is_refused_only_where_it_matters() -> None:
    """SmolLM2's activations are large, so 1e-6 for 1e-5 changes less than rounding does."""
    assert all(check.holds for check in checks_of("epsilon 1e-6 for 1e-5"))
    case = RECORDED["epsilon 1e-6 for 1e-5"]
    effect = [
        np.abs(np.subtract(*pair)).mean()
        for pair in zip(case["exact"], RECORDED["right"]["exact"], strict=True)
    ]
    assert max(effect) < checks_of("right")[0].rounding


def test_rounding_is_within_bounds_for_short_sequences() -> None:
    """Right weights pass, wherever we cut the recorded sequences."""
    case = RECORDED["right"]
    for length in (2, 3, 5, 9, 17, 40, 90):
        for start in range(0, 127 - length, length):
            cut = {
                key: [one[start : start + length] for one in case[key]]
                for key in ("exact", "rounded", "engine")
            }
            checks = check_canaries(canaries_of(cut), cut["engine"], "bfloat16")
            assert all(check.holds for check in checks), (length, start, *map(str, checks))


def test_a_shift_that_is_smaller_than_rounding_is_refused() -> None:
    """Rounding errors go both ways. Those of another policy may all go one way."""
    case = RECORDED["right"]
    shifted = [[value + 0.04 for value in one] for one in case["engine"]]
    checks = check_canaries(canaries_of(case), shifted, "bfloat16")
    assert all(check.error <= check.max_error for check in checks)
    assert not all(check.holds for check in checks)


def test_float32_bound_covers_only_addition_order() -> None:
    canary = Canary((1, 2, 3), (-1.0, -2.0), (-1.0, -2.0))
    (check,) = check_canaries([canary], [[-1.0005, -2.0]], "float32")
    assert check.holds
    (check,) = check_canaries([canary], [[-1.0, -2.003]], "float32")
    assert not check.holds


def test_coarse_rounding_disables_the_check_with_a_warning() -> None:
    coarse = -1.0 - 2 * MAX_ROUNDING
    canary = Canary((1, 2, 3), (-1.0, -1.0), (coarse, coarse))
    (check,) = check_canaries([canary], [[-1.0, -1.0]], "bfloat16")
    assert not check.holds
    assert "the trainer itself differs by 0.6 nats" in str(check)


@pytest.mark.parametrize("where", ["exact", "rounded", "engine"])
def test_no_number_is_refused(where: str) -> None:
    case = {"exact": [[-1.0, -1.0]], "rounded": [[-1.0, -1.0]], "engine": [[-1.0, -1.0]]}
    assert all(c.holds for c in check_canaries(canaries_of(case), case["engine"], "bfloat16"))
    case[where] = [[-1.0, nan]]
    assert not any(c.holds for c in check_canaries(canaries_of(case), case["engine"], "bfloat16"))


def test_a_tolerance_that_was_given_replaces_the_bounds() -> None:
    case = RECORDED["noise of 0.1 in one layer"]
    assert all(c.holds for c in check_canaries(canaries_of(case), case["engine"], "bfloat16", 0.2))
    right = RECORDED["right"]
    strict = check_canaries(canaries_of(right), right["engine"], "bfloat16", 0.01)
    assert not any(check.holds for check in strict)


def test_the_message_has_both_differences_and_their_bounds() -> None:
    wrong = checks_of("q and k swapped in one layer")[0]
    for number in (wrong.error, wrong.max_error, wrong.max_shift, wrong.rounding):
        assert f"{number:.3g}" in str(wrong)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_engine_refuses_what_the_record_says(smollm2_dir: Path, tmp_path: Path) -> None:
    """The cases above on a live engine, and a layer that receives no weights."""
    command = [sys.executable, "-m", "tests.inference.smollm2", str(smollm2_dir)]
    file = tmp_path / "found.json"
    done = subprocess.run(
        [*command, str(file)], cwd=REPOSITORY, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert {name for name in RIGHT if found[name]["refused"]} == set()
    assert {name for name in WRONG if not found[name]["refused"]} == set()
    assert "took no new weights for" in found["a layer is missing"]["said"]


def long_one(changed: float = 0.0, num_changed: int = PIECE) -> tuple[Canary, list[float]]:
    """Return a long canary, and the engine's log-probabilities of it.

    The canary is all recorded sequences, eight times. The engine's last `num_changed` values are
    off by `changed`.
    """
    case = RECORDED["right"]
    exact, rounded, engine = (
        np.concatenate([one for one in case[name] for _ in range(8)])
        for name in ("exact", "rounded", "engine")
    )
    engine[-num_changed:] += changed * np.resize([1.0, -1.0], num_changed)
    return Canary((0,) * (1 + len(exact)), tuple(exact), tuple(rounded)), engine.tolist()


def test_pieces_of_a_long_canary_pass_with_room() -> None:
    canary, engine = long_one()
    checks = check_pieces([canary], [engine], "bfloat16")
    assert len(checks) == len(engine) // PIECE == 15
    assert sum(check.num_tokens for check in checks) == len(engine)
    for check in checks:
        assert check.error < 0.85 * check.max_error


def test_difference_behind_a_long_window_is_refused() -> None:
    """Negative control: the mean over the whole canary hides the difference in rounding."""
    canary, engine = long_one(changed=0.15)
    assert all(check.holds for check in check_canaries([canary], [engine], "bfloat16"))
    *before, last = check_pieces([canary], [engine], "bfloat16")
    assert all(check.holds for check in before[:-1])
    assert not last.holds
    assert f"after the first {14 * PIECE:,} its log-probabilities" in str(last)


@pytest.mark.parametrize("where", [0, 1000, -1])
def test_no_number_in_a_long_canary_is_refused(where: int) -> None:
    canary, engine = long_one()
    engine[where] = nan
    assert not all(check.holds for check in check_pieces([canary], [engine], "bfloat16"))


PREPARED = """
import os, torch
torch.cuda.is_available = lambda: {on_gpu}
from refrain.engines.machine import cuda
cuda.cuda_build = lambda: "13.0" if {on_gpu} else None
from refrain.engines.inference.engine.process import prepare_process
prepare_process(1, batch_invariant={wanted})
print(os.environ.get("VLLM_BATCH_INVARIANT"))
"""


@pytest.mark.parametrize(
    ("on_gpu", "wanted", "told"),
    [(True, True, "1"), (True, False, "None"), (False, True, "None")],
)
def test_batch_invariance_is_vllms_and_for_gpus(on_gpu, wanted, told):
    script = PREPARED.format(on_gpu=on_gpu, wanted=wanted)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [told], done.stderr
