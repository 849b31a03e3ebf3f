"""A node as data: the files, device nodes, NVML answers and other facts that describe it.

A recording of a real node and a simulated node are the same thing. Written to a folder, it is what ``--sysroot`` reads:

    DIR/sys, DIR/proc, DIR/dev   files and symbolic links as on the node; a device node is a file "char MAJOR:MINOR"
    DIR/hybrid_ep/facts.json     what no file holds: verbs attributes, command outputs, clock, versions
    DIR/hybrid_ep/nvml.conf      what the stub of libnvidia-ml.so.1 answers (HYBRID_EP_NVML_STUB)
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_ep.errors import ConfigError
from hybrid_ep.inputs import read_json_input

_BINARY = "base64:"


@dataclass
class Recording:
    """One node, recorded or simulated. Mutable, because a scenario starts healthy and then breaks something.

    Attributes:
        files: absolute path → text; what is not UTF-8 stands as ``base64:…``.
        folders: absolute paths of folders that are there even if nothing in them is; in such a folder a missing name is
            known to be missing.
        links: absolute path → target of the symbolic link, relative as the kernel writes it.
        devices: absolute path → ``char MAJOR:MINOR``.
        nvml: key → value in the language of the NVML stub.
        facts: what no file holds, see `read_facts`.
    """

    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    nvml: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def nvml_text(self) -> str:
        """The text that the NVML stub reads."""
        return "".join(f"{key} {value}\n" for key, value in self.nvml.items())

    def write(self, root: Path) -> None:
        """Lays the node out below `root`, which must not hold another one."""
        made: set[str] = set()

        def place(path: str) -> str:
            folder = os.path.dirname(path)
            if folder not in made:
                os.makedirs(f"{root}/{folder}", exist_ok=True)
                made.add(folder)
            return f"{root}/{path}"

        for path in self.folders:
            os.makedirs(f"{root}/{path}", exist_ok=True)
        for path, text in {**self.files, **self.devices}.items():
            with open(place(path), "wb") as file:
                file.write(decode(text))
        for path, target in self.links.items():
            os.symlink(target, place(path))
        own = root / "hybrid_ep"
        own.mkdir(parents=True, exist_ok=True)
        (own / "facts.json").write_text(json.dumps(self.facts, indent=1))
        (own / "nvml.conf").write_text(self.nvml_text)

    def save(self, path: Path) -> None:
        """Writes the recording as one JSON file."""
        path.write_text(self.to_text())

    def to_text(self) -> str:
        """The recording as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads what `save` wrote.

        Raises:
            ConfigError: the file is no recording.
        """
        try:
            recording = cls(**read_json_input(path))
            recording._require_sound()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not a recording of a node: {error}") from error
        return recording

    def _require_sound(self) -> None:
        """Refuses what is no table of texts, and paths that lead out of the folder it is laid out in."""
        for name in ("files", "links", "devices", "nvml"):
            table = getattr(self, name)
            if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
                raise ValueError(f"{name} is no table of texts")
        if not isinstance(self.facts, dict) or not isinstance(self.folders, list):
            raise ValueError("facts is no table, or folders no list")
        targets = [f"{os.path.dirname(path)}/{target}" for path, target in self.links.items()]
        for path in (*self.files, *self.links, *self.devices, *self.folders):
            if not str(path).startswith("/") or ".." in str(path).split("/"):
                raise ValueError(f"{path!r}; allowed: an absolute path without '..'")
        for path, target in zip(self.links, targets, strict=True):
            if self.links[path].startswith("/") or _leads_out(target):
                raise ValueError(
                    f"{path!r} is a link to {self.links[path]!r}; allowed: one that stays in the recording"
                )


def _leads_out(path: str) -> bool:
    """Whether a path climbs above its root."""
    depth = 0
    for part in path.strip("/").split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return True
    return False


def encode(content: bytes) -> str:
    """Returns the text of a file, or its base64 form where it is no text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return _BINARY + base64.b64encode(content).decode()
    return _BINARY + base64.b64encode(content).decode() if "\0" in text else text


def decode(text: str) -> bytes:
    """The inverse of `encode`."""
    return base64.b64decode(text[len(_BINARY) :]) if text.startswith(_BINARY) else text.encode()


def read_facts(root: Path) -> dict[str, Any]:
    """Reads the facts of the recorded node below `root`.

    Returns:
        ``verbs``, ``commands``, ``clock``, ``packages``, ``torch_cuda``, ``cuda``, each where it was recorded; {} for a
        bare tree.

    Raises:
        ConfigError: the file is there and is not JSON object.
    """
    try:
        facts = json.loads((root / "hybrid_ep" / "facts.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{root}/hybrid_ep/facts.json cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{root}/hybrid_ep/facts.json holds a {type(facts).__name__}; allowed: an object")
    return facts
