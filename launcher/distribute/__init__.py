"""Models and images on every node: `model`, `image`. `node/` runs on the nodes."""

COMMANDS = {
    "model": (240, "list, download, copy and remove models"),
    "image": (250, "list, pull and copy images"),
}
