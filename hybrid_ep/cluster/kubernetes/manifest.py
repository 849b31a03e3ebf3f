"""Manifests as plain values: built by kustomize from a folder, or read from a file or standard input."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_ep.errors import ConfigError, HybridEPError
from hybrid_ep.inputs import read_input

__all__ = ["STDIN", "Manifest", "MissingToolError", "PodTemplate", "Requests", "claim_of", "find_sources", "json_path"]
__all__ += ["load"]

STDIN = Path("-")
_KUSTOMIZATION = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_BUILD_LIMIT_S = 60.0

# Where the Pod templates of a kind are; "*" stands for every item. A bare Pod is its own template.
_TEMPLATES: dict[str, tuple[str, ...]] = {
    "Pod": ("",),
    "PodTemplate": ("template",),
    **{
        kind: ("spec.template",)
        for kind in ("Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController")
    },
    "CronJob": ("spec.jobTemplate.spec.template",),
    "MPIJob": ("spec.mpiReplicaSpecs.*.template",),
    "PyTorchJob": ("spec.pytorchReplicaSpecs.*.template",),
    "JobSet": ("spec.replicatedJobs.*.template.spec.template",),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"),
}
# Kinds that rules know, and the groups that they are of. Others have kinds of these names, e.g. Knative's Service.
_KINDS = {*_TEMPLATES, "ComputeDomain", "ConfigMap", "Namespace", "Secret", "Service", "ServiceAccount"}
_KINDS |= {"ClusterRoleBinding", "ResourceClaim", "ResourceClaimTemplate", "RoleBinding"}
_GROUPS = {"", "apps", "batch", "rbac.authorization.k8s.io", "resource.k8s.io"}
_GROUPS |= {"kubeflow.org", "jobset.x-k8s.io", "leaderworkerset.x-k8s.io", "resource.nvidia.com"}


class _Loader(yaml.SafeLoader):
    """Reads plain words as kubectl does: dates and times are texts, and ``0o`` begins an octal number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 8) if "0o" in node.value else int(loader.construct_yaml_int(node))


_INT = re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|0[0-7_]*|[1-9][0-9_]*)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


class MissingToolError(HybridEPError):
    """A program or package that a check needs is not installed; the message says which."""


Requests = Mapping[str, Mapping[str, float]]  # of a claim: name of a request → kind of device → number


class PodTemplate(NamedTuple):
    """A Pod template inside a manifest.

    Attributes:
        path: JSON path to it.
        role: ``Launcher`` or ``Worker`` in an MPIJob, otherwise the manifest's kind.
        content: with ``metadata`` and ``spec``.
        num_pods: how many Pods are made of it; None where that depends on the cluster.
        claims: the Pod's name for a claim → what it asks for, where the build has the claim.
        is_bare: whether the object has the spec alone, without a template around it, perhaps with other fields.
    """

    path: str
    role: str
    content: dict[str, Any]
    num_pods: int | None = None
    claims: Mapping[str, Requests] = {}
    is_bare: bool = False


