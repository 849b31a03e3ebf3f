"""Rules for the Pods of any workload: what the API server or the kubelet refuses though it fits the schemas."""

from __future__ import annotations

import json
import re
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import (
    MULTUS,
    NETWORKS,
    amount,
    amounts,
    containers,
    containers_of,
    gpus,
    items,
    main,
    runs,
    security,
    spec_of,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule

_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
# An MPIJob's workers are named after it, with -worker-N added, in one label of DNS.
_LONGEST_NAME = {"CronJob": 52, "Job": 63, "Namespace": 63, "Service": 63, "MPIJob": 51}
_RESTART = {
    "Always": ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "LeaderWorkerSet"),
    "Never or OnFailure": ("Job", "CronJob", "JobSet"),
}

_OWN_RESOURCE = r"cpu|memory|ephemeral-storage|hugepages-[1-9]\d*[KMG]i"
_MIG = r"nvidia\.com/mig-\d+c?\.?\d*g\.\d+gb(\.me|\.me\.all|\.gfx|-me)?(\.shared)?"
# A resource → spellings of it that are seen, in small letters and without dots, dashes and a last s.
_RESOURCES = {
    "nvidia.com/gpu": ("gpu", "nvidiagpu", "nvidia/gpu", "nvidiacom/gpu"),
    "amd.com/gpu": ("amdgpu", "amd/gpu", "amdcom/gpu"),
    "vpc.amazonaws.com/efa": ("efa", "awscom/efa", "amazonawscom/efa", "vpcamazonawscom/efa"),
    "memory": ("memory",),
    "cpu": ("cpu",),
}


@rule("duplicate-key", Level.ERROR)
def _duplicate_key(manifest: Manifest) -> Found:
    """No mapping has a key twice: one of the two values would be lost, and the API server refuses it."""
    for path in manifest.duplicates:
        yield Finding(path, "is given twice; allowed: once")


@rule("no-pod", Level.ERROR)
def _no_pod(manifest: Manifest) -> Found:
    """A workload has a Pod template with a spec: the schemas accept `null`, and the API server does not."""
    if manifest.has_pods and not any(manifest.pod_templates()):
        yield Finding("$.spec", f"no Pod for the {manifest.kind}; allowed: a Pod template with containers")


@rule("name", Level.ERROR)
def _name(manifest: Manifest) -> Found:
    """An object's name is lower-case letters, digits, `-` and `.`, and as long as its kind allows: the API server
    refuses others.
    """
    name = manifest.metadata.get("name")
    if manifest.metadata.get("generateName") or manifest.api_version.startswith("rbac.authorization.k8s.io/"):
        return
    longest = _LONGEST_NAME.get(manifest.kind, 253)
    if not isinstance(name, str) or not re.fullmatch(_SUBDOMAIN, name):
        yield Finding("$.metadata.name", f"{name!r}; allowed: lower-case letters, digits, '-' and '.' between them")
    elif len(name) > longest:
        yield Finding("$.metadata.name", f"{name!r} has {len(name)} characters; allowed: up to {longest}")


@rule("annotation-json", Level.ERROR)
def _annotation_json(manifest: Manifest) -> Found:
    """An annotation that lists networks as JSON is a list in JSON, no two have one interface, and none of Multus has
    eth0, which is that of the cluster's own network: the network plugin fails the Pod otherwise.
    """
    for template in manifest.pod_templates():
        for name, value in ((template.content.get("metadata") or {}).get("annotations") or {}).items():
            path = json_path(f"{template.path}.metadata.annotations", [name])
            if name == MULTUS and re.search(r"""@eth0\s*(,|$)|"interface"\s*:\s*"eth0\"""", str(value)):
                yield Finding(path, "'eth0' is of the cluster's own network; allowed: another name, e.g. 'net1'")
            if name in NETWORKS and str(value).lstrip().startswith(("[", "{")):
                try:
                    listed = json.loads(value)
                except ValueError as error:
                    yield Finding(path, f"is not JSON: {error}; allowed: a list of networks as JSON")
                    continue
                if not isinstance(listed, list):
                    yield Finding(path, "is a single network; allowed: a list of networks, also of one, as JSON")
                    continue
                named = [
                    each.get("interfaceName") or each.get("interface") for each in listed if isinstance(each, dict)
                ]
                for interface in sorted({str(each) for each in named if each and named.count(each) > 1}):
                    yield Finding(path, f"{interface!r} is given twice; allowed: an interface each")


