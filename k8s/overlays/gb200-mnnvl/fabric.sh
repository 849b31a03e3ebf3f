# GB200 NVL72: the ranks are on several trays, and NVLink joins them. The network between domains is the site's.

# Source: docs/kubernetes.md. The cuda engine takes all ranks for one domain.
HYBRID_EP_ENGINE=cuda

# NCCL fails if NVLink does not reach the other trays, and does not fall back to a network. It needs memory by handles.
# Source: NCCL's environment variables.
NCCL_MNNVL_ENABLE=1
NCCL_CUMEM_ENABLE=1
