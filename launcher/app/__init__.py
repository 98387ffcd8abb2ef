"""The frame of a command: session, options, plans, lock, audit trail, progress, tables, errors."""

COMMANDS = {
    "lock": (220, "who works on the cluster; break a lock that is left over"),
    "audit": (230, "who changed what on the nodes, and when"),
    "config": (285, "validate the inventory and print it in full"),
}
