"""Faults of the campaign on lab hosts, and their repair."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import engines
from benchmarks.faults import host_faults, host_memory, jobs
from benchmarks.faults.cases import DISKS, REAL, Case
from benchmarks.faults.testbed import FaultTestbed, RunningCommand, find_processes, wait_until
from launcher.core.domain import Ports
from launcher.lab.layout import Host

_BACK = 2.0  # seconds until systemd would start a daemon again
_OFF = 3.0
# seconds that agents are frozen or cut off, and that an engine is frozen
_AGENT, _ENGINE = 30.0, 20.0
_FIND = 40.0  # seconds to wait for a process to kill
_LOADS = 200.0  # the same for a rank: Ray reports it alive when its model is loaded
_DISK = 80  # MiB of the small file system; `vlaunch up` requires 64
_RATE = "20mbit"  # at which a job's large input takes several seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The target of a fault: the hosts, the case and the running command."""

    testbed: FaultTestbed
    case: Case
    launcher: RunningCommand | None = None
    at: list[float] = field(default_factory=list)

    def note_time(self) -> None:
        """Record the time of the fault; the wait for its target may have taken long."""
        self.at.append(time.time())

    @property
    def host(self) -> Host:
        """The faulty host; the head for faults without one."""
        return (
            self.testbed.host(self.case.host)
            if self.case.host.startswith("node")
            else self.testbed.head
        )

    @property
    def other(self) -> Host:
        """Another host than the faulty one."""
        return next(
            host
            for host in self.testbed.lab.hosts
            if host is not self.host and host.name != self.host.name
        )


class NoTargetError(Exception):
    """The target of the fault does not exist."""


def prepare(scene: Scene) -> None:
    """Prepare the hosts before the command starts."""
    if scene.case.fault == "disk":
        host_faults.small_disk(scene.host, DISKS[scene.case.verb], _DISK)
    elif _hits_transfer(scene.case):
        host_faults.limit_rate(scene.testbed.head, _RATE)


def inject(scene: Scene) -> str:
    """Inject the fault; return a note for the results.

    Raises NoTargetError.
    """
    return _INJECT[scene.case.fault](scene) or ""


def heal(scene: Scene) -> None:
    """Repair faults that do not heal by themselves."""
    fault = scene.case.fault
    if fault in ("cut", "cut-5s"):
        host_faults.plug(scene.host)
    elif fault == "one-way":
        host_faults.heal(scene.host)
    elif _hits_transfer(scene.case):
        host_faults.unlimit_rate(scene.testbed.head)
    elif fault == "disk":
        host_faults.drain(scene.host, DISKS[scene.case.verb])


def repair_hosts(testbed: FaultTestbed) -> None:
    """Repair the hosts after any fault; the injection may have been interrupted."""
    for host in testbed.lab.hosts:
        engines.thaw(process.pid for process, _ in find_processes(host))
        for repair in (
            host_faults.plug,
            host_faults.heal,
            host_faults.unlimit_rate,
            host_memory.relieve,
        ):
            repair(host)
        host_faults.power_on(testbed.lab, host)
        for path in DISKS.values():
            host_faults.drain(host, path)


def remove_disks(testbed: FaultTestbed) -> None:
    """Remove the small file systems when they are no longer in use."""
    for host in testbed.lab.hosts:
        for path in DISKS.values():
            host_faults.remove_disk(host, path)


def _kill(
    scene: Scene,
    *patterns: str,
    host: Host | None = None,
    name: str = "",
    wait: float = _FIND,
    launcher: RunningCommand | None = None,
) -> None:
    """Wait for a process of a host, by its name or parts of its command line, and kill it."""
    pids: list[int] = []
    host = host or scene.host

    def look() -> bool:
        pids[:] = [
            process.pid
            for process, line in find_processes(host, *patterns)
            if (not name or process.name == name) and not _is_wrapper(line)
        ]
        return bool(pids) or (launcher is not None and launcher.is_over)

    if not wait_until(look, wait) or not pids:
        raise NoTargetError(f"no {name or patterns[0]} on {host.name}")
    scene.note_time()
    os.kill(pids[0], signal.SIGKILL)


