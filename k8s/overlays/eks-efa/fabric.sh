# EFA, which hybrid_ep, NCCL and NVSHMEM reach through libfabric.

# The provider, and writes to GPU memory without the host. Source: AWS' guide to EFA and NCCL.
FI_PROVIDER=efa
FI_EFA_USE_DEVICE_RDMA=1

# Interfaces for NCCL's first contact. Source: AWS' guide to EFA and NCCL.
NCCL_SOCKET_IFNAME=^lo,docker

# Source: NVSHMEM's environment variables. EFA has no queue pairs that a GPU could post to.
NVSHMEM_REMOTE_TRANSPORT=libfabric
NVSHMEM_LIBFABRIC_PROVIDER=efa
NVSHMEM_IB_ENABLE_IBGDA=0

# hybrid_ep takes libfabric where the image has it, else tcp. Source: docs/several_nodes.md.
HYBRID_EP_FABRIC_PROVIDER=efa
