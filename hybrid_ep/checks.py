"""Checks of a caller's values that need no torch. Each raises ConfigError with the value and what is allowed.

Checks of tensors and devices are in `hybrid_ep.core.checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid_ep import env
from hybrid_ep.errors import ConfigError

MAX_TOPK = 32
MAX_INT = 2**31 - 1  # what kernels count with
MAX_BYTES = 2**63 - 1
CHANNELS_PER_SCALE = 128  # of FP8


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def require_instance(name: str, value: object, kind: type | tuple[type, ...], allowed: str) -> None:
    """Raises ConfigError with the type of `value` unless that is `kind`."""
    require(isinstance(value, kind), f"type of {name}", type(value).__name__, allowed)


def require_path(name: str, value: object) -> Path:
    """Returns `value` as a path if it is one or a str."""
    if isinstance(value, str | Path):
        return Path(value)
    raise ConfigError(f"type of {name} is {type(value).__name__}; allowed: str or pathlib.Path")


def require_int(name: str, value: object, *, minimum: int, maximum: int = MAX_INT, multiple_of: int = 1) -> int:
    """Returns `value` if it is an int from `minimum` to `maximum` and a multiple of `multiple_of`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and minimum <= value <= maximum and value % multiple_of == 0:  # type: ignore[operator]
        return value  # type: ignore[return-value]
    # A maximum that no caller comes near is named only if it was exceeded.
    is_bounded = maximum < MAX_INT or (is_int and value > maximum)  # type: ignore[operator]
    allowed = f"an integer from {minimum} to {maximum}" if is_bounded else f"an integer ≥ {minimum}"
    if multiple_of > 1:
        allowed += f" that is a multiple of {multiple_of}"
    raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def require_number(name: str, value: float, *, minimum: float, maximum: float) -> float:
    """Returns `value` if it is from `minimum` to `maximum`; NaN is not."""
    require(minimum <= value <= maximum, name, value, f"a number from {minimum:g} to {maximum:g}")
    return value


def require_seconds(name: str, value: object) -> float:
    """Returns `value` if it is a number of seconds that a wait can be limited to."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= env.MAX_TIMEOUT_S:  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; allowed: a number of seconds > 0 and ≤ {env.MAX_TIMEOUT_S:.0f}")
    return value  # type: ignore[return-value]


def require_bool(name: str, value: object) -> bool:
    """Returns a flag as a bool; callers also pass 1 and 0."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{name} is {value!r}; allowed: True or False")
    return bool(value)


def require_bools(names: Sequence[str], values: Sequence[object]) -> None:
    """The same for several values."""
    for value in values:
        if value is not True and value is not False:
            require_bool(names[[v is value for v in values].index(True)], value)


def unsupported(**arguments: object) -> None:
    """Raises NotImplementedError naming the first argument that was given (is neither None nor False)."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not supported; allowed: leaving it out")