@rule("volume-mount", Level.ERROR)
def _volume_mount(manifest: Manifest) -> Found:
    """Every volumeMount names a volume of its Pod, and no two mounts of a container have one path. The path has no `:`,
    and subPath stays inside the volume. subPathExpr stands alone and names variables of the container: it is not
    started otherwise.
    """
    claims = items(manifest.spec, "volumeClaimTemplates") + items(manifest.spec, "volumeClaimPolicies")
    claims += items(manifest.spec.get("leaderWorkerTemplate"), "volumeClaimTemplates")
    given_by_claims = {str((claim.get("metadata") or {}).get("name")) for claim in claims}
    given_by_claims |= {str(t["metadata"].get("name")) for claim in claims for t in claim.get("templates") or []}
    for template in manifest.pod_templates():
        given = given_by_claims | {str(volume.get("name")) for volume in items(spec_of(template), "volumes")}
        for path, container in containers(template, init=True):
            taken = set()
            for i, mount in enumerate(items(container, "volumeMounts")):
                if str(mount.get("name")) not in given:
                    allowed = ", ".join(sorted(given)) or "none, as the Pod has no volumes"
                    yield Finding(f"{path}.volumeMounts[{i}].name", f"{mount.get('name')!r}; allowed: {allowed}")
                if (where := mount.get("mountPath")) in taken:
                    yield Finding(
                        f"{path}.volumeMounts[{i}].mountPath", f"{where!r} is taken; allowed: a path of its own"
                    )
                taken.add(where)
                if ":" in str(where):
                    yield Finding(f"{path}.volumeMounts[{i}].mountPath", f"{where!r}; allowed: a path without ':'")
                inside = str(mount.get("subPath") or "")
                if inside.startswith("/") or ".." in inside.split("/"):
                    yield Finding(f"{path}.volumeMounts[{i}].subPath", f"{inside!r}; allowed: a path without '..'")
                where, expression = f"{path}.volumeMounts[{i}].subPathExpr", str(mount.get("subPathExpr") or "")
                if inside and expression:
                    yield Finding(where, f"{expression!r} beside subPath {inside!r}; allowed: one of them")
                known = {str(variable.get("name")) for variable in items(container, "env")}
                for name in re.findall(r"(?<!\$)\$\(([^()]+)\)", expression) if not container.get("envFrom") else ():
                    if name not in known:
                        allowed = ", ".join(sorted(known)) or "none, as the container has no variables"
                        yield Finding(where, f"$({name}); allowed: {allowed}")


@rule("volume-unused", Level.WARNING)
def _volume_unused(manifest: Manifest) -> Found:
    """A container mounts every volume of its Pod: otherwise the mount was forgotten, or the volume is left over."""
    for template in manifest.pod_templates():
        uses = [
            str(use.get("name"))
            for _, container in containers(template, init=True)
            for key in ("volumeMounts", "volumeDevices")
            for use in items(container, key)
        ]
        volumes = items(spec_of(template), "volumes")
        is_misspelt = not {str(volume.get("name")) for volume in volumes}.issuperset(uses)  # a finding of volume-mount
        for i, volume in enumerate(volumes):
            in_memory = (volume.get("emptyDir") or {}).get("medium") == "Memory"  # of interest to shared-memory
            if str(volume.get("name")) not in uses and not is_misspelt and not in_memory:
                message = f"{volume.get('name')!r} is mounted by no container; allowed: with a volumeMount, or none"
                yield Finding(f"{template.path}.spec.volumes[{i}].name", message)


