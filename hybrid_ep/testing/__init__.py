"""Parts that tests, demo and benchmarks share: a dense reference, synthetic workloads, a cluster of local processes."""
