"""Commands for hosts before they form a cluster: `check` and `init`."""

COMMANDS = {
    "init": (10, "Scan hosts and write inventory.yaml"),
    "check": (11, "Check nodes and network; change nothing"),
}