@rule("init-container", Level.ERROR)
def _init_container(manifest: Manifest) -> Found:
    """An init container ends, unless it is a sidecar with restartPolicy `Always`: the others start after it."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            said = " ".join(str(word) for key in ("command", "args") for word in container.get(key) or [])
            endless = re.search(r"\bsleep (infinity|inf)\b|\btail -f /dev/null\b", said)
            if ".initContainers[" in path and container.get("restartPolicy") != "Always" and endless:
                yield Finding(path, f"{endless[0]!r} never ends; allowed: a command that ends, or restartPolicy Always")


@rule("ephemeral-container", Level.ERROR)
def _ephemeral_container(manifest: Manifest) -> Found:
    """A manifest has no ephemeralContainers: they are added to a running Pod, by `kubectl debug`, and the API server
    refuses a Pod or a Pod template with some.
    """
    for template in manifest.pod_templates():
        if found := items(spec_of(template), "ephemeralContainers"):
            names = ", ".join(str(each.get("name")) for each in found)
            yield Finding(f"{template.path}.spec.ephemeralContainers", f"{names}; allowed: none")


@rule("unique-name", Level.ERROR)
def _unique_name(manifest: Manifest) -> Found:
    """Containers, volumes and scheduling gates of a Pod, and ports of a container, each have a name of their own."""
    for template in manifest.pod_templates():
        named = [(f"{path}.name", container) for path, container in containers(template, init=True)]
        yield from _taken(named)
        volumes = items(spec_of(template), "volumes")
        yield from _taken([(f"{template.path}.spec.volumes[{i}].name", volume) for i, volume in enumerate(volumes)])
        gates = items(spec_of(template), "schedulingGates")
        yield from _taken([(f"{template.path}.spec.schedulingGates[{i}].name", gate) for i, gate in enumerate(gates)])
        for path, container in containers(template, init=True):
            ports = items(container, "ports")
            yield from _taken([(f"{path}.ports[{i}].name", port) for i, port in enumerate(ports) if "name" in port])


def _taken(named: list[tuple[str, dict[str, Any]]]) -> Found:
    seen = set()
    for path, thing in named:
        if (name := thing.get("name")) in seen:
            yield Finding(path, f"{name!r} is taken; allowed: a name of its own")
        seen.add(name)


@rule("environment-twice", Level.WARNING)
def _environment_twice(manifest: Manifest) -> Found:
    """A container sets no variable twice: only the last one has an effect."""
    for path, container in containers_of(manifest):
        seen: dict[str, int] = {}
        for i, variable in enumerate(items(container, "env")):
            name = str(variable.get("name"))
            if name in seen:
                yield Finding(f"{path}.env[{i}]", f"{name} is also in env[{seen[name]}]; allowed: once")
            seen[name] = i


@rule("command-words", Level.ERROR)
def _command_words(manifest: Manifest) -> Found:
    """A command is a list of words, of which the first is the program alone. A shell's script, after `-c`, is one word:
    more words are lost unless the script asks for them (`$1`, `$@`). A backslash that continues a line is its last
    character.
    """
    for path, container in containers_of(manifest):
        command, args = (list(map(str, container.get(key) or [])) for key in ("command", "args"))
        if command and re.search(r"\S\s+\S", command[0]):
            message = f"{command[0]!r} is taken as the name of a program; allowed: a word each, or a shell with -c"
            yield Finding(f"{path}.command[0]", message)
        said = command + args
        shell = said[:1] and re.fullmatch(r"(/\S*/)?(ba|da|z|k)?sh", said[0])
        for key in ("command", "args") if shell else ():
            for i, word in enumerate(map(str, container.get(key) or [])):
                if broken := re.search(r"[^\n]*\\[ \t]+(?=\n)", word):
                    message = f"{broken[0].strip()[-40:]!r} has spaces behind its backslash; allowed: none"
                    yield Finding(f"{path}.{key}[{i}]", message)
        at = _script(said) if shell else None
        if at and len(said) > at + 1 and not re.search(r"\$\{?[@*#0-9]", said[at]):
            lost = at + 1
            if said[lost:] in _SCRIPT_NAMES:
                continue
            where = f"command[{lost}]" if lost < len(command) else f"args[{lost - len(command)}]"
            message = f'{said[lost]!r} is no part of the script {said[at]!r:.60}; allowed: one word, or "$@" in it'
            yield Finding(f"{path}.{where}", message)


_SCRIPT_NAMES = [["--"], ["-"], ["_"], ["sh"], ["bash"]]  # what a script is called by habit, behind it


def _script(said: list[str]) -> int | None:
    """The place of a shell's script: behind ``-c``, and behind options that stand between; None where there is none."""
    at = next((i + 1 for i, word in enumerate(said) if re.fullmatch(r"-[a-z]*c", word)), None)
    while at and at < len(said) and re.fullmatch(r"[-+][a-z]+", said[at]):
        at += 2 if said[at].endswith("o") else 1
    return at


