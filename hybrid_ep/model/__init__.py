"""A model of dispatch and combine on grids that nobody has yet: `hybrid-ep model`, and a simulation of the link."""
