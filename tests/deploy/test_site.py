"""The documentation site builds without a warning, and has what its pages are for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("index.html", ["make demo", "make test"]),
        ("reference/python.html", ["TimeoutError", "recover"]),
        ("reference/buffers.html", ["low_latency_dispatch", "dispatch_with_permute", "EventOverlap"]),
        ("reference/training.html", ["MoELayer", "sync_router_gradients"]),
        ("reference/formats.html", ["cast_to_nvfp4"]),
        ("adding.html", ["A transport", "A format of rows", "A check of the doctor", "A test"]),
        ("reference/cli.html", ["hybrid-ep bench", "--num-sms", "hybrid-ep doctor"]),
        ("reference/environment.html", ["HYBRID_EP_TIMEOUT_S", "TORCH_CUDA_ARCH_LIST"]),
        ("troubleshooting.html", ["ConfigError", "OverflowError"]),
        ("repo/ansible/index.html", ["validate"]),
    ],
)
def test_a_page_has_what_it_is_for(site: Path, page: str, words: list[str]) -> None:
    text = (site / page).read_text()
    assert [word for word in words if word not in text] == []


def test_the_site_works_from_a_file_and_asks_no_other_host(site: Path) -> None:
    assert (site / "search" / "search_index.js").exists()
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)|<link[^>]* href=\"(http[^\"]+)", page.read_text()
        )
        assert [url for pair in loaded for url in pair if url.startswith("http")] == [], page
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text()


def test_every_check_of_the_doctor_has_a_place(site: Path) -> None:
    from hybrid_ep.cluster.doctor.active.judge import ACTIVE_CHECKS
    from hybrid_ep.cluster.doctor.compare import COMPARISONS
    from hybrid_ep.cluster.doctor.registry import all_checks

    page = (site / "doctor_reference.html").read_text()
    entries = (site / "troubleshooting.html").read_text()
    for item in [*all_checks(), *ACTIVE_CHECKS, *COMPARISONS]:
        assert f'id="{item.id.replace(".", "")}"' in page, item.id
        assert f'href="doctor_reference.html#{item.id.partition(".")[0]}"' in entries, item.id


def test_every_error_class_has_a_place_in_troubleshooting(site: Path) -> None:
    from hybrid_ep import errors

    page, reference = (site / "troubleshooting.html").read_text(), (site / "reference/python.html").read_text()
    for name in set(errors.__all__) - {"HybridEPError"}:
        assert f'id="{name.lower()}"' in page, name
        assert f'href="../troubleshooting.html#{name.lower()}"' in reference, name


def test_examples_are_code_and_results_are_one_text(site: Path) -> None:
    pages = ("python", "buffers", "training", "formats")
    page = "".join((site / "reference" / f"{name}.html").read_text() for name in pages)
    assert page.count("&gt;&gt;&gt;") > 50
    assert 'class="example"' not in page, "an example is a remark, and its lines are joined"
    results = page.partition("Counts where this rank's tokens go")[2].partition("Returns:")[2].partition("Raises:")[0]
    assert results.count("<li") == 1, results
