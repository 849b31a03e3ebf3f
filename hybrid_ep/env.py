"""Every environment variable that hybrid_ep reads, as one table.

Nothing else in the package looks into ``os.environ``: the table drives parsing, `hybrid-ep env` and the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hybrid_ep.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: its name; ``HYBRID_EP_*`` unless the field already has one for it.
        default: the value when it is unset or empty.
        parse: turns the text into the value; raises ValueError for text that it does not take.
        allowed: the texts that `parse` takes, in words.
        effect: what the variable does, in words.
        phase: ``"run"`` for variables read by the package, ``"build"`` for those read by setup.py.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    effect: str
    phase: str = "run"

    @property
    def is_set(self) -> bool:
        """Whether the environment holds text for it."""
        return bool(os.environ.get(self.name))

    def get(self) -> T:
        """Returns the value in force.

        Raises:
            ConfigError: the variable holds text that is not allowed.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{self.name}={text!r} is not allowed; it takes {self.allowed}") from None


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return parse


MAX_TIMEOUT_S = 1e7  # what every layer below can count in milliseconds


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError(text)
    return value


def _rate(text: str) -> float:
    value = float(text)
    if value != 0 and not 0.0001 <= value <= 10_000:
        raise ValueError(text)
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(text)
    return names


ENGINE = Variable(
    "HYBRID_EP_ENGINE",
    "auto",
    _choice("auto", "torch", "cuda"),
    "auto, torch or cuda",
    "The engine that moves tokens. `auto` takes cuda if it is built, all ranks have Hopper or newer GPUs, and each "
    "domain is one host; several domains also need a transport. Otherwise it takes torch. "
    "`cuda` makes all ranks one domain, unless the size of a domain is given.",
)
TIMEOUT_S = Variable(
    "HYBRID_EP_TIMEOUT_S",
    100.0,
    _seconds,
    "a number of seconds > 0 and ≤ 10000000",
    "How long a rank waits for another one before it raises TimeoutError. A buffer's `timeout_s` overrides it.",
)
LOST_RANKS = Variable(
    "HYBRID_EP_LOST_RANKS",
    "raise",
    _choice("raise", "mask"),
    "raise or mask",
    "Low-latency calls of a buffer with `enable_shrink` mask a rank that they lose. With `raise` such a call also "
    "raises an error. With `mask` it does not, and the caller asks `low_latency_query_mask_buffer`. A buffer's "
    "`lost_ranks` overrides it.",
)
LOW_LATENCY_BETWEEN = Variable(
    "HYBRID_EP_LOW_LATENCY_BETWEEN",
    "cuda",
    _choice("torch", "cuda"),
    "torch or cuda",
    "The engine of low-latency calls between domains, for a buffer of the cuda engine. The same on every rank.",
)
NUM_RANKS_PER_DOMAIN: Variable[int | None] = Variable(
    "HYBRID_EP_NUM_RANKS_PER_DOMAIN",
    None,
    _positive_int,
    "an integer ≥ 1 that divides the number of ranks",
    "The size of a domain, the ranks that NVLink joins. Unset, a domain is the ranks of a host, or all ranks if "
    "the cuda engine is asked for by name.",
)
POOL_SLOTS = Variable(
    "HYBRID_EP_POOL_SLOTS",
    64,
    _natural,
    "an integer ≥ 0",
    "Cuda engine: how many results of dispatch can be alive at once without a copy. The receive pool begins with 2 "
    "slots and grows while results are alive. With 0 every result is copied to memory of torch's allocator.",
)
ELASTIC_BUFFER = Variable(
    "HYBRID_EP_ELASTIC_BUFFER",
    "off",
    _choice("on", "off"),
    "on or off",
    "`on` adds `ElasticBuffer`, `EPBuffer`, `EPHandle` and `BufferAllocator` to the `deep_ep` of this project. "
    "Programs that find them may stop using `Buffer`.",
)
LOG_LEVEL = Variable(
    "HYBRID_EP_LOG_LEVEL",
    "WARNING",
    _choice("DEBUG", "INFO", "WARNING", "ERROR"),
    "DEBUG, INFO, WARNING or ERROR",
    "Least level of the messages that the `hybrid-ep` command logs to stderr.",
)