@dataclass(frozen=True)
class Manifest:
    """One object for the cluster.

    Attributes:
        source: the file, the folder that kustomize built, or `STDIN`.
        content: its tree.
        lines: JSON path → line of the file, counted from 1; empty for what kustomize built.
        duplicates: JSON paths of mapping keys that are given twice.
        claims: kind and name → requests, of every claim and claim template of the build (`with_claims`).
    """

    source: Path
    content: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    claims: Mapping[tuple[str, str], Requests] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """As kubectl says it: a kind of another group that has the name of a known one is followed by its group."""
        kind, group = str(self.content.get("kind", "")), self.api_version.rpartition("/")[0]
        return f"{kind}.{group}" if kind in _KINDS and group not in _GROUPS else kind

    @property
    def api_version(self) -> str:
        return str(self.content.get("apiVersion", ""))

    @property
    def metadata(self) -> dict[str, Any]:
        return _mapping(self.content, "metadata")

    @property
    def spec(self) -> dict[str, Any]:
        """The mapping of that name; empty where there is none."""
        return _mapping(self.content, "spec")

    @property
    def name(self) -> str:
        """``kind/name``."""
        return f"{self.kind or 'no kind'}/{self.metadata.get('name', '')}"

    def line(self, path: str) -> int | None:
        """The line of `path`, or of the closest thing around it that is written down."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["))] if "." in path or "[" in path else ""
        return self.lines.get(path)

    @property
    def has_pods(self) -> bool:
        """Whether it is of a kind that makes Pods."""
        return self.kind in _TEMPLATES

    def pod_templates(self) -> Iterator[PodTemplate]:
        """The Pod templates of a kind that has some; of a kind that is not known, whatever has the shape of one, or of
        a Pod's spec.
        """
        places = [each for pattern in _TEMPLATES.get(self.kind, ()) for each in self._places(pattern)]
        for parts, tree in places if self.kind in _TEMPLATES else _find_shapes(self.content, []):
            is_bare = not self.has_pods and _has_containers(tree)
            content = {"spec": tree} if is_bare else tree
            if _mapping(content, "spec"):
                role = str(parts[2]) if self.kind in ("MPIJob", "PyTorchJob") else self.kind
                claims = {
                    str(claim.get("name")): self.claims[key]
                    for claim in content["spec"].get("resourceClaims") or ()
                    if (key := claim_of(claim)) in self.claims
                }
                yield PodTemplate(json_path("$", parts), role, content, self._num_pods(parts), claims, is_bare)

    def written(self, path: str) -> str:
        """A path of a rule as the object has it: below a Pod's spec without a template, without ``.spec``; of a
        TrainJob's trainer, with its own name for resources.
        """
        if self.kind == "TrainJob":
            return path.replace("$.spec.trainer.resources.", "$.spec.trainer.resourcesPerNode.")
        for template in self.pod_templates():
            if template.is_bare and path.startswith(f"{template.path}.spec"):
                return template.path + path.removeprefix(f"{template.path}.spec")
        return path

    def _places(self, pattern: str) -> Iterator[tuple[list[str | int], dict[str, Any]]]:
        return _find(self.content, pattern.split(".") if pattern else [])

    def _num_pods(self, parts: list[str | int]) -> int | None:
        spec = self.spec
        if self.kind == "Pod":
            return 1
        if self.kind in ("MPIJob", "PyTorchJob"):
            return _count(_mapping(_mapping(spec, str(parts[1])), str(parts[2])), "replicas")
        if self.kind == "Job":
            return _count(spec, "completions", "parallelism")
        if self.kind == "JobSet":
            job = spec["replicatedJobs"][parts[2]]
            return _count(job, "replicas") * _count(_mapping(job["template"], "spec"), "completions", "parallelism")
        if self.kind == "LeaderWorkerSet":
            template = _mapping(spec, "leaderWorkerTemplate")
            groups, size = _count(spec, "replicas"), _count(template, "size")
            if parts[-1] == "leaderTemplate":
                return groups
            return groups * (size - 1 if "leaderTemplate" in template else size)
        if self.kind in ("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController"):
            return _count(spec, "replicas")
        return None


def claim_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name of the object that an entry of a Pod's resourceClaims names."""
    if "resourceClaimName" in entry:
        return "ResourceClaim", str(entry["resourceClaimName"])
    return "ResourceClaimTemplate", str(entry.get("resourceClaimTemplateName"))


def json_path(root: str, parts: Any) -> str:
    """``$``, ``["spec", 0, "a.b"]`` → ``$.spec[0]['a.b']``."""
    text = root
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if part.replace("_", "").isalnum() else f"['{part}']"
    return text


def find_sources(path: Path) -> list[Path]:
    """What there is to check at `path`: the file; the folder, if kustomize builds it; or all such folders below it.

    Components and bases stand on nothing of their own: of a tree, only folders below ``overlays`` are taken where
    there is one. A folder without any kustomization is what ``kubectl apply -f`` takes: all its YAML and JSON files.

    Raises:
        ConfigError: nothing is there.
    """
    if path == STDIN or path.is_file() or _kustomization(path):
        return [path]
    below = path / "overlays" if (path / "overlays").is_dir() else path
    folders = sorted({found.parent for name in _KUSTOMIZATION for found in below.rglob(name)})
    folders = [folder for folder in folders if _kustomization(folder).get("kind", "Kustomization") == "Kustomization"]
    if not folders and not _files_of(path):
        raise ConfigError(f"{path} holds no manifest; allowed: a YAML file, or a folder with a kustomization.yaml")
    return folders or [path]


def _files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix in (".yaml", ".yml", ".json"))


def load(source: Path) -> list[Manifest]:
    """Builds a folder with ``kubectl kustomize``, or reads its files, or reads a file of one or more documents.

    A ``List`` is opened.

    Raises:
        ConfigError: it cannot be built or read, or holds no object; says what kustomize or the parser said.
        MissingToolError: kubectl is not installed.
    """
    try:
        manifests = list(_manifests(source))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} cannot be read: it is nested too deeply") from error
    if not manifests:
        raise ConfigError(f"{source} holds no object; allowed: mappings with apiVersion and kind")
    return manifests