@rule("port", Level.ERROR)
def _port(manifest: Manifest) -> Found:
    """A probe's named port is one of its container's, and under hostNetwork a hostPort equals its containerPort. No two
    ports of a Pod have one hostPort.
    """
    for template in manifest.pod_templates():
        of_host = set()
        for path, container in containers(template):
            for i, port in enumerate(items(container, "ports")):
                key = port.get("hostPort"), port.get("protocol", "TCP"), port.get("hostIP")
                if key[0] and key in of_host:
                    yield Finding(f"{path}.ports[{i}].hostPort", f"{key[0]} is taken; allowed: a port of its own")
                of_host.add(key)
        for path, container in containers(template, init=True):
            ports = items(container, "ports")
            names = {port.get("name") for port in ports}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                for way in ("tcpSocket", "httpGet"):
                    asked = ((container.get(probe) or {}).get(way) or {}).get("port")
                    if isinstance(asked, str) and asked not in names:
                        allowed = ", ".join(sorted(str(name) for name in names if name)) or "a number"
                        yield Finding(f"{path}.{probe}.{way}.port", f"{asked!r}; allowed: {allowed}")
                    if isinstance(asked, int) and not 0 < asked < 65536:
                        yield Finding(f"{path}.{probe}.{way}.port", f"{asked}; allowed: 1 to 65535")
            for i, port in enumerate(ports):
                host = port.get("hostPort")
                if spec_of(template).get("hostNetwork") and host not in (None, port.get("containerPort")):
                    yield Finding(f"{path}.ports[{i}].hostPort", f"{host}; allowed: {port.get('containerPort')}")


@rule("request-over-limit", Level.ERROR)
def _request_over_limit(manifest: Manifest) -> Found:
    """No request is larger than its limit: the API server refuses the Pod."""
    for path, container in containers_of(manifest):
        limits = amounts(container, "limits")
        for name, asked in amounts(container, "requests").items():
            if name in limits and "/" not in name and amount(asked) > amount(limits[name]):
                where = json_path(f"{path}.resources.requests", [name])
                yield Finding(where, f"{asked} with a limit of {limits[name]}; allowed: up to the limit")


