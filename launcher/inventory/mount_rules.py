"""Rules for mount points in the containers: unique targets that spare vlaunch's own."""

import posixpath
from collections.abc import Iterator, Mapping

from launcher.core.domain import Mount
from launcher.inventory.draft import InventoryDraft
from launcher.inventory.mistakes import Mistake, YamlPath

# Mounts of all containers (tools/containers.py). The first two are read-only: Docker cannot create
# mount points inside them.
_SEALED: Mapping[str, str] = {
    "/opt/vlaunch": "its node programs",
    "/run/vlaunch/secrets": "the secrets",
}
_OWN_MOUNTS: Mapping[str, str] = {
    **_SEALED,
    "/var/lib/vlaunch": "the state of servers",
    "/var/cache/vlaunch": "the compile cache",
}
_SHM = "/dev/shm"
_HF_CACHE = "/root/.cache/huggingface"


def mounts(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require unique mount targets outside vlaunch's own mounts."""
    invalid = {
        where[1] for where in draft.invalid_paths if where[:1] == ("mounts",) and len(where) > 1
    }
    first_index: dict[str, int] = {}
    for index, mount in enumerate(draft.file.mounts):
        if index in invalid:
            continue
        target = _normalize(mount.target)
        text = (
            _covers_root(target)
            or _covers_own(mount)
            or _covers_cache(draft, mount)
            or _covers_other(draft, target, first_index)
        )
        if text:
            yield Mistake(yaml_path=("mounts", index), text=text)
        first_index.setdefault(target, index)


def cache(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require an unused container path for the Hugging Face cache: it equals the node's."""
    for yaml_path, hf_home in _hf_homes(draft).items():
        reserved_path = next(
            (
                path
                for path in (*_OWN_MOUNTS, _SHM)
                if hf_home == path or (path in _SEALED and _is_below(hf_home, path))
            ),
            None,
        )
        if reserved_path:
            text = (
                "should be another directory: the containers get it at the same path, and there"
                f" `{reserved_path}` is taken"
            )
            yield Mistake(yaml_path=yaml_path, text=text)


def compile_cache(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require a compile cache outside `hf_home`, which nodes may share."""
    for item in draft.nodes:
        node_path: YamlPath = ("nodes", item.entry, "cache_dir")
        yaml_path = node_path if draft.is_written(*node_path) else ("cache_dir",)
        if item.node.cache_dir is None or not draft.is_valid(*yaml_path):
            continue
        hf_home, cache_dir = _normalize(item.node.hf_home), _normalize(item.node.cache_dir)
        if cache_dir == hf_home or _is_below(cache_dir, hf_home):
            text = (
                f"should be outside `hf_home` ({hf_home}), which nodes may share: each node needs"
                " its own compile cache"
            )
            yield Mistake(yaml_path=yaml_path, text=text)


ALL = (mounts, cache, compile_cache)


def _covers_root(target: str) -> str:
    return "should not cover the container's root directory" if target == "/" else ""


def _covers_own(mount: Mount) -> str:
    target = _normalize(mount.target)
    if target == _SHM:
        return (
            f"should be removed: `shm` sets the containers' {_SHM}; `shm: host` gives them the"
            " node's"
        )
    for path, purpose in _OWN_MOUNTS.items():
        if target == path:
            return f"should have another target: vlaunch mounts {purpose} at `{path}`"
        if _is_below(target, path):
            return f"should have a target outside `{path}`, where vlaunch mounts {purpose}"
        if mount.read_only and _is_below(path, target):
            return _read_only_message(path, f"vlaunch mounts {purpose}")
    return ""


def _covers_cache(draft: InventoryDraft, mount: Mount) -> str:
    source, target = _normalize(mount.source), _normalize(mount.target)
    for yaml_path, home in _hf_homes(draft).items():
        if target == home:
            line = f" (line {draft.line_of(*yaml_path)})" if draft.is_written(*yaml_path) else ""
            return (
                f"should have another target, or be left out: `hf_home`{line} is mounted at"
                f" `{home}`"
            )
        # `/data:/data:ro` around /data/huggingface works: its source has the directory.
        if (
            mount.read_only
            and _is_below(home, target)
            and source + home.removeprefix(target) != home
        ):
            return _read_only_message(home, "`hf_home` is mounted")
    # HF_HOME overrides the launcher's cache.
    if target == _HF_CACHE and not any("HF_HOME" in item.node.env for item in draft.nodes):
        return "should be written as `hf_home`: the containers look for models there, not here"
    return ""


def _covers_other(draft: InventoryDraft, target: str, first_index: Mapping[str, int]) -> str:
    if target not in first_index:
        return ""
    line = draft.line_of("mounts", first_index[target])
    return f"should have a target of its own; `{target}` is used on line {line}"


def _read_only_message(path: str, reason: str) -> str:
    return (
        f"should be writable, or have another target: Docker must make `{path}` in it, where"
        f" {reason}"
    )


def _hf_homes(draft: InventoryDraft) -> dict[YamlPath, str]:
    """Return the Hugging Face caches of the nodes by the path of the setting."""
    homes: dict[YamlPath, str] = {}
    for item in draft.nodes:
        node_path: YamlPath = ("nodes", item.entry, "hf_home")
        yaml_path = (
            node_path
            if draft.is_written(*node_path) and draft.file.nodes[item.entry].hf_home
            else ("hf_home",)
        )
        if draft.is_valid(*node_path) and draft.is_valid(*yaml_path):
            homes[yaml_path] = _normalize(item.node.hf_home)
    return homes


def _normalize(path: str) -> str:
    # Unlike Docker, normpath keeps two leading slashes.
    return posixpath.normpath("/" + path.lstrip("/"))


def _is_below(path: str, parent: str) -> bool:
    return path.startswith(f"{parent}/")
