"""Rules for fields of Pods and Services that depend on each other, or whose values have a grammar of their own."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import NETWORKS, containers, fits, items, spec_of
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule
from hybrid_ep.cluster.kubernetes.schema import LABEL_VALUE

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_HANDLERS = ("exec", "grpc", "httpGet", "tcpSocket")
_FIELDS = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_CAPABILITIES = frozenset(
    re.findall(
        r"\w+",
        """
        ALL AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN DAC_OVERRIDE DAC_READ_SEARCH
        FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN
        NET_BIND_SERVICE NET_BROADCAST NET_RAW PERFMON SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT
        SYS_CHROOT SYS_MODULE SYS_NICE SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM
        """,
    )
)
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"((localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:\d+/))(:\d+)?/)?{_PATH}(/{_PATH})*"
    r"(:\w[\w.-]{0,127})?(@[A-Za-z0-9+.:_-]+:[0-9a-fA-F]{32,})?"
)
# Smallest and largest value, and names, of minute, hour, day of the month, month and day of the week.
_SCHEDULE = (
    (0, 59, ()),
    (0, 23, ()),
    (1, 31, ()),
    (1, 12, tuple(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"])),
    (0, 6, tuple(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])),
)
_SCHEDULE_WORD = re.compile(r"@(yearly|annually|monthly|weekly|daily|midnight|hourly|every ([\d.]+(ns|us|ms|s|m|h))+)")
_SERVICE_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"


@rule("selector-expression", Level.ERROR)
def _selector_expression(manifest: Manifest) -> Found:
    """An expression with `In` or `NotIn` has values, one with `Exists` or `DoesNotExist` none, and one with `Gt` or
    `Lt` a single whole number. A required node affinity has terms, and none is empty: an empty one fits no node.
    """
    for template in manifest.pod_templates():
        yield from _node_terms(template)
        for path, expression in _expressions(template):
            operator, values = expression.get("operator"), expression.get("values") or []
            if operator in ("In", "NotIn") and not values:
                yield Finding(f"{path}.values", f"none with {operator}; allowed: at least one")
            if operator in ("Exists", "DoesNotExist") and values:
                yield Finding(f"{path}.values", f"{values} with {operator}; allowed: none")
            if operator in ("Gt", "Lt") and not (len(values) == 1 and re.fullmatch(r"-?\d+", str(values[0]))):
                yield Finding(f"{path}.values", f"{values} with {operator}; allowed: one whole number")
            for value in values if ".matchFields[" not in path else ():
                if len(str(value)) > 63 or not re.fullmatch(LABEL_VALUE, str(value)):
                    message = (
                        f"{value!r}, which no label can have; allowed: up to 63 letters, digits and -_. between them"
                    )
                    yield Finding(f"{path}.values", message)


def _node_terms(template: PodTemplate) -> Found:
    affinity = (spec_of(template).get("affinity") or {}).get("nodeAffinity") or {}
    path = f"{template.path}.spec.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms"
    if _REQUIRED not in affinity:
        return
    terms = items(affinity[_REQUIRED], "nodeSelectorTerms")
    if not terms:
        yield Finding(path, "empty; allowed: at least one term")
    for i, term in enumerate(terms):
        if not term.get("matchExpressions") and not term.get("matchFields"):
            yield Finding(f"{path}[{i}]", "empty, so it fits no node; allowed: at least one expression")


def _expressions(template: PodTemplate) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON path, expression) of every selector of nodes and Pods."""
    affinity = spec_of(template).get("affinity") or {}
    root = f"{template.path}.spec.affinity"
    node = affinity.get("nodeAffinity") or {}
    selectors = [
        (f"{root}.nodeAffinity.{_REQUIRED}.nodeSelectorTerms[{i}]", term)
        for i, term in enumerate(items(node.get(_REQUIRED), "nodeSelectorTerms"))
    ]
    for i, term in enumerate(items(node, _PREFERRED)):
        selectors.append((f"{root}.nodeAffinity.{_PREFERRED}[{i}].preference", term.get("preference") or {}))
    for name in ("podAffinity", "podAntiAffinity"):
        for when, below in ((_REQUIRED, ""), (_PREFERRED, ".podAffinityTerm")):
            for i, term in enumerate(items(affinity.get(name), when)):
                of_pods = term.get("podAffinityTerm") or {} if below else term
                path = f"{root}.{name}.{when}[{i}]{below}.labelSelector"
                selectors.append((path, of_pods.get("labelSelector") or {}))
    for i, term in enumerate(items(spec_of(template), "topologySpreadConstraints")):
        path = f"{template.path}.spec.topologySpreadConstraints[{i}].labelSelector"
        selectors.append((path, term.get("labelSelector") or {}))
    for path, selector in selectors:
        for key in ("matchExpressions", "matchFields"):
            for i, expression in enumerate(items(selector, key)):
                yield f"{path}.{key}[{i}]", expression


