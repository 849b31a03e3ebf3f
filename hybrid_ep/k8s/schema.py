"""Manifests against schemas: Kubernetes' own through the package kubernetes-validate, our closed ones for other kinds.

A Pod template inside an MPIJob is checked as a `PodTemplate` of Kubernetes, because the operator's CRD does not look
into it. Unknown fields are errors everywhere: the API server drops them without a word.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, MissingToolError
from hybrid_ep.k8s.problem import Problem

__all__ = ["KUBERNETES_VERSION", "check_schema", "json_path"]

# The first in which resource.k8s.io/v1, which the gb200-mnnvl overlay claims its channel through, is on by default.
KUBERNETES_VERSION = "1.34"
_OWN = {"MPIJob": "mpijob-v2beta1.json", "ComputeDomain": "computedomain-v1beta1.json"}


def check_schema(manifest: Manifest) -> Iterator[Problem]:
    """Yields every place where the manifest does not fit its schema.

    Raises:
        MissingToolError: kubernetes-validate is not installed.
    """
    try:
        import kubernetes_validate
    except ImportError as error:
        raise MissingToolError("the schemas are not installed: pip install kubernetes-validate") from error

    def problem(path: str, message: str) -> Problem:
        return Problem(str(manifest.source), manifest.name, path, "schema", message)

    if manifest.kind in _OWN:
        from jsonschema import Draft202012Validator

        for breach in Draft202012Validator(_schema(_OWN[manifest.kind])).iter_errors(manifest.content):
            yield problem(json_path("$", breach.absolute_path), breach.message)
        for template in manifest.pod_templates():
            content = {"apiVersion": "v1", "kind": "PodTemplate", "template": template.content}
            for path, message in _errors_of_kubernetes(content):
                yield problem(path.replace("$.template", template.path, 1), message)
        return
    if not manifest.kind or not isinstance(manifest.content.get("apiVersion"), str):
        yield problem("$", "apiVersion or kind is missing")
        return
    try:
        for path, message in _errors_of_kubernetes(manifest.content):
            yield problem(path, message)
    except kubernetes_validate.SchemaNotFoundError:
        kind = f"{manifest.content['apiVersion']} {manifest.kind}"
        yield problem("$.kind", f"{kind} is no kind of Kubernetes {KUBERNETES_VERSION}; also known: {', '.join(_OWN)}")


def json_path(root: str, parts: Any) -> str:
    """``$``, ``["spec", 0, "a.b"]`` → ``$.spec[0]['a.b']``."""
    text = root
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if part.replace("_", "").isalnum() else f"['{part}']"
    return text


def _errors_of_kubernetes(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(content, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield json_path("$", error.absolute_path), error.message


@functools.cache
def _schema(name: str) -> Any:
    return json.loads((resources.files("hybrid_ep.k8s") / "schemas" / name).read_text(encoding="utf-8"))