TRANSPORT = Variable(
    "HYBRID_EP_TRANSPORT",
    "auto",
    _choice("auto", "verbs", "libfabric", "tcp", "loopback", "nvshmem"),
    "auto, verbs, libfabric, tcp, loopback or nvshmem",
    "The transport between domains of the cuda engine. `auto` takes loopback where all ranks are on one host, "
    "else verbs where every rank has an active RDMA device, else libfabric where every rank has EFA or Slingshot, "
    "else tcp. nvshmem is taken only where it is asked for.",
)
FABRIC_PROVIDER = Variable(
    "HYBRID_EP_FABRIC_PROVIDER",
    "",
    str,
    "a provider's name: efa, cxi, tcp, verbs;ofi_rxm or shm",
    "libfabric: the provider. Unset, it is efa or cxi where the node has such NICs, else tcp.",
)
GID_INDEX = Variable(
    "HYBRID_EP_GID_INDEX",
    -1,
    _integer(-1, 255),
    "-1 or an index into the port's GID table",
    "verbs: the GID index of RDMA ports. -1 takes RoCE v2 over IPv4, else RoCE v2, else the first.",
)
PKEY_INDEX = Variable(
    "HYBRID_EP_PKEY_INDEX",
    -1,
    _integer(-1, 65535),
    "-1 or an index into the port's table of partition keys",
    "verbs: the index of the partition key. -1 takes the first partition in which both ports are full members.",
)
SERVICE_LEVEL = Variable(
    "HYBRID_EP_SERVICE_LEVEL",
    0,
    _integer(0, 15),
    "an integer from 0 to 15",
    "verbs: the service level of packets (the priority on RoCE).",
)
TRAFFIC_CLASS = Variable(
    "HYBRID_EP_TRAFFIC_CLASS",
    0,
    _integer(0, 255),
    "an integer from 0 to 255",
    "verbs: the traffic class of packets (DSCP × 4 on RoCE v2), as the switches' flow control needs it.",
)
RDMA_MTU = Variable(
    "HYBRID_EP_RDMA_MTU",
    0,
    _integer(0, 4096),
    "0, 256, 512, 1024, 2048 or 4096 bytes",
    "verbs: the MTU of a path. 0 takes the largest that both ports allow.",
)
QUEUE_PAIRS = Variable(
    "HYBRID_EP_QUEUE_PAIRS",
    2,
    _integer(1, 4),
    "an integer from 1 to 4",
    "verbs: queue pairs per peer and NIC.",
)
RELAXED_ORDERING = Variable(
    "HYBRID_EP_RELAXED_ORDERING",
    "1",
    _choice("0", "1"),
    "0 or 1",
    "verbs: whether PCIe writes of rows may be reordered. Writes of flags never are.",
)
TCP_ADDRESS = Variable(
    "HYBRID_EP_TCP_ADDRESS",
    "",
    str,
    "a numeric IPv4 or IPv6 address of this host",
    "tcp, libfabric over tcp: the address at which peers reach this rank. Unset, it is the local address of the route "
    "to rank 0's host.",
)
TCP_CONNECTIONS = Variable(
    "HYBRID_EP_TCP_CONNECTIONS",
    4,
    _integer(1, 16),
    "an integer from 1 to 16",
    "tcp: connections per peer, the same at every rank.",
)
LOOPBACK_RATE = Variable(
    "HYBRID_EP_LOOPBACK_RATE",
    0.0,
    _rate,
    "a number of GB/s from 0.0001 to 10000, or 0",
    "loopback: the rate of a simulated NIC in GB/s, for measurements; 0 is as fast as memory.",
)
NICS: Variable[tuple[str, ...] | None] = Variable(
    "HYBRID_EP_NICS",
    None,
    _names,
    "names of RDMA devices, separated by commas",
    "The NICs of each GPU, in the order of gpu_idx. `+` joins NICs of one GPU. A list shorter than the GPUs is "
    "repeated. Unset, each GPU has its nearest.",
)
NVML_STUB = Variable(
    "HYBRID_EP_NVML_STUB",
    "",
    str,
    "a file with one `key value` per line",
    "What the stub of libnvidia-ml.so.1 answers on a simulated or recorded node; the driver's library ignores it.",
)

