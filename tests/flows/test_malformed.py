"""Malformed input is refused before anything starts. The error names it in plain words."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.flows.cli import main
from tests.flows.malformed import Malformed, cases

SEED = 17
NUM, SHARES = 100, 2
EXPENSIVE = ("vllm", "ray", "prefect", "mlflow")
"""Modules that must not be imported before all input has been checked."""


def refusal(case: Malformed) -> str:
    """Return the error that `refrain train` prints."""
    result = CliRunner().invoke(main, ["train", *case.arguments, "--check"])
    assert isinstance(result.exception, SystemExit), f"{case.what}: {result.exception!r}"
    assert result.exit_code == 2, f"{case.what}: {result.output}"
    return result.output


@pytest.mark.parametrize("share", range(SHARES))
def test_a_malformed_config_or_file_is_refused(tmp_path: Path, share: int) -> None:
    loaded = {name for name in EXPENSIVE if name in sys.modules}
    drawn = set()
    for case in cases(SEED + share, NUM // SHARES, tmp_path):
        said = refusal(case)
        assert said.startswith("error: "), f"{case.what}: {said}"
        assert case.named in said, f"{case.what}: {said}"
        for word in ("Traceback", "errors.pydantic.dev", "<class "):
            assert word not in said, f"{case.what}: {said}"
        drawn.add(case.what)
    assert len(drawn) > NUM / SHARES / 2
    assert {name for name in EXPENSIVE if name in sys.modules} == loaded
