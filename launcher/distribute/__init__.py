"""Models and images on every node: `model`, `image`. `node/` runs on the nodes."""
