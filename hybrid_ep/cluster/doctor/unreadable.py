"""The one exception of the doctor: a fact could not be read, so the check that needs it says `unknown`."""

from __future__ import annotations

from typing import Any

__all__ = ["Unreadable"]


class Unreadable(Exception):  # noqa: N818 - a fact about the node, not an error of ours
    """A fact could not be read; the message says which and why.

    Attributes:
        nvml_code: the nvmlReturn_t, where NVML refused.
        log: of a log that does not reach back far enough, what is left.
    """

    def __init__(self, reason: str, nvml_code: int | None = None, log: tuple[Any, ...] = ()) -> None:
        super().__init__(reason, nvml_code, log)  # all of them, so that it can be pickled
        self.nvml_code = nvml_code
        self.log = log

    def __str__(self) -> str:
        return str(self.args[0])
