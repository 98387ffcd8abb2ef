"""Lab hosts in network namespaces of this machine, each with its own sshd and Docker."""

COMMANDS = {
    "lab": (280, "a practice cluster on this machine"),
}
