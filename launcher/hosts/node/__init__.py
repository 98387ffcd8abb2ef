"""Programs that run on a node or in its container, sent as text: standard library only."""
