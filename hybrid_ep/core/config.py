"""`Config`: tuning parameters in the form of DeepEP."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.checks import require, require_int

_ALIGNMENT_BYTES = 128
_MAX_TOPK_METADATA_BYTES = 32 * (8 + 4)  # an int64 index and a float32 weight for each of at most 32 experts


@dataclass(frozen=True)
class Config:
    """SM count and chunk sizes of one dispatch or combine.

    Calls use `num_sms` alone. Chunk sizes are accepted for compatibility: they are checked as DeepEP does, and the size
    hints depend on them.

    Attributes:
        num_sms: SMs of a call, ≥ 1; more than the GPU has count as all.
        num_max_nvl_chunked_send_tokens: tokens sent at once inside a domain.
        num_max_nvl_chunked_recv_tokens: tokens buffered inside a domain; more than are sent at once.
        num_max_rdma_chunked_send_tokens: tokens sent at once between domains.
        num_max_rdma_chunked_recv_tokens: tokens buffered between domains; more than are sent at once.

    Raises:
        ConfigError: a number is not a positive integer, or not more tokens are buffered than are sent at once.

    Example:
        >>> hybrid_ep.Config(num_sms=24).get_nvl_buffer_size_hint(hidden_bytes=7168 * 2, num_ranks=8)
        745537536
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            require_int(name, getattr(self, name), minimum=1)
        for link in ("nvl", "rdma"):
            sent, buffered = f"num_max_{link}_chunked_send_tokens", f"num_max_{link}_chunked_recv_tokens"
            most = getattr(self, sent)
            require(getattr(self, buffered) > most, buffered, getattr(self, buffered), f"more than {sent} = {most}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns bytes that callers pass to `Buffer` as `num_nvl_bytes`; any number of ranks.

        The number is that of DeepEP: for each SM and rank, `num_max_nvl_chunked_recv_tokens` rows with their metadata.
        Calls do not use this memory. What the engine allocates is in docs/cuda_engine.md, "Memory".

        Args:
            hidden_bytes: bytes of one token row.
            num_ranks: ranks of the group.

        Raises:
            ConfigError: a number is not a positive integer.
        """
        return self._size_hint(hidden_bytes, num_ranks, self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns bytes that callers pass to `Buffer` as `num_rdma_bytes`; otherwise as `get_nvl_buffer_size_hint`."""
        return self._size_hint(hidden_bytes, num_ranks, self.num_max_rdma_chunked_recv_tokens)

    def _size_hint(self, hidden_bytes: int, num_ranks: int, tokens: int) -> int:
        require_int("hidden_bytes", hidden_bytes, minimum=1)
        require_int("num_ranks", num_ranks, minimum=1)
        scales_bytes = hidden_bytes // 32
        row_bytes = hidden_bytes + scales_bytes + _MAX_TOPK_METADATA_BYTES
        return -(-self.num_sms * num_ranks * tokens * row_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
