"""The front: one address for all servers, with TLS, keys and limits (HAProxy)."""
