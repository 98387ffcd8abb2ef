"""The network probe, one rank for each GPU or node: standard library and torch."""
