"""Scan of a model on a node, in its container or on the host, for its files and `config.json`, and
the sizes in `config.json` that limit parallelism (keys as in transformers and vLLM).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.core import shell, untrusted
from launcher.core.domain import Answer, Argv
from launcher.core.transport import Command
from launcher.core.values import is_whole_number
from launcher.tools.site import Site

WEIGHTS = ".safetensors"
ModelState = Literal["there", "missing", "not cached", "begun", "lacks", "unknown"]
# Exit statuses of core/shell/model.sh.
_STATUSES: Mapping[int, ModelState] = {
    0: "there",
    3: "missing",
    4: "not cached",
    5: "there",
    6: "begun",
    7: "lacks",
}
_ABSENT = ("missing", "not cached", "begun")
EXPERT_FIELDS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScan:
    """Result of a scan; `begun` means an unfinished copy, `lacks` that `missing_file` is missing.

    `files` maps paths to bytes, -1 for a broken link; None if the model is missing or cannot be
    listed. `digest` is that of `config.json`, empty if it is missing or unreadable.
    """

    where: ModelState
    config: Mapping[str, Any] | None = None
    digest: str = ""
    missing_file: str = ""
    files: Mapping[str, int] | None = None

    @property
    def absent(self) -> bool:
        """True when some or all of its files are known to be missing."""
        return self.where in (*_ABSENT, "lacks")

    @property
    def listed(self) -> bool:
        """True when the node's files of the model are known, even if there are none."""
        return self.files is not None or self.where in _ABSENT

    @property
    def weight_bytes(self) -> int:
        """Total size of its safetensors; 0 if there are none or one is missing."""
        sizes = [size for path, size in (self.files or {}).items() if path.endswith(WEIGHTS)]
        return sum(sizes) if sizes and min(sizes) > 0 else 0


def scan(model: str, hf_home: str) -> Argv:
    """Print a model's files and its `config.json`; needs GNU find for the files."""
    return ("sh", "-c", shell.program_text("model"), "model", model, hf_home)


def query_scans(site: Site, name: str, *, hosts: bool = False) -> list[Command]:
    """Scan all running containers for a model; with `hosts`, also nodes without a container."""
    return [
        site.in_container(node, scan(name, node.hf_home))
        if site.running_container(node) is not None
        else Command(node=node.name, argv=scan(name, node.hf_home), timeout=60)
        for node in site.observed_nodes
        if hosts or site.running_container(node) is not None
    ]


def parse_scan(answer: Answer) -> ModelScan:
    """Parse a scan; `unknown` if unreadable, in which case vLLM decides at its start."""
    state = _STATUSES.get(answer.code, "unknown")
    if state not in ("there", "lacks"):
        return ModelScan(where=state)
    listing, _, rest = f"\n{answer.out}".partition("\n\n")
    files = _parse_files(listing[1:])
    if state == "lacks":
        return ModelScan(where=state, missing_file=untrusted.single_line(rest.strip()), files=files)
    try:
        config = json.loads(rest)  # accepts Infinity, which some models use
    except (ValueError, RecursionError):
        return ModelScan(where=state, files=files)
    digest = hashlib.sha256(rest.encode()).hexdigest()
    config = config if isinstance(config, dict) else None
    return ModelScan(where=state, config=config, digest=digest, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model that limit parallelism, from its `config.json`; `None` if unknown."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    experts: int | None = None


def shape_of(config: Mapping[str, Any] | None) -> ModelShape:
    """Read the shape from a `config.json`, where multimodal models have their language part in
    `text_config` or the like.
    """
    if not config:
        return ModelShape()
    parts: list[Mapping[str, Any]] = [config]
    parts += [
        part
        for name in ("text_config", "llm_config", "language_config")
        if isinstance(part := config.get(name), Mapping)
    ]

    def number(*names: str) -> int | None:
        values = (
            part[name]
            for part in reversed(parts)
            for name in names
            if is_whole_number(part.get(name))
        )
        return next((value for value in values if value > 0), None)

    heads = number("num_attention_heads", "n_head", "n_heads")
    return ModelShape(
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        experts=count_experts(config) if heads is not None else None,
    )


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in any part of the model (as vLLM's `get_num_experts`); 0 if
    dense.
    """
    counts = [0]
    for name, value in config.items():
        if isinstance(value, Mapping):
            counts.append(count_experts(value))
        elif isinstance(value, list) and name == "block_configs":
            counts += [count_experts(block) for block in value if isinstance(block, Mapping)]
        elif name in EXPERT_FIELDS:
            numbers = value if isinstance(value, list) else [value]
            counts += filter(is_whole_number, numbers)
    return max(counts)


def _parse_files(listing: str) -> Mapping[str, int] | None:
    """Parse a listing into bytes by path; None if a line is not a file."""
    files: dict[str, int] = {}
    for line in listing.splitlines():
        kind, _, rest = line.partition(" ")
        size, separator, path = rest.partition(" ")
        if not (separator and len(kind) == 1 and size.isdecimal() and len(size) < 20):
            return None
        files[path] = -1 if kind in "lLN" else int(size)
    return files
