"""Checks manifests against schemas: those of Kubernetes, and stricter ones of this package for the kinds of operators.

Kubernetes publishes its schemas, and the package kubernetes-validate has them for each version. They state some rules
of the API server in prose only: for quantities, ports, labels, words such as `Exists`. `schemas/values.json` and
`_formats` add these. The schemas of this package refer to Kubernetes' definition of a Pod template, because the
operators' own CRDs do not check it. Unknown fields are errors everywhere, because the API server drops them silently.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

from hybrid_ep.cluster.kubernetes.manifest import Manifest, MissingToolError, json_path
from hybrid_ep.cluster.kubernetes.problem import Level, Problem
from hybrid_ep.errors import ConfigError

__all__ = ["KUBERNETES_VERSION", "LABEL_VALUE", "QUANTITY", "check_schema", "kubernetes_versions"]

# The first in which resource.k8s.io/v1, which the gb200-mnnvl overlay claims its channel through, is on by default.
KUBERNETES_VERSION = "1.34"
QUANTITY = r"^\+?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_LABEL_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_OWN = {
    ("kubeflow.org/v2beta1", "MPIJob"): "mpijob-v2beta1.json",
    ("resource.nvidia.com/v1beta1", "ComputeDomain"): "computedomain-v1beta1.json",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset-v1alpha2.json",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset-v1.json",
}
_URI = "https://kubernetes.io/api/_definitions.json"  # by which the published schemas refer to their definitions


def check_schema(manifest: Manifest, version: str = KUBERNETES_VERSION) -> Iterator[Problem]:
    """Yields every place where the manifest does not fit its schema.

    Args:
        manifest: any object.
        version: of Kubernetes, one of `kubernetes_versions`.

    Raises:
        MissingToolError: kubernetes-validate is not installed.
        ConfigError: it has no schemas of that version.
    """

    def problem(path: str, message: str, rule: str = "schema", level: Level = Level.ERROR) -> Problem:
        path = manifest.written(path)
        return Problem(str(manifest.source), manifest.name, path, rule, message, level, manifest.line(path))

    _package()  # without it even a kind of ours is not checked: its Pods are Kubernetes'
    if not manifest.kind or not isinstance(manifest.content.get("apiVersion"), str):
        yield problem("$", "apiVersion or kind is missing; allowed: both, as texts")
        return
    schemas = _Schemas.of(version)
    validator = schemas.validator(manifest.api_version, manifest.kind)
    if validator is None:
        what = f"{manifest.api_version} {manifest.content['kind']}"
        close = difflib.get_close_matches(manifest.kind, schemas.kinds(manifest.api_version), 1, 0.0)
        if close:
            yield problem("$.kind", f"{what} is no kind of Kubernetes {version} or its operators; allowed: {close[0]}")
        else:
            found = list(manifest.pod_templates())
            parts = "only its Pods are checked" if found else "is not checked"
            message = f"{what}: {parts}, as there is no schema for it here"
            yield problem("$.kind", message, "unknown-kind", Level.HINT)
            for template in found:
                for breach in schemas.pod_template.iter_errors(template.content):
                    path, message = _described(breach)
                    if template.is_bare and path == "$.spec" and not _has_misspelt_field(breach):
                        continue  # beside a Pod's fields there are the kind's own
                    yield problem(f"{template.path}{path[1:]}", message)
        return
    for breach in sorted(validator.iter_errors(manifest.content), key=lambda breach: list(map(str, breach.path))):
        yield problem(*_described(breach))


def kubernetes_versions() -> list[str]:
    """Versions of Kubernetes whose schemas are installed, e.g. ``1.34``, the oldest first.

    Raises:
        MissingToolError: kubernetes-validate is not installed.
    """
    names = (folder.name for folder in _package().iterdir())
    found = {match[1] for name in names if (match := re.match(r"v(\d+\.\d+)\.\d+-local-strict$", name))}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class _Schemas:
    """The schemas of one version of Kubernetes, and ours."""

    def __init__(self, version: str) -> None:
        if version not in kubernetes_versions():
            raise ConfigError(f"Kubernetes version is {version!r}; allowed: {', '.join(kubernetes_versions())}")
        self._folder = next(
            f for f in _package().iterdir() if re.match(rf"v{re.escape(version)}\.\d+-local-strict$", f.name)
        )
        definitions = json.loads((self._folder / "_definitions.json").read_text(encoding="utf-8"))
        _formats(definitions["$defs"])
        self._definitions = definitions["$defs"]
        self._registry: Registry[Any] = Registry().with_resource(_URI, Resource.from_contents(definitions))
        self._known: dict[tuple[str, str], Draft202012Validator | None] = {}

    @classmethod
    @functools.cache
    def of(cls, version: str) -> _Schemas:
        return cls(version)

    def validator(self, api_version: str, kind: str) -> Draft202012Validator | None:
        """For one kind; None where there is no schema of it."""
        key = api_version, kind
        if key not in self._known:
            self._known[key] = self._make(api_version, kind)
        return self._known[key]

    @functools.cached_property
    def pod_template(self) -> Draft202012Validator:
        """For a Pod template anywhere."""
        schema = {"$ref": f"{_URI}#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
        return Draft202012Validator(schema, registry=self._registry)

    def kinds(self, api_version: str) -> list[str]:
        """All kinds of one group and version."""
        own = [kind for version, kind in _OWN if version == api_version]
        return own or [
            meta["kind"]
            for definition in self._definitions.values()
            for meta in definition.get("x-kubernetes-group-version-kind", ())
            if "/".join(filter(None, (meta["group"], meta["version"]))) == api_version
        ]

    def _make(self, api_version: str, kind: str) -> Draft202012Validator | None:
        if (api_version, kind) in _OWN:
            return Draft202012Validator(_shipped(_OWN[api_version, kind]), registry=self._registry)
        # Of a definition, because the files of single kinds leave out what `_formats` adds.
        group, _, version = api_version.rpartition("/")
        for name, definition in self._definitions.items():
            for meta in definition.get("x-kubernetes-group-version-kind", ()):
                if (meta["group"], meta["version"], meta["kind"]) == (group, version, kind):
                    schema = {"$ref": f"{_URI}#/$defs/{name}"}
                    return Draft202012Validator(schema, registry=self._registry)
        return None


def _formats(definitions: dict[str, Any]) -> None:
    """Adds to Kubernetes' definitions what they say in prose only."""
    for name, fields in _shipped("values.json").items():
        for field, allowed in fields.items() if name in definitions else ():
            if property := definitions[name]["properties"].get(field):
                property.update(allowed if isinstance(allowed, dict) else {"enum": [*allowed, None]})
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {
        "title": "quantity",
        "type": ["string", "number", "null"],
        "pattern": QUANTITY,
        "minimum": 0,
    }
    for name, field in (("ContainerPort", "containerPort"), ("ContainerPort", "hostPort"), ("ServicePort", "port")):
        definitions[f"io.k8s.api.core.v1.{name}"]["properties"][field].update(minimum=1, maximum=65535)
    # The API server takes True where a condition's status is missing.
    definitions["io.k8s.api.batch.v1.PodFailurePolicyOnPodConditionsPattern"]["required"] = ["type"]
    metadata = definitions["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]["properties"]
    selector = definitions["io.k8s.api.core.v1.PodSpec"]["properties"]["nodeSelector"]
    for labels in (metadata["labels"], selector):
        labels["additionalProperties"].update(title="label", maxLength=63, pattern=LABEL_VALUE)
    for named, pattern in (
        (metadata["labels"], _LABEL_NAME),
        (selector, _LABEL_NAME),
        (metadata["annotations"], f"(?i){_LABEL_NAME}"),
    ):
        named["propertyNames"] = {"title": "name of a label", "pattern": pattern}


_EXAMPLES = {
    "DNS label": "up to 63 lower-case letters, digits and - between them",
    "resource of a container": "limits or requests of cpu, memory, ephemeral-storage or huge pages, e.g. limits.cpu",
    "name of an object": "lower-case letters, digits, - and . between them",
    "name of a label": "up to 63 letters, digits and -_. between them, after a domain and / or not",
    "name with a domain": "a domain, / and a name, e.g. kueue.x-k8s.io/multikueue",
    "name of a port": "up to 15 lower-case letters, digits and single - between them, with a letter",
    "quantity": "a number with m, k, M, G, T, Ki, Mi, Gi, Ti or nothing, and no space, e.g. 64Gi",
    "label": "up to 63 letters, digits and -_. between them",
}


def _described(breach: ValidationError) -> tuple[str, str]:
    """JSON path and message of a breach; of several ways to fit, the one that came closest."""
    breach = best_match([breach]) or breach
    path, message = json_path("$", breach.absolute_path), breach.message
    schema: Mapping[str, Any] = breach.schema if isinstance(breach.schema, Mapping) else {}
    if breach.validator == "additionalProperties" and isinstance(breach.instance, dict):
        allowed = schema.get("properties", {})
        parts = []
        for name in (name for name in breach.instance if name not in allowed):
            close = difflib.get_close_matches(str(name), allowed, 1)
            parts.append(f"unknown field {name!r}" + (f", like {close[0]!r}" if close else ""))
        message = f"{'; '.join(parts)}; allowed: {', '.join(sorted(allowed))}"
    elif schema.get("title") in _EXAMPLES:
        message = f"{breach.instance!r} is no {schema['title']}; allowed: {_EXAMPLES[schema['title']]}"
    elif breach.validator == "enum":
        allowed = [str(value) for value in schema["enum"] if value is not None]
        message = f"{breach.instance!r}; allowed: {', '.join(value or repr(value) for value in allowed)}"
    return path, message


def _has_misspelt_field(breach: ValidationError) -> bool:
    """Whether it is no unknown field, or one that is nearly a known one."""
    if breach.validator != "additionalProperties" or not isinstance(breach.instance, dict):
        return True
    known = breach.schema.get("properties", {}) if isinstance(breach.schema, Mapping) else {}
    return any(difflib.get_close_matches(str(name), known, 1, 0.85) for name in breach.instance if name not in known)


def _shipped(name: str) -> Any:
    return json.loads((resources.files("hybrid_ep.cluster.kubernetes") / "schemas" / name).read_text(encoding="utf-8"))


def _package() -> Any:
    try:
        import kubernetes_validate
    except ImportError as error:
        raise MissingToolError("the schemas are not installed: pip install kubernetes-validate") from error
    return resources.files(kubernetes_validate) / "kubernetes-json-schema"
