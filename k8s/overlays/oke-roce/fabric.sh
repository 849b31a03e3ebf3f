# RoCE v2 on BM.GPU.H100.8. Source, where none is named: Oracle's nccl-tests manifest for this shape (oci-hpc-oke).

# The sixteen RDMA ports by name, without those of the VNIC. Source: the same manifest.
NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8,mlx5_9,mlx5_10,mlx5_12,mlx5_13,mlx5_14,mlx5_15,mlx5_16,mlx5_17

# The two ports of the adapter below the PCIe switch of each GPU. Source: Oracle's NCCL topology file for this shape
# (oci-hpc, samples/gpu/H100-topology.xml). `hybrid-ep topology` shows them on a node.
HYBRID_EP_NICS=mlx5_0+mlx5_1,mlx5_3+mlx5_4,mlx5_5+mlx5_6,mlx5_7+mlx5_8,mlx5_9+mlx5_10,mlx5_12+mlx5_13,mlx5_14+mlx5_15,mlx5_16+mlx5_17

# The RoCE v2 address over IPv4. Source: the same manifest.
NCCL_IB_GID_INDEX=3
NVSHMEM_IB_GID_INDEX=3
HYBRID_EP_GID_INDEX=3

# The class and level that the switches treat as lossless. Source: the same manifest.
NCCL_IB_TC=41
NVSHMEM_IB_TRAFFIC_CLASS=41
HYBRID_EP_TRAFFIC_CLASS=41
NCCL_IB_SL=0
NVSHMEM_IB_SL=0
HYBRID_EP_SERVICE_LEVEL=0

# Retries that outlast a change of route; each message on one queue pair; the interface for NCCL's first contact.
# Source: the same manifest.
NCCL_IB_TIMEOUT=22
NCCL_IB_SPLIT_DATA_ON_QPS=0
NCCL_SOCKET_IFNAME=eth0

# GPUs post work requests themselves. Source: NVSHMEM's environment variables; the doctor's gdr.ibgda says whether the
# node's driver allows it, otherwise a CPU thread posts them.
NVSHMEM_IB_ENABLE_IBGDA=1
