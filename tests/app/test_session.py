"""Connections at the start of a command."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.command_line import INVENTORY

# A terminal, a live display, and a fleet that prompts for a passphrase as the real one does.
_PROGRAM = """\
import fcntl, getpass, sys, termios
from pathlib import Path
sys.path[:0] = {path!r}
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from launcher.app import session
from launcher.core.events import Event
from launcher.inventory.load import load
from launcher.ssh import fleet
from launcher.app.progress import LiveLines

class Asking:
    def __init__(self, inventory, terminal, **_):
        self.terminal = terminal
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def connect(self, nodes):
        for node in nodes:
            text = "one row of the display"
            to.show(Event(kind="step", stage="x", node=node, text=text, state="running"))
        with self.terminal():
            print("heard", len(getpass.getpass("Passphrase of /the/key: ")))
        return {{}}

fleet.Fleet = Asking
with LiveLines() as to, session.open_session(load(Path({inventory!r})), to) as reached:
    pass
"""


def read_until(terminal: int, text: str, *, within: float = 120.0) -> str:
    output, deadline = "", time.monotonic() + within
    while text not in output and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                output += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the program has exited
                break
    return output


def test_the_live_display_pauses_for_a_prompt(tmp_path: Path) -> None:
    """For the passphrase of a key: its prompt stays visible, and the display continues after the
    answer.
    """
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(INVENTORY)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(path=sys.path, inventory=str(inventory)))
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "HF_TOKEN": "x"}
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            prompt = read_until(ours, "Passphrase of /the/key: ")
            assert "Passphrase of /the/key: " in prompt
            assert (
                read_until(ours, "one row", within=0.6).strip() == ""
            )  # the time of four repaints
            os.write(ours, b"sesame\n")
            rest = read_until(ours, "connected")
        finally:
            process.kill()
            os.close(ours)

    assert "heard 6" in rest
    assert "one row" in rest  # the display is back
    assert "connected" in rest
    assert "sesame" not in rest