def _is_wrapper(line: str) -> bool:
    """Return whether a command line belongs to a wrapper of the target program."""
    return (
        "vlaunch_agent" in line
        or "entry.sh" in line
        or line.startswith(("/bin/sh", "sh ", "bash "))
    )


def _kill_launcher(scene: Scene) -> None:
    if scene.launcher is None or scene.launcher.is_over:
        raise NoTargetError("the launcher has ended")
    os.kill(scene.launcher.process.pid, signal.SIGKILL)


def _freeze_agent(scene: Scene) -> None:
    agent = engines.find_agent(scene.host)
    if agent is None:
        raise NoTargetError(f"no agent runs on {scene.host.name}")
    _freeze(scene, [agent], _AGENT)


def _cut_agents(scene: Scene) -> None:
    host, port = scene.host, Ports().group
    scene.note_time()
    host_faults.cut(host, scene.testbed.head, port=port)
    time.sleep(_AGENT)
    host_faults.heal(host)


def _freeze_engine(scene: Scene) -> str:
    pids = engines.find_engine_pids(scene.testbed.lab.hosts)
    if not pids:
        raise NoTargetError("no engine runs")
    _freeze(scene, pids, _ENGINE)
    return f"{len(pids)} processes frozen"


def _freeze(scene: Scene, pids: list[int], seconds: float) -> None:
    scene.note_time()
    try:
        engines.freeze(pids)
        time.sleep(seconds)
    finally:
        engines.thaw(pids)


def _kill_api(scene: Scene) -> None:
    try:
        _kill(scene, "VLLM::APIServer", wait=1)
    except NoTargetError:
        _kill(scene, "vllm", "serve", "--host", wait=5)


def _kill_rank(scene: Scene) -> None:
    """Kill a rank of vLLM, or a worker of a batch; in Ray, the table of actors has its pid."""
    # a replica of one rank has no process but its engine
    if scene.case.verb in ("serve-mp", "serve-dp"):
        return _kill(
            scene,
            "VLLM::Worker" if scene.case.verb == "serve-mp" else "VLLM::EngineCore",
            wait=_LOADS,
        )
    name_prefix = "vllm_Worker_" if scene.case.verb == "serve" else ""

    ranks: list[tuple[str, int]] = []

    def exists() -> bool:
        rows = [
            row
            for row in scene.testbed.living_actors()
            if str(row.get("name") or "").startswith(name_prefix)
        ]
        if not name_prefix:
            rows = [row for row in rows if "Replica" in str(row.get("class_name"))]
        ranks[:] = sorted((str(row["host"]), int(row["pid"])) for row in rows if row["host"])
        return bool(ranks)

    if not wait_until(exists, _LOADS, every=0.5):
        raise NoTargetError("no rank runs")
    host, pid = next((rank for rank in ranks if rank[0] == scene.host.name), ranks[0])
    scene.note_time()
    if not host_faults.kill_inside(scene.testbed.host(host), pid):
        raise NoTargetError(f"rank {pid} on {host} has ended")
    return None


def _kill_container(scene: Scene) -> None:
    _await_container(scene)
    scene.note_time()
    host_faults.kill_container(scene.host, scene.testbed.container(scene.host))


def _docker_kill(scene: Scene) -> None:
    _await_container(scene)
    scene.note_time()
    if not scene.testbed.docker(scene.host, "kill", scene.testbed.container(scene.host)):
        raise NoTargetError(f"`docker kill` failed on {scene.host.name}")


def _await_container(scene: Scene) -> None:
    name = scene.testbed.container(scene.host)

    def exists() -> bool:
        return name in scene.testbed.docker(scene.host, "ps", "--format", "{{.Names}}").split()

    if not wait_until(exists, _FIND):
        raise NoTargetError(f"no container on {scene.host.name}")


