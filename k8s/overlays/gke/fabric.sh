# RoCE v2 on A3 Ultra and A4. Google's script on the node has NCCL's plugin gIB and the settings of the machine type.

# Source: Google's guide to GPUDirect RDMA on GKE. A node without the script does without.
if [ -f /usr/local/gib/scripts/set_nccl_env.sh ]; then
  . /usr/local/gib/scripts/set_nccl_env.sh
fi

# The other libraries use NCCL's class and address. Source: that script; the second value is its own for A4.
NVSHMEM_IB_TRAFFIC_CLASS=${NCCL_IB_TC:-52}
HYBRID_EP_TRAFFIC_CLASS=${NCCL_IB_TC:-52}
NVSHMEM_IB_GID_INDEX=${NCCL_IB_GID_INDEX:-3}
HYBRID_EP_GID_INDEX=${NCCL_IB_GID_INDEX:-3}
