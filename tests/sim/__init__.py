"""Simulated nodes: platforms.py builds a healthy one, scenarios/*.yaml break it, the doctor must find exactly that."""
