"""Writes docs/doctor.md from the checks and the profiles: ``python -m hybrid_ep.doctor.document > docs/doctor.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hybrid_ep.doctor.compare import COMPARISONS
from hybrid_ep.doctor.model import Check
from hybrid_ep.doctor.profile import load_profile, shipped_profiles
from hybrid_ep.doctor.registry import GROUPS, all_checks

__all__ = ["document"]

_INTRODUCTION = """# The node doctor

<!-- Written by `python -m hybrid_ep.doctor.document`; a test compares. Change the checks, not this page. -->

`hybrid-ep doctor` says whether this node is fit to run hybrid_ep, and what to do if not. It needs no root and no GPU:
what it cannot read is `unknown`, with the reason.

```
hybrid-ep doctor                                 # every check of this platform's profile
hybrid-ep doctor --quick                         # without second readings and other programs
hybrid-ep doctor --group nic --check gpu.count   # only these groups and these single checks
hybrid-ep doctor --profile site.yaml --json --junit doctor.xml
hybrid-ep doctor --record node.json              # everything that was read, to replay it elsewhere
hybrid-ep doctor --sysroot DIR                   # a recorded or simulated node
hybrid-ep doctor --accept-unknown                # exit 0 where only unreadable things are left, as in a Pod
hybrid-ep doctor compare a.json b.json …         # what only several nodes together can show
```

| result | meaning | exit status |
|---|---|---|
| pass | the expectation was confirmed | 0 |
| fail | a fault was confirmed | 1 |
| warn | a fault was confirmed, in a check of severity `warning` | as if it had passed |
| unknown | a tool is missing or something may not be read; nothing is concluded | 2, unless something failed |

GPUs are read through NVML (nvidia-ml-py), RDMA devices from /sys and libibverbs: through pyverbs where that can be
imported, else through our own module `_verbs`, with the same facts; without either, /sys has to do, and the active MTU
of InfiniBand ports and the NICs' dma-buf support are unknown. `hybrid-ep topology --json` says which reader answered.
"""

_COUNTERS = """## Error counters

`nvlink.errors` and `nic.errors` read every counter twice, a second apart. The profile names those that may rise, and by
how much a second on one link or port (`error_rise_per_s`); a counter that it does not name must not rise at all.

On Hopper "no counter rises" would be a false alarm. Measured on 4× H200, idle ([the node](node-h200.md)): within one
second the CRC data counter rose on 23 of 72 links, by 1 or 2; a run later on 22, by 1 to 3. Replay, recovery and CRC
flit counters stood at 0 on every link. So CRC errors at a low rate are normal; what shows a bad link is a replay, a
recovery, or very many CRC errors. Replay and recovery must not rise, and CRC counters may by up to 100 a second, the
limit of NVIDIA's own monitor (DCGM). NVLink 5 has other counters; no Blackwell node was measured, and there none may
rise.
"""

_PROFILES = """## Profiles

Expectations come from a profile; the GPU's model proposes one, `--profile` chooses, and the report names it. GPUs that
fit no other profile, and GPUs on PCI that NVML does not name, are held to `gpu-server`: what any GPU must do. A
container that was given no GPU sees the node's GPUs on PCI all the same; `--profile cpu` says that none is meant.

The NICs that are judged are those of the GPUs: at `affinity.max_distance` or nearer. Others, of storage and management,
are named in `nic.count` and not judged. Where no NIC is near, as in a virtual machine that hides the PCIe tree, all of
them are judged.

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


def document() -> str:
    """Returns the page as Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_comparisons(), _COUNTERS, _PROFILES, *_profile_table()]) + "\n"


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
    yield f"- **passes when** {_with_keys(check.expectation)}"
    if check.wants:
        keys = ", ".join(f"`{key}`" for key in check.wants)
        yield f"- **applies where the profile sets** {keys}"
    if check.privilege:
        yield f"- **needs** {check.privilege}"
    yield f"- **remedy** {check.remedy}\n"


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
    sys.stdout.write(document())
