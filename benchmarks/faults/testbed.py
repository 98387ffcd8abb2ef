"""The campaign's own lab hosts: their inventories, commands as a user runs them, and the hosts'
state without SSH.
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
from launcher.tools.site.servers import DEFAULT

NAME, SUBNET, CLUSTER = "vlaunch-faults{0}", "10.8{0}.0.0/24", "faults"
VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
API_KEY = "campaign-api-key"
_STAND_IN = "/srv/stand-in"
# Processes of every lab host; nsenter started their services.
_OWN = {"sleep", "sshd", "sshd-session", "sshd-auth", "dockerd", "containerd", "nsenter"}
_FILES = ("root/.vlaunch", "tmp", "var/tmp")
# Kept by design: the audit log, the files of kernel locks, and the compile cache.
_PERSISTENT = ("root/.vlaunch/audit", "root/.vlaunch/locks", "root/.vlaunch/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command."""

    code: int
    out: str
    output: str
    seconds: float
    ended: float
    hung: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object in the output; empty without one."""
        try:
            payload = json.loads(self.out)
        except ValueError:
            return {}
        return payload if isinstance(payload, dict) else {}


@dataclass(slots=True)
class RunningCommand:
    """A running command. Its output goes to files, so that processes that outlive it hold no pipe
    open.
    """

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    watcher: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Start a thread that records the end of the command."""
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    @property
    def is_over(self) -> bool:
        """True when the command has exited."""
        return not self.watcher.is_alive()

    def wait(self, timeout: float) -> CommandResult:
        """Wait for the command; kill its process group at the deadline."""
        self.watcher.join(timeout)
        hung = not self.is_over
        self.kill()
        out, err = (
            self.log.with_suffix(end).read_text(errors="replace") for end in (".out", ".err")
        )
        seconds = self.ended - self.began
        return CommandResult(
            code=self.process.returncode,
            out=out,
            output=err + out,
            seconds=seconds,
            ended=self.ended,
            hung=hung,
        )

    def kill(self) -> None:
        """Kill the process group unless the command has exited."""
        if not self.is_over:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.watcher.join(10)

    def _watch(self) -> None:
        self.process.wait()
        self.ended = time.time()


