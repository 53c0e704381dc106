"""Look at the samples of a run with 50,000 rollouts in a real browser."""

import time
from pathlib import Path

import pytest

from refrain.benchmarks.samples import made_up_run
from tests.browser.pages import Browser
from tests.flows.commands import Command
from tests.sockets import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PAGE_S = 10.0
"""Longest time for a page on a busy machine. `refrain bench samples` measures it."""


def test_a_large_run_is_looked_at(browser: Browser, tmp_path: Path) -> None:
    made_up_run(tmp_path / "run", 50_000, 64)
    command = Command("samples", tmp_path / "run", "--serve", str(free_port()))
    try:
        browser.open(command.wait_for_line("http://").split()[-1])
        started_s = time.monotonic()
        browser.see("50 of 50,000 samples", "step 49, sample 0", timeout_s=PAGE_S)
        browser.follow("next 50")
        browser.see("step 49, sample", "previous 50", timeout_s=PAGE_S)
        browser.open(browser.url.partition("?")[0] + "?sort=reward&finish=length")
        browser.see("reward 1, ", "finish length", timeout_s=PAGE_S)
        assert time.monotonic() - started_s < 3 * PAGE_S
        look_at_one(browser)
        look_over_epochs(browser)
    finally:
        command.close()


def look_at_one(browser: Browser) -> None:
    browser.click("(//article//a)[1]")
    browser.see("reward: format", "nats a token", "from 90%", timeout_s=PAGE_S)
    unlikely = browser.find("//pre/span[@class='likely3']")
    assert unlikely.value_of_css_property("background-color") == "rgba(251, 213, 160, 1)"
    browser.follow("by version")
    browser.find("//pre/span[@class='version0']")


def look_over_epochs(browser: Browser) -> None:
    browser.follow("this prompt over epochs")
    browser.see("epoch 0", "epoch 1", timeout_s=PAGE_S)
    later, first = (browser.find(f"//section[h2='epoch {epoch}']").rect for epoch in (1, 0))
    assert later["y"] == first["y"]
    assert later["x"] + later["width"] <= first["x"], "epochs are side by side"
