"""Kubernetes: checks of the manifests before they reach a cluster, and the doctor's word as a condition of the node."""
