"""Platform profiles: what a node should look like, as YAML that a site can override.

No expectation is in code. A profile is a tree of values checked against profile_schema.yaml; null means "not
checked". ``extends: NAME`` takes everything from another profile (of several, the last one wins) and replaces what is
given. A profile is proposed by the GPUs' model, and in a cloud also by what the firmware and the NICs say, because two
vendors sell the same GPU with different networks. GPUs that fit no other profile are judged by `gpu-server`, which
expects what any GPU must do.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybrid_ep.errors import ConfigError
from hybrid_ep.inputs import read_input

_FOLDER = Path(__file__).parent
_CPU = "cpu"
_ANY_GPUS = "gpu-server"
_STANDARD_INPUT = "-"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same language, ten times faster where libyaml is there

_MAX_DEPTH = 20


@dataclass(frozen=True)
class Profile:
    """A platform's expectations.

    Attributes:
        name: e.g. ``hgx-h200``.
        values: the tree; ``profile["gpu.count"]`` reads it.
    """

    name: str
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        value: Any = self.values
        for part in key.split("."):
            value = value[part]
        return value

    def fill(self, template: str) -> str:
        """Replaces ``{gpu.count}`` by the profile's value."""
        return re.sub(r"\{([a-z0-9_.]+)\}", lambda match: _show(self[match[1]]), template)

    def severity_of(self, check_id: str) -> str | None:
        """``error``, ``warning`` or ``off`` where the profile overrides the check's own severity."""
        found = self.values["severity"].get(check_id)
        return None if found is None else str(found)

    def to_text(self) -> str:
        """The whole profile, with its name and all that it extends, as `load_profile` takes it from standard input."""
        # One mapping in braces, as the playbooks' module knows it. Not JSON, whose 1e-07 is a word in YAML.
        return yaml.safe_dump({"name": self.name, **self.values}, default_flow_style=True, sort_keys=False)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "none"
    if isinstance(value, list):
        return (" or " if isinstance(value[0], str) else ", ").join(str(item) for item in value)
    return "not checked" if value is None else str(value)


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package; those with an underscore are only there to be extended."""
    return sorted(name for name in _shipped() if name[0] != "_")


def load_profile(name_or_file: str) -> Profile:
    """Loads a shipped profile by name, a site's by path, or from standard input (``-``) what `Profile.to_text` wrote.

    Raises:
        ConfigError: there is no such profile, or it does not follow the schema.
    """
    if name_or_file == _STANDARD_INPUT:
        values = _parse(sys.stdin.read(), "on standard input")
        name = str(values.pop("name", "standard input"))
    elif is_profile_file(name_or_file):
        name, values = Path(name_or_file).stem, _read(Path(name_or_file), ())
    elif name_or_file in shipped_profiles():
        return _load_shipped(name_or_file)
    else:
        raise ConfigError(f"profile {name_or_file!r} is not known; allowed: {', '.join(shipped_profiles())}, or a file")
    _validate(values, name)
    return Profile(name, values)


@cache  # a proposal looks at all of them
def _load_shipped(name: str) -> Profile:
    return Profile(name, _resolve(_shipped()[name], None, ()))  # a test holds it to the schema


def is_profile_file(name_or_file: str) -> bool:
    """Whether this is a site's file, by its form, and not the name of a shipped profile."""
    return "/" in name_or_file or name_or_file.endswith((".yaml", ".yml"))


def propose_profile(
    gpu_names: list[str], num_pci_gpus: int, *, machine: str = "", product: str = "", had_gpus: str = ""
) -> tuple[str, str]:
    """Proposes the profile that fits most of this node's GPUs, else what holds for any GPU.

    A single board of another model is a fault that ``gpu.model`` names, and not another platform. A node that shows no
    GPU at all has lost them if it is a server that comes with GPUs, or if something else says that it had some.

    Args:
        gpu_names: models by NVML.
        num_pci_gpus: GPUs on PCI.
        machine: vendor, product and asset tag of the firmware and the vendors of the NICs, as `Node.machine` has them.
        product: the firmware's product alone.
        had_gpus: why a node without GPUs should have some; empty where nothing says so.

    Returns:
        The name, and why.
    """
    # Those that also ask for a certain machine come first: a cloud's node has the GPUs of other servers, too.
    profiles = sorted(map(load_profile, shipped_profiles()), key=lambda profile: not profile["match.machine"])
    profiles = [each for each in profiles if re.search(each["match.machine"] or "", machine)]
    for profile in profiles:
        pattern = profile["match.gpu_name"]
        fitting = [gpu for gpu in gpu_names if pattern and re.search(pattern, gpu)]
        if 2 * len(fitting) > len(gpu_names):
            on = f" on {machine}" if profile["match.machine"] else ""
            return profile.name, f"proposed by GPU model {fitting[0]!r}{on}"
    if gpu_names:
        return _ANY_GPUS, f"no other profile is for {', '.join(sorted(set(gpu_names)))}"
    for profile in profiles:
        if profile["match.product"] and re.fullmatch(profile["match.product"], product):
            return profile.name, f"a {product} has such GPUs, and NVML names none"
    if num_pci_gpus:
        return _ANY_GPUS, f"{num_pci_gpus} GPUs on PCI, and NVML names none"
    return (_ANY_GPUS, had_gpus) if had_gpus else (_CPU, "no NVIDIA GPU on this node")


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """The profiles of the package as they are written, also those that are only there to be extended."""
    profiles: dict[str, dict[str, Any]] = yaml.load((_FOLDER / "profiles.yaml").read_text(), _Loader)
    return profiles


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Reads a site's profile and everything it extends."""
    if path in seen:
        raise ConfigError(f"profile {path} extends itself")
    try:
        text = read_input(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    return _resolve(_parse(text, str(path)), path, (*seen, path))


def _resolve(values: dict[str, Any], path: Path | None, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Adds what a profile extends: a file beside `path`, where it was read, or else a profile of the package."""
    parents = values.get("extends") or []
    found: dict[str, Any] = {}
    for parent in parents if isinstance(parents, list) else [parents]:
        beside = path and path.parent / f"{parent}.yaml"
        if beside and (beside.exists() or str(parent) not in _shipped()):
            found = _merge(found, _read(beside, seen))
        else:
            found = _merge(found, _resolve(_shipped()[str(parent)], None, seen))
    return _merge(found, {key: value for key, value in values.items() if key != "extends"})


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        _require_shallow(text, place)
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"profile {place} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"profile {place} holds a {type(values).__name__}; allowed: a mapping")
    return values


def _require_shallow(text: str, place: str) -> None:
    """Refuses what is nested so deeply that libyaml, which recurses, would end the process."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"profile {place} is nested more than {_MAX_DEPTH} deep; allowed: as deep as the schema")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


@cache
def _schema() -> Any:
    return yaml.load((_FOLDER / "profile_schema.yaml").read_text(), _Loader)


def _validate(values: dict[str, Any], name: str) -> None:
    import jsonschema  # only here: its import takes longer than a quick doctor's checks

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(_schema()).iter_errors(values))
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "the profile"
        raise ConfigError(f"profile {name}: {place}: {error.message}")