@rule("bytes", Level.ERROR)
def _bytes(manifest: Manifest) -> Found:
    """Amounts of memory and disk are at least 1 KiB: a number alone is bytes, and `m` is a thousandth of one."""
    for template in manifest.pod_templates():
        stated: list[tuple[str, Any]] = []
        owners = [(f"{path}.resources", container) for path, container in containers(template, init=True)]
        for path, owner in [*owners, (f"{template.path}.spec.resources", spec_of(template))]:
            for which in ("requests", "limits"):
                for name, value in amounts(owner, which).items():
                    if re.fullmatch(r"memory|ephemeral-storage|hugepages-.+", name):
                        stated.append((json_path(f"{path}.{which}", [name]), value))
        for i, volume in enumerate(items(spec_of(template), "volumes")):
            size = (volume.get("emptyDir") or {}).get("sizeLimit")
            stated.append((f"{template.path}.spec.volumes[{i}].emptyDir.sizeLimit", size))
        for where, value in stated:
            if 0 < amount(value) < 1024:
                yield Finding(where, f"{value} is {amount(value):g} bytes; allowed: at least 1Ki, e.g. 512Mi")


@rule("resource-name", Level.ERROR)
def _resource_name(manifest: Manifest) -> Found:
    """A resource is cpu, memory, ephemeral-storage or huge pages, or has its vendor's domain, as the vendor's device
    plugin spells it: the API server refuses others, or no node offers them.
    """
    for path, container in containers_of(manifest):
        for which in ("requests", "limits"):
            for name in amounts(container, which):
                where = json_path(f"{path}.resources.{which}", [name])
                spelt = re.sub(r"[^a-z/]", "", name.lower()).removesuffix("s")
                meant = next((known for known, spellings in _RESOURCES.items() if spelt in spellings), None)
                if meant and name != meant:
                    yield Finding(where, f"{name!r}; allowed: {meant!r}")
                elif re.match(r"nvidia\.com/mig[-.]", name) and not re.fullmatch(_MIG, name):
                    yield Finding(where, f"{name!r}; allowed: as nvidia.com/mig-1g.10gb")
                elif "/" not in name and not re.fullmatch(_OWN_RESOURCE, name):
                    allowed = "cpu, memory, ephemeral-storage, hugepages-SIZE, or a name with a domain"
                    yield Finding(where, f"{name!r}; allowed: {allowed}, e.g. nvidia.com/gpu")


@rule("gpu-limit", Level.ERROR)
def _gpu_limit(manifest: Manifest) -> Found:
    """GPUs and NICs are whole devices: a request needs a limit of the same number."""
    for path, container in containers_of(manifest):
        limits, requests = amounts(container, "limits"), amounts(container, "requests")
        for name, asked in requests.items():
            if "/" in name and (name not in limits or amount(asked) != amount(limits[name])):
                seen = f"{name} is requested {asked} times, its limit is {limits.get(name)}"
                yield Finding(
                    f"{path}.resources.requests['{name}']", f"{seen}; allowed: the limit alone, or both equal"
                )
        for name, given in limits.items():
            if "/" in name and amount(given) % 1 != 0:
                yield Finding(f"{path}.resources.limits['{name}']", f"{given}; allowed: whole numbers")


@rule("hugepages", Level.ERROR)
def _hugepages(manifest: Manifest) -> Found:
    """A container with huge pages also states cpu or memory, has a limit of them, and requests as many as that:
    Kubernetes refuses the Pod otherwise. A Pod with a volume of huge pages has some: it never starts otherwise.
    """
    for template in manifest.pod_templates():
        asked = {name for _, each in containers(template, init=True) for name in amounts(each, "limits")}
        for i, volume in enumerate(items(spec_of(template), "volumes")):
            medium = str((volume.get("emptyDir") or {}).get("medium") or "")
            wanted = medium.replace("HugePages", "hugepages")
            if wanted.startswith("hugepages") and not any(name.startswith(wanted) for name in asked):
                message = f"{medium!r}, and no container has a limit of {wanted}; allowed: with one"
                yield Finding(f"{template.path}.spec.volumes[{i}].emptyDir.medium", message)
        for path, container in containers(template, init=True):
            stated = amounts(container, "limits") | amounts(container, "requests")
            pages = [name for name in stated if name.startswith("hugepages-")]
            if pages and not {"cpu", "memory"} & stated.keys():
                yield Finding(f"{path}.resources", f"{', '.join(pages)} alone; allowed: with cpu or memory")
            limits, requests = amounts(container, "limits"), amounts(container, "requests")
            for name in pages:
                where = json_path(f"{path}.resources.requests", [name])
                if name not in limits:
                    yield Finding(where, f"{requests[name]} without a limit; allowed: with a limit of {requests[name]}")
                elif name in requests and amount(requests[name]) != amount(limits[name]):
                    yield Finding(where, f"{requests[name]} with a limit of {limits[name]}; allowed: the limit")


