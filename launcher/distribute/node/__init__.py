"""Brings the same files to many nodes in about the time of one copy: each node pulls what it lacks
from the one before it, and serves what it has.

The program of one node, for any Python from 3.8 on. It is sent on standard input
(`launcher/distribute/chain.py`), and works in a container or with what the node has. The launcher
says who is before whom.
"""
