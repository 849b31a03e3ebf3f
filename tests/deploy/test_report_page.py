"""The validation report's page as a browser shows it: four nodes of the real doctor, hostile text, a thousand nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hybrid_ep.cluster.doctor import Report
from hybrid_ep.cluster.validation.cluster import Cluster
from tests.prerequisites import require, require_programs
from tests.sim.cluster import PLATFORM, names, simulated_reports, write_inventory, write_large, write_nodes, write_small

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    """One browser for all tests."""
    require(find_spec("selenium"), "selenium (a development dependency)")
    from tests.deploy.report_browser import browser

    require_programs("chromium", "chromedriver")
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """The doctor's reports of simulated nodes."""
    return simulated_reports()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, reports: dict[str, Report]) -> Path:
    """Four nodes, one with a fault."""
    folder = tmp_path_factory.mktemp("small")
    write_small(folder, reports)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, reports: dict[str, Report]) -> Path:
    """A thousand nodes, ten of them broken; four rounds of pairs are enough here."""
    folder = tmp_path_factory.mktemp("large")
    write_large(folder, reports, 1000, 4)
    return folder


@pytest.fixture(scope="module")
def clusters() -> dict[Path, Cluster]:
    """What the pages that were written show, by results folder."""
    return {}


@pytest.fixture
def show(chrome: Chrome, clusters: dict[Path, Cluster]) -> Iterator[Callable[[Path], Cluster]]:
    """Returns `show(results)`: opens the page of a results folder; afterwards the console must hold no complaint."""
    from tests.deploy.report_browser import open_page, resize, scheme, write_page

    resize(chrome, 1280, 1000)
    scheme(chrome, "light")
    chrome.get_log("browser")  # forget what was said before

    def show(results: Path) -> Cluster:
        if results not in clusters:
            clusters[results] = write_page(results)
        open_page(chrome, results)
        return clusters[results]

    yield show
    assert [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"] == []


def _texts(chrome: Chrome, selector: str) -> list[str]:
    return [element.text for element in chrome.find_elements("css selector", selector)]


def _cell(chrome: Chrome, node: str, check: str) -> Any:
    return chrome.find_element("css selector", f'#matrix td[aria-label^="{node} {check}:"]')


def _detail(chrome: Chrome) -> str:
    return str(chrome.find_element("id", "detail").text)


def _press(chrome: Chrome, *keys: str) -> None:
    for key in keys:
        chrome.switch_to.active_element.send_keys(key)


def test_matrix_has_the_cells_of_the_reports(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    cluster = show(small)
    shown = {cell.get_attribute("aria-label") for cell in chrome.find_elements("css selector", "#matrix td.cell")}
    expected = {
        f"{node.name} {result.id}: {result.shown_as}" for node in cluster.nodes for result in node.report.results
    }
    assert shown == expected
    assert len(expected) == 4 * len(cluster.nodes[0].report.results)
    assert _texts(chrome, "#matrix thead th")[1:] == [result.id for result in cluster.nodes[0].report.results]
    assert [cell.get_attribute("aria-label") for cell in chrome.find_elements("css selector", "#matrix td.f")] == [
        "worker-2 nic.count: fail"
    ]
    assert _texts(chrome, "#matrix th.unfit") == ["worker-2"]


def test_summary_findings_jobs_and_topology(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    cluster = show(small)
    assert chrome.find_element("id", "headline").text == cluster.headline + "."
    assert "worker-2 is not: nic.count: Compare with lspci" in cluster.headline
    assert _texts(chrome, "#to-do tbody td")[:3] == ["nic.count", "fail", "worker-2"]
    assert _texts(chrome, "#between .id") == [result.id for result in cluster.findings.results]
    assert _texts(chrome, "#jobs .id") == [
        "group-all",
        "nic-worker-1-worker-4",
        "nic-without-worker-2",
        "nic-worker-3-worker-4",
        "pair-worker-1-worker-3",
        "pair-worker-3-worker-4",
        "pair-worker-4-worker-1",
    ]
    log = chrome.find_element("css selector", "#jobs details")
    log.find_element("css selector", "summary").click()
    assert "rank 12 waited 20 s for rank 3: no counts" in log.text
    assert _texts(chrome, "#topology figcaption") == ["3 nodes: worker-1, worker-3, worker-4", "1 node: worker-2"]
    widths = "return [...document.querySelectorAll('#topology img')].map(image => image.naturalWidth)"
    assert min(chrome.execute_script(widths)) > 400


def test_click_shows_what_was_seen_and_the_remedy(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    cluster = show(small)
    result = cluster.nodes[1].problems[0]
    _cell(chrome, "worker-2", "nic.count").click()
    text = _detail(chrome)
    for part in ("worker-2: nic.count", result.seen, result.expected, result.source, result.remedy):
        assert part in text
    assert _texts(chrome, "#detail dt") == ["seen", "expected", "read from", "remedy"]
    chrome.find_element("css selector", "#detail .close").click()  # a long remedy covers the rows behind it
    _cell(chrome, "worker-1", "nic.count").click()
    assert _texts(chrome, "#detail dt") == ["seen", "expected", "read from"]
    chrome.find_element("css selector", '#matrix th[title="worker-2"]').click()
    assert "Not fit: it takes no part in test jobs. 1 of its checks did not pass." in _detail(chrome)
    assert result.remedy in _detail(chrome)
    chrome.find_element("css selector", "#detail .close").click()
    assert not chrome.find_element("id", "detail").is_displayed()


def test_keyboard_reaches_every_cell(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    show(small)
    from selenium.webdriver.common.keys import Keys

    chrome.find_element("id", "text").click()
    _press(chrome, Keys.TAB, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    focused = chrome.switch_to.active_element
    assert focused.get_attribute("aria-label") == "worker-2 driver.version: pass"
    _press(chrome, Keys.ENTER)
    assert "worker-2: driver.version" in _detail(chrome)
    _press(chrome, Keys.ESCAPE)
    assert not chrome.find_element("id", "detail").is_displayed()
    assert chrome.switch_to.active_element == focused
    _press(chrome, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    assert "Not fit" in _detail(chrome)


def test_filter(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    show(small)
    group, text = chrome.find_element("id", "group"), chrome.find_element("id", "text")
    chrome.find_element("id", "only-problems").click()
    assert _texts(chrome, "#matrix tbody th") == ["worker-2"]
    assert chrome.find_element("id", "shown").text == "1 of 4 nodes"
    group.send_keys("gdr")
    assert (_texts(chrome, "#matrix thead th"), _texts(chrome, "#matrix tbody th")) == (
        ["node", "gdr.peer_memory", "gdr.ibgda"],
        [],
    )
    chrome.find_element("id", "only-problems").click()
    assert len(_texts(chrome, "#matrix tbody th")) == 4
    text.send_keys("ER-3")
    assert _texts(chrome, "#matrix tbody th") == ["worker-3"]
    text.clear()
    group.send_keys("all")
    text.send_keys("mlx5_6, mlx5_7")
    assert _texts(chrome, "#matrix tbody th") == ["worker-2"]


def test_heat_map(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    cluster = show(small)
    assert _texts(chrome, "#metric option") == [table.metric for table in cluster.pair_tables]
    chrome.find_element("id", "metric").send_keys("nic write")
    seen = chrome.find_element("id", "heat-seen")
    assert seen.text == "Slowest: worker-1 – worker-4: 212.4 Gb/s, 70 % of the median."
    point = """
        const heat = document.getElementById("heat"), box = heat.getBoundingClientRect();
        const x = box.left + arguments[0] * box.width, y = box.top + arguments[1] * box.height;
        heat.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y}));
        const scale = heat.width / box.width;
        const at = heat.getContext("2d").getImageData((x - box.left) * scale + 14, (y - box.top) * scale + 14, 1, 1);
        return [...at.data].slice(0, 3);
    """
    orange = chrome.execute_script(point, 0.9, 0.15)
    assert seen.text.startswith("worker-1 – worker-4: 212.4 Gb/s")
    blue = chrome.execute_script(point, 0.9, 0.45)
    assert seen.text.startswith("worker-3 – worker-4: 393.9 Gb/s, 130 %")
    assert orange[0] > orange[2] + 80
    assert blue[2] > blue[0] + 50


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["light", "dark"])
def test_light_and_dark_wide_and_narrow(
    chrome: Chrome, small: Path, show: Callable[[Path], Cluster], name: str, width: int
) -> None:
    """Text is legible (contrast of WCAG AA) in both schemes, and nothing sticks out sideways."""
    from tests.deploy.report_browser import resize, scheme

    resize(chrome, width, 900)
    scheme(chrome, name)
    show(small)
    _cell(chrome, "worker-2", "nic.count").click()
    assert chrome.execute_script("return document.documentElement.scrollWidth") == width
    paper = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 23, 30)"}[name]
    passed = chrome.execute_script("return getComputedStyle(document.querySelector('.cell.p')).backgroundColor")
    assert passed == {"light": "rgb(231, 244, 239)", "dark": "rgb(22, 48, 42)"}[name]
    selectors = ["h1", ".lead", "#headline", ".card b", ".card span", ".badge.pass", ".badge.fail", ".badge.skipped"]
    selectors += [".cell.p", ".cell.f", "#matrix th.unfit", "#matrix thead span", "#detail dt", "#detail dd", ".hint"]
    selectors += ["td.bad", "#between th" if width > 600 else "#between td", "#to-do td", "footer"]
    contrasts = dict(zip(selectors, chrome.execute_script(_CONTRAST, selectors), strict=True))
    assert {selector: value for selector, value in contrasts.items() if value < 4.5} == {}


# Contrast by WCAG 2: relative luminances of an element's colour and of the nearest background behind it.
_CONTRAST = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => parts(colour).slice(0, 3).map((value) => value / 255)
  .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
  .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if ((parts(colour)[3] ?? 1) === 1) return colour;
  }
};
return arguments[0].map((selector) => {
  const element = document.querySelector(selector);
  const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
});
"""


def test_without_javascript(chrome: Chrome, small: Path, show: Callable[[Path], Cluster]) -> None:
    chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        cluster = show(small)
        text = chrome.find_element("css selector", "main").text
        assert cluster.headline in text
        assert cluster.nodes[1].problems[0].remedy in text
        assert "The matrix needs JavaScript" in text
        assert not chrome.find_element("id", "matrix-tool").is_displayed()
    finally:
        chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


_HOSTILE = '</script><img src=x onerror="document.title=1"><script>document.title=2</script>'


def test_hostile_text_stays_text(
    chrome: Chrome, tmp_path: Path, reports: dict[str, Report], show: Callable[[Path], Cluster]
) -> None:
    write_inventory(tmp_path, names(2), title=_HOSTILE)
    write_nodes(tmp_path, reports, dict.fromkeys(names(2), PLATFORM))
    path = tmp_path / "nodes" / "worker-2.json"
    tree = json.loads(path.read_text())
    tree["results"][0] |= {
        "status": "fail",
        "seen": _HOSTILE,
        "expected": _HOSTILE,
        "remedy": _HOSTILE,
        "title": _HOSTILE,
    }
    tree["facts"]["topology_svg"] = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">{_HOSTILE}</svg>'
    path.write_text(json.dumps(tree))
    show(tmp_path)
    assert chrome.title == f"{_HOSTILE}: fail"
    _cell(chrome, "worker-2", "driver.version").click()
    assert _detail(chrome).count(_HOSTILE) == 3  # the heading of a check is that of the first node
    assert chrome.find_elements("css selector", "img[src=x]") == []
    assert chrome.title == f"{_HOSTILE}: fail"


def test_printing_shows_the_matrix_and_hides_the_tools(
    chrome: Chrome, large: Path, show: Callable[[Path], Cluster]
) -> None:
    from tests.deploy.report_browser import resize

    show(large)
    chrome.execute_script("document.getElementById('only-problems').click()")
    assert len(_texts(chrome, "#matrix tbody th")) < 100
    chrome.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert len(chrome.find_elements("css selector", "#matrix tbody th")) == 200
    chrome.execute_script("dispatchEvent(new Event('afterprint'))")
    assert len(_texts(chrome, "#matrix tbody th")) < 100
    resize(chrome, 720, 1000)  # A4 without its margins
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    try:
        hidden = [chrome.find_element("id", name).is_displayed() for name in ("filter", "heat-tool", "detail")]
        assert hidden == [False, False, False]
        assert chrome.execute_script("return document.documentElement.scrollWidth") == 720
        paper = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(255, 255, 255)"
    finally:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_many_nodes_on_a_phone(chrome: Chrome, large: Path, show: Callable[[Path], Cluster]) -> None:
    """Nothing sticks out sideways, and the heat map is drawn at the size at which it is seen."""
    from tests.deploy.report_browser import resize

    resize(chrome, 390, 844)
    show(large)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 390
    drawn = float(chrome.execute_script("return parseFloat(document.getElementById('heat').style.width)"))
    assert chrome.find_element("id", "heat").size["width"] == pytest.approx(drawn, abs=1)
    assert 200 < drawn < 390


def test_a_thousand_nodes(chrome: Chrome, large: Path, show: Callable[[Path], Cluster]) -> None:
    cluster = show(large)
    unfit = [node.name for node in cluster.unfit]
    assert len(unfit) == 11  # ten by the doctor, one by test jobs: it is slow with everybody
    assert chrome.find_element("id", "shown").text == "11 of 1000 nodes"
    assert _texts(chrome, "#matrix tbody th") == unfit
    assert "hosts; each cell is the slowest tested pair" in chrome.find_element("id", "heat-note").text
    chrome.find_element("id", "only-problems").click()
    assert chrome.find_element("id", "shown").text == "1000 of 1000 nodes"
    assert "worker-0001" in _texts(chrome, "#matrix tbody th")
    chrome.execute_script("document.getElementById('matrix-scroll').scrollTop = 1e6")
    chrome.implicitly_wait(10)  # rows are drawn after the browser has told of the scrolling
    chrome.find_element("css selector", '#matrix th[title="worker-1000"]').click()
    chrome.implicitly_wait(0)
    assert "Every check passed." in _detail(chrome)
    assert len(chrome.find_elements("css selector", "#matrix tbody th")) < 100  # only what is in view
    chrome.find_element("id", "text").send_keys(unfit[3])
    assert _texts(chrome, "#matrix tbody th") == [unfit[3]]
