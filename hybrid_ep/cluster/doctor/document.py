"""Writes the doctor's pages from the checks and the profiles.

python -m hybrid_ep.cluster.doctor.document guide > docs/doctor.md
python -m hybrid_ep.cluster.doctor.document checks > docs/doctor_checks.md
python -m hybrid_ep.cluster.doctor.document profiles > docs/doctor_profiles.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hybrid_ep.cluster.doctor.active.judge import ACTIVE_CHECKS
from hybrid_ep.cluster.doctor.compare import COMPARISONS
from hybrid_ep.cluster.doctor.model import Check
from hybrid_ep.cluster.doctor.profile import load_profile, shipped_profiles
from hybrid_ep.cluster.doctor.registry import GROUPS, all_checks

__all__ = ["document"]

_GUIDE = """# The node doctor

<!-- Written by `python -m hybrid_ep.cluster.doctor.document guide`; a test compares. Change the code instead. -->

`hybrid-ep doctor` says whether this node can run hybrid_ep, and what to do if it cannot. It needs no root and no GPU.
What it cannot read is `unknown`, with the reason.

```
hybrid-ep doctor                                 # every check of this platform's profile
hybrid-ep doctor --quick                         # no second reading of counters, no other programs
hybrid-ep doctor --group nic --check gpu.count   # only these groups and these single checks
hybrid-ep doctor --profile site.yaml --json --junit doctor.xml
hybrid-ep doctor --state /var/lib/hybrid_ep/doctor.json   # keep counters, and judge their rise since the last run
hybrid-ep doctor --record node.json              # write everything that was read, for a report of a wrong result
hybrid-ep doctor --replay node.json              # judge such a recording, on any machine, also by another profile
hybrid-ep doctor --sysroot DIR                   # read /sys, /proc and /dev below DIR, as the tests do
hybrid-ep doctor --accept-unknown                # exit 0 if only unknown is left, as in a Pod
hybrid-ep doctor --active                        # minutes: bandwidth, burn and memory test of idle GPUs
hybrid-ep doctor compare a.json b.json …         # reports of several nodes, side by side
```

| page | has |
|---|---|
| [Checks](doctor_checks.md) | each check: what passes, what to do if it fails, what is read |
| [Profiles](doctor_profiles.md) | what is expected of each platform, and how a site changes it |
| [Faults](doctor_scenarios.md) | simulated faults, and the checks that find them |
| [Other validators](doctor_scope.md) | what NVSentinel, DCGM, AzNHC, OCI and imbue look for, and the check here |
| [A recorded node](node-h200.md) | the report of a real node |

## Results

| result | meaning | exit status |
|---|---|---|
| pass | the expectation was confirmed | 0 |
| fail | a fault was confirmed: follow the remedy before the node gets work | 1 |
| warn | a check of severity `warning` confirmed a fault: the node can do its work | as for pass |
| unknown | something is missing, may not be read or does not answer | 2, unless a check failed |

Exit status 1 means a confirmed fault and nothing else. Status 2 also stands for an error of the doctor itself, a file
that cannot be written, and wrong options.

No check can hang or crash the doctor. A child process reads the node. A source that is silent for 5 s is
`unknown: no answer in 5 s` and is not read again. A check that breaks is `unknown: internal error`.

## In a container or a Pod

- A container that has some of the node's GPUs is judged by those. A container without GPUs gets `unknown`.
- `gpu.xid` and `host.kernel_log` need the kernel log, which only a privileged container may open. A sidecar keeps it
  with `hybrid-ep k8s kernel-log FILE`, and `--kernel-log FILE` reads it. Without it these two are `unknown`. They are
  also `unknown` where the file is older than 15 minutes.
- The fabric manager may run in the GPU operator's container. A complete fabric shows that it runs.
- Processes of other containers cannot be seen. Memory in use is then `unknown`, not a fault.

## Counters between runs

`--state FILE` keeps the counters of ECC, row remapping, PCIe (replay, AER), NVLink and NIC ports. The next run judges
their rise per hour (`error_rise_per_h` of the profile). Keep the file on the node. In Kubernetes,
`hybrid-ep k8s mark-node --remember` keeps the counters in an annotation of the node.

If the file is lost or damaged, the counters start over; that is no fault. A counter that is lower than before was
reset by the driver and counts from 0.

## Recordings

