"""Checks manifests against schemas: those of Kubernetes, and stricter ones of this package for the kinds of operators.

Kubernetes publishes its schemas, and the package kubernetes-validate has them for each version. The schemas of this
package refer to Kubernetes' definition of a Pod template, because the operators' own CRDs do not check it. Unknown
fields are errors everywhere, because the API server drops them silently.
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

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, MissingToolError, Problem, json_path
from hybrid_ep.errors import ConfigError

# The first in which resource.k8s.io/v1, which the gb200-mnnvl overlay claims its channel through, is on by default.
KUBERNETES_VERSION = "1.34"
_OWN = {
    ("kubeflow.org/v2beta1", "MPIJob"): "mpijob-v2beta1",
    ("resource.nvidia.com/v1beta1", "ComputeDomain"): "computedomain-v1beta1",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset-v1alpha2",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset-v1",
}
_URI = "https://kubernetes.io/api/_definitions.json"  # by which the published schemas refer to their definitions
_FOLDER = r"v({})\.\d+-local-strict"


def check_schema(manifest: Manifest, version: str = KUBERNETES_VERSION) -> Iterator[Problem]:
    """Yields every place where the manifest does not fit its schema.

    Args:
        manifest: any object.
        version: of Kubernetes, one of `kubernetes_versions`.

    Raises:
        MissingToolError: kubernetes-validate is not installed.
        ConfigError: it has no schemas of that version.
    """
    schemas = _Schemas.of(version)
    kind, api_version = str(manifest.content.get("kind") or ""), manifest.content.get("apiVersion")
    if not kind or not isinstance(api_version, str):
        yield manifest.problem("$", "schema", "apiVersion or kind is missing; allowed: both, as texts", Level.ERROR)
        return
    if validator := schemas.validator(api_version, kind):
        for breach in sorted(validator.iter_errors(manifest.content), key=lambda breach: list(map(str, breach.path))):
            path, message = _described(breach)
            yield manifest.problem(path, "schema", message, Level.ERROR)
    elif close := difflib.get_close_matches(kind, schemas.kinds(api_version), 1, 0.0):
        message = f"{api_version} {kind} is no kind of Kubernetes {version} or its operators; allowed: {close[0]}"
        yield manifest.problem("$.kind", "schema", message, Level.ERROR)
    else:
        templates = list(manifest.pod_templates())
        parts = "only its Pods are checked" if templates else "is not checked"
        message = f"{api_version} {kind}: {parts}, as there is no schema for it here"
        yield manifest.problem("$.kind", "unknown-kind", message, Level.HINT)
        for template in templates:
            for breach in schemas.pod_template.iter_errors(template.content):
                path, message = _described(breach)
                # Beside a Pod's fields without a template there are the kind's own.
                if not template.is_bare or path != "$.spec" or breach.validator != "additionalProperties":
                    yield manifest.problem(f"{template.path}{path[1:]}", "schema", message, Level.ERROR)


def kubernetes_versions() -> list[str]:
    """Versions of Kubernetes whose schemas are installed, e.g. ``1.34``, the oldest first.

    Raises:
        MissingToolError: kubernetes-validate is not installed.
    """
    found = {match[1] for each in _package().iterdir() if (match := re.match(_FOLDER.format(r"\d+\.\d+"), each.name))}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class _Schemas:
    """The schemas of one version of Kubernetes, and ours."""

    def __init__(self, version: str) -> None:
        if version not in kubernetes_versions():
            raise ConfigError(f"Kubernetes version is {version!r}; allowed: {', '.join(kubernetes_versions())}")
        folder = next(each for each in _package().iterdir() if re.match(_FOLDER.format(re.escape(version)), each.name))
        definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
        # The API server takes True where a condition's status is missing.
        definitions["$defs"]["io.k8s.api.batch.v1.PodFailurePolicyOnPodConditionsPattern"]["required"] = ["type"]
        self._registry: Registry[Any] = Registry().with_resource(_URI, Resource.from_contents(definitions))
        self._schemas = {
            ("/".join(filter(None, (meta["group"], meta["version"]))), meta["kind"]): {"$ref": f"{_URI}#/$defs/{name}"}
            for name, definition in definitions["$defs"].items()
            for meta in definition.get("x-kubernetes-group-version-kind", ())
        }
        own = json.loads((resources.files(__package__) / "schemas.json").read_text(encoding="utf-8"))["$defs"]
        self._schemas |= {key: own[name] for key, name in _OWN.items()}
        self.pod_template = self._validator({"$ref": f"{_URI}#/$defs/io.k8s.api.core.v1.PodTemplateSpec"})

    @classmethod
    def of(cls, version: str) -> _Schemas:
        _package()  # says what is missing, also after another call has read the schemas
        return cls._cached(version)

    @classmethod
    @functools.cache
    def _cached(cls, version: str) -> _Schemas:
        return cls(version)

    def validator(self, api_version: str, kind: str) -> Draft202012Validator | None:
        """For one kind; None where there is no schema of it."""
        schema = self._schemas.get((api_version, kind))
        return None if schema is None else self._validator(schema)

    def kinds(self, api_version: str) -> list[str]:
        """All kinds of one group and version."""
        return [kind for of, kind in self._schemas if of == api_version]

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        return Draft202012Validator(schema, registry=self._registry)


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
    elif breach.validator == "enum":
        message = f"{breach.instance!r}; allowed: {', '.join(str(each) for each in schema['enum'] if each is not None)}"
    return path, message


def _package() -> Any:
    try:
        import kubernetes_validate
    except ImportError as error:
        raise MissingToolError("the schemas are not installed: pip install kubernetes-validate") from error
    return resources.files(kubernetes_validate) / "kubernetes-json-schema"
