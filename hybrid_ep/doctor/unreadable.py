"""The one exception of the doctor: a fact could not be read, so the check that needs it says `unknown`."""

from __future__ import annotations

__all__ = ["Unreadable"]


class Unreadable(Exception):  # noqa: N818 - a fact about the node, not an error of ours
    """A fact could not be read; the message says which and why.

    Attributes:
        nvml_code: the nvmlReturn_t, where NVML refused.
    """

    def __init__(self, reason: str, *, nvml_code: int | None = None) -> None:
        super().__init__(reason)
        self.nvml_code = nvml_code
