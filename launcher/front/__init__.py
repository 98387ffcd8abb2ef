"""The front: one address for all servers, with TLS, keys and limits (HAProxy)."""

COMMANDS = {"front": (15, "Show the address for all servers; manage its keys")}