`--record FILE` writes what the checks read. A recording has no host keys, no environment and no serial numbers.
Unlike a report, it can be judged again: `hybrid-ep doctor --replay FILE` does that without the node, without GPUs and
without a driver. So a node can be recorded once and held to another profile, or to the checks of a newer version.

- A recording has no configuration space of PCIe. `host.acs` and `nic.pcie_settings` are `unknown`.
- Counters have the rise that the recorded run saw.
- What a newer check reads is not in an older recording. The check is then `unknown`, or passes as not supported.
- `--active`, `--record`, `--state`, `--kernel-log`, `--asked-at` and `--sysroot` need a live node.

## Active checks

`hybrid-ep doctor --active` loads the GPUs and measures them, after the other checks. Run it on idle nodes. It takes
minutes; `--burn-seconds` sets the time of the burn.

- A bandwidth is compared with the profile (`active.*`). Without a figure there, it is compared with the median of the
  run. So one slow GPU or link is found in both cases.
- The burn compares the bits of every result. A difference is silent data corruption.
- perftest measures GPUDirect RDMA with GPU memory. Where perftest is missing or has no CUDA, the transport `verbs` of
  this package does. The NIC registers GPU memory by dma-buf or nvidia-peermem, and the bytes that arrived are
  compared. If no GPU memory can be registered, the check is `unknown` and says why. Host memory is never measured in
  its place.

