"""Commands that start, stop, watch, query and measure servers."""

COMMANDS = {
    "serve": (14, "Serve a model and wait for its first answer"),
    "status": (20, "Show nodes, servers, jobs and drift"),
    "chat": (21, "Chat with the served model"),
    "metrics": (22, "Show throughput, latency and KV cache use"),
    "soak": (23, "Load a running server and report its errors"),
    "exec": (25, "Run a command on every node"),
    "tunnel": (26, "Forward the API to this machine"),
    "rollback": (27, "Return to the last server that worked"),
    "stop": (28, "Stop servers or batch jobs; keep the cluster"),
}
