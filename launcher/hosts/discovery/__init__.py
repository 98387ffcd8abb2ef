"""Derivation of an inventory from scanned hosts, for `init`."""
