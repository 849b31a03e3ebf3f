"""Manifests as sites write them: `hybrid-ep k8s check` accepts each, and finds each mistake by the listed rules.

`NAME.yaml` in the folder is a manifest in which nothing is wrong. `NAME.cases.yaml` lists changes to it: `edits`
replace texts, `more` is put behind it, `text` stands in its place. `finds` are the rules that must report an error or a
warning then, all of them; without it nothing may be found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.problem import Level

FOLDER = Path(__file__).resolve().parents[1] / "data" / "manifests" / "sites"
CASES = [
    (file.name.removesuffix(".cases.yaml"), case)
    for file in sorted(FOLDER.glob("*.cases.yaml"))
    for case in yaml.safe_load(file.read_text(encoding="utf-8"))
]
OF_SITES = {rule for _, case in CASES for rule in str(case.get("finds", "")).split()}


@pytest.mark.parametrize(("base", "case"), CASES, ids=[f"{base}: {case['name']}" for base, case in CASES])
def test_verdict(base: str, case: dict[str, Any], tmp_path: Path) -> None:
    text = case["text"] if "text" in case else (FOLDER / f"{base}.yaml").read_text(encoding="utf-8")
    for old, new in case.get("edits", []):
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "a.yaml"
    file.write_text(text + case.get("more", ""), encoding="utf-8")
    problems = [problem for problem in check([file]).problems if problem.level is not Level.HINT]
    found = {problem.rule: f"{problem.path}: {problem.message}" for problem in problems}
    assert sorted(found) == sorted(case.get("finds", "").split()), found
