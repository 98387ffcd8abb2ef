"""The front on its nodes: rotation of servers in HAProxy, and the router beside it."""
