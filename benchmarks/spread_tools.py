"""The same copy with other tools: rsync from the source to all at once, and libtorrent, as a swarm
in which each node knows all others and as a chain.
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

from benchmarks.spread_network import address, node_argv, send_line, start_program

_PORT = 29572
_MOST = 8  # nodes
Tool = Callable[[Sequence[Path], int], float]
# The peers are fixed; no tracker or DHT is used.
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
if role == "chain":  # in order, without peer exchange
    params.flags |= lt.torrent_flags.sequential_download | lt.torrent_flags.disable_pex
print("ready", flush=True); sys.stdin.readline()
handle = session.add_torrent(params)
for peer in peers: handle.connect_peer((peer, 29573))
connected = time.monotonic()
while not handle.status().is_seeding:
    time.sleep(0.05)
    if time.monotonic() - connected > 2:
        connected = time.monotonic()
        for peer in peers: handle.connect_peer((peer, 29573))
print("done", flush=True); sys.stdin.readline()
"""


def rsync(roots: Sequence[Path], chunk: int) -> float:
    """Return the seconds until all have fetched the files from the first node, at once and without
    SSH.
    """
    assert chunk
    config = roots[0].parent / "rsyncd.conf"
    config.write_text(
        f"use chroot = no\nuid = 0\ngid = 0\n[m]\npath = {roots[0]}\nread only = yes\n"
    )
    daemon = subprocess.Popen(
        node_argv(
            0,
            *f"rsync --daemon --no-detach --address {address(0)} --port {_PORT}".split(),
            f"--config={config}",
        )
    )
    try:
        _await_port(daemon)
        began = time.monotonic()
        fetch = f"rsync -a --whole-file rsync://{address(0)}:{_PORT}/m/"
        clients = [
            subprocess.Popen(node_argv(node, *fetch.split(), f"{root}/"))
            for node, root in enumerate(roots)
            if node
        ]
        assert [client.wait() for client in clients] == [0] * len(clients)
        return time.monotonic() - began
    finally:
        daemon.terminate()
        daemon.wait(10)


def _await_port(daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    query = node_argv(0, "ss", "-Hltn", f"sport = :{_PORT}")
    while not subprocess.run(query, check=True, capture_output=True).stdout:
        assert daemon.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def torrent(roots: Sequence[Path], chunk: int, *, chain: bool = False) -> float:
    """Return the seconds until all nodes have everything; the creation of the torrent does not
    count.

    Each node connects to all nodes before it; in a chain, to the previous one.
    """
    file = roots[0].parent / "m.torrent"
    file.write_bytes(_encode_torrent(roots[0], chunk // 2 if chain else 2 * chunk))
    peers = [_start_peer(file, roots[node], node, chain=chain) for node in range(len(roots))]
    began = time.monotonic()
    for peer in peers:
        send_line(peer)
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "done\n"
    seconds = time.monotonic() - began
    for peer in peers:
        peer.communicate("\n", timeout=60)
    return seconds


def _start_peer(file: Path, root: Path, node: int, *, chain: bool) -> subprocess.Popen[str]:
    earlier = [address(peer) for peer in range(node)][-1 if chain else 0 :]
    role = ("chain" if chain else "swarm") if node else "seed"
    arguments = (str(file), str(root.parent), address(node), json.dumps(earlier), role)
    return start_program(node, _TORRENT, *arguments)


def _encode_torrent(root: Path, piece: int) -> bytes:
    import libtorrent as lt  # type: ignore[import-not-found, unused-ignore]

    files = [
        lt.create_file_entry(f"{root.name}/{path.name}", path.stat().st_size)
        for path in sorted(root.iterdir())
        if path.is_file()
    ]
    torrent = lt.create_torrent(files, piece, lt.create_torrent.v1_only)
    lt.set_piece_hashes(torrent, str(root.parent))
    return bytes(lt.bencode(torrent.generate()))


def installed_tools(count: int) -> list[tuple[str, Tool]]:
    """Return the installed tools; rsync only for few nodes, because its copies share one link."""
    tools: list[tuple[str, Tool]] = []
    if shutil.which("rsync") and count <= _MOST:
        tools.append(("rsync, all from the source at once", rsync))
    if importlib.util.find_spec("libtorrent"):
        tools.append(("libtorrent, a swarm", torrent))
        tools.append(("libtorrent, a chain", partial(torrent, chain=True)))
    return tools
