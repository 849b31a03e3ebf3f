"""Runs an MPIJob on simulated hosts, as Kubernetes and the MPI operator would run it on a cluster.

    python -m tests.sim.mpijob k8s/overlays/cpu

Every Pod is a host of tests/sim/hosts.py, so sshd, mpirun and the ranks are real and meet over a real network. What the
operator (kubeflow.org/v2beta1, pkg/controller of kubeflow/mpi-operator) adds is added here: one key pair for the job
under `sshAuthMountPath`, the hostfile, its environment variables, the launcher's retries, deadline and clean-up. What
the operator does not do is not done either: a worker that never gets ready does not end a job. Where the operator would
wait forever, the runner gives up and says so.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, load
from hybrid_ep.errors import ConfigError
from tests.sim.hosts import Cluster, Host
from tests.sim.pods import NAMESPACE, Kubelet, Pod, checkout_image

_POLL_S = 0.1
_RETRY_DELAY_S = 0.2  # between two attempts of the launcher; a cluster takes 10 s and doubles it


@dataclass
class JobResult:
    """How the job ended.

    Attributes:
        succeeded: the launcher's last attempt did.
        reason: ``Completed``, ``BackoffLimitExceeded``, ``DeadlineExceeded`` or ``WorkersNotReady``.
        message: for people; names the Pod that is to blame and shows its last lines.
        launchers: one Pod for each attempt.
        workers: by index, after the clean-up.
    """

    succeeded: bool = False
    reason: str = ""
    message: str = ""
    launchers: list[Pod] = field(default_factory=list)
    workers: list[Pod] = field(default_factory=list)

    @property
    def log(self) -> str:
        """What the last launcher said; empty if none was made."""
        return self.launchers[-1].log if self.launchers else ""


class MPIJobRun:
    """One run of one MPIJob.

    Args:
        manifests: the built overlay: one MPIJob and the ConfigMaps that it mounts.
        cluster: where its Pods become hosts.
        ready_limit_s: how long workers may take to get ready.
        prepare: is called with each Pod's host before anything runs there; tests break it in there.

    Raises:
        ConfigError: not one MPIJob, or one that needs what is not known here.
    """

    def __init__(
        self,
        manifests: list[Manifest],
        cluster: Cluster,
        *,
        ready_limit_s: float = 20.0,
        prepare: Callable[[Host], None] = lambda host: None,
    ) -> None:
        jobs = [manifest.content for manifest in manifests if manifest.kind == "MPIJob"]
        if len(jobs) != 1:
            raise ConfigError(f"there are {len(jobs)} MPIJobs; allowed: 1")
        self._job: str = jobs[0]["metadata"]["name"]
        self._spec: dict[str, Any] = jobs[0]["spec"]
        self._policy: dict[str, Any] = self._spec.get("runPolicy", {})
        self._launcher, self._worker = (self._spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
        for replica in (self._launcher, self._worker):
            if replica.get("restartPolicy", "Never") != "Never":
                raise ConfigError(f"restartPolicy is {replica['restartPolicy']!r}; allowed here: 'Never'")
        self._ready_limit_s = ready_limit_s
        self._kubelet = Kubelet(cluster, manifests, self._job, prepare)
        self._names = [f"{self._job}-worker-{i}" for i in range(self._worker.get("replicas", 1))]
        for name in self._names:
            self._kubelet.reserve_name(name)
        self._keys = self._make_keys()

    def run(self) -> JobResult:
        """Runs the job to its end and cleans up as its policy says."""
        result = JobResult()
        for name in self._names:
            template, variables = self._worker["template"], {"K_MPI_JOB_ROLE": "worker"}
            result.workers.append(self._kubelet.start(name, template, variables, self._add_operator_files))
        if self._spec.get("launcherCreationPolicy", "AtStartup") == "WaitForWorkersReady":
            self._await_workers(result)
        if not result.reason:
            self._run_launcher(result)
        self._clean_up(result)
        return result

    def _await_workers(self, result: JobResult) -> None:
        begun = time.monotonic()
        while not all(worker.ready for worker in result.workers):
            for worker in result.workers:
                worker.poll()
                worker.ready = worker.phase == "Running" and self._kubelet.is_ready(worker, self._worker["template"])
            blamed = [worker for worker in result.workers if worker.phase != "Running"]
            if not blamed and time.monotonic() - begun > self._ready_limit_s:
                blamed = [worker for worker in result.workers if not worker.ready]
            if blamed:
                result.reason = "WorkersNotReady"
                result.message = "\n".join(
                    f"worker {pod.name} is {pod.phase} and not ready, so there is no launcher, and on a cluster "
                    f"the job would wait forever; its last lines:\n{pod.last_lines()}"
                    for pod in blamed
                )
                return
            time.sleep(_POLL_S)

    def _run_launcher(self, result: JobResult) -> None:
        deadline_s = self._policy.get("activeDeadlineSeconds", float("inf"))
        begun = time.monotonic()  # the deadline is the launcher's own, over all attempts
        for attempt in range(self._policy.get("backoffLimit", 6) + 1):
            if attempt:
                time.sleep(_RETRY_DELAY_S)
            pod = self._kubelet.start(
                f"{self._job}-launcher",
                self._launcher["template"],
                self._launcher_variables(),
                self._add_operator_files,
            )
            result.launchers.append(pod)
            while pod.phase == "Running":
                time.sleep(_POLL_S)
                pod.poll()
                if pod.phase == "Running" and time.monotonic() - begun > deadline_s:
                    result.reason = "DeadlineExceeded"
                    result.message = f"the launcher took more than {deadline_s} s; its last lines:\n{pod.last_lines()}"
                    pod.delete()
                    return
            if pod.phase == "Succeeded":
                result.succeeded, result.reason, result.message = True, "Completed", "the launcher ended with 0"
                return
        result.reason = "BackoffLimitExceeded"
        last = result.launchers[-1].last_lines()
        result.message = f"the launcher failed {len(result.launchers)} times; its last lines:\n{last}"

    def _clean_up(self, result: JobResult) -> None:
        policy = self._policy.get("cleanPodPolicy", "None")
        for worker in result.workers:
            worker.poll()
            if policy == "All" or (policy == "Running" and worker.phase == "Running"):
                worker.delete()

    def _add_operator_files(self, host: Host) -> None:
        where = self._spec.get("sshAuthMountPath", "/root/.ssh")
        # A Secret belongs to root, as links in a folder that anybody may write; its mode is narrowed for /root only.
        for file, content in self._keys.items():
            host.write(f"{where}/..data/{file}", content, 0o600 if where == "/root/.ssh" else 0o644)
            host.path(f"{where}/{file}").symlink_to(f"..data/{file}")
        host.path(where).chmod(0o1777)
        slots = self._spec.get("slotsPerWorker", 1)
        lines = [f"{name}.{self._job}.{NAMESPACE}.svc slots={slots}" for name in self._names]
        host.write("/etc/mpi/hostfile", "\n".join([*lines, ""]), 0o444)

    def _launcher_variables(self) -> dict[str, str]:
        return {
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(self._spec.get("slotsPerWorker", 1)),
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
        }

    def _make_keys(self) -> dict[str, str]:
        private = self._kubelet.work / "key"
        options = ["-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", ""]
        subprocess.run(["ssh-keygen", *options, "-f", str(private)], check=True)
        public = private.with_suffix(".pub").read_text()
        return {"id_rsa": private.read_text(), "id_rsa.pub": public, "authorized_keys": public}


def main() -> int:
    """Runs the MPIJob of an overlay or a file and prints what the launcher said."""
    with Cluster(checkout_image()) as cluster:
        result = MPIJobRun(load(Path(sys.argv[1])), cluster).run()
    print(result.log)
    print(f"{result.reason}: {result.message}", file=sys.stderr)
    return 0 if result.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
