"""The operator's half: checks of nodes, clusters and manifests, and the model that plans jobs.

The library never imports it. It starts the library only as a command, `hybrid-ep bench` say.
"""
