"""The doctor's reference as a page, from the checks and the profiles: `python -m hybrid_ep.cluster.doctor.document`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hybrid_ep.cluster.doctor.active.judge import ACTIVE_CHECKS
from hybrid_ep.cluster.doctor.compare import COMPARISONS
from hybrid_ep.cluster.doctor.model import Check
from hybrid_ep.cluster.doctor.profile import load_profile, shipped_profiles
from hybrid_ep.cluster.doctor.registry import GROUPS, all_checks

_CHECKS = """# Doctor reference

This page is made from the checks and the profiles of the [node doctor](doctor.md). Each check has what passes, what to
do if it fails, and where its facts are read. `key` in a condition is a key of the [profile](#profiles). A
check applies if the profile sets the keys that it names.

## What is read

**GPUs** are read through NVML (nvidia-ml-py). **NICs** are read from /sys and libibverbs: through pyverbs if it can be
imported, else through the package's module `_verbs`. Without both, two facts are unknown: the active MTU of InfiniBand
ports, and the NICs' dma-buf support. `hybrid-ep topology --json` says which reader answered.

**Xids** are judged by NVIDIA's catalogue, `hybrid_ep/cluster/doctor/xids.yaml`. An event counts until the driver
reports that no recovery is needed (Xid 154, "None"), or until the driver is loaded again. NVLink 5's Xids 144 to 150
count if their message says Fatal.

**CUDA's codes** of `driver.cuda_start` have their meaning and remedy in `hybrid_ep/cluster/doctor/cuda_codes.yaml`.

**Error counters** (`gpu.errors`, `nvlink.errors`, `nic.errors`, `host.aer`) are read twice, a second apart. The profile
names the counters that may rise:

| key | for | limit |
|---|---|---|
| `error_rise_per_s` | counters that rise on sound links | a second |
| `error_rise_per_h` | rare events | an hour; in a shorter time, as many as in one hour |

A counter that the profile does not name must not rise at all. With `--state` the same limits hold for the rise since
the last run.

CRC errors at a low rate are normal on Hopper. On an idle node with four H200, 22 of 72 links counted 1 to 3 in a
second. A bad link shows a replay, a recovery, or very many CRC errors. So replay and recovery
must not rise. CRC counters may rise by the limit of NVIDIA's DCGM. NVLink 5 has other counters; no Blackwell node was
measured.
"""

_PROFILES = """## Profiles

A profile says what is expected of a platform. The doctor proposes one by the model of the GPUs and, in clouds, by the
firmware's vendor, product and asset tag (`match.machine`). `--profile` chooses another, and the report names it.

- A board of another model than the profile's is a fault (`gpu.model`).
- GPUs that fit no other profile are judged by `gpu-server`: what any GPU must do. So are GPUs on PCI that NVML does not
  name.
- A node that shows no GPU is judged by the profile whose `match.product` is its firmware's product. Other nodes
  without GPUs get `cpu`, unless the driver is loaded or the state file knows GPUs.
- `extends` takes one profile or a list, of which the last one wins.
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
[profiles/h200-4gpu-vm.yaml](profiles/h200-4gpu-vm.yaml) is such a profile, for a virtual machine.

## Shipped profiles
"""


def document() -> str:
    """Returns the page as Markdown."""
    return "\n".join([_CHECKS, *_groups(), *_active(), *_comparisons(), _PROFILES, *_profile_table()]) + "\n"


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
    sys.stdout.write(document())
