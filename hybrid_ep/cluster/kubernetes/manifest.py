"""Manifests as plain values: built by kustomize from a folder, or read from a file or standard input.

Beside them stand what a check finds in them, and what the claims of a build ask for (DRA).
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybrid_ep.errors import ConfigError, HybridEPError
from hybrid_ep.inputs import read_input

STDIN = Path("-")
_KUSTOMIZATION = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_SUFFIXES = (".yaml", ".yml", ".json")
_BUILD_LIMIT_S = 60.0

# Kinds whose Pods are counted or whose parts have roles. Of others every Pod template that is found is checked.
_KNOWN = {"Pod", "Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "CronJob"}
_KNOWN |= {"PodTemplate", "MPIJob", "PyTorchJob", "JobSet", "LeaderWorkerSet"}
# Kinds that rules know, and the groups that they are of. Others have kinds of these names, e.g. Knative's Service.
_KINDS = {*_KNOWN, "ComputeDomain", "ConfigMap", "Service"}
_GROUPS = {"", "apps", "batch", "kubeflow.org", "jobset.x-k8s.io", "leaderworkerset.x-k8s.io", "resource.nvidia.com"}


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

    @property
    def spec(self) -> dict[str, Any]:
        """The Pod's spec."""
        return _mapping(self.content, "spec")

    @property
    def labels(self) -> dict[str, Any]:
        return _mapping(_mapping(self.content, "metadata"), "labels")

    @property
    def annotations(self) -> dict[str, Any]:
        return _mapping(_mapping(self.content, "metadata"), "annotations")


@dataclass(frozen=True)
class Manifest:
    """One object for the cluster.

    Attributes:
        source: the file, the folder that kustomize built, or `STDIN`.
        content: its tree.
        lines: JSON path → line of the file, counted from 1; empty for what kustomize built.
        build: all objects of its source (`joined`); empty where they are not compared with each other.
    """

    source: Path
    content: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    build: Sequence[Manifest] = field(default=(), repr=False, compare=False)

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

    def problem(self, path: str, rule: str, message: str, level: Level) -> Problem:
        """What is wrong at a path, as the object is written."""
        path = self._written(path)
        return Problem(str(self.source), self.name, path, rule, message, level, self.line(path))

    def line(self, path: str) -> int | None:
        """The line of `path`, or of the closest thing around it that is written down."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["))] if "." in path or "[" in path else ""
        return self.lines.get(path)

    @cached_property
    def _claims(self) -> Mapping[tuple[str, str], Requests]:
        return requests_by_claim(each.content for each in self.build)

    def pod_templates(self) -> Iterator[PodTemplate]:
        """Whatever has the shape of a Pod template; in kinds that are not known, also of a Pod's spec."""
        for parts, tree in _find_shapes(self.content, [], is_known=self.kind in _KNOWN):
            is_bare = "containers" in tree
            content = {"spec": tree} if is_bare else tree
            role = str(parts[-2]) if self.kind in ("MPIJob", "PyTorchJob") else self.kind
            claims = {
                str(claim.get("name")): self._claims[key]
                for claim in content["spec"].get("resourceClaims") or ()
                if (key := claim_of(claim)) in self._claims
            }
            yield PodTemplate(json_path("$", parts), role, content, self._num_pods(parts), claims, is_bare)

    def _written(self, path: str) -> str:
        """A path of a rule as the object has it: below a Pod's spec without a template, without ``.spec``."""
        for template in self.pod_templates():
            if template.is_bare and path.startswith(f"{template.path}.spec"):
                return template.path + path.removeprefix(f"{template.path}.spec")
        return path

    def _num_pods(self, parts: list[Any]) -> int | None:
        spec = self.spec
        if self.kind == "Pod":
            return 1
        if self.kind in ("MPIJob", "PyTorchJob"):
            return _count(_mapping(_mapping(spec, str(parts[1])), str(parts[-2])), "replicas")
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


