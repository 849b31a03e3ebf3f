from typing import Any

version: str
compiler: str
built: str
left_out: str

def compute_layout(
    *,
    topk_idx: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
    num_tokens_per_rank: int,
    num_tokens_per_expert: int,
    is_token_in_rank: int,
) -> int: ...
def scan_sysfs(*, sysroot: str) -> dict[str, Any]:
    """PCI devices, NICs, NUMA nodes and GPU distances; see `hybrid_ep.topology.probe`."""
