"""Devices by DRA: what the claims and claim templates of a build ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, Requests

__all__ = ["CLAIM_KINDS", "devices_of_claim", "with_claims"]

CLAIM_KINDS = ("ResourceClaim", "ResourceClaimTemplate")


def with_claims(build: Sequence[Manifest]) -> list[Manifest]:
    """The same objects, whose Pod templates know what the claims of the build ask for."""
    given = {
        (manifest.kind, str(manifest.metadata.get("name"))): _requests(manifest)
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


def _requests(manifest: Manifest) -> Requests:
    _, devices = devices_of_claim(manifest)
    return {str(request.get("name")): _numbers(request) for request in devices.get("requests") or ()}


def _numbers(request: dict[str, Any]) -> dict[str, int]:
    """Device class → number; empty where the number depends on the node, or where devices are only looked at.

    Since v1beta2 a request has its fields in ``exactly``. Of ``firstAvailable`` the node decides which one holds.
    """
    options = request.get("firstAvailable") or [request.get("exactly") or request]
    numbers = {option.get("count") or 1 for option in options}
    known = all(option.get("allocationMode") != "All" and not option.get("adminAccess") for option in options)
    return {str(options[0].get("deviceClassName")): numbers.pop()} if known and len(numbers) == 1 else {}
