"""The containers of a cluster and Ray in them: `up`, `down`, `secrets`."""

COMMANDS = {
    "up": (12, "Start the cluster, or apply inventory changes"),
    "down": (29, "Remove the cluster from every node"),
    "secrets": (54, "List and rotate secrets"),
}
