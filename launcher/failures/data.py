"""Data files of known failures; archives for nodes have `pack_entries` instead."""

from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LAYERS = {
    "host": "Hosts and drivers",
    "docker": "Docker and the container toolkit",
    "limits": "Disks and limits",
    "network": "Network",
    "memory": "Memory",
    "compilers": "Compilers and caches",
    "model": "Models, arguments and the engine",
    "hub": "Hugging Face",
    "ray": "Ray",
    "kv": "KV transfer",
    "batch": "Batch jobs",
    "cluster": "Clusters of vlaunch",
    "general": "Errors and hangs without an entry",
}
# Fields of an entry that archives need.
_PACKED = (
    *("id", "layer", "kind", "match", "unless", "needs", "rdma", "explains"),
    *("cause", "fix", "vlaunch", "batch", "lines"),
)


@cache
def load_entries() -> list[dict[str, Any]]:
    """Return the entries of all layers, as in the files, with their `layer`."""
    import yaml  # noqa: PLC0415 - few commands need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where it is built
    return [
        {"layer": layer, **entry}
        for layer in LAYERS
        for entry in yaml.load((FOLDER / f"{layer}.yaml").read_text(encoding="utf-8"), loader)  # noqa: S506
    ]


def pack_entries() -> bytes:
    """Return a module with the entries that can be matched, in place of this one."""
    entries = [
        {name: entry[name] for name in _PACKED if name in entry}
        for entry in load_entries()
        if "match" in entry and entry.get("kind") != "unknown"
    ]
    return f"ENTRIES = {entries!r}\n\n\ndef load_entries():\n    return ENTRIES\n".encode()
