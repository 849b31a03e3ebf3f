"""Devices by DRA: what the claims and claim templates of a build ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, Requests

__all__ = ["CLAIM_KINDS", "devices_of_claim", "with_claims"]

CLAIM_KINDS = ("ResourceClaim", "ResourceClaimTemplate")


def with_claims(build: Sequence[Manifest]) -> list[Manifest]:
    """The same objects, whose Pod templates know what the claims of the build ask for."""
    classes = {
        str(manifest.metadata.get("name")): _expressions(manifest.spec)
        for manifest in build
        if manifest.kind == "DeviceClass"
    }
    given = {
        (manifest.kind, str(manifest.metadata.get("name"))): _requests(manifest, classes)
        for manifest in build
        if manifest.kind in CLAIM_KINDS
    }
    return [replace(manifest, claims=given) for manifest in build]


def devices_of_claim(manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """JSON path and content of the ``devices`` of a claim or claim template."""
    path, spec = "$.spec", manifest.spec
    if manifest.kind == "ResourceClaimTemplate":
        path, spec = "$.spec.spec", spec.get("spec") or {}
    return f"{path}.devices", spec.get("devices") or {}


def _requests(manifest: Manifest, classes: Mapping[str, str]) -> Requests:
    _, devices = devices_of_claim(manifest)
    return {str(request.get("name")): _numbers(request, classes) for request in devices.get("requests") or ()}


def _numbers(request: dict[str, Any], classes: Mapping[str, str]) -> dict[str, float]:
    """Kind of device → number, NaN where that depends on the node; empty where devices are only looked at.

    Since v1beta2 a request has its fields in ``exactly``. Of ``firstAvailable`` the node decides which one holds.
    """
    options = request.get("firstAvailable") or [request.get("exactly") or request]
    if any(option.get("adminAccess") for option in options):
        return {}
    numbers = {option.get("count") or 1 for option in options}
    known = all(option.get("allocationMode") != "All" for option in options) and len(numbers) == 1
    return {_kind(options[0], classes): numbers.pop() if known else math.nan}


def _kind(option: dict[str, Any], classes: Mapping[str, str]) -> str:
    """The device class. The driver follows where a class of the build has another name. An interface of DRANET has
    ``with rdma``, unless the request selects it by something else.
    """
    kind = str(option.get("deviceClassName"))
    asked, of_class = _expressions(option), classes.get(kind, "")
    driver = re.search(r"""device\.driver\s*==\s*["']([\w.-]+)""", of_class)
    if driver and driver[1] not in kind:
        kind += f" of {driver[1]}"
    has_rdma = not asked or "rdma" in of_class + asked
    return f"{kind} with rdma" if re.search(r"dra\.?net", kind) and has_rdma and "rdma" not in kind else kind


def _expressions(spec: dict[str, Any]) -> str:
    """What a device class or a request selects by, in CEL."""
    return "\n".join(str((each.get("cel") or {}).get("expression")) for each in spec.get("selectors") or ())