@rule("probe", Level.ERROR)
def _probe(manifest: Manifest) -> Found:
    """A probe has one handler. The successThreshold of a livenessProbe and a startupProbe is 1, and a readinessProbe,
    which ends no container, has no terminationGracePeriodSeconds. An init container has probes and a lifecycle only as
    a sidecar, with restartPolicy `Always`.
    """
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            runs_to_end = ".initContainers[" in path and container.get("restartPolicy") != "Always"
            if runs_to_end and container.get("lifecycle"):
                message = "of a container that runs to its end; allowed: with restartPolicy Always"
                yield Finding(f"{path}.lifecycle", message)
            for name in ("livenessProbe", "readinessProbe", "startupProbe"):
                probe = container.get(name)
                if not isinstance(probe, dict):
                    continue
                ways = [way for way in _HANDLERS if probe.get(way) is not None]
                if len(ways) != 1:
                    found = " and ".join(ways) or "none"
                    yield Finding(f"{path}.{name}", f"{found}; allowed: one of {', '.join(_HANDLERS)}")
                if name != "readinessProbe" and probe.get("successThreshold") not in (None, 0, 1):
                    yield Finding(f"{path}.{name}.successThreshold", f"{probe['successThreshold']}; allowed: 1")
                if name == "readinessProbe" and probe.get("terminationGracePeriodSeconds") is not None:
                    seen = f"{probe['terminationGracePeriodSeconds']} of a readinessProbe"
                    yield Finding(f"{path}.{name}.terminationGracePeriodSeconds", f"{seen}; allowed: none")
                if runs_to_end:
                    message = "of a container that runs to its end; allowed: with restartPolicy Always"
                    yield Finding(f"{path}.{name}", message)


@rule("volume-source", Level.ERROR)
def _volume_source(manifest: Manifest) -> Found:
    """A volume has one source."""
    for template in manifest.pod_templates():
        for i, volume in enumerate(items(spec_of(template), "volumes")):
            sources = sorted(name for name, value in volume.items() if name != "name" and value is not None)
            if len(sources) > 1:
                yield Finding(f"{template.path}.spec.volumes[{i}]", f"{' and '.join(sources)}; allowed: one of them")


