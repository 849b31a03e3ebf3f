"""The rule for namespaces of a build that enforce a Pod Security Standard (kubernetes.io, "Pod Security Standards")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import added_capabilities, containers, items, security, spec_of
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, build_rule

_ENFORCE = "pod-security.kubernetes.io/enforce"
_LEVELS = ("privileged", "baseline", "restricted")
_BASELINE_CAPABILITIES = frozenset(
    [
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ]
)
_RESTRICTED_VOLUMES = frozenset(
    [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ]
)


@build_rule("pod-security", Level.ERROR)
def _pod_security(build: Build) -> BuildFound:
    """A namespace of the build that enforces a Pod Security Standard gets Pods that fit it: others are never made.
    Below `privileged` a Pod has no IPC_LOCK, host path or host network, so RDMA jobs need a namespace of that level.
    """
    enforced: dict[str, str] = {}
    for manifest in build:
        level = (manifest.metadata.get("labels") or {}).get(_ENFORCE) if manifest.kind == "Namespace" else None
        if level is not None and level not in _LEVELS:
            where = json_path("$.metadata.labels", [_ENFORCE])
            yield manifest, Finding(where, f"{level!r}; allowed: {', '.join(_LEVELS)}")
        if level in _LEVELS[1:]:
            enforced[str(manifest.metadata.get("name"))] = level
    for manifest in build:
        level = enforced.get(str(manifest.metadata.get("namespace")))
        for template in manifest.pod_templates() if level else ():
            found = [*_below_baseline(template)]
            found += _below_restricted(template) if level == "restricted" else ()
            for path, seen, allowed in found:
                name = manifest.metadata["namespace"]
                yield manifest, Finding(path, f"{seen} in {name}, which enforces {level}; allowed: {allowed}")


def _below_baseline(template: PodTemplate) -> Iterator[tuple[str, str, str]]:
    """(JSON path, what is there, what is allowed) of what the level `baseline` refuses."""
    spec, root = spec_of(template), f"{template.path}.spec"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{root}.{name}", "true", "false"
    for i, volume in enumerate(items(spec, "volumes")):
        if volume.get("hostPath") is not None:
            yield f"{root}.volumes[{i}].hostPath", f"{(volume['hostPath'] or {}).get('path')} of the host", "none"
    for path, owner in [(root, spec), *containers(template, init=True)]:
        context = owner.get("securityContext") or {}
        for kind in ("seccompProfile", "appArmorProfile"):
            if (context.get(kind) or {}).get("type") == "Unconfined":
                yield f"{path}.securityContext.{kind}.type", "'Unconfined'", "'RuntimeDefault' or 'Localhost'"
    for path, container in containers(template, init=True):
        if (container.get("securityContext") or {}).get("privileged"):
            yield f"{path}.securityContext.privileged", "true", "false"
        more = [name for name in added_capabilities(container) if name not in _BASELINE_CAPABILITIES]
        if more:
            yield f"{path}.securityContext.capabilities.add", ", ".join(more), "none of them"
        for i, port in enumerate(items(container, "ports")):
            if port.get("hostPort"):
                yield f"{path}.ports[{i}].hostPort", str(port["hostPort"]), "none"


def _below_restricted(template: PodTemplate) -> Iterator[tuple[str, str, str]]:
    """The same of what the level `restricted` refuses besides."""
    for i, volume in enumerate(items(spec_of(template), "volumes")):
        for source in volume.keys() - {"name", "hostPath"} - _RESTRICTED_VOLUMES:
            path = f"{template.path}.spec.volumes[{i}].{source}"
            yield path, f"a volume of {source}", ", ".join(sorted(_RESTRICTED_VOLUMES))
    for path, container in containers(template, init=True):
        own: dict[str, Any] = container.get("securityContext") or {}
        context = security(template, container)
        where = f"{path}.securityContext"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{where}.allowPrivilegeEscalation", str(own.get("allowPrivilegeEscalation")).lower(), "false"
        if context.get("runAsNonRoot") is not True:
            yield f"{where}.runAsNonRoot", str(context.get("runAsNonRoot")).lower(), "true, also of the Pod"
        elif context.get("runAsUser") == 0:
            yield f"{where}.runAsUser", "0", "the id of another user"
        if not (context.get("seccompProfile") or {}).get("type"):
            yield f"{where}.seccompProfile", "none", "'RuntimeDefault' or 'Localhost', also of the Pod"
        capabilities = own.get("capabilities") or {}
        if "ALL" not in [str(name).upper() for name in capabilities.get("drop") or []]:
            yield f"{where}.capabilities.drop", str(capabilities.get("drop") or "none"), "a list with ALL"
        if set(added_capabilities(container)) & (_BASELINE_CAPABILITIES - {"NET_BIND_SERVICE"}):
            yield f"{where}.capabilities.add", ", ".join(added_capabilities(container)), "NET_BIND_SERVICE alone"
