"""Fixtures that start `refrain ui` and a browser, once for each module."""

import os
from collections.abc import Iterator

import pytest

from tests.browser.pages import CHROMIUM, DRIVER, MISSING, Browser, chromium
from tests.browser.ui import Ui, served_ui


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Ui]:
    # Skip before `refrain ui` starts if there is no browser.
    del browser
    with served_ui(tmp_path_factory.mktemp("ui") / "runs") as ui:
        yield ui


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (CHROMIUM and DRIVER):
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
