"""Commands that start, stop, watch, query and measure servers."""

COMMANDS = {
    "serve": (70, "start the server and wait until it has answered"),
    "rollback": (80, "return to the server that answered before"),
    "status": (110, "what is there: nodes, containers, Ray, server, drift"),
    "metrics": (120, "what servers do: requests, tokens per second, latencies, KV cache, ranks"),
    "soak": (130, "load a running server, then judge it"),
    "chat": (140, "talk to the served model"),
    "exec": (180, "run a command in every node's container"),
    "tunnel": (190, "make the API reachable on this machine"),
    "stop": (200, "stop the server, or batch jobs; the cluster stays"),
}
