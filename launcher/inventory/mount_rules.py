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
    broken = {where[1] for where in draft.broken if where[:1] == ("mounts",) and len(where) > 1}
    seen: dict[str, int] = {}
    for at, mount in enumerate(draft.file.mounts):
        if at in broken:
            continue
        target = _clean(mount.target)
        text = (
            _root(target)
            or _over_own(mount)
            or _over_cache(draft, mount)
            or _over_other(draft, target, seen)
        )
        if text:
            yield Mistake(where=("mounts", at), text=text)
        seen.setdefault(target, at)


def cache(draft: Draft) -> Iterator[Mistake]:
    """The Hugging Face cache has the same path in the containers as on its node."""
    for where, home in _homes(draft).items():
        taken = next(
            (
                place
                for place in (*_OWN, _SHM)
                if home == place or (place in _SEALED and _inside(home, place))
            ),
            None,
        )
        if taken:
            text = (
                "should be another directory: the containers get it at the same path, and there"
                f" `{taken}` is taken"
            )
            yield Mistake(where=where, text=text)


def compiled(draft: Draft) -> Iterator[Mistake]:
    """What one node compiles is no other's: it must not lie where all nodes may look for models."""
    for one in draft.placed:
        own: Where = ("nodes", one.entry, "cache_dir")
        where = own if draft.written(*own) else ("cache_dir",)
        if one.node.cache_dir is None or not draft.sound(*where):
            continue
        home, folder = _clean(one.node.hf_home), _clean(one.node.cache_dir)
        if folder == home or _inside(folder, home):
            text = (
                f"should lie outside `hf_home` ({home}), which nodes may share: what one compiles"
                " is for itself alone"
            )
            yield Mistake(where=where, text=text)


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
    for place, what in _OWN.items():
        if target == place:
            return f"should have another target: vlaunch mounts {what} at `{place}`"
        if _inside(target, place):
            return f"should have a target outside `{place}`, where vlaunch mounts {what}"
        if mount.read_only and _inside(place, target):
            return _sealing(place, f"vlaunch mounts {what}")
    return ""


def _over_cache(draft: Draft, mount: Mount) -> str:
    source, target = _clean(mount.source), _clean(mount.target)
    for where, home in _homes(draft).items():
        if target == home:
            line = f" (line {draft.line(*where)})" if draft.written(*where) else ""
            return (
                f"should have another target, or be left out: `hf_home`{line} is mounted at"
                f" `{home}`"
            )
        # `/data:/data:ro` around /data/huggingface works: what is mounted has the directory
        # already.
        if mount.read_only and _inside(home, target) and source + home.removeprefix(target) != home:
            return _sealing(home, "`hf_home` is mounted")
    # Who sets HF_HOME wants something else than the launcher's.
    if target == _HF_CACHE and not any("HF_HOME" in one.node.env for one in draft.placed):
        return (
            "should be written as `hf_home`: that is where the containers look for models, and not"
            " here"
        )
    return ""


def _over_other(draft: Draft, target: str, seen: Mapping[str, int]) -> str:
    if target not in seen:
        return ""
    line = draft.line("mounts", seen[target])
    return f"should have a target of its own; `{target}` is used on line {line}"


def _sealing(place: str, why: str) -> str:
    return (
        f"should be writable, or have another target: Docker must make `{place}` in it, where {why}"
    )


def _homes(draft: Draft) -> dict[Where, str]:
    """Return the Hugging Face caches that nodes have, by what says so."""
    homes: dict[Where, str] = {}
    for one in draft.placed:
        own: Where = ("nodes", one.entry, "hf_home")
        where = own if draft.written(*own) and draft.file.nodes[one.entry].hf_home else ("hf_home",)
        if draft.sound(*own) and draft.sound(*where):
            homes[where] = _clean(one.node.hf_home)
    return homes


def _clean(path: str) -> str:
    # normpath keeps two leading slashes, which Docker does not.
    return posixpath.normpath("/" + path.lstrip("/"))


def _inside(path: str, around: str) -> bool:
    return path.startswith(f"{around}/")
