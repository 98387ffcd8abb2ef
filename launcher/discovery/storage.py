"""Where the launcher's own files go on hosts whose logins have their home on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.discovery.described import on_some, size_of
from launcher.discovery.shape import Choice, Probed
from launcher.model import fold

_NAME = "vlaunch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """`state_dir` is a folder for all hosts; None where the login's home will do, or where there is
    no better one, which `warnings` tell.
    """

    state_dir: Choice | None = None
    warnings: tuple[str, ...] = ()


def choose(hosts: Sequence[Probed], order: Sequence[str]) -> Storage:
    """Choose a folder on a disk of each host's own where homes lie over the network: there, by
    default, root may not write (exports(5), `root_squash`), which containers are, and hosts would
    share what engines compile for themselves alone.
    """
    kinds = {name: kind for host, name in zip(hosts, order, strict=True) if (kind := _remote(host))}
    if not kinds:
        return Storage()
    text = f"the login's home lies on {' and '.join(sorted(set(kinds.values())))}, over the network"
    free = _free(hosts)
    if not free:
        user = hosts[0].facts.user or "LOGIN"
        fix = f"`sudo install -d -o {user} /var/lib/{_NAME}` there, then `state_dir:` names it"
        none = f"{fold(list(kinds))}: {text}, and no disk of all hosts' own is the login's to write"
        return Storage(warnings=(f"{none}: {fix}",))
    path = max(free, key=lambda each: free[each])
    why = (
        f"{text}{on_some(list(kinds), order)}, where containers' root may not write",
        f"{path} is on a disk of each host's own: {size_of(free[path])} free",
        "what engines compile lies there, too, in `cache` (`cache_dir:`)",
    )
    return Storage(state_dir=Choice(value=f"{path.rstrip('/')}/{_NAME}", why=why))


def _remote(host: Probed) -> str:
    """Return the file system of the login's home if it is another machine's; else nothing."""
    found = host.facts.compiled
    return found.kind if found is not None and found.remote else ""


def _free(hosts: Sequence[Probed]) -> dict[str, int]:
    """Return the folders that all hosts have on disks of their own, with the least that is free."""
    each = [{disk.path: disk.free for disk in host.assets.disks} for host in hosts]
    common = [path for path in each[0] if all(path in disks for disks in each)]
    return {path: min(disks[path] for disks in each) for path in common}