def _manifests(source: Path) -> Iterator[Manifest]:
    if source.is_dir() and not _kustomization(source):
        for file in _files_of(source):
            yield from _manifests(file)
        return
    for content, lines, duplicates in _documents(_text_of(source)):
        if not isinstance(content, dict):
            raise ConfigError(f"{source} holds {type(content).__name__}; allowed: mappings with apiVersion and kind")
        if str(content.get("apiVersion", "")).startswith("kustomize.config.k8s.io/"):
            raise ConfigError(
                f"{source} is kustomize's own {content.get('kind')}; allowed: its folder, {source.parent}"
            )
        # What kustomize built has lines of its own, which no file has.
        yield from _opened(Manifest(source, content, {} if source.is_dir() else lines, tuple(duplicates)))


def _text_of(source: Path) -> str:
    if source == STDIN:
        return sys.stdin.read()
    return _build(source) if source.is_dir() else read_input(source)


def _documents(text: str) -> Iterator[tuple[Any, dict[str, int], list[str]]]:
    """Each document that is not empty: its tree, the lines of its JSON paths, and keys that are given twice."""
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            lines: dict[str, int] = {}
            duplicates: list[str] = []
            _walk(node, "$", lines, duplicates, set())
            content = loader.construct_document(node)
            if content is not None:
                yield content, lines, duplicates
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: str, lines: dict[str, int], duplicates: list[str], seen: set[int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in seen:  # an alias, possibly of something around it
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, json_path(path, [i]), lines, duplicates, seen)
    elif isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            name = str(key.value)
            below = json_path(path, [name])
            if name in keys:
                duplicates.append(below)
            keys.add(name)
            lines.setdefault(below, key.start_mark.line + 1)
            _walk(value, below, lines, duplicates, seen)


def _opened(manifest: Manifest) -> Iterator[Manifest]:
    """The objects of a List, also of one in another; items of a ``PodList`` are Pods, even without their own `kind`."""
    items = manifest.content.get("items")
    if not manifest.kind.endswith("List") or not isinstance(items, list):
        yield manifest
        return
    of_list = {"apiVersion": manifest.api_version, "kind": manifest.kind.removesuffix("List")}
    for i, item in enumerate(items):
        root = f"$.items[{i}]"
        inside = {path: path.replace(root, "$", 1) for path in manifest.lines if path.startswith(root)}
        lines = {below: manifest.lines[path] for path, below in inside.items()}
        duplicates = tuple(path.replace(root, "$", 1) for path in manifest.duplicates if path.startswith(root))
        content = item if isinstance(item, dict) else {}
        if of_list["kind"] and content and "kind" not in content and "apiVersion" not in content:
            content = {**of_list, **content}
        yield from _opened(Manifest(manifest.source, content, lines, duplicates))


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


def _find(tree: Any, pattern: list[str]) -> Iterator[tuple[list[str | int], dict[str, Any]]]:
    """Every mapping that `pattern` leads to, with the parts of its path."""
    if not pattern:
        if isinstance(tree, dict):
            yield [], tree
        return
    items: list[tuple[str | int, Any]] = []
    if pattern[0] == "*":
        items += tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else []
    elif isinstance(tree, dict) and pattern[0] in tree:
        items.append((pattern[0], tree[pattern[0]]))
    for part, value in items:
        for parts, found in _find(value, pattern[1:]):
            yield [part, *parts], found


def _find_shapes(tree: Any, parts: list[str | int]) -> Iterator[tuple[list[str | int], dict[str, Any]]]:
    """Every mapping with a Pod's spec, or that is one.

    The object itself is none: containers in its spec are added to Pods that an operator makes (Prometheus). Containers
    of a set of Argo are no Pod's alone.
    """
    may_be = parts not in ([], ["spec"]) and "containerSet" not in parts
    if may_be and (_has_containers(_mapping(tree, "spec")) or _has_containers(tree)):
        yield parts, tree
        return
    below: Any = tree.items() if _is_map(tree) else enumerate(tree) if isinstance(tree, list) else ()
    for part, value in below:
        yield from _find_shapes(value, [*parts, part])


def _has_containers(tree: Any) -> bool:
    """Whether it has a list of containers with names and images, as a Pod's spec; a policy's have wildcards."""
    found = tree.get("containers") if _is_map(tree) else None
    if not isinstance(found, list) or not found:
        return False
    named = [f"{each['name']} {each['image']}" for each in found if _is_map(each) and {"name", "image"} <= each.keys()]
    return len(named) == sum(map(_is_map, found)) and not any("*" in each for each in named)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _count(tree: dict[str, Any], *names: str) -> int:
    """The first of these numbers that is given; 1 where none is."""
    return next((tree[name] for name in names if isinstance(tree.get(name), int)), 1)


def _mapping(tree: Any, key: str) -> dict[str, Any]:
    """`tree[key]` if it is a mapping, otherwise an empty one: the schemas report a wrong shape."""
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}
