"""The sizes of a `HybridEPBuffer`, in the attributes of Hybrid-EP."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hybrid_ep.errors import ConfigError


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
    """Holds the buffer's configuration where callers of Hybrid-EP look for it."""

    buffer_config: BufferConfig


@dataclass
class HybridEpConfigInstance:
    """The sizes of one call, and settings of Hybrid-EP's kernels that have no effect here.

    Attributes:
        hidden_dim: as in `BufferConfig`.
        max_num_of_tokens_per_rank: as in `BufferConfig`.
        num_of_experts_per_rank: as in `BufferConfig`.
        num_of_ranks_per_node: ranks of a domain.
        num_of_nodes: domains.
        pad_multiple: of every expert's block.

    Example:
        >>> config = hybrid_ep.HybridEpConfigInstance()
        >>> config.set(hidden_dim=7168, pad_multiple=16)
        >>> config.hidden_dim, config.pad_multiple
        (7168, 16)
    """

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 0
    num_of_nodes: int = 0
    pad_multiple: int = 0
    token_data_type: object = None
    num_of_threads_per_block_preprocessing_api: int = 0
    num_of_blocks_preprocessing_api: int = 0
    num_of_stages_dispatch_api: int = 0
    num_of_tokens_per_chunk_dispatch_api: int = 0
    num_of_blocks_dispatch_api: int = 0
    device_side_sync_dispatch_api: bool = True
    num_of_stages_g2s_combine_api: int = 0
    num_of_stages_s2g_combine_api: int = 0
    num_of_tokens_per_chunk_combine_api: int = 0
    num_of_tokens_per_group_combine_api: int = 0
    num_of_additional_in_flight_s2g_combine_api: int = 0
    num_of_blocks_combine_api: int = 0
    device_side_sync_combine_api: bool = True

    def set(self, **settings: object) -> None:
        """Sets attributes by name.

        Raises:
            ConfigError: there is no such setting.
        """
        known = [field.name for field in fields(self)]
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"{name} is not a setting of HybridEpConfigInstance; allowed: {', '.join(known)}")
            setattr(self, name, value)
