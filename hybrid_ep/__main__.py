"""`python -m hybrid_ep` is the command `hybrid-ep`, for launchers that start Python modules, as torchrun does."""

from hybrid_ep.cli import main

main(prog_name="hybrid-ep")
