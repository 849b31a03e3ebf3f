"""Numbers for people, as bytes, times and ratios with sensible units, and long lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """``1234567`` → ``1.23 MB`` (decimal units: networks and NVLink are sold in them)."""
    factor, unit = unit_of_bytes(num_bytes)
    return f"{_three_digits(num_bytes / factor)} {unit}" if factor > 1 else f"{num_bytes:.0f} B"


def unit_of_bytes(num_bytes: float) -> tuple[float, str]:
    """The largest unit in which `num_bytes` is at least 1, as (bytes, name)."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((factor, unit) for factor, unit in units if num_bytes >= factor), (1.0, "B"))


def unit_of_microseconds(microseconds: float) -> tuple[float, str]:
    """The unit in which a time reads well, as (µs, name): ms only from 10 ms on."""
    return (1e3, "ms") if microseconds >= 1e4 else (1.0, "µs")


def format_microseconds(microseconds: float) -> str:
    """``12345`` → ``12.3 ms``."""
    factor, unit = unit_of_microseconds(microseconds)
    return f"{_three_digits(microseconds / factor)} {unit}"


def format_ratio(part: float, whole: float) -> str:
    """``1, 2`` → ``0.50×``; ``–`` where there is nothing to compare with."""
    return f"{part / whole:.2f}×" if whole else "–"


def _three_digits(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def shorten_names(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
