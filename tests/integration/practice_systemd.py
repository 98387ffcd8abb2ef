"""Practice hosts with systemd as the first process, whose Docker is a service of it."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

from benchmarks.faults import host_faults
from launcher.lab import hosts, machine, processes
from launcher.lab.layout import Host, Lab

SYSTEMD = Path("/lib/systemd/systemd")
_SCRIPT = Path(__file__).with_name("practice_systemd.sh")
_DOCKER_UNIT = Path("/lib/systemd/system/docker.service")
_NEW_MACHINE = "5eed" * 8  # any number: without one every unit of the machine would be enabled


def missing() -> str:
    """Say what this machine lacks for it; nothing when it has all."""
    lacking = [str(path) for path in (SYSTEMD, _DOCKER_UNIT) if not path.exists()]
    if lacking:
        return f"{' and '.join(lacking)}: not there, install Debian's systemd and docker.io"
    version = machine.run(str(SYSTEMD), "--version").split()[1]
    # The machine's control groups are of the first version, which systemd 258 no longer knows.
    if Path("/sys/fs/cgroup/systemd").exists() and int(version) >= 258:
        return f"systemd {version} cannot run in control groups of version 1"
    return ""


def boot(lab: Lab, host: Host) -> None:
    """Turn a host on, with systemd in the place of its Docker daemon, and wait until systemd takes
    commands: what is enabled may take longer.
    """
    hosts.prepare(lab, host)
    (host.root / "etc/machine-id").write_text(f"{_NEW_MACHINE}\n")
    hosts.boot(host)
    hosts.start_service(host, "sshd")
    group = f"{lab.name}/{host.name}/systemd"
    machine.run(
        *("setsid", "--fork", "sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null'),
        *("sh", str(hosts.log(host, "systemd"))),
        *hosts.enter_argv(host, "sh", "-c", _SCRIPT.read_text(), "systemd", group),
    )
    machine.await_true(
        lambda: _answers(host),
        what=f"the start of systemd on `{host.name}`",
        timeout=60,
        evidence=lambda: machine.tail(hosts.log(host, "systemd")),
    )


def with_systemd(lab: Lab, host: Host) -> None:
    """Reboot a host into systemd, with Docker enabled and running."""
    host_faults.power_off(host)
    boot(lab, host)
    done = enter(host, "systemctl", "enable", "--now", "docker.service", timeout=120)
    assert done.returncode == 0, done.stderr + journal(host, "docker")


def without_systemd(lab: Lab, host: Host) -> None:
    """Reboot a host into what it was, and remove what systemd was told."""
    host_faults.power_off(host)
    machine.run("rm", "-rf", str(host.root / "etc/systemd"), str(host.root / "etc/machine-id"))
    host_faults.power_on(lab, host)


def enter(host: Host, *argv: str, timeout: float = 60) -> CompletedProcess[str]:
    """Run a command where a host's systemd is the first process; it may fail."""
    return machine.attempt(
        *("env", "-i", f"PATH={machine.PATH}", "HOME=/root", "LANG=C.UTF-8", host.marker),
        *("nsenter", f"--target={_first(host)}", "--mount", "--uts", "--ipc", "--net", "--pid"),
        *("--cgroup", "--", *argv),
        timeout=timeout,
    )


def journal(host: Host, unit: str) -> str:
    """Return what a unit has said."""
    return enter(host, "journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout


def shown(host: Host, unit: str, name: str) -> str:
    """Return a property of a unit, such as `NRestarts`."""
    return enter(host, "systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()


def _first(host: Host) -> int:
    """Return the process id of a host's systemd, 0 where there is none."""
    found = [
        each.pid
        for each in processes.on_host(host)
        if each.name == "systemd" and each.pids[2:] == (1,)
    ]
    return found[0] if found else 0


def _answers(host: Host) -> bool:
    if not _first(host):
        return False
    said = enter(host, "systemctl", "is-system-running").stdout.strip()
    return said in ("starting", "running", "degraded")
