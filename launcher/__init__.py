"""vlaunch: from a list of machines you can SSH into, to a verified multi-node vLLM cluster."""

__version__ = "0.2.0"
