"""The containers of a cluster and Ray in them: `up`, `down`, `secrets`."""

COMMANDS = {
    "up": (30, "bring the cluster up, or to the inventory's state"),
    "down": (210, "remove everything from every node, verified"),
    "secrets": (260, "where secrets come from and lie; make new ones"),
}
