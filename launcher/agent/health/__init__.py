"""Requests to the APIs of engines, and what their answers and counters say of a server."""
