from typing import Any

def probe() -> list[dict[str, Any]]:
    """RDMA devices; RuntimeError where libibverbs cannot list them."""
