# InfiniBand on ND H100 v5 and ND H200 v5. The virtual machine hides which GPU is near which NIC.

# Which GPU is near which NIC, from the ConfigMap nccl-topology. Source: Azure's ndv5-topo.xml.
NCCL_TOPO_FILE=/etc/nccl/topology.xml

# Source: Azure's nccl.conf for ND H100 v5 (azhpc-images).
NCCL_IB_PCI_RELAXED_ORDERING=1

# Interface for NCCL's first contact, and four queue pairs a connection. Source: Azure's nccl-test chart for AKS
# (ai-infrastructure-on-azure).
NCCL_SOCKET_IFNAME=eth0
NCCL_IB_QPS_PER_CONNECTION=4

# The eight NICs. A GPU and its NIC have the same place in PCI's order. Source: Azure's ndv5-topo.xml, and that chart
# for the name mlx5_0.
NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
NVSHMEM_ENABLE_NIC_PE_MAPPING=1
NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1
HYBRID_EP_NICS=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
