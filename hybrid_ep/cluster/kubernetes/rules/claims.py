"""Rules for devices by DRA: claims, claim templates, and the NVLink domains of several nodes."""

from __future__ import annotations

import re

from hybrid_ep.cluster.kubernetes.claims import CLAIM_KINDS, devices_of_claim
from hybrid_ep.cluster.kubernetes.manifest import Manifest, claim_of
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import containers, is_network, items, spec_of
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, Found, build_rule, rule


@rule("claims", Level.ERROR)
def _claims(manifest: Manifest) -> Found:
    """Every claim that a container uses is one of its Pod's, and every one of the Pod's is used, unless it is for
    network interfaces, which the whole Pod has. A claim of the Pod names a ResourceClaim or a template, and not both.
    """
    for template in manifest.pod_templates():
        for i, claim in enumerate(items(spec_of(template), "resourceClaims")):
            sources = [name for name in ("resourceClaimName", "resourceClaimTemplateName") if claim.get(name)]
            if len(sources) != 1:
                message = (
                    f"{' and '.join(sources) or 'no source'}; allowed: resourceClaimName or resourceClaimTemplateName"
                )
                yield Finding(f"{template.path}.spec.resourceClaims[{i}]", message)
        given = {str(claim.get("name")) for claim in items(spec_of(template), "resourceClaims")}
        used = set()
        for path, container in containers(template, init=True):
            for i, claim in enumerate(items(container.get("resources"), "claims")):
                used.add(str(claim.get("name")))
                if str(claim.get("name")) not in given:
                    allowed = ", ".join(sorted(given)) or "none, as the Pod has none"
                    yield Finding(f"{path}.resources.claims[{i}]", f"{claim.get('name')!r}; allowed: {allowed}")
        for name in sorted(given - used):
            kinds = [kind for request in template.claims.get(name, {}).values() for kind in request]
            if kinds and all(map(is_network, kinds)):
                continue
            message = (
                f"no container uses the claim {name!r}, so none gets the device; allowed: in resources.claims of one"
            )
            level = None if kinds else Level.WARNING  # another build's claim, perhaps for network interfaces
            yield Finding(f"{template.path}.spec.resourceClaims", message, level)


@rule("claim-shared", Level.WARNING)
def _claim_shared(manifest: Manifest) -> Found:
    """Several Pods name a ResourceClaimTemplate, and not one ResourceClaim: with one claim, all of them get the same
    devices, and so the same node.
    """
    for template in manifest.pod_templates():
        for i, claim in enumerate(items(spec_of(template), "resourceClaims")):
            if claim.get("resourceClaimName") and (template.num_pods or 1) > 1:
                message = (
                    f"{claim['resourceClaimName']!r} for {template.num_pods} Pods; allowed: resourceClaimTemplateName"
                )
                yield Finding(f"{template.path}.spec.resourceClaims[{i}].resourceClaimName", message)


@rule("device-request", Level.ERROR)
def _device_request(manifest: Manifest) -> Found:
    """A request of a claim is `exactly` one or `firstAvailable`, and has a count only where it does not ask for all
    devices. Constraints and configurations name requests of the claim, and a constraint's attribute has a domain.
    """
    if manifest.kind not in CLAIM_KINDS:
        return
    path, devices = devices_of_claim(manifest)
    names = set()
    for i, request in enumerate(items(devices, "requests")):
        names |= {str(request.get("name"))}
        names |= {f"{request.get('name')}/{each.get('name')}" for each in items(request, "firstAvailable")}
        ways = [way for way in ("deviceClassName", "exactly", "firstAvailable") if request.get(way)]
        if len(ways) != 1:
            message = f"{' and '.join(ways) or 'no device class'}; allowed: exactly or firstAvailable"
            yield Finding(f"{path}.requests[{i}]", message)
        for each in (request, request.get("exactly") or {}, *items(request, "firstAvailable")):
            if each.get("allocationMode") == "All" and each.get("count"):
                message = f"a count of {each['count']} with allocationMode All; allowed: one of them"
                yield Finding(f"{path}.requests[{i}]", message)
    for key in ("constraints", "config"):
        for i, each in enumerate(items(devices, key)):
            for name in each.get("requests") or ():
                if name not in names:
                    message = f"{name!r}; allowed: {', '.join(sorted(names))}"
                    yield Finding(f"{path}.{key}[{i}].requests", message)
            attribute = each.get("matchAttribute")
            if attribute is not None and not re.fullmatch(r"[a-z0-9.-]+/\w+", attribute):
                message = f"{attribute!r}; allowed: with its domain, e.g. resource.kubernetes.io/pcieRoot"
                yield Finding(f"{path}.{key}[{i}].matchAttribute", message)


@rule("claim-request", Level.ERROR)
def _claim_request(manifest: Manifest) -> Found:
    """A request that a container names of a claim is one of the claim's, where the build has the claim: the API server
    takes any, and the Pod is never scheduled.
    """
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            for i, claim in enumerate(items(container.get("resources"), "claims")):
                names = template.claims.get(str(claim.get("name")), {})
                asked = str(claim.get("request") or "")
                if names and asked and asked.partition("/")[0] not in names:
                    where = f"{path}.resources.claims[{i}].request"
                    yield Finding(where, f"{asked!r}; allowed: {', '.join(names)}")


@build_rule("compute-domain", Level.ERROR)
def _compute_domain(build: Build) -> BuildFound:
    """A ComputeDomain's numNodes is 0 or the number of Pods that claim its channel: the driver waits for that many."""
    for domain in build:
        if domain.kind != "ComputeDomain":
            continue
        channel = (domain.spec.get("channel") or {}).get("resourceClaimTemplate") or {}
        counts = [
            template.num_pods
            for manifest in build
            for template in manifest.pod_templates()
            if ("ResourceClaimTemplate", str(channel.get("name")))
            in map(claim_of, items(spec_of(template), "resourceClaims"))
        ]
        wanted = domain.spec.get("numNodes")
        known = [count for count in counts if count is not None]
        if wanted and known and len(known) == len(counts) and sum(known) != wanted:
            yield (
                domain,
                Finding(
                    "$.spec.numNodes", f"{wanted}, and {sum(known)} Pods claim the channel; allowed: {sum(known)} or 0"
                ),
            )
