"""Writes the doctor's pages from the checks and the profiles.

python -m hybrid_ep.doctor.document guide > docs/doctor.md
python -m hybrid_ep.doctor.document checks > docs/doctor_checks.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hybrid_ep.doctor.active.judge import ACTIVE_CHECKS
from hybrid_ep.doctor.compare import COMPARISONS
from hybrid_ep.doctor.model import Check
from hybrid_ep.doctor.profile import load_profile, shipped_profiles
from hybrid_ep.doctor.registry import GROUPS, all_checks

__all__ = ["document"]

_INTRODUCTION = """# The node doctor

<!-- Written by `python -m hybrid_ep.doctor.document guide`; a test compares. Change the checks, not this page. -->

`hybrid-ep doctor` says whether this node is fit to run hybrid_ep, and what to do if not. It needs no root and no GPU:
what it cannot read is `unknown`, with the reason.

```
hybrid-ep doctor                                 # every check of this platform's profile
hybrid-ep doctor --quick                         # without second readings and other programs
hybrid-ep doctor --group nic --check gpu.count   # only these groups and these single checks
hybrid-ep doctor --profile site.yaml --json --junit doctor.xml
hybrid-ep doctor --state /var/lib/hybrid_ep/doctor.json   # remember counters, and judge what rose since the last run
hybrid-ep doctor --record node.json              # everything that was read, to replay it elsewhere
hybrid-ep doctor --sysroot DIR                   # a recorded or simulated node
hybrid-ep doctor --accept-unknown                # exit 0 where only unreadable things are left, as in a Pod
hybrid-ep doctor --active                        # minutes: bandwidth, burn and memory test of idle GPUs
hybrid-ep doctor compare a.json b.json …         # what only several nodes together can show
```

| result | meaning | exit status |
|---|---|---|
| pass | the expectation was confirmed | 0 |
| fail | a fault was confirmed: do what the remedy says before the node gets work | 1 |
| warn | a fault was confirmed, in a check of severity `warning`: the node can do its work | as if it had passed |
| unknown | something is missing, may not be read or does not answer: nothing is told | 2, unless something failed |

Exit status 1 means a confirmed fault and nothing else. An error of the doctor itself, a file that cannot be written and
wrong options end with 2.

No check can hang or crash the doctor. A child process reads the node; a source that is silent for 5 s (`nvmlInit`, a
file of /sys) is `unknown: no answer in 5 s` and is not asked again. A check that breaks is `unknown: internal error`.

Other pages: [what each check reads, and profiles](doctor_checks.md); [which fault is found by which
check](doctor_scenarios.md); [the report of a real node](node-h200.md).

## In a container or a Pod

- A container that was given some of the node's GPUs is judged by those. One that sees none says `unknown`.
- `gpu.xid` and `host.kernel_log` need the kernel log: mount the host's /dev/kmsg (hostPath) or its journal. Without
  it they are `unknown`, and everything else is judged.
- The fabric manager may run in the GPU operator's container; a fabric that is complete shows that it runs.
- Processes of other containers cannot be seen: memory in use is then `unknown`, and no fault.

## Memory between runs

`--state FILE` keeps the counters of ECC, row remapping, PCIe (replay, AER), NVLink and NIC ports. The next run judges
what rose in between, per hour (`error_rise_per_h` of the profile), beside what rises within one second. Keep the file
on the node (in Kubernetes on a hostPath). A file that is lost or damaged starts over and is no fault. Counters that are
lower than before started over with the driver; they count from 0.

## Active checks

`hybrid-ep doctor --active` loads the GPUs and measures them, after the other checks; it is for idle nodes and takes
minutes (`--burn-seconds` for the burn alone). Bandwidths are held to the profile (`active.*`), else to the median of
the run, so that one slow GPU or link is found without a figure. The burn compares the bits of every result: other bits
are silent data corruption. GPUDirect RDMA is measured by perftest with GPU memory. Where that cannot be (no perftest,
or built without CUDA) the check is `unknown`; host memory is never measured in its place.

{active}

## Clocks of several nodes

`hybrid-ep doctor --asked-at "$(date +%s.%N)" --json` tells the doctor the caller's clock. Who collects the report adds
`received_s` to its `facts`. Both enclose the node's clock, so `compare.clock` judges measured offsets. Without them it
has only the bounds that the nodes give of themselves.

## What is out of scope

The doctor changes nothing, and asks no BMC, no switch and no subnet manager. Not examined: power supplies and fans
(IPMI), disks, NVLink switch trays of a rack, the Ethernet or InfiniBand fabric beyond the port, Kubernetes itself.
NVIDIA's NVSentinel, DCGM and vendor tools do that.
"""

_CHECKS = """# What the doctor's checks read

<!-- Written by `python -m hybrid_ep.doctor.document checks`; a test compares. Change the checks, not this page. -->

GPUs are read through NVML (nvidia-ml-py), RDMA devices from /sys and libibverbs: through pyverbs where that can be
imported, else through our own module `_verbs`, with the same facts. Without either, /sys has to do, and the active MTU
of InfiniBand ports and the NICs' dma-buf support are unknown. `hybrid-ep topology --json` says which reader answered.

