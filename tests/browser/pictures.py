"""Take the documentation's screenshots anew: `make pictures`.

Starts `refrain ui`, fills in a form, trains the demo for a few steps and takes a picture of each
page. `docs/pictures.json` then says which version of refrain each picture shows.
"""

import json
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect.client.orchestration import SyncPrefectClient

from refrain.engines.tracking.mlflow_run import RUN_FILE
from tests.browser.pages import CHROMIUM, DRIVER, MISSING, Browser, PrefectPages, chromium
from tests.browser.test_ui import log_in_to_mlflow, newest_run, start, watch
from tests.browser.ui import Ui, served_ui
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import Command

DOCS = REPOSITORY / "docs"
PICTURES = DOCS / "pictures.json"
NAME, NUM_PROMPTS, PROMPTS_PER_STEP, NUM_EPOCHS = "first", 128, 64, 2
LAST_STEP = NUM_EPOCHS * NUM_PROMPTS // PROMPTS_PER_STEP


def version() -> str:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def changes(directory: Path) -> dict[str, Any]:
    """Return the changes that reduce the demo to a few steps."""
    data = directory / "train.parquet"
    pq.write_table(pq.read_table(DEMO / "data" / "train.parquet").slice(0, NUM_PROMPTS), data)
    return {
        "num_epochs": NUM_EPOCHS,
        "prompts_per_step": PROMPTS_PER_STEP,
        "data.train": [str(data)],
    }


def show_form(browser: Browser, pages: PrefectPages) -> None:
    pages.open_form("train")
    browser.scroll_to("//*[normalize-space(text())='Algorithm (Optional)']")


def train(ui: Ui, pages: PrefectPages, directory: Path) -> str:
    """Train from the form, and return the id of Prefect's run."""
    start(pages, NAME, changes(directory))
    with SyncPrefectClient(ui.api, auth_string=ui.password) as client:
        run_id = newest_run(client, "train").id
        watch(pages, client, run_id, "Completed")
    return run_id


def show_run(browser: Browser) -> None:
    browser.press_tab("Subflow Runs")
    browser.see("step 1", f"step {LAST_STEP}")


def show_mlflow(browser: Browser, ui: Ui, run_dir: Path) -> None:
    log_in_to_mlflow(browser, ui)
    ids = json.loads((run_dir / RUN_FILE).read_text())
    address = f"{ui.mlflow}/#/experiments/{ids['experiment_id']}/runs/{ids['run_id']}"
    browser.open(f"{address}/model-metrics?workflowType=machine_learning")
    browser.click("//button[@aria-label='Close']")
    browser.find("//input[@placeholder='Search metric charts']").send_keys("critic/score")
    browser.see_no("//*[starts-with(normalize-space(text()), 'actor (')]")


def show_timeline(browser: Browser, run_dir: Path, directory: Path) -> None:
    page = directory / "timeline.html"
    Command("export", run_dir, "--timeline", str(LAST_STEP), page).finish()
    browser.open(page.as_uri())
    browser.find("//*[name()='svg'][@id='chart']//*[name()='rect']")


def take(browser: Browser, name: str, show: Callable[..., None], *args: Any) -> None:
    """Show a page and write its picture."""
    show(browser, *args)
    browser.picture(DOCS / name)
    print(DOCS / name, flush=True)


def main() -> None:
    """Write the pictures and their versions. Exit with a message where there is no browser."""
    if not (CHROMIUM and DRIVER):
        sys.exit(f"pictures: {MISSING}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with chromium(directory / "chromium") as browser, served_ui(directory / "runs") as ui:
            pages = PrefectPages(browser, ui.prefect)
            pages.log_in(ui.password)
            take(browser, "ui_form.png", show_form, pages)
            train(ui, pages, directory)
            take(browser, "ui_run.png", show_run)
            take(browser, "ui_mlflow.png", show_mlflow, ui, ui.runs_dir / NAME)
            take(browser, "timeline_page.png", show_timeline, ui.runs_dir / NAME, directory)
    names = ("ui_form.png", "ui_run.png", "ui_mlflow.png", "timeline_page.png")
    taken = [{"page": "ui.md", "picture": name, "version": version()} for name in names]
    PICTURES.write_text(json.dumps(taken, indent=2) + "\n")


if __name__ == "__main__":
    main()
