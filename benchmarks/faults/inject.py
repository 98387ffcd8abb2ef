"""How each fault is made to happen on the practice hosts, and how it is put right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import engines
from benchmarks.faults import host_faults, host_memory, jobs
from benchmarks.faults.cases import DISKS, REAL, Case
from benchmarks.faults.practice import Practice, Started, running, until
from launcher.core.domain import Ports
from launcher.lab.layout import Host

_BACK = 2.0  # seconds until systemd would start a daemon again
_OFF = 3.0
# seconds that agents are frozen or cut off, and that an engine is frozen
_AGENT, _ENGINE = 30.0, 20.0
_FIND = 40.0  # seconds to wait for something that is to be killed
_LOADS = 200.0  # the same for a rank: Ray calls it alive when its model is loaded
_DISK = 80  # MiB of the small file system; `vlaunch up` requires 64
_RATE = "20mbit"  # at which a job's large input takes several seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault meets."""

    practice: Practice
    case: Case
    launcher: Started | None = None
    at: list[float] = field(default_factory=list)

    def strikes(self) -> None:
        """Note that it happens now: what was to be broken may have been waited for."""
        self.at.append(time.time())

    @property
    def host(self) -> Host:
        """The host that it meets; the head where it meets none."""
        return (
            self.practice.host(self.case.host)
            if self.case.host.startswith("node")
            else self.practice.head
        )

    @property
    def other(self) -> Host:
        """Another host."""
        return next(
            host
            for host in self.practice.lab.hosts
            if host is not self.host and host.name != self.host.name
        )


class NothingThere(Exception):
    """What was to be broken did not exist."""


def prepare(scene: Scene) -> None:
    """Do what must be done before the command starts."""
    if scene.case.fault == "disk":
        host_faults.small_disk(scene.host, DISKS[scene.case.verb], _DISK)
    elif _in_transfer(scene.case):
        host_faults.slow(scene.practice.head, _RATE)


def inject(scene: Scene) -> str:
    """Let the fault happen; returns what is worth noting.

    Raises NothingThere when there is nothing to break.
    """
    return _INJECT[scene.case.fault](scene) or ""


def heal(scene: Scene) -> None:
    """Put right what does not heal by itself."""
    fault = scene.case.fault
    if fault in ("cut", "cut-5s"):
        host_faults.plug(scene.host)
    elif fault == "one-way":
        host_faults.heal(scene.host)
    elif _in_transfer(scene.case):
        host_faults.unslow(scene.practice.head)
    elif fault == "disk":
        host_faults.drain(scene.host, DISKS[scene.case.verb])


def mend(practice: Practice) -> None:
    """See that the hosts are whole, whatever was done to them: what broke them may have been
    interrupted.
    """
    for host in practice.lab.hosts:
        engines.thaw(each.pid for each, _ in running(host))
        for right in (host_faults.plug, host_faults.heal, host_faults.unslow, host_memory.relieve):
            right(host)
        host_faults.power_on(practice.lab, host)
        for path in DISKS.values():
            host_faults.drain(host, path)


def tidy(practice: Practice) -> None:
    """Take the small file systems away, once nothing uses them."""
    for host in practice.lab.hosts:
        for path in DISKS.values():
            host_faults.remove_disk(host, path)


def _kill(
    scene: Scene,
    *words: str,
    host: Host | None = None,
    name: str = "",
    wait: float = _FIND,
    launcher: Started | None = None,
) -> None:
    """Kill one process of a host by its name or by words of its command line, as soon as there is
    one.
    """
    found: list[int] = []
    host = host or scene.host

    def look() -> bool:
        found[:] = [
            each.pid
            for each, line in running(host, *words)
            if (not name or each.name == name) and not _wraps(line)
        ]
        return bool(found) or (launcher is not None and launcher.over)

    if not until(look, wait) or not found:
        raise NothingThere(f"no {name or words[0]} on {host.name}")
    scene.strikes()
    os.kill(found[0], signal.SIGKILL)


def _wraps(line: str) -> bool:
    """Tell whether a command line only names the program that it has started, or will."""
    return (
        "vlaunch_agent" in line
        or "entry.sh" in line
        or line.startswith(("/bin/sh", "sh ", "bash "))
    )


def _launcher(scene: Scene) -> None:
    if scene.launcher is None or scene.launcher.over:
        raise NothingThere("the launcher has ended")
    os.kill(scene.launcher.process.pid, signal.SIGKILL)


def _agent_frozen(scene: Scene) -> None:
    agent = engines.agent(scene.host)
    if agent is None:
        raise NothingThere(f"no agent runs on {scene.host.name}")
    _frozen(scene, [agent], _AGENT)


def _agents_cut(scene: Scene) -> None:
    host, port = scene.host, Ports().group
    scene.strikes()
    host_faults.cut(host, scene.practice.head, port=port)
    time.sleep(_AGENT)
    host_faults.heal(host)


def _engine_frozen(scene: Scene) -> str:
    found = engines.of_server(scene.practice.lab.hosts)
    if not found:
        raise NothingThere("no engine runs")
    _frozen(scene, found, _ENGINE)
    return f"{len(found)} processes frozen"


def _frozen(scene: Scene, pids: list[int], seconds: float) -> None:
    scene.strikes()
    try:
        engines.freeze(pids)
        time.sleep(seconds)
    finally:
        engines.thaw(pids)


def _api(scene: Scene) -> None:
    try:
        _kill(scene, "VLLM::APIServer", wait=1)
    except NothingThere:
        _kill(scene, "vllm", "serve", "--host", wait=5)