def _restart_later(kill: Callable[[Host], None]) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        kill(scene.host)
        time.sleep(_BACK)
        host_faults.power_on(scene.testbed.lab, scene.host)

    return fault


def _cut_briefly(scene: Scene) -> None:
    host_faults.unplug(scene.host)
    time.sleep(5)
    host_faults.plug(scene.host)


def _exhaust_memory(scene: Scene) -> str:
    _await_container(scene)
    scene.note_time()
    killed = host_memory.squeeze(scene.host)
    if killed is None:
        raise NoTargetError("this machine does not account the memory of containers")
    return f"the kernel ended {killed} processes"


def _reboot(scene: Scene) -> None:
    host_faults.power_off(scene.host)
    time.sleep(_OFF)
    host_faults.power_on(scene.testbed.lab, scene.host)


def chooses_moment(case: Case) -> bool:
    """Return whether a fault chooses its moment itself."""
    return _hits_transfer(case)


def _hits_transfer(case: Case) -> bool:
    """Return whether the fault resets connections during the copy of a job's input."""
    return (case.fault, case.verb) == ("ssh-reset", "batch")


def _reset_ssh(scene: Scene) -> str:
    host = scene.host
    if _hits_transfer(scene.case):
        host, byte_count = scene.testbed.head, scene.case.fraction * jobs.PADDED
        arrived = wait_until(
            lambda: jobs.count_bytes(scene.testbed, scene.case) >= byte_count, _FIND, every=0.1
        )
        if not arrived:
            raise NoTargetError("the input did not travel")
    count = 0

    def reset() -> bool:
        nonlocal count
        scene.note_time()
        count = host_faults.reset_ssh(host)
        return bool(count) or (scene.launcher is not None and scene.launcher.is_over)

    wait_until(reset, _FIND, every=0.05)
    if not count:
        raise NoTargetError("there was no SSH connection")
    return f"{count} connections reset"


def _kill_engine(scene: Scene) -> None:
    # A batch without data parallelism has one engine per replica, on any host.
    hosts = (
        scene.testbed.lab.hosts
        if scene.case.engine == REAL and scene.case.verb == "batch"
        else (scene.host,)
    )
    wait_until(
        lambda: any(True for host in hosts for _ in find_processes(host, "VLLM::EngineCore")), _FIND
    )
    for host in hosts:
        if any(True for _ in find_processes(host, "VLLM::EngineCore")):
            _kill(scene, "VLLM::EngineCore", host=host)
            return
    raise NoTargetError("no engine runs")


_INJECT: dict[str, Callable[[Scene], str | None]] = {
    "launcher": _kill_launcher,
    "driver": lambda scene: _kill(scene, "-m vlaunch_batch"),
    "agent": _kill_container,
    "agent-frozen": _freeze_agent,
    "agents-cut": _cut_agents,
    "engine": _kill_engine,
    "engine-frozen": _freeze_engine,
    "api": _kill_api,
    "rank": _kill_rank,
    "raylet": lambda scene: _kill(scene, name="raylet", launcher=_starting_launcher(scene)),
    "gcs": lambda scene: _kill(scene, name="gcs_server", launcher=_starting_launcher(scene)),
    "container": _kill_container,
    "docker-kill": _docker_kill,
    "dockerd": _restart_later(host_faults.kill_dockerd),
    "sshd": _restart_later(host_faults.kill_sshd),
    "cut-5s": _cut_briefly,
    "cut": lambda scene: host_faults.unplug(scene.host),
    "one-way": lambda scene: host_faults.drop_incoming(scene.host, scene.other),
    "disk": lambda scene: host_faults.fill(scene.host, DISKS[scene.case.verb]),
    "memory": _exhaust_memory,
    "reboot": _reboot,
    "ssh-reset": _reset_ssh,
}


def _starting_launcher(scene: Scene) -> RunningCommand | None:
    """Return the launcher when its command starts the target process."""
    return scene.launcher if scene.case.verb == "up" else None