@rule("environment", Level.ERROR)
def _environment(manifest: Manifest) -> Found:
    """A variable's name has no `=`. It has a value, or takes it from one source that exists."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            for i, variable in enumerate(items(container, "env")):
                where, name = f"{path}.env[{i}]", str(variable.get("name", ""))
                if not re.fullmatch(r"[ -<>-~]+", name):
                    yield Finding(f"{where}.name", f"{name!r}; allowed: letters, digits and signs other than '='")
                source = variable.get("valueFrom")
                if not isinstance(source, dict):
                    continue
                if variable.get("value"):
                    yield Finding(where, f"{name} has a value and valueFrom; allowed: one of them")
                if len(source) != 1:
                    found = " and ".join(sorted(source)) or "none"
                    yield Finding(f"{where}.valueFrom", f"{found}; allowed: one source")
                field = (source.get("fieldRef") or {}).get("fieldPath")
                if field is not None and not _FIELDS.fullmatch(str(field)):
                    message = (
                        f"{field!r}; allowed: metadata.name, .namespace, .uid, .labels['…'], .annotations['…'], "
                        "spec.nodeName, .serviceAccountName, status.hostIP, .hostIPs, .podIP, .podIPs"
                    )
                    yield Finding(f"{where}.valueFrom.fieldRef.fieldPath", message)


@rule("capability", Level.ERROR)
def _capability(manifest: Manifest) -> Found:
    """Capabilities have the names of Linux, without the prefix `CAP_`: the container runtime starts no container with
    an unknown one.
    """
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            capabilities = (container.get("securityContext") or {}).get("capabilities") or {}
            for way in ("add", "drop"):
                for i, name in enumerate(capabilities.get(way) or []):
                    short = str(name).upper().removeprefix("CAP_")
                    where = f"{path}.securityContext.capabilities.{way}[{i}]"
                    if short not in _CAPABILITIES:
                        yield Finding(where, f"{name!r}, which Linux does not have; allowed: e.g. IPC_LOCK")
                    elif short != str(name).upper():
                        yield Finding(where, f"{name!r}; allowed: {short!r}", Level.WARNING)


@rule("image-name", Level.ERROR)
def _image_name(manifest: Manifest) -> Found:
    """Every container has an image, and its name is one that the container runtime can parse."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            image = str(container.get("image") or "")
            if re.search(r"[<>{}$]", image):
                message = f"{image!r} is to be filled in; allowed: the name of an image"
                yield Finding(f"{path}.image", message, Level.HINT)
            elif not _IMAGE.fullmatch(image):
                message = f"{image!r} is no image; allowed: REGISTRY/NAME:TAG, with lower-case letters in NAME"
                yield Finding(f"{path}.image", message)


_APP_ARMOR = "container.apparmor.security.beta.kubernetes.io"


@rule("security-context", Level.ERROR)
def _security_context(manifest: Manifest) -> Found:
    """A profile of seccomp or AppArmor of type `Localhost` names its file, others name none. An annotation for AppArmor
    names a container of the Pod. A Pod with users of its own shares no namespace with the host.
    """
    for template in manifest.pod_templates():
        spec = spec_of(template)
        if spec.get("hostUsers") is False:
            for name in ("hostIPC", "hostNetwork", "hostPID"):
                if spec.get(name):
                    yield Finding(f"{template.path}.spec.{name}", "true with hostUsers false; allowed: false")
        owners = [(f"{template.path}.spec", spec), *containers(template, init=True)]
        for path, owner in owners:
            for kind in ("seccompProfile", "appArmorProfile"):
                profile = (owner.get("securityContext") or {}).get(kind) or {}
                file = profile.get("localhostProfile")
                if profile.get("type") and (profile["type"] == "Localhost") != bool(file):
                    message = f"{profile['type']} and the file {file!r}; allowed: Localhost and a file"
                    yield Finding(f"{path}.securityContext.{kind}", message)
        names = [str(container.get("name")) for _, container in containers(template, init=True)]
        for annotation in (template.content.get("metadata") or {}).get("annotations") or {}:
            prefix, _, named = str(annotation).partition("/")
            if prefix == _APP_ARMOR and named not in names:
                where = json_path(f"{template.path}.metadata.annotations", [annotation])
                yield Finding(where, f"{named!r}; allowed: {', '.join(names)}")


# Those that every kubelet accepts (kubernetes.io, "Using sysctls in a Kubernetes cluster", for 1.34).
_SAFE_SYSCTLS = re.compile(
    r"kernel\.shm_rmid_forced|net\.ipv4\.(ip_local_port_range|tcp_syncookies|ping_group_range|ip_unprivileged_port_start"
    r"|ip_local_reserved_ports|tcp_keepalive_(time|intvl|probes)|tcp_fin_timeout|tcp_rmem|tcp_wmem)"
)


