"""Practice hosts in network namespaces of this machine, with their own sshd and Docker."""

COMMANDS = {
    "lab": (280, "a practice cluster on this machine"),
}
