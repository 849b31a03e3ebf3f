"""Packages that only some commands need, and what to install where one of them is missing."""

from __future__ import annotations

import importlib.util

from hybrid_ep.errors import ConfigError

# Module → the distribution that brings it, and the extra of hybrid-ep that does; none where hybrid-ep itself needs it.
_BROUGHT_BY = {
    "torch": ("torch", ""),
    "numpy": ("numpy", ""),
    "matplotlib": ("matplotlib", "pictures"),
    "yaml": ("pyyaml", "cluster"),
    "jsonschema": ("jsonschema", "cluster"),
    "referencing": ("jsonschema", "cluster"),
    "jinja2": ("jinja2", "cluster"),
    "markupsafe": ("jinja2", "cluster"),
    "pynvml": ("nvidia-ml-py", "cluster"),
}


def explain(error: BaseException) -> str | None:
    """Returns what to install where a package of the table could not be found; None for any other error."""
    name = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if name not in _BROUGHT_BY:
        return None
    distribution, extra = _BROUGHT_BY[name]
    alternative = f" or 'hybrid-ep[{extra}]'" if extra else ""
    return f"{distribution} is not installed, and this command needs it: pip install {distribution}{alternative}"


def require_package(name: str) -> None:
    """Raises ConfigError with what to install where a package of the table is missing; does not import it."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(str(explain(ModuleNotFoundError(name=name))))