@rule("sysctl", Level.WARNING)
def _sysctl(manifest: Manifest) -> Found:
    """A Pod's sysctls are safe ones: a kubelet ends a Pod with others, unless it was started to allow them."""
    for template in manifest.pod_templates():
        for i, each in enumerate(items(spec_of(template).get("securityContext"), "sysctls")):
            name = str(each.get("name")).replace("/", ".")
            if not _SAFE_SYSCTLS.fullmatch(name):
                where = f"{template.path}.spec.securityContext.sysctls[{i}].name"
                yield Finding(where, f"{name!r}; allowed: a safe one, or with --allowed-unsafe-sysctls of the kubelets")


@rule("dns-policy", Level.ERROR)
def _dns_policy(manifest: Manifest) -> Found:
    """A Pod with dnsPolicy `None` has nameservers in its dnsConfig. Under hostNetwork, Pods that find each other by
    name have `ClusterFirstWithHostNet`: otherwise they ask the node's DNS, which has no such names.
    """
    for template in manifest.pod_templates():
        spec = spec_of(template)
        policy = spec.get("dnsPolicy", "ClusterFirst")
        if policy == "None" and not (spec.get("dnsConfig") or {}).get("nameservers"):
            yield Finding(f"{template.path}.spec.dnsConfig.nameservers", "none with dnsPolicy None; allowed: a list")
        # The MPI operator sets it by itself.
        named = spec.get("subdomain") or manifest.kind in ("JobSet", "LeaderWorkerSet", "StatefulSet")
        if spec.get("hostNetwork") and named and policy not in ("ClusterFirstWithHostNet", "None"):
            message = f"{policy!r} with hostNetwork; allowed: 'ClusterFirstWithHostNet'"
            yield Finding(f"{template.path}.spec.dnsPolicy", message, Level.WARNING)


_QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"
_QUEUED = ("Job", "JobSet", "MPIJob", "PyTorchJob")  # Kueue admits them as a whole


@rule("pod-annotation", Level.WARNING)
def _pod_annotation(manifest: Manifest) -> Found:
    """Networks and Kueue's topology are in the annotations of the Pod template, and Kueue's queue and priority are
    labels of the workload: elsewhere they have no effect. Nor have networks under hostNetwork. Of Kueue's topologies a
    Pod asks for one.
    """
    for template in manifest.pod_templates():
        given = (template.content.get("metadata") or {}).get("annotations") or {}
        kueue = [name for name in given if re.fullmatch(r"kueue\.x-k8s\.io/podset-(\w+)-topology", name)]
        if len(kueue) > 1:
            path = json_path(f"{template.path}.metadata.annotations", [kueue[1]])
            yield Finding(path, f"beside {kueue[0]}; allowed: one of them")
        for name in NETWORKS if spec_of(template).get("hostNetwork") else ():
            if name in given:
                where = json_path(f"{template.path}.metadata.annotations", [name])
                yield Finding(where, "with hostNetwork, which has the node's networks alone; allowed: one of them")
        labels = (template.content.get("metadata") or {}).get("labels") or {}
        for name in (_QUEUE, _PRIORITY) if manifest.kind in _QUEUED else ():
            if name in labels and name not in (manifest.metadata.get("labels") or {}):
                where = json_path(f"{template.path}.metadata.labels", [name])
                yield Finding(where, f"{labels[name]!r} of the Pods; allowed: at $.metadata.labels, for all of them")
    for name, value in (manifest.metadata.get("annotations") or {}).items():
        where = json_path("$.metadata.annotations", [name])
        of_pods = name in (*NETWORKS, "networking.gke.io/default-interface") or name.startswith(
            "kueue.x-k8s.io/podset-"
        )
        templates = [template.path for template in manifest.pod_templates()]
        if of_pods and templates and manifest.kind != "Pod":
            yield Finding(where, f"{value!r} of the {manifest.kind}; allowed: at {templates[0]}.metadata.annotations")
        if name in (_QUEUE, _PRIORITY) and name not in (manifest.metadata.get("labels") or {}):
            yield Finding(where, f"{value!r} as an annotation; allowed: as a label")


