"""The shipped overlays of `k8s/`, built by kubectl."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import load
from tests.prerequisites import require_programs

K8S = Path(__file__).resolve().parents[2] / "k8s"
OVERLAYS = (
    *("cpu", "single-node", "infiniband", "roce-sriov", "eks-efa", "gke", "aks-infiniband", "gb200-mnnvl"),
    *("cpu-torchrun", "single-node-torchrun", "oke-roce", "jobset-kueue", "lws-serving", "node-doctor"),
)
Tree = Any


@cache
def built(overlay: str) -> list[Tree]:
    require_programs("kubectl")
    return [manifest.content for manifest in load(K8S / "overlays" / overlay)]


def worker(job: Tree) -> Tree:
    return job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]


def launcher(job: Tree) -> Tree:
    return job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
