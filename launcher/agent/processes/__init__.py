"""Engines on this node: their processes, GPUs and ranks, and programs of Ray."""