@rule("run-as-root", Level.ERROR)
def _run_as_root(manifest: Manifest) -> Found:
    """A container with runAsNonRoot has no runAsUser 0: the kubelet never starts it."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            context = security(template, container)
            if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
                where = path if "runAsUser" in (container.get("securityContext") or {}) else f"{template.path}.spec"
                yield Finding(
                    f"{where}.securityContext.runAsUser", "0 with runAsNonRoot; allowed: the id of another user"
                )


@rule("privileged", Level.ERROR)
def _privileged(manifest: Manifest) -> Found:
    """A privileged container does not forbid itself more privileges. Only a privileged container hands its mounts to
    the host (`Bidirectional`). The API server refuses others.
    """
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            context = container.get("securityContext") or {}
            if context.get("privileged") and context.get("allowPrivilegeEscalation") is False:
                where = f"{path}.securityContext.allowPrivilegeEscalation"
                yield Finding(where, "false with privileged; allowed: true, or none")
            for i, mount in enumerate(items(container, "volumeMounts")):
                if mount.get("mountPropagation") == "Bidirectional" and not context.get("privileged"):
                    where = f"{path}.volumeMounts[{i}].mountPropagation"
                    yield Finding(
                        where, "'Bidirectional' without privileged; allowed: 'HostToContainer', or privileged"
                    )


@rule("restart-policy", Level.ERROR)
def _restart_policy(manifest: Manifest) -> Found:
    """A Job's Pods are restarted `Never` or `OnFailure`, and those of all other workloads `Always`, without a deadline.
    Only an init container has a policy of its own, `Always`: before Kubernetes 1.35 the API server refuses others.
    """
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            is_init, policy = ".initContainers[" in path, container.get("restartPolicy")
            if policy is not None and (not is_init or policy != "Always"):
                where = "none, or 'Always'" if is_init else "none, as it is no init container"
                yield Finding(f"{path}.restartPolicy", f"{policy!r}; allowed: {where}", Level.WARNING)
    allowed = next((policy for policy, kinds in _RESTART.items() if manifest.kind in kinds), "")
    for template in manifest.pod_templates() if allowed else ():
        default = "OnFailure" if manifest.kind == "JobSet" else "Always"
        seen = spec_of(template).get("restartPolicy", default)
        if seen not in allowed.split(" or "):
            yield Finding(f"{template.path}.spec.restartPolicy", f"{seen!r}; allowed: {allowed}")
        if allowed == "Always" and spec_of(template).get("activeDeadlineSeconds") is not None:
            seen = spec_of(template)["activeDeadlineSeconds"]
            yield Finding(f"{template.path}.spec.activeDeadlineSeconds", f"{seen} in a {manifest.kind}; allowed: none")


@rule("toleration", Level.ERROR)
def _toleration(manifest: Manifest) -> Found:
    """A toleration with the operator `Exists` has no value, and one without a key has that operator. Only `NoExecute`
    has tolerationSeconds.
    """
    for template in manifest.pod_templates():
        for i, toleration in enumerate(items(spec_of(template), "tolerations")):
            path, operator = f"{template.path}.spec.tolerations[{i}]", toleration.get("operator", "Equal")
            if operator == "Exists" and toleration.get("value"):
                yield Finding(f"{path}.value", f"{toleration['value']!r} with the operator Exists; allowed: none")
            if not toleration.get("key") and operator != "Exists":
                yield Finding(f"{path}.operator", f"{operator!r} without a key; allowed: Exists")
            if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
                message = f"with the effect {toleration.get('effect')!r}; allowed: with NoExecute"
                yield Finding(f"{path}.tolerationSeconds", message)


@rule("selector", Level.ERROR)
def _selector(manifest: Manifest) -> Found:
    """A workload's selector fits the labels of its own Pods: the API server refuses it otherwise."""
    selector = manifest.spec.get("selector")
    if manifest.kind not in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet") or not isinstance(selector, dict):
        return
    for template in manifest.pod_templates():
        labels = (template.content.get("metadata") or {}).get("labels") or {}
        for name, value in (selector.get("matchLabels") or {}).items():
            if labels.get(name) != value:
                path = json_path("$.spec.selector.matchLabels", [name])
                yield Finding(path, f"{value!r}, and the Pods have {labels.get(name)!r}; allowed: the Pods' own")


