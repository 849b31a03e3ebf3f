"""Damaged nodes: healthy ones and scenarios with files, NVML answers and facts broken at random, from a seed.

``python -m tests.sim.damage SEED NODES`` examines that many nodes and prints faults of the doctor itself: an exception,
a check that raised and became `unknown`, a report that cannot be written or read back. Every kind of file gets every
kind of damage: each node takes some of these pairs, in addition to random damage. The process gives up root's right to
read everything, because files without permissions are one kind of damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import random
import re
import shutil
import stat
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from hybrid_ep.cluster.doctor import Node, Report, Status, Unreadable, WatchedNode, examine
from hybrid_ep.cluster.doctor.command import propose, read_topology, recording_of
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.doctor.model import to_junit
from hybrid_ep.cluster.doctor.profile import load_profile
from hybrid_ep.cluster.doctor.render import render
from hybrid_ep.topology import Topology
from hybrid_ep.topology.nccl import to_nccl_xml
from hybrid_ep.topology.recording import Recording
from hybrid_ep.topology.render import render as render_topology
from tests.sim.platforms import PLATFORMS, healthy
from tests.sim.scenario import build_stub, load_scenarios

_TEXTS = (
    "",
    "\n",
    "-1",
    "0",
    "99999999999999999999999999",
    "0x",
    "nan",
    "1e999 Gb/sec",
    "007",
    "a b: c; d, e\n" * 50,
    "../../../../etc/hostname",
    "[red]x[/]",
    "<x>&\"'",
)
_BYTES = (
    b"\xff\xfe\x00\x80" * 8,
    b"\x1b[31mred\x07\x00\r\n\x9b2J",
    "‮\x85﷐ é".encode(),
    b"9" * 5000,
)
_HUGE = b"4: ACTIVE 0x10de 400 Gb/sec flags : x\n" * (5 << 20 >> 5)


def _write(place: Path, content: bytes) -> None:
    place.write_bytes(content)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    """Damage that puts something else in the place of a file or folder."""

    def damage(place: Path, dice: random.Random) -> None:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
        make(place)

    return damage


FILE_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "text": lambda place, dice: _write(place, dice.choice(_TEXTS).encode()),
    "bytes": lambda place, dice: _write(place, dice.choice(_BYTES)),
    "noise": lambda place, dice: _write(place, dice.randbytes(dice.randrange(300))),
    "cut": lambda place, dice: _write(place, place.read_bytes()[: dice.randrange(8)]),
    "huge": lambda place, dice: _write(place, _HUGE),
    "forbidden": lambda place, dice: place.chmod(0),
}
PLACE_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "removed": _replaced(lambda place: None),
    "dangling link": _replaced(lambda place: place.symlink_to("nowhere/at/all")),
    "loop": _replaced(lambda place: place.symlink_to(place.name)),
    "folder": _replaced(lambda place: place.mkdir()),
    "FIFO": _replaced(lambda place: os.mkfifo(place)),
    "file": _replaced(lambda place: place.write_bytes(b"file\n")),
}
_LIMIT_S = 2.0  # for one source to answer: above what a busy machine takes, below what many silent nodes cost
_WRONG_FACTS: tuple[Any, ...] = (None, 5, -1, "x", [], {}, {"a": []}, [{"name": 3}], True, 1e300)


@cache
def kind_of(path: str) -> str:
    """What a file is, whichever device it belongs to: the folder's beginning and the name, without numbers."""
    parts = path.split("/")
    return re.sub(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d|\d+", "#", f"{'/'.join(parts[:3])} {parts[-1]}")


class Pairs:
    """The kinds of file × kinds of damage that no node has had yet, in an order of the dice."""

    def __init__(self, recordings: Iterable[Recording], dice: random.Random, nodes: int) -> None:
        kinds: dict[str, set[str]] = {}
        nodes_with: dict[tuple[str, str], dict[int, None]] = {}  # pair → numbers of the nodes that have such a file
        for number, recording in enumerate(recordings):
            for path in {**recording.files, **recording.devices, **recording.links}:
                damages = _damages_of(recording, path)
                kinds.setdefault(kind_of(path), set()).update(damages)
                for name in damages:
                    nodes_with.setdefault((kind_of(path), name), {})[number] = None
        self._nodes_with = {pair: list(numbers) for pair, numbers in nodes_with.items()}
        self.left = [(kind, name) for kind in sorted(kinds) for name in sorted(kinds[kind])]
        dice.shuffle(self.left)
        self.tried = 0
        self._per_node = 2 * len(self.left) // nodes + 1  # some find no place on a node

    def damage(self, recording: Recording, root: Path, dice: random.Random) -> list[str]:
        """Breaks files of this node by the next pairs that fit it; returns what was done."""
        places: dict[str, list[str]] = {}
        for path in sorted({**recording.files, **recording.devices, **recording.links}):
            places.setdefault(kind_of(path), []).append(path)
        done: dict[tuple[str, str], str] = {}
        for kind, name in self.left:
            if len(done) == self._per_node:
                break
            fitting = [path for path in places.get(kind, ()) if name in _damages_of(recording, path)]
            if not fitting:
                continue
            path = dice.choice(fitting)
            place = root / path.lstrip("/")
            with contextlib.suppress(OSError):  # an earlier damage has closed or removed its folder
                if not os.path.lexists(place):
                    continue
                if path not in recording.links and not stat.S_ISREG(place.lstat().st_mode):
                    continue  # an earlier damage took its place
                _damages_of(recording, path)[name](place, dice)
                done[kind, name] = f"{path}: {name}"
                places[kind].remove(path)
        self.left = [pair for pair in self.left if pair not in done]
        self.tried += len(done)
        return list(done.values())

    def next_node(self, dice: random.Random) -> int:
        """The number of a node that has a file for the next pair."""
        return dice.choice(self._nodes_with[self.left[0]])


def _damages_of(recording: Recording, path: str) -> dict[str, Callable[[Path, random.Random], None]]:
    return PLACE_DAMAGES if path in recording.links else FILE_DAMAGES | PLACE_DAMAGES


def damage(recording: Recording, root: Path, dice: random.Random) -> list[str]:
    """Lays the node out below `root` and breaks it; returns what was done."""
    recording.write(root)
    done = []
    for _ in range(dice.choice((1, 1, 2, 4, 12))):
        kind = dice.choice(("file", "file", "file", "folder", "nvml", "facts", "added"))
        with contextlib.suppress(OSError):  # an earlier damage took its place
            done.append(_DAMAGES[kind](recording, root, dice))
    return done


def _damage_file(recording: Recording, root: Path, dice: random.Random) -> str:
    path = dice.choice(sorted({**recording.files, **recording.devices, **recording.links}))
    damages = _damages_of(recording, path)
    name = dice.choice(sorted(damages))
    damages[name](root / path.lstrip("/"), dice)
    return f"{path}: {name}"


def _damage_folder(recording: Recording, root: Path, dice: random.Random) -> str:
    path = Path(dice.choice(sorted({**recording.files, **recording.devices})))
    folder = dice.choice(list(path.parents)[:-1])
    name = dice.choice((*sorted(PLACE_DAMAGES), "forbidden"))
    (PLACE_DAMAGES | FILE_DAMAGES)[name](root / str(folder).lstrip("/"), dice)
    return f"{folder}/: {name}"


def _damage_nvml(recording: Recording, root: Path, dice: random.Random) -> str:
    place = root / "hybrid_ep" / "nvml.conf"
    lines = place.read_bytes().splitlines()
    if not lines:
        return "no NVML"
    number = dice.randrange(len(lines))
    key = lines[number].partition(b" ")[0]
    values = (b"!%d" % dice.choice((1, 3, 4, 9, 13, 15, 999)), *_BYTES, *(text.encode() for text in _TEXTS))
    lines[number] = key + b" " + dice.choice(values).replace(b"\n", b" ")[:400]
    place.write_bytes(b"\n".join(lines) + b"\n")
    return f"NVML {lines[number][:80]!r}"


def _damage_facts(recording: Recording, root: Path, dice: random.Random) -> str:
    place = root / "hybrid_ep" / "facts.json"
    facts = json.loads(place.read_text())
    table, path = facts, []
    while True:
        key = dice.choice(sorted(table)) if isinstance(table, dict) else dice.randrange(len(table))
        path.append(key)
        if not isinstance(table[key], (dict, list)) or not table[key] or dice.random() < 0.5:
            break
        table = table[key]
    table[key] = dice.choice(_WRONG_FACTS)
    place.write_text(json.dumps(facts))
    return f"fact {path}: {table[key]!r}"


def _add_stray(recording: Recording, root: Path, dice: random.Random) -> str:
    """Something that does not belong there, where names are taken from."""
    folders = ("sys/class/infiniband", "sys/bus/pci/devices", "sys/class/infiniband_verbs", "sys/devices/system/cpu")
    folder = root / dice.choice(folders)
    name = dice.choice(("x", "0", "cpu99", "mlx5_99", "é\udcff", "a\x1b[31m", "uverbs", "..x"))
    folder.mkdir(parents=True, exist_ok=True)
    make = dice.choice((lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff"), os.mkfifo, lambda p: p.symlink_to(".")))
    if os.path.lexists(folder / name):
        raise FileExistsError(name)  # an earlier one, maybe a FIFO, for which writing would wait
    make(folder / name)
    return f"{folder.relative_to(root)} has {name!r}"


_DAMAGES = {
    "file": _damage_file,
    "folder": _damage_folder,
    "nvml": _damage_nvml,
    "facts": _damage_facts,
    "added": _add_stray,
}


class LiveNode(Node):
    """A node that asks this machine for what no file holds, though its files lie elsewhere."""

    def __init__(self, sysroot: Path) -> None:
        super().__init__(sysroot)
        self.is_live = True


@dataclass
class Tally:
    """What the run saw."""

    nodes: int = 0
    damages: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)


def _silence_nvml(root: Path) -> str:
    """For a node that is read by a child: another one would wait forever."""
    with (root / "hybrid_ep" / "nvml.conf").open("a") as file:
        file.write("hang 1\n")
    return "silent NVML"


def _programs(folder: Path, dice: random.Random) -> None:
    """Programs that answer nonsense, for live nodes."""
    script = dice.choice(
        (
            "exit 3",
            r"printf '\377\376\033[31m'",
            "echo '{\"nodes\": 5}'",
            "echo '[]'",
            "kill -9 $$",
            "head -c 5000000 /dev/zero",
        )
    )
    for name in ("journalctl", "nvidia-imex-ctl", "nv-fabricmanager"):
        place = folder / name
        place.write_text(f"#!/bin/sh\n{script}\n")
        place.chmod(0o755)


def examine_damaged(recording: Recording, folder: Path, dice: random.Random, pairs: Pairs, tally: Tally) -> None:
    """Breaks one node, examines it, and checks that everything that comes out is well-formed."""
    root = folder / "node"
    root.mkdir(parents=True)
    done = damage(recording, root, dice) + pairs.damage(recording, root, dice)
    os.environ["HYBRID_EP_NVML_STUB"] = str(root / "hybrid_ep" / "nvml.conf")
    kind = dice.choice(("plain",) * 8 + ("live",) * 2 + ("watched", "watched live"))
    if "watched" in kind and (dice.random() < 0.05 or not tally.damages["silent"]):
        done.append(_silence_nvml(root))
    if "live" in kind:
        _programs(folder, dice)
    make = LiveNode if "live" in kind else Node
    tally.nodes += 1
    tally.damages.update(line.rpartition(": ")[2] if line[:1] == "/" else line.split()[0] for line in done)
    try:
        node: Node | WatchedNode = (
            WatchedNode(root, limit_s=_LIMIT_S, open_node=make) if "watched" in kind else make(root)
        )
        with closing(node):
            name, source = propose(node)
            report = examine(node, load_profile(name), source, wait=lambda since: 1.0)
            recorded = recording_of(node) if dice.random() < 0.2 else None
            topology = None
            if dice.random() < 0.2:
                with contextlib.suppress(Unreadable):  # where four sources are silent, nothing is asked
                    topology = node.insist(read_topology)
        for complaint in _complaints(report, recorded or "{}", topology):
            tally.crashes.append(f"{kind} {done}: {complaint}")
        tally.statuses.update(result.shown_as for result in report.results)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        tally.crashes.append(f"{kind} {done}: {type(error).__name__}: {error} at {place.filename}:{place.lineno}")


def _complaints(report: Report, recorded: str, topology: Topology | None) -> Iterator[str]:
    for result in report.results:
        if "internal error" in result.seen:
            yield f"{result.id}: {result.seen}"
        if result.status is Status.UNKNOWN and not result.seen:
            yield f"{result.id}: unknown without a reason"
    ElementTree.fromstring(to_junit(report))
    json.loads(recorded)
    again = Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    other = Report(**{**vars(again), "host": "another"})
    compare([again, other])
    parts = [render(report)]
    if topology is not None:
        parts.append(render_topology(topology))
        ElementTree.fromstring(to_nccl_xml(topology))
        json.dumps(topology.to_json(), allow_nan=False)
        if svg := report.facts.get("topology_svg"):
            ElementTree.fromstring(svg)
    for part in parts:
        text = io.StringIO()
        Console(file=text, width=100).print(part)
        if odd := re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text.getvalue()):
            yield f"control characters on the terminal: {odd[:5]}"


def main() -> None:
    seed, nodes = int(sys.argv[1]), int(sys.argv[2])
    dice = random.Random(seed)
    bases: list[Callable[[], Recording]] = [lambda name=name: healthy(name) for name in (*PLATFORMS, "cpu")]
    bases += [scenario.build for scenario in load_scenarios() if not scenario.site]
    tally, pairs = Tally(), Pairs((base() for base in bases), dice, nodes)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as top:
        ctypes.CDLL(
            str(build_stub(Path(top)) / "libnvidia-ml.so.1")
        )  # by its soname it is the driver's library from here on
        _obey_permissions()
        os.environ["PATH"] = f"{top}/now:{os.environ['PATH']}"
        while tally.nodes < nodes or pairs.left:
            # Once there are enough nodes, the others are those that the pairs that are left ask for.
            number = dice.randrange(len(bases)) if tally.nodes < nodes else pairs.next_node(dice)
            recording = bases[number]()
            folder = Path(top, "now")
            folder.mkdir()
            examine_damaged(recording, folder, dice, pairs, tally)
            _clear(folder)
    json.dump({**vars(tally), "pairs": pairs.tried}, sys.stdout)


def _obey_permissions() -> None:
    """Gives up what lets root read files without permissions (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, for capabilities below and above 32
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~0b110
    sets[1] &= ~0b110
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def _clear(folder: Path) -> None:
    """Removes a node whose folders may be closed to us; never follows a link."""
    for place, _, _ in os.walk(folder):
        for name in os.listdir(place):
            inner = Path(place, name)
            if stat.S_ISDIR(inner.lstat().st_mode):
                inner.chmod(0o700)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
