"""Drive a browser as a person does: look for a text, click on it, fill in a field."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from selenium import webdriver
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
PATIENCE_S = 120.0
"""Time limit for a page, on a machine that is busy with a training run."""
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    # The page gets less: the window's frame takes a part.
    "--window-size=1400,1143",
)
_TYPE_IN = """
    const property = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value");
    property.set.call(arguments[0], arguments[1]);
    arguments[0].dispatchEvent(new Event("input", {bubbles: true}));
"""


class Browser:
    """Headless Chromium. Its methods wait until the page is ready for them."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    @property
    def text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text

    @property
    def url(self) -> str:
        return self.driver.current_url

    def open(self, url: str) -> None:
        self.driver.get(url)

    def rest(self) -> None:
        """Leave the page, because many pages go on drawing and take CPU time."""
        self.driver.get("about:blank")

    def find(self, xpath: str, timeout_s: float = PATIENCE_S) -> WebElement:
        """Return the first element that is shown."""

        def shown() -> WebElement | None:
            found = self.driver.find_elements(By.XPATH, xpath)
            return next((one for one in found if one.is_displayed()), None)

        return self.until(shown, xpath, timeout_s)

    def enter(self, xpath: str) -> None:
        """Look into a frame of the page."""
        self.driver.switch_to.frame(self.find(xpath))

    def leave(self) -> None:
        """Look at the whole page again."""
        self.driver.switch_to.default_content()

    def see(self, *texts: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the page shows all texts."""
        for text in texts:
            self.until(lambda text=text: text in self.text, text, timeout_s)

    def click(self, xpath: str, timeout_s: float = PATIENCE_S) -> None:
        self.until(lambda: (self.find(xpath, timeout_s=1.0).click(), True), xpath, timeout_s)

    def see_no(self, xpath: str) -> None:
        """Wait until no such element is shown."""

        def gone() -> bool:
            found = self.driver.find_elements(By.XPATH, xpath)
            return not any(one.is_displayed() for one in found)

        self.until(gone, f"end of {xpath}")

    def press(self, name: str) -> None:
        """Click on a button."""
        self.click(f"//button[normalize-space()='{name}']")

    def follow(self, name: str) -> None:
        """Click on a link."""
        self.click(f"//a[normalize-space()='{name}']")

    def press_tab(self, name: str) -> None:
        self.click(f"//li[normalize-space()='{name}']")

    def field(self, label: str, kind: str) -> WebElement:
        """Return a form's field: the first element of this kind below the label."""
        return self.find(f"//*[normalize-space(text())='{label}']/following::{kind}[1]")

    def fill_in(self, label: str, kind: str, value: object) -> None:
        element = self.field(label, kind)
        element.clear()
        element.send_keys(str(value))

    def type_in(self, element: WebElement, text: str) -> None:
        """Set the text at once: key by key, a long text takes minutes."""
        self.driver.execute_script(_TYPE_IN, element, text)

    def scroll_to(self, xpath: str) -> None:
        """Scroll until the element is at the top of the window."""
        self.driver.execute_script("arguments[0].scrollIntoView(true);", self.find(xpath))

    def picture(self, file: Path) -> None:
        """Write what the window shows, as a PNG, once the page stands still."""

        def still() -> bytes:
            before = self.driver.get_screenshot_as_png()
            time.sleep(1.0)
            return before if self.driver.get_screenshot_as_png() == before else b""

        file.write_bytes(self.until(still, "a page that stands still"))

    def go_to_newest_tab(self) -> None:
        self.until(lambda: len(self.driver.window_handles) > 1, "a new tab")
        self.driver.switch_to.window(self.driver.window_handles[-1])

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait for the condition. Try again after errors, as pages change during a look."""
        wait = WebDriverWait(
            self.driver, timeout_s, ignored_exceptions=[WebDriverException], poll_frequency=0.3
        )
        try:
            return wait.until(lambda _: condition())
        except TimeoutException:
            shown = f"on {self.url[:200]}:\n{self.text[:3000]}"
            raise TimeoutException(f"no {what!r} within {timeout_s:.0f} s {shown}") from None


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser that connects only to the addresses that it opens."""
    assert CHROMIUM
    assert DRIVER
    os.environ |= {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*_OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class PrefectPages:
    """Prefect's pages in a browser."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.browser = browser
        self.address = address

    def log_in(self, password: str) -> None:
        self.browser.open(f"{self.address}/deployments")
        self.browser.find("//input[@type='password']").send_keys(password)
        self.browser.press("Login")

    def open_deployment(self, name: str) -> None:
        self.browser.open(f"{self.address}/deployments")
        self.browser.follow(name)
        self.browser.see("Deployment ID")

    def open_form(self, deployment: str) -> None:
        self.open_deployment(deployment)
        self.browser.press("Run")
        self.browser.press("Custom run")
        self.browser.see("Validate parameters")

    def open_run(self, run_id: UUID) -> None:
        self.browser.open(f"{self.address}/runs/flow-run/{run_id}")

    def see_state(self, name: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the state in the run's badge. Its log names the states of tasks, too."""
        self.browser.find(f"//*[normalize-space(text())='{name}']", timeout_s)

    def retry(self) -> None:
        """Retry the run of this page."""
        self.browser.press("Retry")
        self.browser.click("(//button[normalize-space()='Retry'])[last()]")

    def change_json(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change the form's config in its JSON view. Return all values of the form, changed."""
        browser = self.browser
        browser.click("//*[normalize-space()='Parameters']/following::button[1]")
        browser.press("Use JSON input")
        element = browser.find("//textarea")
        values = json.loads(element.get_attribute("value") or "")
        config = values["config"]
        for name, value in changes.items():
            section, _, field = name.partition(".")
            if field:
                config[section] = config[section] | {field: value}
            else:
                config[section] = value
        browser.type_in(element, json.dumps(values, indent=2))
        return values

    def submit(self) -> None:
        """Submit the form. Try again if the server refuses because its database is busy."""
        browser, form = self.browser, self.browser.url

        def is_accepted() -> bool:
            browser.press("Submit")
            browser.until(lambda: browser.url != form, "the deployment's page", 20.0)
            return True

        browser.until(is_accepted, "the deployment's page")

    def set_switch(self, on: bool) -> None:
        """Set the schedule's switch, the only one of its page."""
        self._set("//*[@role='switch']", on)

    def set_switch_of(self, label: str, on: bool) -> None:
        """Set a switch of a form."""
        self._set(f"//*[normalize-space(text())='{label}']/following::*[@role='switch'][1]", on)

    def _set(self, xpath: str, on: bool) -> None:
        browser, state = self.browser, str(on).lower()

        def is_set() -> bool:
            if browser.find(xpath).get_attribute("aria-checked") != state:
                browser.click(xpath)
            browser.find(f"({xpath})[@aria-checked='{state}']", 20.0)
            return True

        browser.until(is_set, f"a switch that is {state}")
