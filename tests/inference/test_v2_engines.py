"""Real engines on vLLM's V2 runner, without a GPU."""

import pytest

from tests.inference.interpreted_env import run_cases

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("cases", ["v2_kv_cases", "v2_tp_cases"])
def test_engines_on_the_v2_runner(cases):
    """The engines choose themselves whether they schedule asynchronously."""
    run_cases(cases, 490.0, asynchronous=False)