@rule("topology-spread", Level.ERROR)
def _topology_spread(manifest: Manifest) -> Found:
    """A Pod is spread over a kind of topology once for each whenUnsatisfiable, with minDomains only where that is
    `DoNotSchedule`. The constraint selects the Pod itself: it counts other Pods only otherwise.
    """
    for template in manifest.pod_templates():
        labels, seen = (template.content.get("metadata") or {}).get("labels") or {}, set()
        for i, each in enumerate(items(spec_of(template), "topologySpreadConstraints")):
            path, when = f"{template.path}.spec.topologySpreadConstraints[{i}]", each.get("whenUnsatisfiable")
            if (each.get("topologyKey"), when) in seen:
                yield Finding(path, f"{each.get('topologyKey')} with {when} again; allowed: once")
            seen.add((each.get("topologyKey"), when))
            if each.get("minDomains") is not None and when != "DoNotSchedule":
                message = f"{each['minDomains']} with {when}; allowed: with DoNotSchedule"
                yield Finding(f"{path}.minDomains", message)
            wanted = (each.get("labelSelector") or {}).get("matchLabels") or {}
            if manifest.has_pods and wanted and not fits(wanted, template):  # operators add labels of their own
                message = f"{wanted}, and the Pod has {labels}; allowed: labels of the Pod itself"
                yield Finding(f"{path}.labelSelector", message, Level.WARNING)


@rule("variable-reference", Level.WARNING)
def _variable_reference(manifest: Manifest) -> Found:
    """A variable that another one names by `$(NAME)` is set before it: otherwise the text stays as it is."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            variables = items(container, "env")
            place = {str(variable.get("name")): i for i, variable in reversed(list(enumerate(variables)))}
            for i, variable in enumerate(variables):
                for name in re.findall(r"(?<!\$)\$\(([A-Za-z_]\w*)\)", str(variable.get("value", ""))):
                    if place.get(name, -1) >= i:
                        message = f"$({name}) stands before {name}, in env[{place[name]}]; allowed: behind it"
                        yield Finding(f"{path}.env[{i}].value", message)


@rule("rollout", Level.ERROR)
def _rollout(manifest: Manifest) -> Found:
    """A rolling update may take a Pod away or add one: not both maxUnavailable and maxSurge are 0. Only the strategy
    `RollingUpdate` has such fields. A PodDisruptionBudget has minAvailable or maxUnavailable, and not both. The
    minReplicas of a HorizontalPodAutoscaler are no more than its maxReplicas.
    """
    spec = manifest.spec
    if manifest.kind == "HorizontalPodAutoscaler":
        least, most = spec.get("minReplicas") or 1, spec.get("maxReplicas")
        if isinstance(most, int) and least > most:
            yield Finding("$.spec.minReplicas", f"{least} with maxReplicas {most}; allowed: up to {most}")
        return
    if manifest.kind == "PodDisruptionBudget":
        if None not in (spec.get("minAvailable"), spec.get("maxUnavailable")):
            yield Finding("$.spec", "minAvailable and maxUnavailable; allowed: one of them")
        return
    strategy, fields = {
        "Deployment": ("strategy", "rollingUpdate"),
        "DaemonSet": ("updateStrategy", "rollingUpdate"),
        "LeaderWorkerSet": ("rolloutStrategy", "rollingUpdateConfiguration"),
    }.get(manifest.kind, ("", ""))
    chosen = spec.get(strategy) or {}
    limits = chosen.get(fields) or {}
    if limits and chosen.get("type", "RollingUpdate") != "RollingUpdate":
        yield Finding(f"$.spec.{strategy}.{fields}", f"with {chosen['type']}; allowed: with RollingUpdate")
    # A Deployment's surge is a quarter where none is given.
    surge = limits.get("maxSurge", "25%" if manifest.kind == "Deployment" else 0)
    if {str(limits.get("maxUnavailable")), str(surge)} <= {"0", "0%"}:
        where = f"$.spec.{strategy}.{fields}.maxUnavailable"
        yield Finding(where, "0 with maxSurge 0; allowed: one of them above 0")


@rule("schedule", Level.ERROR)
def _schedule(manifest: Manifest) -> Found:
    """A CronJob's schedule has the five fields of cron, or is a word such as `@daily`."""
    if manifest.kind != "CronJob":
        return
    text = str(manifest.spec.get("schedule", ""))
    if _SCHEDULE_WORD.fullmatch(text):
        return
    fields = text.split()
    wrong = [field for field, bounds in zip(fields, _SCHEDULE, strict=False) if not _in_bounds(field, *bounds)]
    if len(fields) != 5 or wrong:
        what = f", in which {wrong[0]!r} is wrong" if wrong else ""
        yield Finding("$.spec.schedule", f"{text!r}{what}; allowed: minute hour day month weekday, e.g. 0 3 * * *")