def joined(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The same objects, each of which knows all."""
    build: list[Manifest] = []
    build += [replace(manifest, build=build) for manifest in manifests]
    return build


def json_path(root: str, parts: Any) -> str:
    """``$``, ``["spec", 0, "a.b"]`` → ``$.spec[0]['a.b']``."""
    for part in parts:
        is_plain = str(part).replace("_", "").isalnum()
        root += f"[{part}]" if isinstance(part, int) else f".{part}" if is_plain else f"['{part}']"
    return root


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
    if not folders and not any(each.suffix in _SUFFIXES for each in path.glob("*")):
        raise ConfigError(f"{path} holds no manifest; allowed: a YAML file, or a folder with a kustomization.yaml")
    return folders or [path]


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
        for file in sorted(each for each in source.glob("*") if each.suffix in _SUFFIXES):
            yield from _manifests(file)
        return
    text = sys.stdin.read() if source == STDIN else _build(source) if source.is_dir() else read_input(source)
    for content, lines in _documents(text):
        if not isinstance(content, dict):
            raise ConfigError(f"{source} holds {type(content).__name__}; allowed: mappings with apiVersion and kind")
        if str(content.get("apiVersion", "")).startswith("kustomize.config.k8s.io/"):
            kind = content.get("kind")
            raise ConfigError(f"{source} is kustomize's own {kind}; allowed: its folder, {source.parent}")
        # What kustomize built has lines of its own, which no file has.
        yield from _opened(Manifest(source, content, {} if source.is_dir() else lines))


def _documents(text: str) -> Iterator[tuple[Any, dict[str, int]]]:
    """Each document that is not empty: its tree, and the lines of its JSON paths."""
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            lines: dict[str, int] = {}
            _walk(node, "$", lines, set())
            content = loader.construct_document(node)
            if content is not None:
                yield content, lines
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: str, lines: dict[str, int], seen: set[int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in seen:  # an alias, possibly of something around it
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, json_path(path, [i]), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = json_path(path, [str(key.value)])
            lines.setdefault(below, key.start_mark.line + 1)
            _walk(value, below, lines, seen)


def _opened(manifest: Manifest) -> Iterator[Manifest]:
    """The objects of a List, also of one in another."""
    items = manifest.content.get("items")
    if manifest.kind != "List" or not isinstance(items, list):
        yield manifest
        return
    for i, item in enumerate(items):
        root = f"$.items[{i}]"
        lines = {path.replace(root, "$", 1): line for path, line in manifest.lines.items() if path.startswith(root)}
        yield from _opened(Manifest(manifest.source, item if isinstance(item, dict) else {}, lines))


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


def _find_shapes(tree: Any, parts: list[Any], *, is_known: bool) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Every mapping with a Pod's spec, or that is one, with the parts of its path, the leader's or launcher's first.

    An object of an unknown kind is none: containers in its spec are added to Pods that an operator makes (Prometheus).
    Containers of a set of Argo are no Pod's alone.
    """
    spec = _mapping(tree, "spec")
    if is_known:
        found = isinstance(spec.get("containers"), list)
    else:
        may_be = parts not in ([], ["spec"]) and "containerSet" not in parts
        found = may_be and (_has_containers(spec) or _has_containers(tree))
    if found:
        yield parts, tree
        return
    below: Any = sorted(tree.items(), key=lambda item: str(item[0])) if isinstance(tree, dict) else ()
    for part, value in enumerate(tree) if isinstance(tree, list) else below:
        yield from _find_shapes(value, [*parts, part], is_known=is_known)


def _has_containers(tree: Any) -> bool:
    """Whether it has a list of containers with names and images, as a Pod's spec; a policy's have wildcards."""
    found = tree.get("containers") if isinstance(tree, dict) else None
    maps = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    named = [f"{each['name']} {each['image']}" for each in maps if {"name", "image"} <= each.keys()]
    return bool(named) and len(named) == len(maps) and not any("*" in each for each in named)


def _count(tree: dict[str, Any], *names: str) -> int:
    """The first of these numbers that is given; 1 where none is."""
    return next((tree[name] for name in names if isinstance(tree.get(name), int)), 1)


def _mapping(tree: Any, key: str) -> dict[str, Any]:
    """`tree[key]` if it is a mapping, otherwise an empty one: the schemas report a wrong shape."""
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}


class Level(str, Enum):
    """How bad it is.

    ``error``: the API server refuses it, or it cannot work. ``warning``: it works on some clusters, or until something
    goes wrong. ``hint``: it may be intended, or only the cluster can tell.
    """

    ERROR = "error"
    WARNING = "warning"
    HINT = "hint"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a manifest.

    Attributes:
        source: the file, or the folder that was built.
        name: ``kind/name`` of the object; empty where there is none.
        path: JSON path to what is wrong.
        rule: id of the rule, or ``build``, ``schema``.
        message: what is there, what is allowed, and what would happen.
        level: how bad it is.
        line: of `path` in the file, counted from 1; None for what kustomize built.
        silenced: the reason that an annotation gives for leaving it so; empty where it counts.
    """

    source: str
    name: str
    path: str
    rule: str
    message: str
    level: Level = Level.ERROR
    line: int | None = None
    silenced: str = ""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "level": self.level.value}


Requests = Mapping[str, Mapping[str, float]]  # of a claim: name of a request → kind of device → number


def claim_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name of the object that an entry of a Pod's resourceClaims names."""
    if "resourceClaimName" in entry:
        return "ResourceClaim", str(entry["resourceClaimName"])
    return "ResourceClaimTemplate", str(entry.get("resourceClaimTemplateName"))


def requests_by_claim(build: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Requests]:
    """Kind and name → requests, of every claim and claim template among the objects of a build."""
    claims = [each for each in build if each.get("kind") in ("ResourceClaim", "ResourceClaimTemplate")]
    return {(str(each["kind"]), str((each.get("metadata") or {}).get("name"))): _requests(each) for each in claims}


def _requests(claim: Mapping[str, Any]) -> Requests:
    spec = claim.get("spec") or {}
    spec = (spec.get("spec") or {}) if claim["kind"] == "ResourceClaimTemplate" else spec
    return {str(each.get("name")): _numbers(each) for each in (spec.get("devices") or {}).get("requests") or ()}


def _numbers(request: dict[str, Any]) -> dict[str, float]:
    """Kind of device → number, NaN where that depends on the node; empty where devices are only looked at.

    Since v1beta2 a request has its fields in ``exactly``. Of ``firstAvailable`` the node decides which one holds. The
    kind is the device class. An interface of DRANET has ``with rdma``, unless the request selects by something else.
    """
    options = request.get("firstAvailable") or [request.get("exactly") or request]
    if any(option.get("adminAccess") for option in options):
        return {}
    numbers = {option.get("count") or 1 for option in options}
    known = all(option.get("allocationMode") != "All" for option in options) and len(numbers) == 1
    kind, selectors = str(options[0].get("deviceClassName")), options[0].get("selectors") or ()
    asked = "\n".join(str((each.get("cel") or {}).get("expression")) for each in selectors)
    if re.search(r"dra\.?net", kind) and "rdma" not in kind and (not asked or "rdma" in asked):
        kind += " with rdma"
    return {kind: numbers.pop() if known else math.nan}
