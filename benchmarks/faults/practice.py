"""The campaign's own practice hosts: their inventories, commands as a user runs them, and what is
there, seen past SSH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import engines
from benchmarks.faults import host_faults
from launcher.core.domain import Ports
from launcher.lab import hosts, layout, processes
from launcher.lab.layout import Host, Lab
from launcher.tools import agent_queries
from launcher.tools.servers import DEFAULT

NAME, SUBNET, CLUSTER = "vlaunch-faults{0}", "10.8{0}.0.0/24", "faults"
VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
API_KEY = "campaign-api-key"
_STAND_IN = "/srv/stand-in"
# What every practice host runs by itself. The hosts' own: nsenter is how their services were
# started, by the pid that a host has until its next reboot.
_OWN = {"sleep", "sshd", "sshd-session", "sshd-auth", "dockerd", "containerd", "nsenter"}
_FILES = ("root/.vlaunch", "tmp", "var/tmp")
# Kept by design: what changed the node, the file that the kernel's lock is on, and what engines
# compiled.
_KEPT = ("root/.vlaunch/audit", "root/.vlaunch/locks", "root/.vlaunch/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command line did.

    `ended` is in seconds since 1970; `hung` when it had to be killed at its deadline.
    """

    code: int
    out: str
    said: str
    seconds: float
    ended: float
    hung: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """The JSON that it printed; empty when it printed none."""
        try:
            found = json.loads(self.out)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Started:
    """A command that runs. Its output goes to files, so that what outlives it holds no pipe
    open.
    """

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    watcher: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Watch it: nobody may be waiting when it ends."""
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    @property
    def over(self) -> bool:
        """True when it has ended."""
        return not self.watcher.is_alive()

    def wait(self, timeout: float) -> Ran:
        """Wait for its end; at the deadline it is killed, with what it started."""
        self.watcher.join(timeout)
        hung = not self.over
        self.end()
        out, err = (
            self.log.with_suffix(end).read_text(errors="replace") for end in (".out", ".err")
        )
        seconds = self.ended - self.began
        return Ran(
            code=self.process.returncode,
            out=out,
            said=err + out,
            seconds=seconds,
            ended=self.ended,
            hung=hung,
        )

    def end(self) -> None:
        """Kill it, with what it started, unless it has ended."""
        if not self.over:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.watcher.join(10)

    def _watch(self) -> None:
        self.process.wait()
        self.ended = time.time()


@dataclass(frozen=True)
class Practice:
    """The hosts, and a folder on this machine with inventories and logs."""

    lab: Lab
    folder: Path
    _firsts: dict[str, int] = field(default_factory=dict)

    def files(self, host: Host) -> Path:
        """Return a host's root directory as the host sees it, mounts included."""
        first = self._firsts.get(host.name)
        if first is None or not Path(f"/proc/{first}/root/run/booted").exists():
            first = processes.init_pid(host)
            self._firsts[host.name] = first or 0
        return Path(f"/proc/{first}/root") if first else host.root

    @property
    def head(self) -> Host:
        """The head's host."""
        return self.lab.hosts[0]

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self.lab.host(name)

    def start(self, inventory: str, *words: str) -> Started:
        """Start `vlaunch` as a user would, and go on."""
        log = self.folder / "logs" / f"{time.time_ns()}-{words[0]}"
        log.parent.mkdir(exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith("VLAUNCH_")}
        own = {
            "VLAUNCH_INVENTORY": str(self.folder / inventory),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        env |= {**own, "NO_COLOR": "1"}
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [VLAUNCH, *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return Started(process, log)

    def vlaunch(self, inventory: str, *words: str, timeout: float) -> Ran:
        """Run `vlaunch` to its end."""
        started = self.start(inventory, *words)
        try:
            return started.wait(timeout)
        finally:
            started.end()

    def container(self, host: Host) -> str:
        """Return the name of a host's container."""
        return f"vlaunch-{CLUSTER}-{host.name}"

    def docker(self, host: Host, *words: str, timeout: float = 30) -> str:
        """Run docker on a host, past SSH; returns nothing when it fails."""
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                hosts.docker_argv(host, *words),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            return done.stdout if done.returncode == 0 else ""
        return ""

    def record(self, name: str) -> dict[str, Any]:
        """Read one of the files of the server on the head (`state.DESIRED`, `state.OBSERVED`);
        empty when it is not there.
        """
        folder = self.files(self.head) / "root/.vlaunch" / CLUSTER / "server" / DEFAULT
        try:
            found = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def actors(self) -> list[dict[str, Any]]:
        """Return Ray's living actors, each with the name of its host."""
        text = self.docker(
            self.head,
            "exec",
            self.container(self.head),
            *agent_queries.jobs(Ports()),
        )
        try:
            said = json.loads(text)
            nodes = {row["node_id"]: row["node_ip"] for row in said["nodes"]}
            names = {host.ip: host.name for host in self.lab.hosts}
            rows = said["actors"]
        except (ValueError, KeyError, TypeError):
            return []
        alive = [row for row in rows if row.get("state") == "ALIVE"]
        return [{**row, "host": names.get(nodes.get(row.get("node_id"), ""), "")} for row in alive]

    def dead(self) -> list[str]:
        """Return what of a cluster that should be up is not there."""
        lacking = []
        for host in self.lab.hosts:
            names = [process.name for process in processes.host_processes(host)]
            wanted = ["raylet", *(["gcs_server"] if host is self.head else [])]
            lacking += [f"no {name} on {host.name}" for name in wanted if name not in names]
            if "state UP" not in _link(host):
                lacking.append(f"{host.name} has no network")
        return lacking


def inventories(lab: Lab, folder: Path) -> None:
    """Write the inventories: one for vLLM as it is, one whose containers find the stand-in
    first.
    """
    document = yaml.safe_load(lab.inventory.read_text())
    key = folder / "api.key"
    key.write_text(API_KEY + "\n")
    key.chmod(0o600)
    document |= {"cluster": CLUSTER, "secrets": {"VLLM_API_KEY": {"file": str(key)}}}
    document["ssh"]["connect_timeout"] = 5
    (folder / "real.yaml").write_text(yaml.safe_dump(document))
    document["mounts"] = [{"source": _STAND_IN, "target": "/usr/local/sbin"}]
    (folder / "stand-in.yaml").write_text(yaml.safe_dump(document))
    for host in lab.hosts:
        program = host.root / _STAND_IN.lstrip("/") / "vllm"
        program.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("stand_in.py"), program)
        program.chmod(0o755)


def bring_up(folder: Path, beside: int) -> Practice:
    """Start the practice hosts, or mend what is missing of them; ends the program when that fails.

    Campaigns that run at the same time differ in `beside`, 0 to 9, and so in their hosts.
    """
    name, subnet = NAME.format(beside or ""), SUBNET.format(beside)
    log = folder / "lab.log"
    words = [
        VLAUNCH,
        "lab",
        "up",
        "--install-missing",
        "--name",
        name,
        "--subnet",
        subnet,
        "--nodes",
        "2",
    ]
    with log.open("w") as out:
        done = subprocess.run(
            words, stdout=out, stderr=subprocess.STDOUT, timeout=1800, check=False
        )
    lab = layout.load_lab(layout.default_dir(name))
    if done.returncode != 0 or lab is None:
        sys.exit(f"the practice hosts do not start:\n{log.read_text()[-2000:]}")
    inventories(lab, folder)
    return Practice(lab, folder)


def running(host: Host, *words: str) -> Iterator[tuple[processes.Process, str]]:
    """Yield a host's processes whose command line has all of `words` in it, with that line."""
    for process in processes.host_processes(host):
        line = engines.command_line(process.pid)
        if line is not None and all(word in line for word in words):
            yield process, line


def traces(practice: Practice) -> list[str]:
    """Return one line for everything on the hosts and on this machine that a run might leave
    behind.
    """
    found = [f"process of this machine: {line}" for line in _local(f"{practice.folder}/")]
    for host in practice.lab.hosts:
        found += [f"{host.name}: {each}" for each in _on(practice, host)]
    return found


def _on(practice: Practice, host: Host) -> Iterator[str]:
    for name in practice.docker(host, "ps", "--all", "--format", "{{.Names}}").split():
        yield f"container {name}"
    for name in practice.docker(host, "volume", "ls", "--quiet").split():
        yield f"volume {name[:12]}"
    for process, line in running(host):
        if process.name not in _OWN:
            yield f"process {process.name}: {line[:80]}"
    root = practice.files(host)
    for top in _FILES:
        for path in sorted((root / top).rglob("*")):
            name = str(path.relative_to(root))
            if not name.startswith(_KEPT):
                yield f"file /{name}"
    shared = host_faults.enter(host, "find", "/dev/shm", "-mindepth", "1").stdout.split()
    yield from (f"shared memory {path}" for path in shared)
    first = processes.init_pid(host)
    for line in Path(f"/proc/{first}/mountinfo").read_text().splitlines() if first else ():
        if not line.split()[4].startswith("/run/docker"):
            yield f"mount {line.split()[4]}"


def _local(words: str) -> Iterator[str]:
    """Yield the command lines of this machine's processes that belong to the campaign's folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                environ = (entry / "environ").read_bytes()
                if f"VLAUNCH_INVENTORY={words}".encode() in environ:
                    yield (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")[:80]
                    )


def _link(host: Host) -> str:
    done = subprocess.run(
        ["ip", "link", "show", host.link], capture_output=True, text=True, check=False
    )
    return done.stdout


def until(condition: Callable[[], Any], timeout: float, every: float = 0.2) -> bool:
    """Wait until a condition holds; False when it did not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
