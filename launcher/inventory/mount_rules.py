"""Rules about places in the containers: Docker gives each to one mount, and some are vlaunch's
own.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from launcher.core.domain import Mount
from launcher.inventory.draft import Draft
from launcher.inventory.mistakes import Mistake, Where

# tools/containers.py: what every container has, whatever the inventory says. Nothing can be
# mounted inside the first two: they are read-only, and Docker must make the directory that it
# mounts on.
_SEALED: Mapping[str, str] = {"/opt/vlaunch": "its programs", "/run/vlaunch/secrets": "the secrets"}
_OWN: Mapping[str, str] = {
    **_SEALED,
    "/var/lib/vlaunch": "what it knows about servers",
    "/var/cache/vlaunch": "what engines compile",
}
_SHM = "/dev/shm"
_HF_CACHE = "/root/.cache/huggingface"


def mounts(draft: Draft) -> Iterator[Mistake]:
    """Each place has one mount, and vlaunch's own are left alone."""
    invalid = {where[1] for where in draft.broken if where[:1] == ("mounts",) and len(where) > 1}
    first_index: dict[str, int] = {}
    for index, mount in enumerate(draft.file.mounts):
        if index in invalid:
            continue
        target = _clean(mount.target)
        text = (
            _root(target)
            or _over_own(mount)
            or _over_cache(draft, mount)
            or _over_other(draft, target, first_index)
        )
        if text:
            yield Mistake(where=("mounts", index), text=text)
        first_index.setdefault(target, index)


def cache(draft: Draft) -> Iterator[Mistake]:
    """The Hugging Face cache has the same path in the containers as on its node."""
    for yaml_path, hf_home in _homes(draft).items():
        reserved_path = next(
            (
                path
                for path in (*_OWN, _SHM)
                if hf_home == path or (path in _SEALED and _inside(hf_home, path))
            ),
            None,
        )
        if reserved_path:
            text = (
                "should be another directory: the containers get it at the same path, and there"
                f" `{reserved_path}` is taken"
            )
            yield Mistake(where=yaml_path, text=text)


def compiled(draft: Draft) -> Iterator[Mistake]:
    """What one node compiles is no other's: it must not lie where all nodes may look for models."""
    for expanded in draft.placed:
        node_path: Where = ("nodes", expanded.entry, "cache_dir")
        yaml_path = node_path if draft.written(*node_path) else ("cache_dir",)
        if expanded.node.cache_dir is None or not draft.sound(*yaml_path):
            continue
        hf_home, cache_dir = _clean(expanded.node.hf_home), _clean(expanded.node.cache_dir)
        if cache_dir == hf_home or _inside(cache_dir, hf_home):
            text = (
                f"should lie outside `hf_home` ({hf_home}), which nodes may share: what one"
                " compiles is for itself alone"
            )
            yield Mistake(where=yaml_path, text=text)


ALL = (mounts, cache, compiled)


def _root(target: str) -> str:
    return "should not cover the container's root directory" if target == "/" else ""


def _over_own(mount: Mount) -> str:
    target = _clean(mount.target)
    if target == _SHM:
        return (
            f"should be left to `shm`, which says what the containers have at {_SHM}; `shm: host`"
            " gives them the node's"
        )
    for path, purpose in _OWN.items():
        if target == path:
            return f"should have another target: vlaunch mounts {purpose} at `{path}`"
        if _inside(target, path):
            return f"should have a target outside `{path}`, where vlaunch mounts {purpose}"
        if mount.read_only and _inside(path, target):
            return _sealing(path, f"vlaunch mounts {purpose}")
    return ""


def _over_cache(draft: Draft, mount: Mount) -> str:
    source, target = _clean(mount.source), _clean(mount.target)
    for yaml_path, hf_home in _homes(draft).items():
        if target == hf_home:
            line = f" (line {draft.line(*yaml_path)})" if draft.written(*yaml_path) else ""
            return (
                f"should have another target, or be left out: `hf_home`{line} is mounted at"
                f" `{hf_home}`"
            )
        # `/data:/data:ro` around /data/huggingface works: what is mounted has the directory
        # already.
        if (
            mount.read_only
            and _inside(hf_home, target)
            and source + hf_home.removeprefix(target) != hf_home
        ):
            return _sealing(hf_home, "`hf_home` is mounted")
    # Who sets HF_HOME wants something else than the launcher's.
    if target == _HF_CACHE and not any("HF_HOME" in expanded.node.env for expanded in draft.placed):
        return (
            "should be written as `hf_home`: that is where the containers look for models, and not"
            " here"
        )
    return ""


def _over_other(draft: Draft, target: str, first_index: Mapping[str, int]) -> str:
    if target not in first_index:
        return ""
    line = draft.line("mounts", first_index[target])
    return f"should have a target of its own; `{target}` is used on line {line}"


def _sealing(path: str, reason: str) -> str:
    return (
        f"should be writable, or have another target: Docker must make `{path}` in it, where"
        f" {reason}"
    )


def _homes(draft: Draft) -> dict[Where, str]:
    """Return the Hugging Face caches that nodes have, by what says so."""
    homes: dict[Where, str] = {}
    for expanded in draft.placed:
        node_path: Where = ("nodes", expanded.entry, "hf_home")
        yaml_path = (
            node_path
            if draft.written(*node_path) and draft.file.nodes[expanded.entry].hf_home
            else ("hf_home",)
        )
        if draft.sound(*node_path) and draft.sound(*yaml_path):
            homes[yaml_path] = _clean(expanded.node.hf_home)
    return homes


def _clean(path: str) -> str:
    # normpath keeps two leading slashes, which Docker does not.
    return posixpath.normpath("/" + path.lstrip("/"))


def _inside(path: str, parent: str) -> bool:
    return path.startswith(f"{parent}/")
