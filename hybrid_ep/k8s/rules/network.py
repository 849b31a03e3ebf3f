"""Rules for NICs and networks of a Pod."""

from __future__ import annotations

import json
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.rules.parts import NETWORKS, added_capabilities, amount, gpus, main, nics, security
from hybrid_ep.k8s.rules.registry import Finding, Found, rule


@rule("ipc-lock", Level.WARNING)
def _ipc_lock(manifest: Manifest) -> Found:
    """A Pod with RDMA NICs adds the capability IPC_LOCK or is privileged: otherwise the runtime's limit of locked
    memory holds, which is too small for RDMA on most nodes.
    """
    for template in manifest.pod_templates():
        path, container = main(template)
        found = [*nics(template), *_annotated(template)]
        if found and not security(template, container).get("privileged"):
            added = added_capabilities(container)
            if not {"IPC_LOCK", "ALL"} & set(added):
                where = f"{path}.securityContext.capabilities.add"
                yield Finding(where, f"{added} with {', '.join(found)}; allowed with RDMA: a list with IPC_LOCK")


@rule("nic-count", Level.WARNING)
def _nic_count(manifest: Manifest) -> Found:
    """A Pod's NICs are as many as its GPUs or a multiple or fraction of them, and each has a network. A single one is
    what a plugin for shared NICs hands out.
    """
    for template in manifest.pod_templates():
        path, container = main(template)
        devices = sum(amount(number) for number in gpus(container).values())
        for name, number in nics(template).items():
            count = amount(number)
            where = json_path(f"{path}.resources.limits", [name])
            odd = devices > 1 and count > 1 and max(devices, count) % min(devices, count)
            if odd and devices % 1 == 0:
                message = f"{number} with {devices:g} GPUs; allowed: as many, or a multiple or fraction of that"
                yield Finding(where, message)
            for annotation, networks in _annotated(template).items():
                if count > 1 and annotation == NETWORKS[0] and networks != count:
                    at = json_path(f"{template.path}.metadata.annotations", [annotation])
                    yield Finding(at, f"{networks} networks with {number} × {name}; allowed: {number}")


def _annotated(template: PodTemplate) -> dict[str, int]:
    """Networks that annotations give the Pod: annotation → how many."""
    found = {}
    for name, value in ((template.content.get("metadata") or {}).get("annotations") or {}).items():
        if name in NETWORKS:
            listed: Any = [network for network in str(value).split(",") if network.strip()]
            if str(value).lstrip().startswith("["):
                try:
                    listed = json.loads(value)
                except ValueError:
                    continue  # another rule's
            found[name] = len(listed)
    return found
