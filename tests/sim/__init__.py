"""Simulated nodes: platforms.py builds a healthy one, scenarios.yaml breaks it, the doctor must find exactly that."""
