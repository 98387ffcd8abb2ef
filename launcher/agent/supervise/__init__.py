"""Decisions of the head's agent: when a server starts, hangs, restarts and stops."""