@rule("image-pinned", Level.WARNING)
def _image_pinned(manifest: Manifest) -> Found:
    """Every image has a digest or a tag other than `latest`: otherwise nodes may run different images."""
    for path, container in containers_of(manifest):
        image = str(container.get("image") or "")
        tag = image.rpartition("/")[2].partition(":")[2]
        if image and "@sha256:" not in image and tag in ("", "latest"):
            yield Finding(f"{path}.image", f"{image!r} is not pinned; allowed: NAME:VERSION or NAME@sha256:…")


@rule("shared-memory", Level.WARNING)
def _shared_memory(manifest: Manifest) -> Found:
    """Ranks, and several GPUs, get /dev/shm as a memory volume of more than 64 MiB: a container runtime gives as much,
    and NCCL needs more. Its size is below the memory limit, which it counts towards. It is not mounted readOnly.
    """
    for template in manifest.pod_templates():
        path, container = main(template)
        ranks = template.role == "Worker" or sum(map(amount, gpus(template, container).values())) > 1
        ranks = ranks or any(runs(container, name) for name in ("torchrun", "hybrid-ep", "vllm", "sglang"))
        if not ranks or template.role in ("DaemonSet", "Launcher") or spec_of(template).get("hostIPC"):
            continue
        mounts = {str(mount.get("mountPath")).rstrip("/"): mount for mount in items(container, "volumeMounts")}
        mount = mounts.get("/dev/shm") or {}
        volumes = {volume.get("name"): volume for volume in items(spec_of(template), "volumes")}
        volume = volumes.get(mount.get("name")) or {}
        if mount.get("readOnly"):
            yield Finding(f"{path}.volumeMounts", "/dev/shm is readOnly; allowed: false, as ranks make files in it")
        if "hostPath" in volume:
            continue
        empty_dir = volume.get("emptyDir") or {}
        if empty_dir.get("medium") != "Memory":
            level = None if gpus(template, container) else Level.HINT
            message = "no /dev/shm from an emptyDir of medium Memory, so it has 64 MiB; allowed: one"
            yield Finding(f"{path}.volumeMounts", message, level)
            continue
        where = f"{template.path}.spec.volumes[{list(volumes).index(volume['name'])}].emptyDir"
        size, limit = empty_dir.get("sizeLimit"), amounts(container, "limits").get("memory")
        if size is None:
            yield Finding(where, "no sizeLimit, so /dev/shm grows to the Pod's memory limit; allowed: one", Level.HINT)
        elif amount(size) > amount(limit):
            yield Finding(f"{where}.sizeLimit", f"{size} with a memory limit of {limit}; allowed: less than that")
        elif 1024 <= amount(size) <= 64 * 2**20:
            yield Finding(f"{where}.sizeLimit", f"{size} for ranks; allowed: more than 64Mi, e.g. 8Gi")
