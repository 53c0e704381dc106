"""Fixtures of the tests of tasks."""

import pytest


@pytest.fixture
def no_prefect():
    """Point Prefect at a closed port, so that pages wait in the run's directory."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield
