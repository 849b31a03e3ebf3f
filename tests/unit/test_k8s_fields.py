"""Rules of `hybrid-ep k8s check` over single fields, each with an example that it refuses and one that it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_ep.cluster.kubernetes.problem import Level
from tests.unit.k8s_example import Example, examine

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
C = "$.spec.containers[0]"
TERMS = f"$.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms"


def node_affinity(expressions: str) -> str:
    return f"affinity: {{nodeAffinity: {{{REQUIRED}: {{nodeSelectorTerms: [{{matchExpressions: [{expressions}]}}]}}}}}}"


def pods_affinity(name: str, expressions: str) -> str:
    selector = f"labelSelector: {{matchExpressions: [{expressions}]}}"
    return f"affinity: {{{name}: {{{REQUIRED}: [{{topologyKey: zone, {selector}}}]}}}}"


def job(fields: str, name: str = "a") -> str:
    pod = "{restartPolicy: Never, containers: [{name: a, image: 'a:1'}]}"
    head = f"apiVersion: batch/v1, kind: Job, metadata: {{name: {name}}}"
    return f"{{{head}, spec: {{{fields}, template: {{spec: {pod}}}}}}}"


def cron(schedule: str) -> str:
    template = "{spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: 'a:1'}]}}}}"
    return (
        "{apiVersion: batch/v1, kind: CronJob, metadata: {name: a}, "
        f"spec: {{schedule: '{schedule}', jobTemplate: {template}}}}}"
    )


def service(fields: str, name: str = "a") -> str:
    return f"{{apiVersion: v1, kind: Service, metadata: {{name: {name}}}, spec: {{{fields}}}}}"


def with_map(pod: str) -> str:
    held = "{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {a.sh: x}}"
    return f"{held}\n---\n{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {pod}}}"


def map_volume(source: str, mount: str = "mountPath: /m") -> str:
    container = f"{{name: a, image: 'a:1', volumeMounts: [{{name: c, {mount}}}]}}"
    return with_map(f"{{containers: [{container}], volumes: [{{name: c, configMap: {{name: c{source}}}}}]}}")


def map_variable(key: str) -> str:
    env = f"[{{name: A, valueFrom: {{configMapKeyRef: {{name: c, key: {key}}}}}}}]"
    return with_map(f"{{containers: [{{name: a, image: 'a:1', env: {env}}}]}}")


def stateful(name: str) -> str:
    pods = "{metadata: {labels: {app: a}}, spec: {containers: [{name: a, image: 'a:1'}]}}"
    spec = f"{{serviceName: {name}, selector: {{matchLabels: {{app: a}}}}, template: {pods}}}"
    headless = service("clusterIP: None, selector: {app: a}", "ranks")
    return f"{headless}\n---\n{{apiVersion: apps/v1, kind: StatefulSet, metadata: {{name: a}}, spec: {spec}}}"


def meeting(address: str, kind: str) -> str:
    """Two Pods whose ranks meet at an address: an Indexed Job with a subdomain, or a JobSet."""
    command = f"[torchrun, --nnodes=2, --node-rank=$(JOB_COMPLETION_INDEX), --master-addr={address}, x.py]"
    container = f"{{name: a, image: 'a:1', command: {command}, volumeMounts: [{{name: shm, mountPath: /dev/shm}}]}}"
    volumes = "[{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]"
    subdomain = "subdomain: ranks, " if kind == "Job" else ""
    pod = f"{{{subdomain}restartPolicy: Never, containers: [{container}], volumes: {volumes}}}"
    spec = (
        "{completionMode: Indexed, completions: 2, parallelism: 2, backoffLimit: 0, activeDeadlineSeconds: 60, "
        f"template: {{metadata: {{labels: {{app: a}}}}, spec: {pod}}}}}"
    )
    if kind == "Job":
        headless = service("clusterIP: None, selector: {app: a}", "ranks")
        return f"{headless}\n---\n{{apiVersion: batch/v1, kind: Job, metadata: {{name: job}}, spec: {spec}}}"
    jobs = f"[{{name: w, replicas: 1, template: {{spec: {spec}}}}}]"
    return (
        "{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, metadata: {name: set}, "
        f"spec: {{replicatedJobs: {jobs}}}}}"
    )


def served(port: str) -> str:
    container = "{name: a, image: 'a:1', ports: [{name: http, containerPort: 1}]}"
    pods = f"{{metadata: {{labels: {{app: a}}}}, spec: {{containers: [{container}]}}}}"
    spec = f"{{selector: {{matchLabels: {{app: a}}}}, template: {pods}}}"
    head = service(f"selector: {{app: a}}, ports: [{{port: 80, targetPort: {port}}}]")
    return f"{head}\n---\n{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: a}}, spec: {spec}}}"


def bound(role: str, namespace: str) -> str:
    group = "rbac.authorization.k8s.io"
    return (
        "{apiVersion: v1, kind: ServiceAccount, metadata: {name: runner, namespace: gpu}}\n---\n"
        f"{{apiVersion: {group}/v1, kind: ClusterRole, metadata: {{name: reader}}, rules: []}}\n---\n"
        f"{{apiVersion: {group}/v1, kind: ClusterRoleBinding, metadata: {{name: b}}, "
        f"roleRef: {{apiGroup: {group}, kind: ClusterRole, name: {role}}}, "
        f"subjects: [{{kind: ServiceAccount, name: runner, namespace: {namespace}}}]}}"
    )


def jobset(policy: str) -> str:
    pod = "{spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: 'a:1'}]}}}}"
    return (
        "{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, metadata: {name: a}, "
        f"spec: {{{policy}, replicatedJobs: [{{name: launcher, template: {pod}}}]}}}}"
    )


def held(kind: str, data: str) -> str:
    return f"{{apiVersion: v1, kind: {kind}, metadata: {{name: a}}, {data}}}"


def mpi(command: str, more: str = "", name: str = "mpi", scheduling: str = "{}") -> str:
    launcher = f"{{template: {{spec: {{containers: [{{name: l, image: 'a:1', command: {command}}}]}}}}}}"
    worker = (
        "{replicas: 2, template: {spec: {containers: [{name: w, image: 'a:1', command: [/usr/sbin/sshd, -De], "
        "readinessProbe: {tcpSocket: {port: 22}}, volumeMounts: [{name: shm, mountPath: /dev/shm}]}], "
        "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]}}}"
    )
    policy = f"{{cleanPodPolicy: Running, backoffLimit: 1, activeDeadlineSeconds: 60, schedulingPolicy: {scheduling}}}"
    return (
        f"{{apiVersion: kubeflow.org/v2beta1, kind: MPIJob, metadata: {{name: {name}}}, spec: {{slotsPerWorker: 4, "
        f"launcherCreationPolicy: WaitForWorkersReady, runPolicy: {policy}{more}, "
        f"mpiReplicaSpecs: {{Launcher: {launcher}, Worker: {worker}}}}}}}"
    )


MPIRUN = "[mpirun, --hostfile, /etc/mpi/hostfile, -np, '{}', bench]"
EXAMPLES = [
    # What the schemas say in prose only.
    Example("schema", f"{C}.name", "- {name: My_Worker}", "- {name: my-worker}"),
    Example("schema", "$.spec.volumes[0].name", "volumes: [{name: v_0}]", "volumes: [{name: v-0}]"),
    Example(
        "schema",
        f"{C}.ports[0].name",
        "- {ports: [{name: a-very-long-port-name, containerPort: 1}]}",
        "- {ports: [{name: metrics, containerPort: 1}]}",
    ),
    Example("schema", f"{C}.resources.limits.memory", "- {resources: {limits: {memory: -1Gi}}}", "- {}"),
    Example("schema", f"{C}.resources.limits.cpu", "- {resources: {limits: {cpu: -1}}}", "- {}"),
    Example("schema", f"{C}.livenessProbe.periodSeconds", "- {livenessProbe: {exec: {}, periodSeconds: -1}}", "- {}"),
    Example(
        "schema",
        "$.spec.volumes[0].configMap.defaultMode",
        "volumes: [{name: v, configMap: {name: c, optional: true, defaultMode: 600}}]",
        "volumes: [{name: v, configMap: {name: c, optional: true, defaultMode: 0600}}]",
    ),
    Example(
        "schema",
        "$.spec.topologySpreadConstraints[0].maxSkew",
        "topologySpreadConstraints: [{maxSkew: 0, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
        "topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
    ),
    Example("schema", "$.spec.terminationGracePeriodSeconds", "terminationGracePeriodSeconds: -5", "{}"),
    Example("schema", "$.spec.backoffLimit", job("backoffLimit: -1"), job("backoffLimit: 0")),
    Example("schema", "$.spec.nodeSelector", "nodeSelector: {a b: c}", "nodeSelector: {a.b/c: d}"),
    Example("schema", "$.spec.nodeSelector.a", "nodeSelector: {a: b c}", "nodeSelector: {a: ''}"),
    Example("name", "$.metadata.name", job("backoffLimit: 0", "a" * 64), job("backoffLimit: 0", "a" * 63)),
    Example("name", "$.metadata.name", mpi(MPIRUN.format(8), name="a" * 52), mpi(MPIRUN.format(8), name="a" * 51)),
    # Selectors.
    Example(
        "selector-expression",
        f"{TERMS}[0].matchExpressions[0].values",
        node_affinity("{key: a, operator: In}"),
        node_affinity("{key: a, operator: In, values: [b]}"),
    ),
    Example(
        "selector-expression",
        f"{TERMS}[0].matchExpressions[0].values",
        node_affinity("{key: a, operator: Exists, values: [b]}"),
        node_affinity("{key: a, operator: Exists}"),
    ),
    Example(
        "selector-expression",
        f"{TERMS}[0].matchExpressions[0].values",
        node_affinity("{key: a, operator: Gt, values: ['80', '90']}"),
        node_affinity("{key: a, operator: Gt, values: ['80']}"),
    ),
    Example(
        "selector-expression",
        f"{TERMS}[0].matchExpressions[0].values",
        node_affinity("{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA H200]}"),
        node_affinity("{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-H200]}"),
    ),
    Example("selector-expression", f"{TERMS}[0]", node_affinity(""), node_affinity("{key: a, operator: DoesNotExist}")),
    Example(
        "selector-expression", TERMS, f"affinity: {{nodeAffinity: {{{REQUIRED}: {{nodeSelectorTerms: []}}}}}}", "{}"
    ),
    Example(
        "selector-expression",
        f"$.spec.affinity.podAntiAffinity.{REQUIRED}[0].labelSelector.matchExpressions[0].values",
        pods_affinity("podAntiAffinity", "{key: a, operator: NotIn}"),
        pods_affinity("podAntiAffinity", "{key: a, operator: NotIn, values: [b]}"),
    ),
    # Probes, volumes, variables.
    Example(
        "probe",
        f"{C}.livenessProbe",
        "- {livenessProbe: {httpGet: {port: 80}, tcpSocket: {port: 80}}}",
        "- {livenessProbe: {tcpSocket: {port: 80}}}",
    ),
    Example("probe", f"{C}.readinessProbe", "- {readinessProbe: {periodSeconds: 5}}", "- {}"),
    Example(
        "probe",
        f"{C}.livenessProbe.successThreshold",
        "- {livenessProbe: {tcpSocket: {port: 80}, successThreshold: 2}}",
        "- {readinessProbe: {tcpSocket: {port: 80}, successThreshold: 2}}",
    ),
    Example(
        "probe",
        "$.spec.initContainers[0].readinessProbe",
        "initContainers: [{name: i, image: 'a:1', readinessProbe: {tcpSocket: {port: 80}}}]",
        "initContainers: [{name: i, image: 'a:1', restartPolicy: Always, readinessProbe: {tcpSocket: {port: 80}}}]",
    ),
    Example(
        "volume-source",
        "$.spec.volumes[0]",
        "volumes: [{name: v, emptyDir: {}, hostPath: {path: /dev/shm}}]",
        "volumes: [{name: v, hostPath: {path: /dev/shm}}, {name: w}]",
    ),
    Example("volume-mount", f"{C}.volumeMounts[0].mountPath", map_volume("", "mountPath: 'a:b'"), map_volume("")),
    Example(
        "volume-mount",
        f"{C}.volumeMounts[0].subPath",
        "- {volumeMounts: [{name: v, mountPath: /m, subPath: ../x}]}\nvolumes: [{name: v}]",
        "- {volumeMounts: [{name: v, mountPath: /m, subPath: a..b/x}]}\nvolumes: [{name: v}]",
    ),
    Example(
        "environment", f"{C}.env[0].name", "- {env: [{name: A=B, value: x}]}", "- {env: [{name: a.b-C, value: x}]}"
    ),
    Example(
        "environment",
        f"{C}.env[0]",
        "- {env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}",
        "- {env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}",
    ),
    Example("environment", f"{C}.env[0].valueFrom", "- {env: [{name: A, valueFrom: {}}]}", "- {env: [{name: A}]}"),
    Example(
        "environment",
        f"{C}.env[0].valueFrom.fieldRef.fieldPath",
        "- {env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.node}}}]}",
        "- {env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['a/b']\"}}}]}",
    ),
    # What a container is and may.
    Example(
        "capability",
        f"{C}.securityContext.capabilities.add[0]",
        "- {securityContext: {capabilities: {add: [IPC_LCK]}}}",
        "- {securityContext: {capabilities: {add: [IPC_LOCK], drop: [ALL]}}}",
    ),
    Example(
        "capability",
        f"{C}.securityContext.capabilities.drop[0]",
        "- {securityContext: {capabilities: {drop: [CAP_NET_RAW]}}}",
        "- {securityContext: {capabilities: {drop: [NET_RAW]}}}",
        Level.WARNING,
    ),
    Example(
        "image-name", f"{C}.image", "- {image: 'registry/My Image:1'}", "- {image: 'Registry.example:5000/a/b_c:V.1'}"
    ),
    Example("image-name", f"{C}.image", "- {image: 'registry.example/Server:1'}", "- {image: 'localhost/server:1'}"),
    Example("image-name", f"{C}.image", "- {image: null}", f"- {{image: 'a@sha256:{'0' * 64}'}}"),
    Example("image-name", f"{C}.image", "- {image: '<your image>:1'}", "- {image: 'host:5000/a:1'}", Level.HINT),
    Example(
        "security-context",
        "$.spec.securityContext.seccompProfile",
        "securityContext: {seccompProfile: {type: Localhost}}",
        "securityContext: {seccompProfile: {type: Localhost, localhostProfile: a.json}}",
    ),
    Example(
        "security-context",
        f"{C}.securityContext.seccompProfile",
        "- {securityContext: {seccompProfile: {type: RuntimeDefault, localhostProfile: a.json}}}",
        "- {securityContext: {seccompProfile: {type: RuntimeDefault}}}",
    ),
    Example("security-context", "$.spec.hostNetwork", "{hostUsers: false, hostNetwork: true}", "hostUsers: false"),
    Example(
        "dns-policy",
        "$.spec.dnsConfig.nameservers",
        "dnsPolicy: None",
        "{dnsPolicy: None, dnsConfig: {nameservers: [10.0.0.10]}}",
    ),
    Example(
        "hugepages",
        f"{C}.resources.requests['hugepages-2Mi']",
        "- {resources: {requests: {memory: 1Gi, hugepages-2Mi: 1Gi}, limits: {hugepages-2Mi: 2Gi}}}",
        "- {resources: {requests: {memory: 1Gi, hugepages-2Mi: 1Gi}, limits: {hugepages-2Mi: 1024Mi}}}",
    ),
    Example(
        "toleration",
        "$.spec.tolerations[0].tolerationSeconds",
        "tolerations: [{key: a, operator: Exists, effect: NoSchedule, tolerationSeconds: 60}]",
        "tolerations: [{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 60}]",
    ),
    # Jobs and Services.
    Example("schedule", "$.spec.schedule", cron("0 25 * * *"), cron("*/15 0,12 1-7 jan-MAR 1-5/2")),
    Example("schedule", "$.spec.schedule", cron("0 3 * *"), cron("@daily")),
    Example("schedule", "$.spec.schedule", cron("0 3 * * 5-1"), cron("@every 1h30m")),
    Example("schedule", "$.spec.schedule", cron("*/0 3 * * *"), cron("0 3 ? * sun")),
    Example(
        "job-fields",
        "$.spec.selector",
        job("selector: {matchLabels: {a: b}}"),
        job("selector: {}, manualSelector: true"),
    ),
    Example(
        "job-fields",
        "$.spec.backoffLimitPerIndex",
        job("completions: 2, backoffLimitPerIndex: 1"),
        job("completions: 2, backoffLimitPerIndex: 1, completionMode: Indexed"),
    ),
    Example(
        "job-fields",
        "$.spec.completions",
        job("completionMode: Indexed"),
        job("completionMode: Indexed, completions: 1"),
    ),
    Example(
        "service-fields", "$.metadata.name", service("ports: [{port: 1}]", "a.b"), service("ports: [{port: 1}]", "a-b")
    ),
    Example(
        "service-fields", "$.spec.clusterIP", service("clusterIP: none, ports: [{port: 1}]"), service("clusterIP: None")
    ),
    Example(
        "service-fields", "$.spec.ports", service("type: ClusterIP"), service("type: ExternalName, externalName: b")
    ),
    Example(
        "service-fields",
        "$.spec.ports[1].name",
        service("ports: [{name: a, port: 1}, {name: a, port: 2}]"),
        service("ports: [{name: a, port: 1}, {name: b, port: 2}]"),
    ),
    # Other objects.
    Example(
        "reference-key",
        "$.spec.volumes[0].configMap.items[0].key",
        map_volume(", items: [{key: b.sh, path: b.sh}]"),
        map_volume(", items: [{key: a.sh, path: b.sh}]"),
    ),
    Example(
        "reference-key",
        f"{C}.volumeMounts[0].subPath",
        map_volume("", "mountPath: /m/a.sh, subPath: a"),
        map_volume("", "mountPath: /m/a.sh, subPath: a.sh"),
    ),
    Example("reference-key", f"{C}.env[0].valueFrom.configMapKeyRef.key", map_variable("a"), map_variable("a.sh")),
    Example("service", "$.spec.serviceName", stateful("rank"), stateful("ranks")),
    Example("service-port", "$.spec.ports[0].targetPort", served("https"), served("http")),
    Example("role-binding", "$.roleRef.name", bound("readers", "gpu"), bound("reader", "gpu")),
    Example("role-binding", "$.subjects[0].namespace", bound("reader", "default"), bound("view", "gpu")),
    Example(
        "jobset-names",
        "$.spec.successPolicy.targetReplicatedJobs",
        jobset("successPolicy: {operator: All, targetReplicatedJobs: [launchr]}"),
        jobset("successPolicy: {operator: All, targetReplicatedJobs: [launcher]}"),
    ),
    Example("data-keys", "$.data['a b']", held("ConfigMap", "data: {a b: x}"), held("ConfigMap", "data: {a_b.c: x}")),
    Example("data-keys", "$.data.k", held("Secret", "data: {k: plain!}"), held("Secret", "stringData: {k: plain!}")),
    Example(
        "gang",
        "$.spec.runPolicy.schedulingPolicy.minAvailable",
        mpi(MPIRUN.format(8), scheduling="{minAvailable: 4}"),
        mpi(MPIRUN.format(8), scheduling="{minAvailable: 3}"),
    ),
    Example("schema", "$.spec.securityContext.runAsUser", "securityContext: {runAsUser: -1}", "{}"),
    Example(
        "rank-address",
        "$.spec.template.spec.containers[0].command",
        meeting("job-0", "Job"),
        meeting("job-0.ranks.default.svc.cluster.local", "Job"),
    ),
    Example(
        "rank-address",
        "$.spec.replicatedJobs[0].template.spec.template.spec.containers[0].command",
        meeting("set-workers-0-0.set", "JobSet"),
        meeting("set-w-0-0.set", "JobSet"),
    ),
    Example(
        "mpijob-ranks",
        "$.spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].command",
        mpi(MPIRUN.format(12)),
        mpi(MPIRUN.format(8)),
    ),
    Example(
        "mpijob-ranks",
        "$.spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].command",
        mpi(MPIRUN.format(16), ", runLauncherAsWorker: true"),
        mpi(MPIRUN.format(12), ", runLauncherAsWorker: true"),
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_mistake_is_found_by_its_rule_alone_and_the_rest_is_accepted(example: Example, tmp_path: Path) -> None:
    examine(example, tmp_path)