BUILD_CUDA = Variable(
    "HYBRID_EP_BUILD_CUDA",
    "auto",
    _choice("auto", "on", "off"),
    "auto, on or off",
    "The `_cuda` module: `auto` builds it where nvcc is found, `on` makes a missing nvcc an error.",
    "build",
)
BUILD_NVML = Variable(
    "HYBRID_EP_BUILD_NVML",
    "auto",
    _choice("auto", "on", "off"),
    "auto, on or off",
    "The `_nvml` module: `auto` builds it where nvml.h is found, `on` makes a missing nvml.h an error.",
    "build",
)
BUILD_NVSHMEM = Variable(
    "HYBRID_EP_BUILD_NVSHMEM",
    "auto",
    _choice("auto", "on", "off"),
    "auto, on or off",
    "The `_nvshmem` module: `auto` builds it where `_cuda` is built and NVSHMEM's wheel is found, `on` makes a missing "
    "wheel an error.",
    "build",
)
NVSHMEM_HOME = Variable(
    "NVSHMEM_HOME",
    "",
    str,
    "a path",
    "Where NVSHMEM is installed, if not as a wheel beside the interpreter that builds.",
    "build",
)
STRICT = Variable(
    "HYBRID_EP_STRICT",
    "off",
    _choice("on", "off"),
    "on or off",
    "`on` makes the compilers' warnings and register spills of the kernels errors, as the project's CI does.",
    "build",
)
MULTINODE = Variable(
    "HYBRID_EP_MULTINODE",
    "0",
    _choice("0", "1"),
    "0 or 1",
    "The `_verbs` module: 1 makes a missing libibverbs an error.",
    "build",
)
LIBFABRIC_HOME = Variable(
    "LIBFABRIC_HOME",
    "",
    str,
    "a folder",
    "Where libfabric is installed, if not in the system's folders; its headers are needed to build.",
    "build",
)
RDMA_CORE_HOME = Variable(
    "RDMA_CORE_HOME",
    "",
    str,
    "a folder with include/ and lib/",
    "Where rdma-core is installed, if not in the system's folders.",
    "build",
)
ARCH_LIST = Variable(
    "TORCH_CUDA_ARCH_LIST",
    "9.0 10.0",
    str,
    "compute capabilities, separated by spaces or semicolons",
    "The GPU architectures that the `_cuda` module is compiled for.",
    "build",
)
TARGET_ROOT = Variable(
    "HYBRID_EP_TARGET_ROOT",
    "",
    str,
    "a folder with usr/include and usr/lib",
    "Cross-compilation: Python's and libibverbs' headers for the target (csrc/cmake/aarch64-linux.cmake).",
    "build",
)
CMAKE_ARGS = Variable("CMAKE_ARGS", "", str, "arguments of cmake", "Added to those that setup.py gives.", "build")


# Set by torchrun and mpirun: who this process is. `hybrid-ep bench` joins such a group instead of starting its own.
RANK: Variable[int | None] = Variable("RANK", None, _natural, "an integer ≥ 0", "This process's rank, set by torchrun.")
WORLD_SIZE: Variable[int | None] = Variable(
    "WORLD_SIZE", None, _positive_int, "an integer ≥ 1", "How many ranks there are, set by torchrun."
)
LOCAL_RANK: Variable[int | None] = Variable(
    "LOCAL_RANK", None, _natural, "an integer ≥ 0", "This process's rank within its node, set by torchrun."
)
MPI_RANK: Variable[int | None] = Variable(
    "OMPI_COMM_WORLD_RANK", None, _natural, "an integer ≥ 0", "This process's rank, set by Open MPI's mpirun."
)
MPI_SIZE: Variable[int | None] = Variable(
    "OMPI_COMM_WORLD_SIZE", None, _positive_int, "an integer ≥ 1", "How many ranks there are, set by Open MPI's mpirun."
)
MPI_LOCAL_RANK: Variable[int | None] = Variable(
    "OMPI_COMM_WORLD_LOCAL_RANK",
    None,
    _natural,
    "an integer ≥ 0",
    "The rank within its node, set by Open MPI's mpirun.",
)
SLURM_RANK: Variable[int | None] = Variable(
    "SLURM_PROCID", None, _natural, "an integer ≥ 0", "This process's rank, set by srun."
)
SLURM_SIZE: Variable[int | None] = Variable(
    "SLURM_STEP_NUM_TASKS", None, _positive_int, "an integer ≥ 1", "How many ranks there are, set by srun."
)
SLURM_LOCAL_RANK: Variable[int | None] = Variable(
    "SLURM_LOCALID", None, _natural, "an integer ≥ 0", "The rank within its node, set by srun."
)
MASTER_ADDR = Variable(
    "MASTER_ADDR",
    "127.0.0.1",
    str,
    "a host name or address",
    "Where rank 0 can be reached; needed by mpirun on several nodes.",
)
MASTER_PORT = Variable("MASTER_PORT", 29500, _positive_int, "a port", "The port of rank 0, for the rendezvous.")

# Set in Pods, the first two by Kubernetes itself: where `hybrid-ep k8s mark-node` writes.
KUBERNETES_HOST = Variable("KUBERNETES_SERVICE_HOST", "", str, "a host name or address", "Where the API server is.")
KUBERNETES_PORT = Variable("KUBERNETES_SERVICE_PORT", 443, _positive_int, "a port", "The port of the API server.")
NODE_NAME = Variable("NODE_NAME", "", str, "a node's name", "The Kubernetes node that this Pod runs on.")

