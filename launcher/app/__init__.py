"""The frame of a command: session, options, plans, lock, audit trail, progress, tables, errors."""

COMMANDS = {
    "audit": (42, "Show who changed what, and when"),
    "lock": (43, "Show or break the cluster lock"),
    "config": (61, "Validate the inventory and print it in full"),
}
