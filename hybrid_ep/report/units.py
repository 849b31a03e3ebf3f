"""Numbers for people: bytes, times and ratios with sensible units."""

from __future__ import annotations

__all__ = ["format_bytes", "format_microseconds", "format_ratio"]


def format_bytes(num_bytes: float) -> str:
    """``1234567`` → ``1.23 MB`` (decimal units: networks and NVLink are sold in them)."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}" if num_bytes < 1e3 * factor else f"{num_bytes / factor:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def format_microseconds(microseconds: float) -> str:
    """``1234`` → ``1.23 ms``, ``12.3`` → ``12.3 µs``."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.3g} s"
    if microseconds >= 1e4:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 100 else f"{microseconds:.3g} µs"


def format_ratio(part: float, whole: float) -> str:
    """``1, 2`` → ``0.50×``; ``–`` where there is nothing to compare with."""
    return f"{part / whole:.2f}×" if whole else "–"