# Set in the Pods of a gang, by what starts them: where `hybrid-ep preflight` meets the gang's other nodes.
GANG_ID = Variable("GANG_ID", "", str, "any text", "The gang's name, set by NVSentinel's preflight.")
GANG_CONFIG_DIR = Variable(
    "GANG_CONFIG_DIR", "", str, "a folder", "Files that list the gang's Pods, mounted by NVSentinel's preflight."
)
GANG_TIMEOUT_SECONDS = Variable(
    "GANG_TIMEOUT_SECONDS",
    600.0,
    _seconds,
    "a number of seconds > 0 and ≤ 10000000",
    "How long the nodes of a gang wait for each other, set by NVSentinel's preflight.",
)
POD_NAME = Variable("POD_NAME", "", str, "a Pod's name", "This Pod's name, by which GANG_CONFIG_DIR lists it.")
LWS_LEADER_ADDRESS = Variable(
    "LWS_LEADER_ADDRESS", "", str, "a host name or address", "The first Pod of a LeaderWorkerSet's group."
)
LWS_GROUP_SIZE: Variable[int | None] = Variable(
    "LWS_GROUP_SIZE", None, _positive_int, "an integer ≥ 1", "Pods of a LeaderWorkerSet's group."
)
LWS_WORKER_INDEX: Variable[int | None] = Variable(
    "LWS_WORKER_INDEX", None, _natural, "an integer ≥ 0", "This Pod's place in a LeaderWorkerSet's group."
)
PET_NNODES: Variable[int | None] = Variable(
    "PET_NNODES", None, _positive_int, "an integer ≥ 1", "torchrun's --nnodes, set by Kubeflow's Trainer."
)
PET_NODE_RANK: Variable[int | None] = Variable(
    "PET_NODE_RANK", None, _natural, "an integer ≥ 0", "torchrun's --node-rank, set by Kubeflow's Trainer."
)
PET_MASTER_ADDR = Variable(
    "PET_MASTER_ADDR", "", str, "a host name or address", "torchrun's --master-addr, set by Kubeflow's Trainer."
)
JOB_COMPLETION_INDEX: Variable[int | None] = Variable(
    "JOB_COMPLETION_INDEX", None, _natural, "an integer ≥ 0", "This Pod's index in an Indexed Job or a JobSet's Job."
)

# Set in containers by what runs them.
CONTAINER = Variable("container", "", str, "any text", "Set by podman and systemd inside a container.")
VISIBLE_DEVICES = Variable(
    "NVIDIA_VISIBLE_DEVICES", "", str, "all, none, or GPUs", "The GPUs that the container toolkit was asked for."
)

CHECKS_ONLY = Variable(
    "HYBRID_EP_CHECKS_ONLY",
    "off",
    _choice("on", "off"),
    "on or off",
    "`on` says that no job runs with this installation, so that the doctor does not judge its packages, torch first. "
    "The image `doctor` sets it.",
)

VARIABLES: tuple[Variable[Any], ...] = (
    ENGINE,
    TIMEOUT_S,
    LOST_RANKS,
    LOW_LATENCY_BETWEEN,
    NUM_RANKS_PER_DOMAIN,
    POOL_SLOTS,
    ELASTIC_BUFFER,
    LOG_LEVEL,
    TRANSPORT,
    FABRIC_PROVIDER,
    GID_INDEX,
    PKEY_INDEX,
    SERVICE_LEVEL,
    TRAFFIC_CLASS,
    RDMA_MTU,
    QUEUE_PAIRS,
    RELAXED_ORDERING,
    TCP_ADDRESS,
    TCP_CONNECTIONS,
    LOOPBACK_RATE,
    NICS,
    NVML_STUB,
    RANK,
    WORLD_SIZE,
    LOCAL_RANK,
    MPI_RANK,
    MPI_SIZE,
    MPI_LOCAL_RANK,
    SLURM_RANK,
    SLURM_SIZE,
    SLURM_LOCAL_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    KUBERNETES_HOST,
    KUBERNETES_PORT,
    NODE_NAME,
    GANG_ID,
    GANG_CONFIG_DIR,
    GANG_TIMEOUT_SECONDS,
    POD_NAME,
    LWS_LEADER_ADDRESS,
    LWS_GROUP_SIZE,
    LWS_WORKER_INDEX,
    PET_NNODES,
    PET_NODE_RANK,
    PET_MASTER_ADDR,
    JOB_COMPLETION_INDEX,
    CONTAINER,
    VISIBLE_DEVICES,
    CHECKS_ONLY,
    BUILD_CUDA,
    BUILD_NVML,
    BUILD_NVSHMEM,
    NVSHMEM_HOME,
    STRICT,
    MULTINODE,
    LIBFABRIC_HOME,
    RDMA_CORE_HOME,
    ARCH_LIST,
    TARGET_ROOT,
    CMAKE_ARGS,
)


def environment_without(*variables: Variable[Any], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's environment for a program that must not see these variables, or those with such a prefix."""
    hidden = {variable.name for variable in variables}
    return {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith(prefixes)}
