"""The agent: first process of every container of a cluster, and on the head the supervisor of
servers.

Beyond the standard library it needs aiohttp, pydantic and prometheus_client, as vLLM's image has.
"""
