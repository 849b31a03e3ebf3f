"""Platform profiles: what a node should look like, as YAML that a site can override.

No expectation stands in code. A profile is a tree of values checked against profiles/schema.yaml; null means "not
checked". ``extends: NAME`` takes everything from another profile and replaces what is given. The GPU's model only
proposes a profile, because two vendors sell the same GPU with different networks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from hybrid_ep.errors import ConfigError

__all__ = ["Profile", "load_profile", "propose_profile", "shipped_profiles"]

_FOLDER = Path(__file__).parent / "profiles"
_CPU = "cpu"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same language, ten times faster where libyaml is there


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


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "none"
    if isinstance(value, list):
        return (" or " if isinstance(value[0], str) else ", ").join(str(item) for item in value)
    return "not checked" if value is None else str(value)


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package; those with an underscore are only there to be extended."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != "schema" and path.stem[0] != "_")


def load_profile(name_or_file: str) -> Profile:
    """Loads a shipped profile by name, or a site's by path.

    Raises:
        ConfigError: there is no such profile, or it does not follow the schema.
    """
    path = Path(name_or_file) if "/" in name_or_file or name_or_file.endswith((".yaml", ".yml")) else None
    if path is None and name_or_file not in shipped_profiles():
        raise ConfigError(f"profile {name_or_file!r} is not known; allowed: {', '.join(shipped_profiles())}, or a file")
    values = _resolve(path or _FOLDER / f"{name_or_file}.yaml", ())
    _validate(values, name_or_file)
    return Profile(path.stem if path else name_or_file, values)


def propose_profile(gpu_names: list[str], num_pci_gpus: int) -> tuple[str, str]:
    """Proposes the profile that fits this node's GPUs.

    Returns:
        The name, and why.

    Raises:
        ConfigError: the GPUs fit none.
    """
    if not gpu_names and not num_pci_gpus:
        return _CPU, "no NVIDIA GPU on this node"
    for name in shipped_profiles():
        pattern = load_profile(name)["match.gpu_name"]
        if gpu_names and pattern and all(re.search(pattern, gpu) for gpu in gpu_names):
            return name, f"proposed by GPU model {gpu_names[0]!r}"
    seen = sorted(set(gpu_names)) or f"{num_pci_gpus} GPUs without NVML"
    raise ConfigError(f"no profile fits {seen}; give --profile: {', '.join(shipped_profiles())}, or a file")


def _resolve(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Reads a profile and everything it extends."""
    if path in seen:
        raise ConfigError(f"profile {path} extends itself")
    try:
        values = yaml.load(path.read_text(), _Loader)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"profile {path} holds a {type(values).__name__}; allowed: a mapping")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    beside = path.parent / f"{parent}.yaml"
    base = beside if beside.exists() else _FOLDER / f"{parent}.yaml"
    return _merge(_resolve(base, (*seen, path)), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


@cache
def _schema() -> Any:
    return yaml.load((_FOLDER / "schema.yaml").read_text(), _Loader)


def _validate(values: dict[str, Any], name: str) -> None:
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(_schema()).iter_errors(values))
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "the profile"
        raise ConfigError(f"profile {name}: {place}: {error.message}")
