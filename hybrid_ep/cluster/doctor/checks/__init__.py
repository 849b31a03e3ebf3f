"""The checks, one file per group. Importing a file registers its checks; see `hybrid_ep.cluster.doctor.registry`."""
