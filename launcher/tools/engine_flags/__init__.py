"""Check of engine arguments by the vLLM in a container, before anything changes."""
