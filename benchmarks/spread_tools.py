"""The same copy by the tools that are there already: rsync from the source to all at once, and
libtorrent, as a swarm in which each knows all others and as a chain.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.spread_network import address, begin, inside, tell

_PORT = 29572
_MOST = 8  # nodes
Tool = Callable[[Sequence[Path], int], float]
# Peers are given; nothing is asked of the world outside.
_TORRENT = """
import json, sys, time
import libtorrent as lt
file, folder, own, peers, role = *sys.argv[1:4], json.loads(sys.argv[4]), sys.argv[5]
session = lt.session({
    "listen_interfaces": own + ":29573", "alert_mask": 0, "enable_dht": False, "enable_lsd": False,
    "enable_upnp": False, "enable_natpmp": False, "enable_outgoing_utp": False,
    "enable_incoming_utp": False, "unchoke_slots_limit": -1,
})
params = lt.add_torrent_params()
params.ti, params.save_path = lt.torrent_info(file), folder
params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
if role == "seed": params.flags |= lt.torrent_flags.seed_mode
if role == "chain":  # in order, and nobody is told of others
    params.flags |= lt.torrent_flags.sequential_download | lt.torrent_flags.disable_pex
print("ready", flush=True); sys.stdin.readline()
handle = session.add_torrent(params)
for peer in peers: handle.connect_peer((peer, 29573))
asked = time.monotonic()
while not handle.status().is_seeding:
    time.sleep(0.05)
    if time.monotonic() - asked > 2:
        asked = time.monotonic()
        for peer in peers: handle.connect_peer((peer, 29573))
print("done", flush=True); sys.stdin.readline()
"""


def rsync(roots: Sequence[Path], chunk: int) -> float:
    """Return the seconds until all have fetched it from the first, at once and without SSH."""
    assert chunk
    config = roots[0].parent / "rsyncd.conf"
    config.write_text(
        f"use chroot = no\nuid = 0\ngid = 0\n[m]\npath = {roots[0]}\nread only = yes\n"
    )
    serves = subprocess.Popen(
        inside(
            0,
            *f"rsync --daemon --no-detach --address {address(0)} --port {_PORT}".split(),
            f"--config={config}",
        )
    )
    try:
        _await_port(serves)
        began = time.monotonic()
        fetch = f"rsync -a --whole-file rsync://{address(0)}:{_PORT}/m/"
        started = [
            subprocess.Popen(inside(node, *fetch.split(), f"{root}/"))
            for node, root in enumerate(roots)
            if node
        ]
        assert [each.wait() for each in started] == [0] * len(started)
        return time.monotonic() - began
    finally:
        serves.terminate()
        serves.wait(10)


def _await_port(serves: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 10
    look = inside(0, "ss", "-Hltn", f"sport = :{_PORT}")
    while not subprocess.run(look, check=True, capture_output=True).stdout:
        assert serves.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


def torrent(roots: Sequence[Path], chunk: int, *, chain: bool = False) -> float:
    """Return the seconds until all have everything; making the torrent's file is not counted.

    Each connects to those before it, as a chain to the one before it alone.
    """
    file = roots[0].parent / "m.torrent"
    file.write_bytes(_torrent(roots[0], chunk // 2 if chain else 2 * chunk))
    started = [_begin(file, roots[node], node, chain=chain) for node in range(len(roots))]
    began = time.monotonic()
    for each in started:
        tell(each)
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "done\n"
    seconds = time.monotonic() - began
    for each in started:
        each.communicate("\n", timeout=60)
    return seconds


def _begin(file: Path, root: Path, node: int, *, chain: bool) -> subprocess.Popen[str]:
    before = [address(each) for each in range(node)][-1 if chain else 0 :]
    role = ("chain" if chain else "swarm") if node else "seed"
    words = (str(file), str(root.parent), address(node), json.dumps(before), role)
    return begin(node, _TORRENT, *words)


def _torrent(root: Path, piece: int) -> bytes:
    import libtorrent as lt  # type: ignore[import-not-found, unused-ignore]

    files = [
        lt.create_file_entry(f"{root.name}/{each.name}", each.stat().st_size)
        for each in sorted(root.iterdir())
        if each.is_file()
    ]
    made = lt.create_torrent(files, piece, lt.create_torrent.v1_only)
    lt.set_piece_hashes(made, str(root.parent))
    return bytes(lt.bencode(made.generate()))


def there(count: int) -> list[tuple[str, Tool]]:
    """Return those that this machine has; many copies from one link are not waited for."""
    found: list[tuple[str, Tool]] = []
    if shutil.which("rsync") and count <= _MOST:
        found.append(("rsync, all from the source at once", rsync))
    if importlib.util.find_spec("libtorrent"):
        found.append(("libtorrent, a swarm", torrent))
        found.append(("libtorrent, a chain", partial(torrent, chain=True)))
    return found