def _rank(scene: Scene) -> None:
    """A rank of vLLM, or a worker of a batch; where they are in Ray, by its own table of actors,
    which knows the process.
    """
    # a replica of one rank has no process but its engine
    if scene.case.verb in ("serve-mp", "serve-dp"):
        return _kill(
            scene,
            "VLLM::Worker" if scene.case.verb == "serve-mp" else "VLLM::EngineCore",
            wait=_LOADS,
        )
    wanted = "vllm_Worker_" if scene.case.verb == "serve" else ""

    ranks: list[tuple[str, int]] = []

    def there() -> bool:
        each = [
            row for row in scene.practice.actors() if str(row.get("name") or "").startswith(wanted)
        ]
        if not wanted:
            each = [row for row in each if "Replica" in str(row.get("class_name"))]
        ranks[:] = sorted((str(row["host"]), int(row["pid"])) for row in each if row["host"])
        return bool(ranks)

    if not until(there, _LOADS, every=0.5):
        raise NothingThere("no rank runs")
    host, pid = next((each for each in ranks if each[0] == scene.host.name), ranks[0])
    scene.strikes()
    if not host_faults.kill_inside(scene.practice.host(host), pid):
        raise NothingThere(f"rank {pid} on {host} has ended")
    return None


def _container(scene: Scene) -> None:
    _has_container(scene)
    scene.strikes()
    host_faults.kill_container(scene.host, scene.practice.container(scene.host))


def _docker_kill(scene: Scene) -> None:
    _has_container(scene)
    scene.strikes()
    if not scene.practice.docker(scene.host, "kill", scene.practice.container(scene.host)):
        raise NothingThere(f"`docker kill` failed on {scene.host.name}")


def _has_container(scene: Scene) -> None:
    name = scene.practice.container(scene.host)

    def there() -> bool:
        return name in scene.practice.docker(scene.host, "ps", "--format", "{{.Names}}").split()

    if not until(there, _FIND):
        raise NothingThere(f"no container on {scene.host.name}")


def _back(kill: Callable[[Host], None]) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        kill(scene.host)
        time.sleep(_BACK)
        host_faults.power_on(scene.practice.lab, scene.host)

    return fault


def _cut_for_a_while(scene: Scene) -> None:
    host_faults.unplug(scene.host)
    time.sleep(5)
    host_faults.plug(scene.host)


def _memory(scene: Scene) -> str:
    _has_container(scene)
    scene.strikes()
    killed = host_memory.squeeze(scene.host)
    if killed is None:
        raise NothingThere("this machine does not account the memory of containers")
    return f"the kernel ended {killed} processes"


def _reboot(scene: Scene) -> None:
    host_faults.power_off(scene.host)
    time.sleep(_OFF)
    host_faults.power_on(scene.practice.lab, scene.host)


def chooses(case: Case) -> bool:
    """Tell whether a fault finds its random moment itself."""
    return _in_transfer(case)


def _in_transfer(case: Case) -> bool:
    """Tell whether connections are reset while a job's input travels."""
    return (case.fault, case.verb) == ("ssh-reset", "batch")


def _ssh_reset(scene: Scene) -> str:
    host = scene.host
    if _in_transfer(scene.case):
        host, wanted = scene.practice.head, scene.case.fraction * jobs.PADDED
        arrived = until(
            lambda: jobs.arrived(scene.practice, scene.case) >= wanted, _FIND, every=0.1
        )
        if not arrived:
            raise NothingThere("the input did not travel")
    count = 0

    def reset() -> bool:
        nonlocal count
        scene.strikes()
        count = host_faults.reset_ssh(host)
        return bool(count) or (scene.launcher is not None and scene.launcher.over)

    until(reset, _FIND, every=0.05)
    if not count:
        raise NothingThere("there was no SSH connection")
    return f"{count} connections reset"


def _engine(scene: Scene) -> None:
    # A batch without data parallelism has one engine a replica, wherever Ray has put it.
    hosts = (
        scene.practice.lab.hosts
        if scene.case.engine == REAL and scene.case.verb == "batch"
        else (scene.host,)
    )
    until(lambda: any(True for host in hosts for _ in running(host, "VLLM::EngineCore")), _FIND)
    for host in hosts:
        if any(True for _ in running(host, "VLLM::EngineCore")):
            _kill(scene, "VLLM::EngineCore", host=host)
            return
    raise NothingThere("no engine runs")


_INJECT: dict[str, Callable[[Scene], str | None]] = {
    "launcher": _launcher,
    "driver": lambda scene: _kill(scene, "-m vlaunch_batch"),
    "agent": _container,
    "agent-frozen": _agent_frozen,
    "agents-cut": _agents_cut,
    "engine": _engine,
    "engine-frozen": _engine_frozen,
    "api": _api,
    "rank": _rank,
    "raylet": lambda scene: _kill(scene, name="raylet", launcher=_starting(scene)),
    "gcs": lambda scene: _kill(scene, name="gcs_server", launcher=_starting(scene)),
    "container": _container,
    "docker-kill": _docker_kill,
    "dockerd": _back(host_faults.kill_dockerd),
    "sshd": _back(host_faults.kill_sshd),
    "cut-5s": _cut_for_a_while,
    "cut": lambda scene: host_faults.unplug(scene.host),
    "one-way": lambda scene: host_faults.deafen(scene.host, scene.other),
    "disk": lambda scene: host_faults.fill(scene.host, DISKS[scene.case.verb]),
    "memory": _memory,
    "reboot": _reboot,
    "ssh-reset": _ssh_reset,
}


def _starting(scene: Scene) -> Started | None:
    """Return the launcher while it brings the processes up that are waited for."""
    return scene.launcher if scene.case.verb == "up" else None
