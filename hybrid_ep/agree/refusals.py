"""Errors of calls that a rank refuses, told to the other ranks.

A rank whose arguments do not fit takes part in the call nevertheless. It sends no rows, but the number of its refusal.
The other ranks read the error under that number in the store, and raise it, too.
"""

from __future__ import annotations

import contextlib

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.errors import ConfigError

_ALLOWED = "; allowed"  # in the text of a ConfigError: what was given is before it


def at_rank(error: ConfigError, rank: int) -> str:
    """Returns what every rank says of an error of one rank's arguments."""
    given, allowed, rest = str(error).partition(_ALLOWED)
    return f"{given} at rank {rank}{allowed}{rest}"


class Refusals:
    """The refusals of one buffer.

    Args:
        board: of the refusals, equal at all ranks; None without other ranks.
        rank: this rank.
    """

    def __init__(self, board: Board | None, rank: int) -> None:
        self._board, self._rank, self._num_told = board, rank, 0

    def tell(self, error: ConfigError) -> tuple[int, ConfigError]:
        """Writes an error of this rank, before it publishes the refusal.

        Returns:
            The number of the refusal, ≥ 1, and the error that every rank raises.
        """
        self._num_told += 1
        text = at_rank(error, self._rank)
        if self._board is not None:
            with contextlib.suppress(StoreLostError):
                self._board.write(f"{self._rank}.{self._num_told}", text)
        return self._num_told, ConfigError(text)

    def read(self, rank: int, number: int) -> ConfigError:
        """Returns the error of a rank that has published the number of a refusal."""
        text = None
        if self._board is not None:
            with contextlib.suppress(StoreLostError):
                text = self._board.read(f"{rank}.{number}")
        return ConfigError(text or f"an argument does not fit at rank {rank}; allowed: what that rank's error says")