@dataclass(frozen=True)
class FaultTestbed:
    """The hosts, and a folder on this machine with inventories and logs."""

    lab: Lab
    folder: Path
    _firsts: dict[str, int] = field(default_factory=dict)

    def root_dir(self, host: Host) -> Path:
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

    def start(self, inventory: str, *arguments: str) -> RunningCommand:
        """Start `vlaunch` as a user would."""
        log = self.folder / "logs" / f"{time.time_ns()}-{arguments[0]}"
        log.parent.mkdir(exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith("VLAUNCH_")}
        own = {
            "VLAUNCH_INVENTORY": str(self.folder / inventory),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        env |= {**own, "NO_COLOR": "1"}
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [VLAUNCH, *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return RunningCommand(process, log)

    def vlaunch(self, inventory: str, *arguments: str, timeout: float) -> CommandResult:
        """Run `vlaunch` and return its result."""
        started = self.start(inventory, *arguments)
        try:
            return started.wait(timeout)
        finally:
            started.kill()

    def container(self, host: Host) -> str:
        """Return the name of a host's container."""
        return f"vlaunch-{CLUSTER}-{host.name}"

    def docker(self, host: Host, *arguments: str, timeout: float = 30) -> str:
        """Run docker on a host, without SSH; return nothing when it fails."""
        with suppress(OSError, subprocess.TimeoutExpired):
            completed = subprocess.run(
                hosts.docker_argv(host, *arguments),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            return completed.stdout if completed.returncode == 0 else ""
        return ""

    def record(self, name: str) -> dict[str, Any]:
        """Read a file of the server on the head (`state.DESIRED`, `state.OBSERVED`); empty without
        one.
        """
        folder = self.root_dir(self.head) / "root/.vlaunch" / CLUSTER / "server" / DEFAULT
        try:
            record = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def living_actors(self) -> list[dict[str, Any]]:
        """Return Ray's living actors, each with the name of its host."""
        text = self.docker(
            self.head,
            "exec",
            self.container(self.head),
            *agent_queries.jobs(Ports()),
        )
        try:
            payload = json.loads(text)
            nodes = {row["node_id"]: row["node_ip"] for row in payload["nodes"]}
            names = {host.ip: host.name for host in self.lab.hosts}
            rows = payload["actors"]
        except (ValueError, KeyError, TypeError):
            return []
        alive = [row for row in rows if row.get("state") == "ALIVE"]
        return [{**row, "host": names.get(nodes.get(row.get("node_id"), ""), "")} for row in alive]

    def missing_parts(self) -> list[str]:
        """Return the missing parts of a cluster that should be up."""
        missing = []
        for host in self.lab.hosts:
            names = [process.name for process in processes.host_processes(host)]
            required = ["raylet", *(["gcs_server"] if host is self.head else [])]
            missing += [f"no {name} on {host.name}" for name in required if name not in names]
            if "state UP" not in _link_state(host):
                missing.append(f"{host.name} has no network")
        return missing


def write_inventories(lab: Lab, folder: Path) -> None:
    """Write the inventories: one for vLLM itself, one whose containers prefer the stand-in."""
    document = yaml.safe_load(lab.inventory.read_text())
    key = folder / "api.key"
    key.write_text(API_KEY + "\n")
    key.chmod(0o600)
    document |= {"cluster": CLUSTER, "secrets": {"VLLM_API_KEY": {"file": str(key)}}}
    document["ssh"]["connect_timeout"] = 5
    del document["front"]  # traffic goes to the servers themselves
    (folder / "real.yaml").write_text(yaml.safe_dump(document))
    document["mounts"] = [{"source": _STAND_IN, "target": "/usr/local/sbin"}]
    (folder / "stand-in.yaml").write_text(yaml.safe_dump(document))
    for host in lab.hosts:
        program = host.root / _STAND_IN.lstrip("/") / "vllm"
        program.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("stand_in.py"), program)
        program.chmod(0o755)


def start_hosts(folder: Path, instance: int) -> FaultTestbed:
    """Start the lab hosts, or their missing parts; exit when that fails.

    Concurrent campaigns differ in `instance`, 0 to 9, and so in their hosts.
    """
    name, subnet = NAME.format(instance or ""), SUBNET.format(instance)
    log = folder / "lab.log"
    argv = [
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
        completed = subprocess.run(
            argv, stdout=out, stderr=subprocess.STDOUT, timeout=1800, check=False
        )
    lab = layout.load_lab(layout.default_dir(name))
    if completed.returncode != 0 or lab is None:
        sys.exit(f"the lab hosts do not start:\n{log.read_text()[-2000:]}")
    write_inventories(lab, folder)
    return FaultTestbed(lab, folder)


def find_processes(host: Host, *patterns: str) -> Iterator[tuple[processes.Process, str]]:
    """Yield a host's processes whose command lines contain all of `patterns`, with these lines."""
    for process in processes.host_processes(host):
        line = engines.command_line(process.pid)
        if line is not None and all(pattern in line for pattern in patterns):
            yield process, line


def list_traces(testbed: FaultTestbed) -> list[str]:
    """Return one line for each object on the hosts and on this machine that a run might leave
    behind.
    """
    lines = [f"process of this machine: {line}" for line in _local_processes(f"{testbed.folder}/")]
    for host in testbed.lab.hosts:
        lines += [f"{host.name}: {item}" for item in _host_traces(testbed, host)]
    return lines


def _host_traces(testbed: FaultTestbed, host: Host) -> Iterator[str]:
    for name in testbed.docker(host, "ps", "--all", "--format", "{{.Names}}").split():
        yield f"container {name}"
    for name in testbed.docker(host, "volume", "ls", "--quiet").split():
        yield f"volume {name[:12]}"
    for process, line in find_processes(host):
        if process.name not in _OWN:
            yield f"process {process.name}: {line[:80]}"
    root = testbed.root_dir(host)
    for top in _FILES:
        for path in sorted((root / top).rglob("*")):
            name = str(path.relative_to(root))
            if not name.startswith(_PERSISTENT):
                yield f"file /{name}"
    shared = host_faults.enter(host, "find", "/dev/shm", "-mindepth", "1").stdout.split()
    yield from (f"shared memory {path}" for path in shared)
    first = processes.init_pid(host)
    for line in Path(f"/proc/{first}/mountinfo").read_text().splitlines() if first else ():
        if not line.split()[4].startswith("/run/docker"):
            yield f"mount {line.split()[4]}"


def _local_processes(folder: str) -> Iterator[str]:
    """Yield the command lines of this machine's processes that use the campaign's folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                environ = (entry / "environ").read_bytes()
                if f"VLAUNCH_INVENTORY={folder}".encode() in environ:
                    yield (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")[:80]
                    )


def _link_state(host: Host) -> str:
    completed = subprocess.run(
        ["ip", "link", "show", host.link], capture_output=True, text=True, check=False
    )
    return completed.stdout


def wait_until(condition: Callable[[], Any], timeout: float, every: float = 0.2) -> bool:
    """Wait until a condition holds; return False at the deadline."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
