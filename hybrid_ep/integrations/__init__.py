"""Plugs for frameworks that have a place for an expert-parallel library of their own; each needs its framework."""
