"""A model on a node, in its container or on the host: its files, its `config.json`, and what is
missing; how it can be split, by that `config.json` (keys as in transformers and vLLM).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.core import shell, untrusted
from launcher.core.domain import Answer, Argv
from launcher.core.transport import Command
from launcher.tools.site import Site

WEIGHTS = ".safetensors"
Where = Literal["there", "missing", "not cached", "begun", "lacks", "unknown"]
# Exit statuses of core/shell/model.sh.
_STATUSES: Mapping[int, Where] = {
    0: "there",
    3: "missing",
    4: "not cached",
    5: "there",
    6: "begun",
    7: "lacks",
}
_ABSENT = ("missing", "not cached", "begun")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A model as one node has it: `begun` is one of which a copy is not finished, `lacks` one
    without a file that must be there, whose name is `lacking`.

    `files` maps paths to bytes, -1 where a link leads nowhere; None when the node has no such model
    or cannot list it. `digest` is of its `config.json`, empty when it has none that can be read.
    """

    where: Where
    config: Mapping[str, Any] | None = None
    digest: str = ""
    lacking: str = ""
    files: Mapping[str, int] | None = None

    @property
    def absent(self) -> bool:
        """True when some or all of its files are known not to be there."""
        return self.where in (*_ABSENT, "lacks")

    @property
    def listed(self) -> bool:
        """True when it is known which of its files the node has, or that it has no such model."""
        return self.files is not None or self.where in _ABSENT

    @property
    def weight_bytes(self) -> int:
        """The bytes of its safetensors; 0 where one is missing, or there are none."""
        sizes = [size for path, size in (self.files or {}).items() if path.endswith(WEIGHTS)]
        return sum(sizes) if sizes and min(sizes) > 0 else 0


def scan(model: str, hf_home: str) -> Argv:
    """Print a model's files and its `config.json`; needs GNU find for the files."""
    return ("sh", "-c", shell.program("model"), "model", model, hf_home)


def query(site: Site, name: str, *, hosts: bool = False) -> list[Command]:
    """Scan every running container for a model; `hosts`: a node itself where no container runs."""
    return [
        site.inside(node, scan(name, node.hf_home))
        if site.running(node) is not None
        else Command(node=node.name, argv=scan(name, node.hf_home), timeout=60)
        for node in site.seen
        if hosts or site.running(node) is not None
    ]


def parse(answer: Answer) -> ModelSeen:
    """Parse a scan; an unreadable one is `unknown`: vLLM itself will find the model or fail."""
    where = _STATUSES.get(answer.code, "unknown")
    if where not in ("there", "lacks"):
        return ModelSeen(where=where)
    listing, _, rest = f"\n{answer.out}".partition("\n\n")
    files = _parse_files(listing[1:])
    if where == "lacks":
        return ModelSeen(where=where, lacking=untrusted.brief(rest.strip()), files=files)
    try:
        config = json.loads(rest)  # with Infinity, which some models have there
    except (ValueError, RecursionError):
        return ModelSeen(where=where, files=files)
    digest = hashlib.sha256(rest.encode()).hexdigest()
    config = config if isinstance(config, dict) else None
    return ModelSeen(where=where, config=config, digest=digest, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's `config.json` says about how it can be split; `None` where it says nothing."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    experts: int | None = None


def shape_of(config: Mapping[str, Any] | None) -> ModelShape:
    """Read heads and layers from a `config.json`; a multimodal model keeps its language part under
    `text_config`.
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
        found = (
            part[name]
            for part in reversed(parts)
            for name in names
            if _is_whole_number(part.get(name))
        )
        return next((value for value in found if value > 0), None)

    heads = number("num_attention_heads", "n_head", "n_heads")
    return ModelShape(
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        experts=_experts(config) if heads is not None else None,
    )


def _parse_files(listing: str) -> Mapping[str, int] | None:
    """Return path → bytes; None where a line is not a file."""
    files: dict[str, int] = {}
    for line in listing.splitlines():
        kind, _, rest = line.partition(" ")
        size, named, path = rest.partition(" ")
        if not (named and len(kind) == 1 and size.isdecimal()):
            return None
        files[path] = -1 if kind in "lLN" else int(size)
    return files


def _experts(config: Mapping[str, Any]) -> int:
    """Count a model's experts, wherever in its parts they are named (vLLM's `get_num_experts`); 0
    of a dense one.
    """
    found = [0]
    for name, value in config.items():
        if isinstance(value, Mapping):
            found.append(_experts(value))
        elif isinstance(value, list) and name == "block_configs":
            found += [_experts(block) for block in value if isinstance(block, Mapping)]
        elif name in _EXPERTS:
            numbers = value if isinstance(value, list) else [value]
            found += filter(_is_whole_number, numbers)
    return max(found)


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
