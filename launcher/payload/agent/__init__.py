"""The agent: first process of every container of a cluster, and on the head the keeper of servers.

Standard library only.
"""
