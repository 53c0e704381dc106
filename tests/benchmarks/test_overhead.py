"""`refrain bench overhead`: its stopwatch, and the arguments that it refuses."""

import pytest
from click.testing import CliRunner

from refrain.benchmarks.overhead import Stopwatch
from refrain.flows.cli import main


def test_seconds_are_added_up_as_far_as_they_lie_in_the_stretches():
    watch = Stopwatch()
    watch.spans["store"] = [(0.0, 1.0), (2.0, 5.0), (9.0, 10.0)]
    assert watch.seconds("store", (0.0, 10.0)) == 5.0
    assert watch.seconds("store", (0.0, 0.5), (3.0, 10.0)) == 3.5
    assert watch.seconds("store", (5.0, 9.0)) == 0.0
    assert watch.seconds("nothing", (0.0, 10.0)) == 0.0


@pytest.mark.parametrize("arguments", [["--steps", "1"], ["--rollouts", "64,100"]])
def test_sizes_that_make_no_sense_are_refused(arguments):
    result = CliRunner().invoke(main, ["bench", "overhead", *arguments])
    assert result.exit_code == 2
    assert "--rollouts" in result.output
