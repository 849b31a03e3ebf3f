"""The transport that joins the domains of a group, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_ep import _C, env
from hybrid_ep.errors import ConfigError
from hybrid_ep.transport import nvshmem

# In the order in which `auto` takes them between hosts.
_NAMES = ("verbs", "libfabric", "tcp", "loopback", "nvshmem")
_SYSFS = Path("/sys")


@dataclass(frozen=True)
class TransportState:
    """One transport in this process.

    Attributes:
        name: ``verbs``, ``libfabric``, ``tcp``, ``loopback`` or ``nvshmem``.
        is_built: whether it was compiled.
        obstacle: why it cannot be used here; None where it can.
        detail: what it would use, for people.
        num_ranks: that a group must have to use it; None: any number.
        is_only_by_name: whether `auto` never takes it here.
    """

    name: str
    is_built: bool
    obstacle: str | None
    detail: str = ""
    num_ranks: int | None = None
    is_only_by_name: bool = False


@dataclass(frozen=True)
class TransportChoice:
    """The transport that is used.

    Attributes:
        name: ``verbs``, ``libfabric``, ``tcp``, ``loopback`` or ``nvshmem``.
        reason: why.
        others: each other transport, and why it is not the one.
    """

    name: str
    reason: str
    others: dict[str, str]


def survey() -> tuple[TransportState, ...]:
    """Finds which transports this process could use. Opens the NICs for a moment; makes no connection."""
    tcp = TransportState("tcp", True, None, "sockets; rings in host memory")
    loopback = TransportState("loopback", True, None, "copies between ranks of one host")
    return (_verbs_state(), _fabric_state(), tcp, loopback, _nvshmem_state())


def fabric_provider() -> str:
    """Returns the provider that libfabric is asked for: ``HYBRID_EP_FABRIC_PROVIDER``, else that of the node's NICs.

    EFA's interfaces and Slingshot's NICs have one each. Without such NICs it is ``tcp``.
    """
    if named := env.FABRIC_PROVIDER.get():
        return named
    drivers = (_SYSFS / "class/infiniband").glob("*/device/driver")
    if any(driver.resolve().name == "efa" for driver in drivers):
        return "efa"
    return "cxi" if any((_SYSFS / "class/cxi").glob("cxi*")) else "tcp"


def _fabric_state() -> TransportState:
    if not _C.has_fabric:
        return TransportState("libfabric", False, "built without the headers of libfabric")
    provider = fabric_provider()
    is_only_by_name = provider not in ("efa", "cxi")
    # Providers take a third of a second to start: tcp, which is always there, is not started.
    is_wanted = not is_only_by_name or env.FABRIC_PROVIDER.is_set
    try:
        devices = _C.fabric_devices(provider if is_wanted else "")
    except ConnectionError as error:
        return TransportState("libfabric", True, error.args[1], is_only_by_name=is_only_by_name)
    detail = f"provider {provider}" + (f" on {', '.join(devices)}" if devices else "")
    return TransportState("libfabric", True, None, detail, is_only_by_name=is_only_by_name)


def _verbs_state() -> TransportState:
    if not _C.has_verbs:
        return TransportState("verbs", False, "built without the headers of libibverbs (HYBRID_EP_MULTINODE=1)")
    try:
        devices = _C.active_verbs_devices()
    except ConnectionError as error:
        return TransportState("verbs", True, error.args[1])
    if not devices:
        return TransportState("verbs", True, "no InfiniBand or RoCE device has an active port")
    return TransportState("verbs", True, None, ", ".join(devices))


def _nvshmem_state() -> TransportState:
    is_built, obstacle = nvshmem.obstacle()
    if obstacle is not None:
        return TransportState("nvshmem", is_built, obstacle, is_only_by_name=True)
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        obstacle = "no GPU is visible"
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    detail = "puts of the kernels; rings on NVSHMEM's heap"
    return TransportState("nvshmem", True, obstacle, detail, num_ranks, is_only_by_name=True)


def choose_transport(
    states: Sequence[TransportState] | None = None, *, asked: str | None = None, is_one_host: bool = False
) -> TransportChoice:
    """Chooses for one process.

    Args:
        states: of every transport; None looks at this process.
        asked: ``auto`` or a name; None = ``HYBRID_EP_TRANSPORT``.
        is_one_host: whether all ranks are on one host, which makes copies the nearest way.

    Raises:
        ConfigError: the transport that was asked for cannot be used here.
    """
    by_name = {state.name: state for state in (survey() if states is None else states)}
    asked = env.TRANSPORT.get() if asked is None else asked
    if asked != "auto":
        if asked not in by_name:
            raise ConfigError(f"transport is {asked!r}; allowed: auto, {', '.join(_NAMES)}")
        if obstacle := by_name[asked].obstacle:
            usable = [name for name in _NAMES if by_name[name].obstacle is None]
            raise ConfigError(f"transport is {asked!r}, but {obstacle}; allowed here: auto, {', '.join(usable)}")
        name, reason = asked, "asked for by name"
    elif is_one_host:
        name, reason = "loopback", "all ranks are on one host"
    else:
        name = next(name for name in _NAMES if by_name[name].obstacle is None and not by_name[name].is_only_by_name)
        reasons = [by_name[name].detail] if name in ("verbs", "libfabric") else []
        if name != "verbs":
            reasons.append(f"verbs cannot be used: {by_name['verbs'].obstacle}")
        reason = "; ".join(reasons)
    others = {other: _why_not(by_name[other], name, asked) for other in _NAMES if other != name}
    return TransportChoice(name, reason, others)


def _why_not(state: TransportState, chosen: str, asked: str) -> str:
    if state.obstacle is not None:
        return state.obstacle
    if asked != "auto":
        return f"usable; {chosen} is asked for by name"
    if state.name == "loopback":
        return "usable where all ranks are on one host"
    if state.is_only_by_name:
        return "usable where it is asked for by name"
    return f"usable; {chosen} comes first"


def agree_on_transport(
    by_rank: Sequence[Sequence[TransportState]], hosts: Sequence[str], asked: str
) -> TransportChoice:
    """Chooses for a group, alike at every rank.

    Args:
        by_rank: what `survey` says at each rank.
        hosts: the name of each rank's host.
        asked: ``auto`` or a name.

    Raises:
        ConfigError: the transport that was asked for cannot be used at some rank, or not between hosts.
    """
    is_one_host = len(set(hosts)) == 1
    if asked == "loopback" and not is_one_host:
        raise ConfigError(f"transport is 'loopback', but the ranks are on {len(set(hosts))} hosts; allowed: one host")
    states = []
    for columns in zip(*by_rank, strict=True):
        worst = next(((rank, state) for rank, state in enumerate(columns) if state.obstacle is not None), None)
        if worst is not None:
            rank, state = worst
            states.append(replace(state, obstacle=f"rank {rank}: {state.obstacle}"))
        elif columns[0].num_ranks not in (None, len(hosts)):
            why = f"it joins all {columns[0].num_ranks} ranks of the job, and the group has {len(hosts)}"
            states.append(replace(columns[0], obstacle=why))
        else:
            states.append(replace(columns[0], is_only_by_name=any(state.is_only_by_name for state in columns)))
    return choose_transport(states, asked=asked, is_one_host=is_one_host)
