#!/usr/bin/env python3
"""Builds the Helm chart into a folder: `python ci/chart.py FOLDER`, or `make chart`.

charts/hybrid-ep has templates and values, and no manifest. Each of the `files` that are added here is what kustomize
makes of an overlay whose settings are placeholders; the templates put the values there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "hybrid-ep"
# What kustomize gets for a setting, and the word that then takes its place: numbers have to be numbers for kustomize.
PLACEHOLDERS: dict[str, tuple[str | int, str]] = {
    "image": ("__IMAGE__", "__IMAGE__"),
    "doctorImage": ("__DOCTOR_IMAGE__", "__DOCTOR_IMAGE__"),
    "nodes": (770001, "__NODES__"),
    "ranksPerNode": (770002, "__RANKS_PER_NODE__"),
}
NAMESPACE = "__NAMESPACE__"
NODE_DOCTOR = {
    "node-doctor": [],
    "node-doctor-kernel-log": ["node-doctor-kernel-log"],
    "node-doctor-pairs": ["node-doctor-pairs"],
}


def build(k8s: Path, folder: Path, overlay: str, components: list[str]) -> str:
    """What kustomize makes of an overlay, below `folder`, with placeholders."""
    settings = k8s / "overlays" / overlay / "settings.yaml"
    tree = yaml.safe_load(settings.read_text())
    tree["spec"] = {name: PLACEHOLDERS[name][0] for name in tree["spec"]}
    kept = settings.read_text()
    settings.write_text(yaml.safe_dump(tree))
    kustomization = {
        "resources": [f"k8s/overlays/{overlay}"],
        "components": [f"k8s/components/{name}" for name in components],
        "namespace": NAMESPACE,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    settings.write_text(kept)
    if done.returncode:
        raise SystemExit(f"{overlay}: {done.stderr}")
    built = done.stdout
    for given, word in PLACEHOLDERS.values():
        built = built.replace(str(given), word)
    return built


def files() -> dict[str, str]:
    """Name → content of every file of the chart that is made here."""
    found: dict[str, str] = {}
    defaults: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        shutil.copytree(ROOT / "k8s", folder / "k8s")
        for settings in sorted((folder / "k8s" / "overlays").glob("*/settings.yaml")):
            overlay = settings.parent.name
            spec = yaml.safe_load(settings.read_text())["spec"]
            if overlay != "node-doctor":
                suffix = "-cpu" if spec["image"].endswith("-cpu") else ""
                sizes = {name: spec[name] for name in ("nodes", "ranksPerNode")}
                defaults[overlay] = {"imageSuffix": suffix, **sizes}
                found[f"jobs/{overlay}.yaml"] = build(folder / "k8s", folder, overlay, [])
        for name, components in NODE_DOCTOR.items():
            found[f"{name}.yaml"] = build(folder / "k8s", folder, "node-doctor", components)
    base = set(found["node-doctor.yaml"].split("---\n"))
    parts = found["node-doctor-pairs.yaml"].split("---\n")
    found["node-doctor-pairs.yaml"] = "---\n".join(part for part in parts if part not in base)
    found["jobs.yaml"] = yaml.safe_dump(defaults, sort_keys=True)
    return found


def main(folder: Path) -> None:
    """Writes the whole chart to `folder`, in place of what is there."""
    made = files()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHART, folder)
    for name, content in made.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python ci/chart.py FOLDER")
    main(Path(sys.argv[1]))
