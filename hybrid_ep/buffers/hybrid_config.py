"""The sizes of a `HybridEPBuffer`, where callers of the peer look for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BufferConfig", "Configurer"]


@dataclass
class BufferConfig:
    """Sizes that a buffer was made for.

    Attributes:
        hidden_dim: H.
        max_num_of_tokens_per_rank: the most tokens that a rank may dispatch at once.
        num_of_experts_per_rank: LE.
    """

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int


@dataclass
class Configurer:
    """Holds the buffer's configuration where the peer's callers look for it."""

    buffer_config: BufferConfig
