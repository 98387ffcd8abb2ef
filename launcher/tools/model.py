"""Where a model is on a node, and what its `config.json` says: one question inside a container, and how its answer is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.model import Answer, Argv

# The layout of the Hugging Face cache: hub/models--ORG--NAME/refs/main names the folder below snapshots/.
_SCRIPT = r"""
case $1 in
/*) [ -e "$1" ] || exit 3; dir=$1 ;;
*) repo=${HF_HUB_CACHE:-$2/hub}/models--$(printf %s "$1" | sed 's|/|--|g')
   ref=$(cat "$repo/refs/main" 2>/dev/null) && dir=$repo/snapshots/$ref && [ -d "$dir" ] || exit 4 ;;
esac
[ -f "$dir/config.json" ] || exit 5
exec cat "$dir/config.json"
"""

Where = Literal["there", "missing", "not cached", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A model as one node has it. `digest` is of its `config.json`, empty when it has none that can be read."""

    where: Where
    config: Mapping[str, Any] | None = None
    digest: str = ""


def look(model: str, hf_home: str) -> Argv:
    """Print a model's `config.json`; exit status 3: no such path, 4: not in the cache, 5: no `config.json`."""
    return ("sh", "-c", _SCRIPT, "model", model, hf_home)


def parse_look(answer: Answer) -> ModelSeen:
    """Read the answer; whatever cannot be told is `unknown`, which vLLM itself will judge."""
    if answer.code == 3:
        return ModelSeen(where="missing")
    if answer.code == 4:
        return ModelSeen(where="not cached")
    if answer.code == 5:
        return ModelSeen(where="there")
    if not answer.ok:
        return ModelSeen(where="unknown")
    try:
        config = json.loads(answer.out)
    except ValueError:
        return ModelSeen(where="there")
    digest = hashlib.sha256(answer.out.encode()).hexdigest()
    return ModelSeen(where="there", config=config if isinstance(config, dict) else None, digest=digest)
