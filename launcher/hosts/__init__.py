"""Commands for hosts before they form a cluster: `check` and `init`."""

COMMANDS = {
    "init": (10, "look at hosts and write an inventory"),
    "check": (20, "preflight: every check, with its fix"),
}
