from typing import Any

def probe() -> dict[str, Any]:
    """Driver versions and GPUs; RuntimeError with NVML's words where NVML does not start."""