Xids are judged by NVIDIA's catalogue (`hybrid_ep/doctor/xids.yaml`: number, meaning, action, generations). An event is
forgotten when the driver reports that the GPU needs no recovery any more (Xid 154, "None") and when the driver is
loaded again. NVLink 5's Xids 144 to 150 count where their message says Fatal.
"""

_COUNTERS = """## Error counters

`gpu.errors`, `nvlink.errors`, `nic.errors` and `host.aer` read every counter twice, a second apart. The profile names
those that may rise: by how much a second (`error_rise_per_s`: counters that rise on sound links), or an hour
(`error_rise_per_h`: events that happen; within less than an hour, as many as in one). A counter that it does not name
must not rise at all. With `--state`, the same limits hold for what rose since the last run.

On Hopper "no counter rises" would be a false alarm. Measured on 4× H200, idle ([the node](node-h200.md)): within one
second the CRC data counter rose on 23 of 72 links, by 1 or 2; a run later on 22, by 1 to 3. Replay, recovery and CRC
flit counters stood at 0 on every link. So CRC errors at a low rate are normal; what shows a bad link is a replay, a
recovery, or very many CRC errors. Replay and recovery must not rise, and CRC counters may by up to 100 a second, the
limit of NVIDIA's own monitor (DCGM). NVLink 5 has other counters, and no Blackwell node was measured.
"""

_PROFILES = """## Profiles

Expectations come from a profile; the model of most GPUs proposes one, `--profile` chooses, and the report names it. A
board of another model is then a fault (`gpu.model`). GPUs that fit no other profile, and GPUs on PCI that NVML does not
name, are held to `gpu-server`: what any GPU must do, and nothing that it does not have. A container that was given no
GPU sees the node's GPUs on PCI all the same; `--profile cpu` says that none is meant.

The NICs that are judged are the GPUs'. Of those at `affinity.max_distance` or nearer, as many as `nic.count` are taken:
first those of the profile's rate and link layer or of the same model, then the nearest. A DPU, a NIC of storage or
management, a second port without a cable are named in `nic.count` with the reason, and not judged. Where no NIC is
near, as in a virtual machine that hides the PCIe tree, all of them are candidates.

A site whose servers differ writes what is different, and nothing else:

```yaml
extends: hgx-h100
nic: {count: 16, rate_gbps: 200, devices: ["mlx5_*"]}
host: {hugepages_2m: 2560}
severity: {gpu.persistence: warning, host.acs: "off"}
```

null means "not checked". `nic: {count: 0}` says that the node has no NIC to count, and leaves out all that needs one;
[profiles/h200-4gpu-vm.yaml](profiles/h200-4gpu-vm.yaml) is such a site's profile, for the recorded node.
"""


def document(page: str) -> str:
    """Returns a page as Markdown: ``guide`` (docs/doctor.md) or ``checks`` (docs/doctor_checks.md)."""
    if page == "guide":
        introduction = _INTRODUCTION.replace("{active}", "\n".join(_active()))
        return "\n".join([introduction, *_remedies(), *_comparisons()])
    return "\n".join([_CHECKS, *_groups(), _COUNTERS, _PROFILES, *_profile_table()]) + "\n"


def _active() -> Iterator[str]:
    yield "| check | what | passes when | what to do where it fails |\n|---|---|---|---|"
    for check in ACTIVE_CHECKS:
        yield f"| {check.id} | {check.title} | {_with_keys(check.expectation)} | {check.remedy} |"


def _remedies() -> Iterator[str]:
    """What to do, check by check: the table that an operator reads."""
    yield "## Remedies\n"
    yield "| check | passes when | what to do where it fails |\n|---|---|---|"
    for check in all_checks():
        name = f"{check.id} (warning)" if check.severity.value == "warning" else check.id
        yield f"| {name} | {_with_keys(check.expectation)} | {check.remedy} |"
    yield ""


def _groups() -> Iterator[str]:
    checks = all_checks()
    for group in GROUPS:
        yield f"## {group}\n"
        for check in checks:
            if check.group == group:
                yield from _check(check)


def _check(check: Check) -> Iterator[str]:
    traits = [check.severity.value] if check.severity.value != "error" else []
    traits += [] if check.quick else ["not in --quick"]
    suffix = f" ({', '.join(traits)})" if traits else ""
    yield f"### {check.id}: {check.title}{suffix}\n"
    yield f"- **read from** {check.source}"
    if check.wants:
        keys = ", ".join(f"`{key}`" for key in check.wants)
        yield f"- **applies where the profile sets** {keys}"
    if check.privilege:
        yield f"- **needs** {check.privilege}"
    yield ""


def _with_keys(expectation: str) -> str:
    return expectation.replace("{", "`").replace("}", "`")


def _comparisons() -> Iterator[str]:
    yield "## compare: several nodes\n"
    yield "| check | passes when | remedy |\n|---|---|---|"
    for item in COMPARISONS:
        yield f"| {item.id} | {item.title}: {item.expectation} | {item.remedy} |"
    yield ""


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