def _in_bounds(field: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    """Whether a field of a schedule is a list of ``*``, numbers, names and ranges, each with a step or without."""

    def number(text: str) -> int | None:
        if text.lower() in names:
            return names.index(text.lower()) + low
        return int(text) if text.isdigit() and low <= int(text) <= high else None

    for part in field.split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isdigit() and int(step) > 0):
            return False
        if span in ("*", "?"):
            continue
        first, dash, last = span.partition("-")
        begin, end = number(first), number(last if dash else first)
        if begin is None or end is None or begin > end:
            return False
    return True


@rule("service-fields", Level.ERROR)
def _service_fields(manifest: Manifest) -> Found:
    """A Service's name is one label of DNS. Its clusterIP is `None` or an address. It has ports unless it is headless,
    and several have names.
    """
    if (manifest.api_version, manifest.kind) != ("v1", "Service"):
        return
    name, spec = manifest.metadata.get("name"), manifest.spec
    if name is not None and not re.fullmatch(_SERVICE_NAME, str(name)):
        message = f"{name!r}; allowed: a letter, then up to 62 lower-case letters, digits and '-' between them"
        yield Finding("$.metadata.name", message)
    address = spec.get("clusterIP")
    if address not in (None, "", "None") and not _is_address(str(address)):
        yield Finding("$.spec.clusterIP", f"{address!r}; allowed: 'None' or an address")
    ports = items(spec, "ports")
    if not ports and address != "None" and spec.get("type") != "ExternalName":
        yield Finding("$.spec.ports", "none; allowed: at least one, or clusterIP 'None'")
    names = [port.get("name") for port in ports]
    for i, given in enumerate(names) if len(names) > 1 else ():
        if not given or given in names[:i]:
            seen = "no name" if not given else f"{given!r} is taken"
            yield Finding(json_path("$.spec.ports", [i, "name"]), f"{seen}; allowed: a name of its own")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@rule("data-keys", Level.ERROR)
def _data_keys(manifest: Manifest) -> Found:
    """Keys of ConfigMaps and Secrets are letters, digits and -_. alone, and a Secret's data are base64."""
    if manifest.kind not in ("ConfigMap", "Secret"):
        return
    for part in ("data", "binaryData", "stringData"):
        for key, value in (manifest.content.get(part) or {}).items():
            path = json_path(f"$.{part}", [str(key)])
            if not re.fullmatch(r"[-._A-Za-z0-9]{1,253}", str(key)) or str(key) in (".", ".."):
                yield Finding(path, f"{key!r}; allowed: up to 253 letters, digits and -_.")
            if part == "binaryData" or (manifest.kind == "Secret" and part == "data"):
                try:
                    base64.b64decode("".join(str(value or "").split()), validate=True)
                except ValueError as error:
                    yield Finding(path, f"is no base64: {error}; allowed: base64, or plain text in stringData")
