"""Kubernetes: checks of manifests before they reach a cluster, and the doctor's findings as conditions of the node."""
