"""Node program that copies files to many nodes in about the time of one copy: each node fetches
missing chunks from the one before it, and serves those that it has.

Python 3.8 or newer, in a container or on the node. It arrives on standard input
(`launcher/distribute/chain.py`), and the launcher sends the order of the nodes.
"""
