"""Rules of `hybrid-ep k8s check` over Pods of ranks, each with an example that it refuses and one that it accepts.

Ranks are started in many ways. Every rule has to read the same job however it is spelt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.problem import Level
from tests.unit.k8s_example import Example, examine

W = Level.WARNING
C = "$.spec.containers[0]"
SHM = "volumeMounts: [{name: shm, mountPath: /dev/shm}]"
VOLUME = "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]"
MULTUS = "k8s.v1.cni.cncf.io/networks"
LAUNCHER = "$.spec.mpiReplicaSpecs.Launcher.template.spec.containers[0]"
WORKER = "$.spec.mpiReplicaSpecs.Worker.template.spec.containers[0]"


def job(command: str, *, pods: int = 2, before: str = "", env: str = "", fields: str = "") -> str:
    """An Indexed Job of 4 GPUs a Pod, in which nothing else is wrong."""
    resources = "resources: {limits: {nvidia.com/gpu: 4}}"
    ranks = f"{{name: a, image: 'a:1', command: {command}, env: [{env}], {resources}, {SHM}}}"
    names = "{apiVersion: v1, kind: Service, metadata: {name: n}, spec: {clusterIP: None, selector: {app: a}}}"
    spec = (
        f"completionMode: Indexed, completions: {pods}, parallelism: {pods}, backoffLimit: 0, activeDeadlineSeconds: 9"
    )
    pod = f"{{subdomain: n, restartPolicy: Never, {fields} containers: [{before} {ranks}], {VOLUME}}}"
    template = f"{{metadata: {{labels: {{app: a}}}}, spec: {pod}}}"
    head = "apiVersion: batch/v1, kind: Job, metadata: {name: j}"
    return f"{names}\n---\n{{{head}, spec: {{{spec}, template: {template}}}}}"


def probed(service: str) -> str:
    """Ranks that are ready when they have joined."""
    text = job("[torchrun, x.py], readinessProbe: {exec: {command: [check]}}")
    return text.replace("{clusterIP: None,", f"{{clusterIP: None, {service}")


def alone(policy: str) -> str:
    """A Job of one Pod, restarted as said."""
    command = "[torchrun, --standalone, --nproc-per-node=4, x.py]"
    text = job(command, pods=1).replace("backoffLimit: 0, ", "")
    return text.replace("restartPolicy: Never", f"restartPolicy: {policy}")


def jobset(nodes: int) -> str:
    """One leader and three workers that torchrun joins."""
    command = f"[torchrun, --nnodes={nodes}, --master-addr=s-lead-0-0.s, x.py]"
    pod = f"{{restartPolicy: Never, containers: [{{name: a, image: 'a:1', command: {command}, {SHM}}}], {VOLUME}}}"
    count = "completionMode: Indexed, completions: {0}, parallelism: {0}, backoffLimit: 0"
    jobs = ", ".join(
        f"{{name: {name}, replicas: 1, template: {{spec: {{{count.format(pods)}, template: {{spec: {pod}}}}}}}}}"
        for name, pods in (("lead", 1), ("rest", 3))
    )
    head = "apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, metadata: {name: s}"
    return f"{{{head}, spec: {{replicatedJobs: [{jobs}]}}}}"


def mpi(command: str, *, launcher: str = "", worker: str = "", spec: str = "", gpus: str = "nvidia.com/gpu: 8") -> str:
    """An MPIJob of two workers of eight slots, and the ConfigMap c."""
    policy = "runPolicy: {cleanPodPolicy: Running, backoffLimit: 1, activeDeadlineSeconds: 600}"
    image = "image: 'a:1'"
    first = f"{{name: l, {image}, command: {command} {launcher}}}"
    probe = "readinessProbe: {tcpSocket: {port: 22}}"
    resources = f"resources: {{limits: {{{gpus}}}}}"
    sshd = f"{{name: w, {image}, command: [/usr/sbin/sshd, -De], {probe}, {resources}, {SHM} {worker}}}"
    roles = (
        f"Launcher: {{template: {{spec: {{containers: [{first}]}}}}}}, "
        f"Worker: {{replicas: 2, template: {{spec: {{containers: [{sshd}], {VOLUME}}}}}}}"
    )
    fields = (
        f"slotsPerWorker: 8, launcherCreationPolicy: WaitForWorkersReady, {policy} {spec}, mpiReplicaSpecs: {{{roles}}}"
    )
    held = "{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {NCCL_DEBUG: INFO}}"
    return f"{held}\n---\n{{apiVersion: kubeflow.org/v2beta1, kind: MPIJob, metadata: {{name: m}}, spec: {{{fields}}}}}"


def networks(value: str, resources: str, at: str = "template") -> str:
    """A Deployment with those networks, at its Pod template or at itself."""
    annotation = f"annotations: {{{MULTUS}: {value}}}"
    lock = "securityContext: {capabilities: {add: [IPC_LOCK]}}" if resources else ""
    container = f"{{name: a, image: 'a:1', resources: {{limits: {{{resources}}}}}, {lock}}}"
    own, of_pods = (annotation, "") if at == "workload" else ("", annotation)
    template = f"{{metadata: {{labels: {{a: b}}, {of_pods}}}, spec: {{containers: [{container}]}}}}"
    spec = f"{{selector: {{matchLabels: {{a: b}}}}, template: {template}}}"
    return f"{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: d, {own}}}, spec: {spec}}}"


def queued(how: str, of_pods: str = "") -> str:
    pod = "{restartPolicy: Never, containers: [{name: a, image: 'a:1'}]}"
    template = f"{{metadata: {{{of_pods}}}, spec: {pod}}}"
    return f"{{apiVersion: batch/v1, kind: Job, metadata: {{name: j, {how}}}, spec: {{template: {template}}}}}"


def claimed(request: str) -> str:
    devices = "{requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}"
    template = (
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: t}, "
        f"spec: {{spec: {{devices: {devices}}}}}}}"
    )
    container = f"{{name: a, image: 'a:1', resources: {{claims: [{{name: g, request: {request}}}]}}}}"
    spec = f"{{resourceClaims: [{{name: g, resourceClaimTemplateName: t}}], containers: [{container}]}}"
    return f"{template}\n---\n{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {spec}}}"


def set_by_map(value: str) -> str:
    held = f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: c}}, data: {{NCCL_IB_TC: '{value}'}}}}"
    container = "{name: a, image: 'a:1', envFrom: [{configMapRef: {name: c}}]}"
    return f"{held}\n---\n{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {{containers: [{container}]}}}}"


COMMAND = "$.spec.template.spec.containers[0].command"
RDMA = "resources: {limits: {rdma/ib: 8, nvidia.com/gpu: 8}}, securityContext: {capabilities: {add: [IPC_LOCK]}}"
SIDECAR = "{name: logs, image: 'a:1', command: [tail, -f, /x]},"
EXAMPLES = [
    # torchrun, however it is started.
    Example(
        "torchrun-size",
        COMMAND,
        job("[python, -m, torch.distributed.run, --nnodes=4, x.py]"),
        job("[python, -m, torch.distributed.run, --nnodes=2, x.py]"),
    ),
    Example(
        "torchrun-size",
        COMMAND,
        job("""[bash, -c, 'exec torchrun --nnodes="4" x.py']"""),
        job("""[bash, -c, 'exec torchrun --nnodes="2" x.py']"""),
    ),
    Example(
        "torchrun-size",
        COMMAND,
        job("[torchrun, --nnodes=$(NODES), x.py]", env="{name: NODES, value: '4'}"),
        job("[torchrun, --nnodes=$(NODES), x.py]", env="{name: NODES, value: '2'}"),
    ),
    Example(
        "torchrun-size",
        COMMAND,
        job("""[bash, -c, 'torchrun --nnodes=${NODES} x.py']""", env="{name: NODES, value: '4'}"),
        job("""[bash, -c, 'NODES=2; torchrun --nnodes=${NODES} x.py']""", env="{name: NODES, value: '4'}"),
    ),
    Example(
        "torchrun-size",
        COMMAND.replace("[0]", "[1]"),
        job("[torchrun, --nnodes=4, x.py]", before=SIDECAR),
        job("[torchrun, --nnodes=2, x.py]", before=SIDECAR),
    ),
    Example(
        "job-indexed",
        "$.spec.template.spec.restartPolicy",
        job("[torchrun, x.py]").replace("restartPolicy: Never", "restartPolicy: OnFailure"),
        alone("OnFailure"),
        W,
    ),
    # Parts of GPUs are GPUs.
    Example(
        "torchrun-size",
        COMMAND,
        job("[torchrun, --nproc-per-node=4, x.py]").replace("nvidia.com/gpu: 4", "nvidia.com/mig-3g.40gb: 2"),
        job("[torchrun, --nproc-per-node=2, x.py]").replace("nvidia.com/gpu: 4", "nvidia.com/mig-3g.40gb: 2"),
    ),
    Example(
        "mpijob-slots",
        "$.spec.slotsPerWorker",
        mpi("[mpirun, -hostfile, /etc/mpi/hostfile, x]", gpus="nvidia.com/mig-1g.10gb: 4"),
        mpi("[mpirun, -hostfile, /etc/mpi/hostfile, x]", gpus="nvidia.com/mig-1g.10gb: 8"),
        W,
    ),
    # mpirun, by other names, and its own options.
    Example(
        "mpijob-ranks",
        f"{LAUNCHER}.command",
        mpi("[mpirun, --hostfile, /etc/mpi/hostfile, -n, '32', x]"),
        mpi("[mpirun, --hostfile, /etc/mpi/hostfile, python, x.py, -n, '32', -np, '32']"),
    ),
    Example(
        "mpijob-ranks",
        f"{LAUNCHER}.command",
        mpi("[mpiexec, --mca, pml, ob1, -x, A, -np, '32', --hostfile, /etc/mpi/hostfile, x]"),
        mpi("[mpiexec, --mca, pml, ob1, -x, A, -np, '16', --hostfile, /etc/mpi/hostfile, x]"),
    ),
    Example(
        "mpijob-hostfile",
        f"{LAUNCHER}.command",
        mpi("[mpiexec, -np, '16', x]"),
        mpi("[mpiexec, -np, '16', x]", spec=", mpiImplementation: MPICH"),
        Level.HINT,
    ),
    Example(
        "mpijob-environment",
        f"{LAUNCHER}.env[0]",
        mpi("[mpirun, --hostfile, /h, x]", launcher=", env: [{name: NCCL_DEBUG, value: INFO}]"),
        mpi("[mpirun, x]", launcher=", env: [{name: NCCL_DEBUG, value: INFO}]", spec=", mpiImplementation: Intel"),
        W,
    ),
    Example(
        "mpijob-environment",
        f"{LAUNCHER}.envFrom[0]",
        mpi("[mpirun, --hostfile, /h, x]", launcher=", envFrom: [{configMapRef: {name: c}}]"),
        mpi("[mpirun, --hostfile, /h, -x, NCCL_DEBUG, x]", launcher=", envFrom: [{configMapRef: {name: c}}]"),
        W,
    ),
    Example(
        "mpijob-environment",
        f"{WORKER}.envFrom[0]",
        mpi("[mpirun, --hostfile, /h, x]", worker=", envFrom: [{configMapRef: {name: c}}]"),
        mpi("[mpirun, --hostfile, /h, x]"),
        W,
    ),
    # Amounts and names of resources.
    Example(
        "bytes",
        f"{C}.resources.limits.memory",
        "- resources: {limits: {memory: 512m}}",
        "- resources: {limits: {memory: 512M}}",
    ),
    Example(
        "bytes",
        f"{C}.resources.limits.memory",
        "- resources: {limits: {memory: 64}}",
        "- resources: {limits: {memory: 64Gi}}",
    ),
    Example(
        "bytes",
        "$.spec.volumes[0].emptyDir.sizeLimit",
        "volumes: [{name: v, emptyDir: {sizeLimit: 8000m}}]",
        "volumes: [{name: v, emptyDir: {sizeLimit: 1e9}}, {name: w, emptyDir: {sizeLimit: 0.1Gi}}]",
    ),
    Example(
        "resource-name",
        f"{C}.resources.limits['nvidia.com/gpus']",
        "- resources: {limits: {nvidia.com/gpus: 1}}",
        "- resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 100}}",
    ),
    Example(
        "resource-name",
        f"{C}.resources.limits.gpu",
        "- resources: {limits: {gpu: 1}}",
        "- resources: {limits: {cpu: 1, ephemeral-storage: 1Gi}}",
    ),
    Example(
        "resource-name",
        f"{C}.resources.limits['nvidia.com/mig.1g.10gb']",
        "- resources: {limits: {nvidia.com/mig.1g.10gb: 1}}",
        "- resources: {limits: {nvidia.com/mig-1g.10gb.shared: 1}}",
    ),
    Example(
        "instance-type",
        f"{C}.resources.limits['nvidia.com/gpu']",
        f"- {{resources: {{limits: {{nvidia.com/gpu: 8}}}}, {SHM}}}\n{VOLUME}\n"
        "nodeSelector: {cloud.google.com/gke-accelerator-count: '4'}",
        f"- {{resources: {{limits: {{nvidia.com/gpu: 4}}}}, {SHM}}}\n{VOLUME}\n"
        "nodeSelector: {cloud.google.com/gke-accelerator-count: '4'}",
    ),
    Example(
        "instance-type",
        f"{C}.resources.limits['nvidia.com/gpu']",
        f"- {{resources: {{limits: {{nvidia.com/gpu: 2}}}}, {SHM}}}\n{VOLUME}\n"
        "nodeSelector: {cloud.google.com/gke-accelerator-count: '1'}",
        f"- {{resources: {{limits: {{nvidia.com/gpu: 2}}}}, {SHM}}}\n{VOLUME}\n"
        "nodeSelector: {cloud.google.com/gke-accelerator-count: '1', cloud.google.com/gke-gpu-partition-size: 1g.5gb}",
    ),
    Example(
        "hugepages",
        f"{C}.resources.requests['hugepages-2Mi']",
        "- resources: {requests: {cpu: 1, hugepages-2Mi: 1Gi}}",
        "- resources: {requests: {cpu: 1, hugepages-2Mi: 1Gi}, limits: {hugepages-2Mi: 1Gi}}",
    ),
    Example(
        "schema",
        "$.spec.runtimeClassName",
        "runtimeClassName: Nvidia",
        "runtimeClassName: nvidia",
    ),
    # Shared memory.
    Example(
        "shared-memory",
        f"{C}.volumeMounts",
        "- resources: {limits: {nvidia.com/gpu: 8}}",
        f"- {{resources: {{limits: {{nvidia.com/gpu: 8}}}}, {SHM.replace('/shm}', '/shm/}')}}}\n{VOLUME}",
        W,
    ),
    Example(
        "shared-memory",
        f"{C}.volumeMounts",
        "- {command: [python3, -m, sglang.launch_server], resources: {limits: {nvidia.com/gpu: 1}}}",
        f"- {{command: [python3, -m, sglang.launch_server], {SHM}}}\n{VOLUME}",
        W,
    ),
    Example(
        "shared-memory",
        "$.spec.volumes[0].emptyDir.sizeLimit",
        f"- {{command: [torchrun, x.py], {SHM}}}\n{VOLUME.replace('8Gi', '64Mi')}",
        f"- {{command: [torchrun, x.py], {SHM}}}\n{VOLUME.replace('8Gi', '1e9')}",
        W,
    ),
    # NICs and networks.
    Example(
        "ipc-lock",
        "$.spec.containers[1].securityContext.capabilities.add",
        "containers: [{name: p, image: 'a:1'}, {name: a, image: 'a:1', resources: {limits: {rdma/ib: 1}}}]",
        "containers: [{name: p, image: 'a:1'}, {name: a, image: 'a:1', resources: {limits: {rdma/ib: 1}}, "
        "securityContext: {capabilities: {add: [IPC_LOCK]}}}]",
        W,
    ),
    Example(
        "ipc-lock",
        "$.spec.template.spec.containers[0].securityContext.capabilities.add",
        networks("rdma-net", ""),
        networks("macvlan", ""),
        W,
    ),
    Example(
        "nic-count",
        f"$.spec.template.metadata.annotations['{MULTUS}']",
        networks("'a,b,c'", "nvidia.com/roce_a: 2, nvidia.com/roce_b: 2"),
        networks("'ns/a@net1, a, b,b'", "nvidia.com/roce_a: 2, nvidia.com/roce_b: 2"),
        W,
    ),
    Example(
        "annotation-json",
        f"$.spec.template.metadata.annotations['{MULTUS}']",
        networks("""'{"name": "a"}'""", "nvidia.com/roce_a: 2"),
        networks("""'[{"name": "a"}, {"name": "a"}]'""", "nvidia.com/roce_a: 2"),
    ),
    Example(
        "annotation-json",
        f"$.spec.template.metadata.annotations['{MULTUS}']",
        networks("""'[{"name": "a", "interface": "eth0"}]'""", "nvidia.com/roce_a: 1"),
        networks("""'[{"name": "a", "interface": "net1"}]'""", "nvidia.com/roce_a: 1"),
    ),
    Example(
        "annotation-json",
        f"$.spec.template.metadata.annotations['{MULTUS}']",
        networks("'b, ns/a@eth0'", "nvidia.com/roce_a: 2"),
        networks("'eth0@net2, ns/a@net1'", "nvidia.com/roce_a: 2"),
    ),
    Example(
        "pod-annotation",
        f"$.metadata.annotations['{MULTUS}']",
        networks("'a,a'", "nvidia.com/roce_a: 2", at="workload"),
        networks("'a,a'", "nvidia.com/roce_a: 2"),
        W,
    ),
    Example(
        "pod-annotation",
        "$.metadata.annotations['kueue.x-k8s.io/queue-name']",
        queued("annotations: {kueue.x-k8s.io/queue-name: q}"),
        queued("labels: {kueue.x-k8s.io/queue-name: q}"),
        W,
    ),
    Example(
        "pod-annotation",
        "$.spec.template.metadata.labels['kueue.x-k8s.io/priority-class']",
        queued("labels: {kueue.x-k8s.io/queue-name: q}", "labels: {kueue.x-k8s.io/priority-class: high}"),
        queued("labels: {kueue.x-k8s.io/queue-name: q, kueue.x-k8s.io/priority-class: high}"),
        W,
    ),
    Example(
        "rdma-files",
        f"{C}.volumeMounts[0]",
        "- volumeMounts: [{name: d, mountPath: /dev/infiniband}]\n"
        "volumes: [{name: d, hostPath: {path: /dev/infiniband}}]",
        "- {volumeMounts: [{name: d, mountPath: /dev/infiniband}], securityContext: {privileged: true}}\n"
        "volumes: [{name: d, hostPath: {path: /dev/infiniband}}]",
        W,
    ),
    Example(
        "dns-policy",
        "$.spec.template.spec.dnsPolicy",
        job("[torchrun, x.py]", fields="hostNetwork: true,"),
        job("[torchrun, x.py]", fields="hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet,"),
        W,
    ),
    # Settings of ranks.
    Example(
        "fabric-settings",
        f"{C}.env[0]",
        f"- {{env: [{{name: NCCL_NET, value: Socket}}], {RDMA}, {SHM}}}\n{VOLUME}",
        f"- {{env: [{{name: NCCL_NET, value: IB}}], {RDMA}, {SHM}}}\n{VOLUME}",
        W,
    ),
    Example(
        "fabric-settings",
        f"{C}.env[0]",
        "- env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,utilities'}]",
        "- env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,all'}]",
        W,
    ),
    Example(
        "fabric-settings",
        "$.spec.template.spec.containers[0].env[0]",
        job("[torchrun, x.py]", env="{name: NCCL_SOCKET_IFNAME, value: lo}"),
        job("[torchrun, x.py]", env="{name: NCCL_SOCKET_IFNAME, value: '^lo'}"),
        W,
    ),
    Example(
        "fabric-settings",
        f"{LAUNCHER}.command",
        mpi("[mpirun, --hostfile, /etc/mpi/hostfile, -x, NCCL_SOCKET_IFNAME=lo, -np, '16', x]"),
        mpi("[mpirun, --hostfile, /etc/mpi/hostfile, -x, NCCL_SOCKET_IFNAME=eth0, -np, '16', x]"),
        W,
    ),
    Example(
        "fabric-settings",
        f"{C}.env[0]",
        f"- {{env: [{{name: NCCL_IB_DISABLE, value: '1'}}], {RDMA}, {SHM}}}\n{VOLUME}",
        f"- {{env: [{{name: NCCL_IB_DISABLE, value: '0'}}], {RDMA}, {SHM}}}\n{VOLUME}",
        W,
    ),
    Example("fabric-settings", "$.data.NCCL_IB_TC", set_by_map("300"), set_by_map("106"), W),
    Example(
        "variable-reference",
        f"{C}.env[0].value",
        "- env: [{name: B, value: $(A)/x}, {name: A, value: y}]",
        "- env: [{name: A, value: y}, {name: B, value: $(A)/x}, {name: C, value: $$(D)}, {name: D, value: y}]",
        W,
    ),
    # Fields of Pods that the schemas leave open.
    Example(
        "ipc-lock",
        f"{C}.securityContext.capabilities.add",
        "- {resources: {limits: {rdma/ib: 1}}, securityContext: {capabilities: {add: [NET_RAW]}}}",
        "- {resources: {limits: {rdma/ib: 1}}, securityContext: {capabilities: {add: [ipc_lock]}}}",
        W,
    ),
    Example(
        "restart-policy",
        "$.spec.initContainers[0].restartPolicy",
        "initContainers: [{name: s, image: 'a:1', restartPolicy: Never}]",
        "initContainers: [{name: s, image: 'a:1', restartPolicy: Always}]",
        W,
    ),
    Example("restart-policy", f"{C}.restartPolicy", "- restartPolicy: Always", "- tty: true", W),
    Example(
        "claims",
        "$.spec.resourceClaims[0]",
        "- resources: {claims: [{name: g}]}\nresourceClaims: [{name: g}]",
        claimed("gpu").split("\n---\n")[0],
    ),
    Example(
        "port",
        f"{C}.ports[1].hostPort",
        "- ports: [{containerPort: 1, hostPort: 80}, {containerPort: 2, hostPort: 80}]",
        "- ports: [{containerPort: 1, hostPort: 80}, {containerPort: 2, hostPort: 80, protocol: UDP}]",
    ),
    Example(
        "hugepages",
        "$.spec.volumes[0].emptyDir.medium",
        "volumes: [{name: v, emptyDir: {medium: HugePages-2Mi}}]",
        "- resources: {limits: {cpu: 1, hugepages-2Mi: 1Gi}}\nvolumes: [{name: v, emptyDir: {medium: HugePages}}]",
    ),
    Example(
        "sysctl",
        "$.spec.securityContext.sysctls[0].name",
        "securityContext: {sysctls: [{name: net.core.rmem_max, value: '1'}]}",
        "securityContext: {sysctls: [{name: net.ipv4.tcp_rmem, value: '1 2 3'}]}",
        W,
    ),
    Example("schema", "$.spec.hostname", "hostname: Node_1", "hostname: node-1"),
    Example(
        "schema",
        f"{C}.env[0].valueFrom.resourceFieldRef.resource",
        "- env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.gpu}}}]",
        "- env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}]",
    ),
    # A workload without a Pod.
    Example(
        "no-pod",
        "$.spec",
        "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: a}, spec: null}",
        "{apiVersion: v1, kind: Namespace, metadata: {name: a}, spec: null}",
    ),
    # What a container starts.
    Example(
        "command-words",
        f"{C}.command[0]",
        "- command: ['python train.py --steps 3']",
        "- command: [python, train.py, '--note=two words']",
    ),
    Example(
        "command-words",
        f"{C}.args[1]",
        "- {command: [/bin/bash, -c], args: [sleep, '3']}",
        "- {command: [/bin/bash, -ec], args: ['exec \"$@\"', name, sleep, '3']}",
    ),
    Example(
        "command-words",
        f"{C}.command[3]",
        "- command: [sh, -c, 'sleep 3', 'echo done']",
        "- command: [sh, -c, 'sleep 3; echo done']",
    ),
    Example(
        "rank-readiness",
        "$.spec.publishNotReadyAddresses",
        probed(""),
        probed("publishNotReadyAddresses: true,"),
        W,
    ),
    # Objects of one build.
    Example("claim-request", f"{C}.resources.claims[0].request", claimed("gpus"), claimed("gpu")),
    Example(
        "object-twice",
        "$.metadata.name",
        f"{queued('labels: {a: b}')}\n---\n{queued('labels: {c: d}')}",
        f"{queued('namespace: x')}\n---\n{queued('namespace: y')}",
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_mistake_is_found_by_its_rule_alone_and_the_rest_is_accepted(example: Example, tmp_path: Path) -> None:
    examine(example, tmp_path)


def test_torchrun_joins_one_job_of_a_jobset_or_all(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(jobset(4))
    assert check([file]).problems == []
    file.write_text(jobset(5))
    assert [problem.message for problem in check([file]).problems] == [
        "--nnodes=5 with 1 or 4 Pods; allowed: 1 or 4",
        "--nnodes=5 with 3 or 4 Pods; allowed: 3 or 4",
    ]
