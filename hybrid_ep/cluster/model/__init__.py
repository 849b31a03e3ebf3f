"""A model of dispatch and combine on any grid of ranks, `hybrid-ep model`, and a simulation of the link."""
