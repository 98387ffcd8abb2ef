"""Where a model is on a node, and what its `config.json` says: one question inside a container, and
how its answer is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.core import shell, untrusted
from launcher.core.domain import Answer, Argv, Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools.site import Site

WEIGHTS = ".safetensors"
Where = Literal["there", "missing", "not cached", "begun", "lacks", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A model as one node has it: `begun` is one of which a copy is not finished, `lacks` one
    without a file that must be there, whose name is `lacking`.

    `digest` is of its `config.json`, empty when it has none that can be read.
    """

    where: Where
    config: Mapping[str, Any] | None = None
    digest: str = ""
    lacking: str = ""

    @property
    def absent(self) -> bool:
        """True when some or all of its files are known not to be there."""
        return self.where in ("missing", "not cached", "begun", "lacks")


def look(model: str, hf_home: str) -> Argv:
    """Print a model's `config.json`; exit status 3: no such path, 4: not in the cache, 5: no
    `config.json`, 6: a copy is not finished, 7: a file is missing, whose name is printed.
    """
    return ("sh", "-c", shell.program("model_config"), "model", model, hf_home)


def ask_model(site: Site, name: str) -> list[Command]:
    """Ask each node's container for the model; nodes whose container does not run are left out."""
    return [
        site.inside(node, look(name, node.hf_home))
        for node in site.nodes
        if site.running(node) is not None
    ]


def parse_look(answer: Answer) -> ModelSeen:
    """Read the answer; whatever cannot be told is `unknown`, which vLLM itself will judge."""
    if answer.code == 3:
        return ModelSeen(where="missing")
    if answer.code == 4:
        return ModelSeen(where="not cached")
    if answer.code == 5:
        return ModelSeen(where="there")
    if answer.code == 6:
        return ModelSeen(where="begun")
    if answer.code == 7:
        return ModelSeen(where="lacks", lacking=untrusted.brief(answer.out.strip()))
    if not answer.ok:
        return ModelSeen(where="unknown")
    try:
        config = json.loads(answer.out)  # with Infinity, which some models have there
    except (ValueError, RecursionError):
        return ModelSeen(where="there")
    digest = hashlib.sha256(answer.out.encode()).hexdigest()
    return ModelSeen(
        where="there", config=config if isinstance(config, dict) else None, digest=digest
    )


def list_files(model: str, hf_home: str) -> Argv:
    """Print every file of a model with its size; exit status 3: no such path, 4: not in the cache,
    6: a copy is not finished.

    Needs GNU find.
    """
    return ("sh", "-c", shell.program("model_files"), "model", model, hf_home)


def parse_files(answer: Answer) -> Mapping[str, int] | None:
    """Return path → bytes, -1 where a link leads nowhere; None when the node has no such model.
    Raises UnreadableAnswer.
    """
    if answer.code in (3, 4, 6):
        return None
    if not answer.ok:
        raise UnreadableAnswer("the model's files could not be listed", evidence=answer.tail)
    files: dict[str, int] = {}
    for line in answer.out.splitlines():
        kind, _, rest = line.partition(" ")
        size, named, path = rest.partition(" ")
        if not (named and len(kind) == 1 and size.isdecimal()):
            raise UnreadableAnswer(
                "`find` answered with a line that is not a file", evidence=untrusted.shown(line)
            )
        files[path] = -1 if kind in "lLN" else int(size)
    return files


def weight_bytes(answer: Answer) -> int:
    """Return the bytes of a model's safetensors from its listed files; 0 where one is missing, or
    there are none.
    """
    try:
        files = parse_files(answer) or {}
    except UnreadableAnswer:
        return 0
    sizes = [size for path, size in files.items() if path.endswith(WEIGHTS)]
    return sum(sizes) if sizes and min(sizes) > 0 else 0


def query_files(site: Site, name: str) -> list[Command]:
    """Ask every node for the files of a model, in its Ray container or on the node itself."""
    return _of_model(site, lambda node: list_files(name, node.hf_home))


def query_config(site: Site, name: str) -> list[Command]:
    """Ask every node for a model's `config.json`, in the same places."""
    return _of_model(site, lambda node: look(name, node.hf_home))


def _of_model(site: Site, ask: Callable[[Node], Argv]) -> list[Command]:
    commands = []
    for node in site.seen:
        if site.running(node) is not None:
            commands.append(site.inside(node, ask(node)))
        else:
            commands.append(Command(node=node.name, argv=ask(node), timeout=60))
    return commands
