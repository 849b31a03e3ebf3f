# RoCE v2 through virtual functions, each on a network of its own. Names of the functions differ between nodes, so none
# stands here.

# The RoCE v2 address over IPv4. Source: the default of NVIDIA's script for RoCE hosts (doroce-linux). It holds where a port
# has one IPv6 and one IPv4 address, each with RoCE v1 and v2. The doctor's nic.gid shows a node's.
NCCL_IB_GID_INDEX=3
NVSHMEM_IB_GID_INDEX=3
HYBRID_EP_GID_INDEX=3

# DSCP 26 with ECN. Source: the default of the same script, which sets trust to DSCP, and UCX's for RoCE v2. Assumed: the
# switches treat this class as lossless. A site with another class changes all three.
NCCL_IB_TC=106
NVSHMEM_IB_TRAFFIC_CLASS=106
HYBRID_EP_TRAFFIC_CLASS=106

# Networks are rails: a ring stays on one of them. Source: NCCL's environment variables.
NCCL_CROSS_NIC=0

# GPUs post work requests themselves. Source: NVSHMEM's environment variables; the doctor's gdr.ibgda says whether the
# node's driver allows it, otherwise a CPU thread posts them.
NVSHMEM_IB_ENABLE_IBGDA=1
