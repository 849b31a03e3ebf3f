"""Devices by DRA: what the claims and claim templates of a build ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Requests", "claim_of", "requests_by_claim"]

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
