"""The report's page in headless Chromium, and its pictures.

python -m tests.deploy.report_browser DIR     # writes report-light.png, report-dark.png, report-1000.png
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from hybrid_ep.cluster.validation.cluster import Cluster, load_cluster
from hybrid_ep.cluster.validation.page import to_html
from tests.prerequisites import find
from tests.sim.cluster import simulated_reports, write_large, write_small

CHROMIUM, DRIVER = find("chromium"), find("chromedriver")
_LOAD_LIMIT_S = 60


@contextmanager
def browser(*, width: int = 1280, height: int = 1000) -> Iterator[webdriver.Chrome]:
    """A browser window that reaches no network; its console is kept."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(_LOAD_LIMIT_S)
    try:
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """Sets the size of the page, also below what a window may be."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(driver: webdriver.Chrome, name: str) -> None:
    """Prefers ``light`` or ``dark``."""
    features = [{"name": "prefers-color-scheme", "value": name}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def write_page(results: Path) -> Cluster:
    """Writes ``report.html`` into a results folder; returns what it shows."""
    cluster = load_cluster(results)
    (results / "report.html").write_text(to_html(cluster, results))
    return cluster


def open_page(driver: webdriver.Chrome, results: Path) -> None:
    """Opens what `write_page` wrote."""
    driver.get((results / "report.html").as_uri())


def main() -> None:
    """Writes the pictures."""
    target = Path(sys.argv[1])
    reports = simulated_reports()
    with tempfile.TemporaryDirectory() as folder, browser(width=1280, height=1500) as driver:
        small, large = Path(folder, "small"), Path(folder, "large")
        write_small(small, reports)
        write_large(large, reports, 1000, 30)
        write_page(small)
        open_page(driver, small)
        for name in ("light", "dark"):
            scheme(driver, name)
            cell = driver.find_element("css selector", "#matrix td.f")
            driver.execute_script("arguments[0].click(); scrollTo(0, 0)", cell)
            driver.save_screenshot(str(target / f"report-{name}.png"))
        scheme(driver, "light")
        resize(driver, 1280, 2600)
        write_page(large)
        open_page(driver, large)
        driver.save_screenshot(str(target / "report-1000.png"))


if __name__ == "__main__":
    main()
