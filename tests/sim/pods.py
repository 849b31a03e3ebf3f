"""Pods on simulated hosts: what kubelet does with a Pod template, as far as the shipped jobs need it.

Volumes are mounted, init containers run in their order, the first container starts with exactly its variables, and a
probe is asked. The network's names are in /etc/hosts, where a cluster has DNS.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest
from hybrid_ep.errors import ConfigError
from tests.sim.hosts import Cluster, Host, Image

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "default"
_LAST_LINES = 8


def checkout_image(*, open_mpi: int = 4) -> Image:
    """The image as this checkout would be in it: its commands on the PATH, a user of its own, no root.

    Args:
        open_mpi: the major version of mpirun: 4 is this machine's, 5 comes with the virtual environment.
    """
    environment = Path(sys.prefix)
    commands = ["hybrid-ep", "torchrun", *(("mpirun", "prterun", "prted") if open_mpi == 5 else ())]
    # The package of this checkout, also where another one is installed in the environment.
    start = f"#!/bin/sh\nPYTHONPATH={ROOT} exec {environment}/bin"
    files = {f"/usr/local/bin/{name}": f'{start}/{name} "$@"\n' for name in commands}
    return Image(files=files, visible=(ROOT, environment, Path(sys.base_prefix).resolve()))


@dataclass
class Pod:
    """One Pod.

    Attributes:
        name: also its host name.
        host: where it is.
        log_path: where its containers' output goes, the first init container's first.
        phase: ``Running``, ``Succeeded``, ``Failed`` or ``Deleted``.
        ready: its probe has succeeded, or it has none.
        log: what was read of the output so far.
        process: its first container.
    """

    name: str
    host: Host
    log_path: Path
    phase: str = "Running"
    ready: bool = False
    log: str = ""
    process: subprocess.Popen[bytes] | None = None

    def poll(self) -> None:
        """Looks whether its container has ended, and reads the log."""
        if self.phase == "Running" and self.process is not None and (status := self.process.poll()) is not None:
            self.phase, self.ready = ("Failed" if status else "Succeeded"), False
        if self.log_path.exists():
            self.log = self.log_path.read_text(errors="replace")

    def delete(self) -> None:
        """Ends it and whatever runs in it."""
        self.host.stop()
        if self.process is not None:
            self.process.wait()
        self.phase, self.ready = "Deleted", False

    def last_lines(self) -> str:
        """The end of its log, indented."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-_LAST_LINES:]) or "    (no output)"


class Kubelet:
    """Starts Pods.

    Args:
        cluster: where they become hosts.
        manifests: the ConfigMaps among them can be mounted.
        subdomain: the headless Service under which Pods know each other.
        prepare: is called with each Pod's host before anything runs there; tests break it in there.
    """

    def __init__(
        self,
        cluster: Cluster,
        manifests: list[Manifest],
        subdomain: str,
        prepare: Callable[[Host], None] = lambda host: None,
    ) -> None:
        self.cluster = cluster
        self.work = cluster.make_folder()
        self._config_maps = {
            manifest.content["metadata"]["name"]: manifest.content["data"]
            for manifest in manifests
            if manifest.kind == "ConfigMap"
        }
        self._subdomain = subdomain
        self._prepare = prepare
        self._names: dict[str, str] = {}

    def reserve_name(self, name: str) -> None:
        """Gives a Pod that starts later an address that all others know it by."""
        self._names[name] = self.cluster.reserve_address()

    def start(
        self,
        name: str,
        template: Mapping[str, Any],
        variables: Mapping[str, str],
        wire_up: Callable[[Host], None] = lambda host: None,
    ) -> Pod:
        """Makes the host, runs the init containers and starts the first container.

        Args:
            name: of the Pod.
            template: with a ``spec``.
            variables: of the first container, beyond its own.
            wire_up: adds the files that an operator or controller mounts.
        """
        spec = template["spec"]
        address = self._names.get(name) or self.cluster.reserve_address()
        host = self.cluster.add_host(name, address)
        self._write_names(host, name, address)
        self._prepare(host)
        wire_up(host)
        pod = Pod(name, host, self.work / f"{name}-{address}.log")
        for container in spec.get("initContainers", []):
            self._mount(host, spec, container)
            if self._run(pod, spec, container, {}).wait():
                pod.phase = "Failed"
                pod.poll()
                return pod
        main = spec["containers"][0]
        self._mount(host, spec, main)
        pod.process = self._run(pod, spec, main, variables)
        return pod

    def is_ready(self, pod: Pod, template: Mapping[str, Any]) -> bool:
        """Asks the readinessProbe of the first container.

        Raises:
            ConfigError: it is of a kind that is not known here.
        """
        probe = template["spec"]["containers"][0].get("readinessProbe")
        if probe is None:
            return True
        if "tcpSocket" not in probe:
            raise ConfigError(f"the readinessProbe is {sorted(probe)}; allowed here: tcpSocket")
        return self.cluster.can_connect(pod.host.address, probe["tcpSocket"]["port"], probe.get("timeoutSeconds", 1))

    def _write_names(self, host: Host, name: str, address: str) -> None:
        lines = ["127.0.0.1 localhost", f"{address} {name}"]
        for other, at in self._names.items():
            service = f"{other}.{self._subdomain}"
            lines.append(f"{at} {service} {service}.{NAMESPACE} {service}.{NAMESPACE}.svc")
        host.write("/etc/hosts", "\n".join([*lines, ""]))

    def _run(
        self, pod: Pod, spec: Mapping[str, Any], container: Mapping[str, Any], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        given = {entry["name"]: str(entry.get("value", "")) for entry in container.get("env", [])} | dict(variables)
        words = [*container.get("command", []), *container.get("args", [])]
        words = [re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: given.get(found[1], found[0]), word) for word in words]
        security = spec.get("securityContext", {}) | container.get("securityContext", {})
        confined = security.get("allowPrivilegeEscalation") is False and "add" not in security.get("capabilities", {})
        user = security.get("runAsUser", 0)
        with pod.log_path.open("ab") as log:
            return pod.host.start(words, user=user, variables=given, output=log.fileno(), confined=confined)

    def _mount(self, host: Host, spec: Mapping[str, Any], container: Mapping[str, Any]) -> None:
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume, at = volumes[mount["name"]], mount["mountPath"]
            if "configMap" in volume:
                files = self._config_maps[volume["configMap"]["name"]]
                if key := mount.get("subPath"):
                    host.write(at, files[key])
                else:
                    for key, content in files.items():
                        host.write(f"{at}/{key}", content)
            elif "emptyDir" in volume:
                size = volume["emptyDir"].get("sizeLimit", "1Gi").rstrip("i")
                script = f"umount {at} 2>/dev/null; mkdir -p {at} && mount -t tmpfs -o mode=1777,size={size} tmpfs {at}"
                if host.start(["sh", "-c", script]).wait():
                    raise ConfigError(f"{host.name}: {volume} cannot be mounted at {at}")
            else:
                raise ConfigError(f"the volume is {volume}; allowed here: configMap and emptyDir")
