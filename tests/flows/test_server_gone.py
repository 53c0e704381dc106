"""Prefect's server is gone for good: how long a run waits for it, and what it says."""

import os
from pathlib import Path
from unittest import mock

import httpx
import pytest

from flows.environment import use_embedded_services
from flows.launch import _result


@pytest.mark.parametrize(
    ("url", "retries"), [(None, "5"), ("http://prefect:4200/api", "8")], ids=["own", "another"]
)
def test_a_run_waits_less_long_for_a_server_of_its_own(
    url: str | None, retries: str, tmp_path: Path
) -> None:
    """Nobody starts that one again."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with mock.patch.dict(os.environ, kept | ({"PREFECT_API_URL": url} if url else {}), clear=True):
        use_embedded_services(tmp_path)
        assert os.environ["PREFECT_CLIENT_MAX_RETRIES"] == retries


def test_its_death_is_told_with_advice() -> None:
    async def flow() -> None:
        raise httpx.ConnectError("All connection attempts failed")

    with pytest.raises(RuntimeError, match=r"server does not answer any more.* by --resume"):
        _result(flow())
