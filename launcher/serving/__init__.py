"""Servers: start, stop, watch, talk to and measure them."""
