"""What tests of tasks share."""

import pytest


@pytest.fixture
def no_prefect():
    """Pages wait in the run's directory."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield
