"""Manifests as plain values: built by kustomize from a folder, or read from a file."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_ep.errors import ConfigError, HybridEPError

__all__ = ["Manifest", "MissingToolError", "PodTemplate", "find_sources", "load"]

_KUSTOMIZATION = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_BUILD_LIMIT_S = 60.0


class MissingToolError(HybridEPError):
    """A program or package that a check needs is not installed; the message says which."""


class PodTemplate(NamedTuple):
    """A Pod template inside a manifest.

    Attributes:
        path: JSON path to it.
        role: ``Launcher`` or ``Worker`` in an MPIJob, otherwise the manifest's kind.
        content: with ``metadata`` and ``spec``.
    """

    path: str
    role: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """One object for the cluster.

    Attributes:
        source: the file, or the folder that kustomize built.
        content: its tree.
    """

    source: Path
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", ""))

    @property
    def name(self) -> str:
        """``kind/name``."""
        metadata = self.content.get("metadata")
        return f"{self.kind or 'no kind'}/{metadata.get('name', '') if isinstance(metadata, dict) else ''}"

    def pod_templates(self) -> Iterator[PodTemplate]:
        """The Pod templates of an MPIJob, or of any workload of Kubernetes itself."""
        spec = _mapping(self.content, "spec")
        if self.kind == "MPIJob":
            for role, replica in _mapping(spec, "mpiReplicaSpecs").items():
                template = _mapping(replica, "template")
                if template:
                    yield PodTemplate(f"$.spec.mpiReplicaSpecs.{role}.template", role, template)
            return
        path = "$.spec"
        if self.kind == "CronJob":
            spec, path = _mapping(_mapping(spec, "jobTemplate"), "spec"), "$.spec.jobTemplate.spec"
        if template := _mapping(spec, "template"):
            yield PodTemplate(f"{path}.template", self.kind, template)


def find_sources(path: Path) -> list[Path]:
    """What there is to check at `path`: the file; the folder, if kustomize builds it; or all such folders below it.

    Components and bases stand on nothing of their own: of a tree, only folders below ``overlays`` are taken where
    there is one.

    Raises:
        ConfigError: nothing is there.
    """
    if path.is_file() or _kustomization(path):
        return [path]
    below = path / "overlays" if (path / "overlays").is_dir() else path
    folders = sorted({found.parent for name in _KUSTOMIZATION for found in below.rglob(name)})
    folders = [folder for folder in folders if _kustomization(folder).get("kind", "Kustomization") == "Kustomization"]
    if not folders:
        raise ConfigError(f"{path} holds no manifest; allowed: a YAML file, or a folder with a kustomization.yaml")
    return folders


def load(source: Path) -> list[Manifest]:
    """Builds a folder with ``kubectl kustomize``, or reads a file of one or more documents.

    Raises:
        ConfigError: it cannot be built or read; says what kustomize or the parser said.
        MissingToolError: kubectl is not installed.
    """
    try:
        text = _build(source) if source.is_dir() else source.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    for document in documents:
        if not isinstance(document, dict):
            raise ConfigError(f"{source} holds {type(document).__name__}; allowed: mappings with apiVersion and kind")
    return [Manifest(source, document) for document in documents]


def _build(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise MissingToolError("kubectl is not installed, and without it a folder cannot be built")
    built = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=_BUILD_LIMIT_S)
    if built.returncode:
        raise ConfigError(f"{folder} cannot be built: {built.stderr.strip()}")
    return built.stdout


def _kustomization(folder: Path) -> dict[str, Any]:
    for name in _KUSTOMIZATION:
        if (folder / name).is_file():
            content = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {"kind": "Kustomization"}
    return {}


def _mapping(tree: Any, key: str) -> dict[str, Any]:
    """`tree[key]` if it is a mapping, otherwise an empty one: a wrong shape is the schemas' business."""
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}
