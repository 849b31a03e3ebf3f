"""hybrid_ep moves the tokens of Mixture-of-Experts models between ranks: dispatch and combine."""


from hybrid_ep._version import __version__ as __version__
