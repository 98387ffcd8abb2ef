"""Lab hosts in network namespaces of this machine, each with its own sshd and Docker."""

COMMANDS = {
    "lab": (60, "Run a test cluster on this machine; no GPU needed"),
}
NODE_PROGRAMS = {"vlaunch_cpu_ray": "plugin:files"}
