"""A front beside an image whose user is not root: the router and the agent are that user."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.agent.front import router_process
from launcher.core import shell
from launcher.core.domain import FrontSettings
from launcher.front import front_plan
from launcher.front.configuration import FrontServer, Replica
from tests.front.running import CHAT, EMBED, OFF, Running, StandIn, wait_for
from tests.ports import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
USER = 65534
# The interpreter may be in a folder of root: everything is imported before the rights are given up.
AS_USER = f"""
import asyncio, sys, os, encodings.idna
from launcher.agent.front import haproxy, router
os.setgroups([]); os.setgid({USER}); os.setuid({USER})
"""
ROUTER = f"{AS_USER}asyncio.run(router.serve(sys.argv[1]))"
AGENT = f"""{AS_USER}
import json, time
agent = haproxy.Front(os.path.dirname(sys.argv[1]))
until = time.monotonic() + 15
while time.monotonic() < until:
    agent.tick({{"one": "drain"}})
    if agent.report and agent.report["one"].state == "drain":
        sys.exit(0)
    time.sleep(0.05)
sys.exit(f"{{agent.report}} {{agent._sync.error}}")
"""


def write(folder: Path, name: str, content: str) -> None:
    """Write a file as the launcher does."""
    argv = ["sh", "-c", front_plan._WRITE, "front-file", str(folder), name]
    subprocess.run(argv, input=content, text=True, check=True)


class SharedFront(Running):
    """A front whose router runs as the image's user."""

    def start_router(self) -> None:
        """Start the router, and wait until it listens."""
        self.router = subprocess.Popen([sys.executable, "-c", ROUTER, str(self.folder)])
        wait_for((self.folder / router_process.SOCKET).is_socket)


@pytest.fixture
def front() -> Iterator[SharedFront]:
    """A running front in a folder that `hand_over` has shared."""
    root = Path(tempfile.mkdtemp(prefix="front-"))
    root.chmod(0o755)
    server, secrets = root / "server", root / "secrets"
    for folder in (server, secrets):
        folder.mkdir()
    (secrets / "TOKEN").touch()
    words = ("hand-over", f"{USER}:{USER}", str(secrets), str(server))
    subprocess.run(["sh", "-c", shell.program_text("hand_over"), *words], check=True)
    write(server / ".front", "keys.map", "")
    server.chmod(0o2771)  # HAProxy's container has the front's folder alone
    stand_in = StandIn(root, "one", models=CHAT)
    settings = FrontSettings(bind="127.0.0.1", port=free_port(), metrics=free_port(), tls=OFF)
    replica = Replica(name="one", address=f"127.0.0.1:{stand_in.port}")
    servers = (
        FrontServer(name="one", replicas=(replica,), models=CHAT),
        FrontServer(name="two", replicas=(replace(replica, name="two"),), models=EMBED),
    )
    front = SharedFront(folder=server / ".front", settings=settings, servers=servers)
    try:
        stand_in.start()
        front.start()
        yield front
    finally:
        front.stop()
        stand_in.kill()
        shutil.rmtree(root)


def test_the_router_serves_requests(front: SharedFront) -> None:
    """HAProxy reaches its socket, and it reaches HAProxy's."""
    key = front.add_key("alice")
    body = json.dumps({"model": CHAT[0], "x": "\\u006d"}).encode()

    assert front.post("/v1/completions", body, key=key)[0] == 200
    assert front.get("/v1/models", key=key)[0] == 200


def test_the_agent_takes_servers_out_of_rotation(front: SharedFront) -> None:
    """Through HAProxy's sockets, and saves the states in the front's folder."""
    ran = subprocess.run(
        [sys.executable, "-c", AGENT, str(front.folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_files_are_shared_with_the_group_alone(front: SharedFront) -> None:
    """Other users of the node reach nothing but sockets."""
    write(front.folder, "router.json", "{}")
    folder, file = front.folder.stat(), (front.folder / "router.json").stat()

    assert (stat.filemode(folder.st_mode), folder.st_gid) == ("drwxrws--x", USER)
    assert (stat.filemode(file.st_mode), file.st_gid) == ("-rw-rw----", USER)


def test_a_folder_from_before_is_shared_too(tmp_path: Path) -> None:
    """An image whose user was root had created it."""
    (tmp_path / "server/.front").mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/TOKEN").touch()
    words = ("hand-over", f"{USER}:{USER}", str(tmp_path / "secrets"), str(tmp_path / "server"))
    subprocess.run(["sh", "-c", shell.program_text("hand_over"), *words], check=True)

    assert (tmp_path / "server/.front").stat().st_mode & stat.S_ISGID
