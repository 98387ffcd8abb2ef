"""Models and images on every node: `model`, `image`. `node/` runs on the nodes."""

COMMANDS = {
    "model": (52, "List, download, copy and remove models"),
    "image": (53, "List, pull and copy images"),
}
