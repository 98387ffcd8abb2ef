"""Hosts before they are a cluster: `check` and `init`."""
