# InfiniBand with a NIC beside each GPU, as on NVIDIA's HGX and DGX. Names of NICs differ between sites, so none stands
# here: NCCL, NVSHMEM and hybrid_ep each take the NICs nearest to a GPU. A site with an isolated virtual lane adds
# NCCL_IB_SL, NVSHMEM_IB_SL and HYBRID_EP_SERVICE_LEVEL.

# GPUs post work requests themselves. Source: NVSHMEM's environment variables; the doctor's gdr.ibgda says whether the
# node's driver allows it, otherwise a CPU thread posts them.
NVSHMEM_IB_ENABLE_IBGDA=1