[Active checks](doctor_checks.md#active) lists them.

## Clocks of several nodes

`hybrid-ep doctor --asked-at "$(date +%s.%N)" --json` passes the caller's clock. The collector adds `received_s` to the
report's `facts`. The node's time lies between the two, so `compare.clock` judges a measured offset. Without them it
judges the error bounds that each node reports of its own clock.

## What the doctor does not do

It changes nothing. It asks no BMC, no switch and no subnet manager. It does not examine power supplies and fans (IPMI),
disks, NVLink switch trays, the network beyond the port, or Kubernetes itself. [Other validators](doctor_scope.md) do
that.
"""

_CHECKS = """# The doctor's checks

<!-- Written by `python -m hybrid_ep.cluster.doctor.document checks`; a test compares. Change the checks. -->

Each check has what passes, what to do if it fails, and where its facts are read. `key` in a condition is a key of the
[profile](doctor_profiles.md). A check applies if the profile sets the keys that it names.

## What is read

**GPUs** are read through NVML (nvidia-ml-py). **NICs** are read from /sys and libibverbs: through pyverbs if it can be
imported, else through the package's module `_verbs`. Without both, two facts are unknown: the active MTU of InfiniBand
ports, and the NICs' dma-buf support. `hybrid-ep topology --json` says which reader answered.

**Xids** are judged by NVIDIA's catalogue, `hybrid_ep/cluster/doctor/xids.yaml`. An event counts until the driver
reports that no recovery is needed (Xid 154, "None"), or until the driver is loaded again. NVLink 5's Xids 144 to 150
count if their message says Fatal.

**Error counters** (`gpu.errors`, `nvlink.errors`, `nic.errors`, `host.aer`) are read twice, a second apart. The profile
names the counters that may rise:

| key | for | limit |
|---|---|---|
| `error_rise_per_s` | counters that rise on sound links | a second |
| `error_rise_per_h` | rare events | an hour; in a shorter time, as many as in one hour |

A counter that the profile does not name must not rise at all. With `--state` the same limits hold for the rise since
the last run.

CRC errors at a low rate are normal on Hopper. An idle node with H200 GPUs shows them on many links
([figures](node-h200.md#nvlink-counters)). A bad link shows a replay, a recovery, or very many CRC errors. So replay and
recovery must not rise. CRC counters may rise by the limit of NVIDIA's DCGM. NVLink 5 has other counters; no Blackwell
node was measured.
"""

_PROFILES = """# The doctor's profiles

<!-- Written by `python -m hybrid_ep.cluster.doctor.document profiles`; a test compares. Change the profiles. -->

A profile says what is expected of a platform. The doctor proposes one by the model of the GPUs, `--profile` chooses
another, and the report names it.

- A board of another model than the profile's is a fault (`gpu.model`).
- GPUs that fit no other profile are judged by `gpu-server`: what any GPU must do. So are GPUs on PCI that NVML does not
  name.
- `oci-h100`, `p5-efa` and `p5en-efa` are for nodes of clouds whose GPUs others have, too. They are never proposed: give
  them by `--profile`.
- A container without GPUs still sees the node's GPUs on PCI. `--profile cpu` says that the container is to have
  none.

## The NICs that are judged

The doctor judges the NICs of the GPUs. Candidates are the NICs at `affinity.max_distance` or nearer. Of these it takes
as many as `nic.count`: first those of the profile's rate and link layer, or of the same model, then the nearest. Where
one kind of them (model and link layer) is complete, it comes first. NICs that are left are named in `nic.count` with
the reason, and not judged. Examples are a DPU, a NIC for storage, and a second port without a cable. If no NIC is near,
as in a virtual machine that hides the PCIe tree, all are candidates.

## A site's own profile

Write what differs, and nothing else:

```yaml
extends: hgx-h100
nic: {count: 16, rate_gbps: 200, devices: ["mlx5_*"]}
host: {hugepages_2m: 2560}
severity: {gpu.persistence: warning, host.acs: "off"}
```

`null` means "not checked". `nic: {count: 0}` means that the node has no NICs; every check that needs one is left out.
[profiles/h200-4gpu-vm.yaml](profiles/h200-4gpu-vm.yaml) is such a profile, for the recorded node.

## Shipped profiles
"""


def document(page: str) -> str:
    """Returns a page as Markdown: ``guide``, ``checks`` or ``profiles``."""
    if page == "guide":
        return _GUIDE
    if page == "profiles":
        return "\n".join([_PROFILES, *_profile_table()]) + "\n"
    return "\n".join([_CHECKS, *_groups(), *_active(), *_comparisons()])


def _groups() -> Iterator[str]:
    checks = all_checks()
    for group in GROUPS:
        yield f"## {group}\n"
        for check in checks:
            if check.group == group:
                yield from _check(check)


def _check(check: Check) -> Iterator[str]:
    """One heading per check, which is its id, so that a message can link to it."""
    traits = ["A warning does not decide the exit status."] if check.severity.value == "warning" else []
    traits += [] if check.quick else ["Not part of `--quick`."]
    yield from _entry(check.id, check.title, check.expectation, check.remedy, *traits)
    yield f"- **Read from:** {check.source}."
    if check.wants:
        keys = ", ".join(f"`{key}`" for key in check.wants)
        yield f"- **Applies if the profile sets:** {keys}."
    if check.privilege:
        yield f"- **Needs:** {check.privilege}."
    yield ""


def _entry(name: str, title: str, expectation: str, remedy: str, *traits: str) -> Iterator[str]:
    yield f"### {name}\n"
    yield " ".join([f"{title[0].upper()}{title[1:]}.", *traits]) + "\n"
    yield f"- **Passes if:** {_with_keys(expectation)}."
    yield f"- **If it fails:** {remedy}"


def _active() -> Iterator[str]:
    yield "## active\n"
    yield "Only with `--active`, on idle nodes.\n"
    for check in ACTIVE_CHECKS:
        yield from _entry(check.id, check.title, check.expectation, check.remedy)
        yield ""


def _comparisons() -> Iterator[str]:
    yield "## compare\n"
    yield "By `hybrid-ep doctor compare`, from the reports of several nodes.\n"
    for item in COMPARISONS:
        yield from _entry(item.id, item.title, item.expectation, item.remedy)
        yield ""


def _with_keys(expectation: str) -> str:
    return expectation.replace("{", "`").replace("}", "`")


def _profile_table() -> Iterator[str]:
    profiles = [load_profile(name) for name in shipped_profiles()]
    yield "| key | " + " | ".join(profile.name for profile in profiles) + " |"
    yield "|---" * (len(profiles) + 1) + "|"
    for section, values in profiles[0].values.items():
        if isinstance(values, dict) and section not in ("severity", "match"):
            for key in values:
                row = [_cell(profile[f"{section}.{key}"]) for profile in profiles]
                yield f"| {section}.{key} | " + " | ".join(row) + " |"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(number)}" for name, number in value.items()) or "none"
    items = value if isinstance(value, list) else [value]
    return ", ".join(str(item).replace("*", "\\*") for item in items)


def _figure(value: object) -> object:
    return f"{value['value']} {value['unit']}" if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.stdout.write(document(sys.argv[1]))
