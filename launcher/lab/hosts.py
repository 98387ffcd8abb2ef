"""Start or repair of lab hosts: files, an init process in its own namespaces, sshd, dockerd."""

import shutil
import socket
from functools import partial
from pathlib import Path

from launcher.core.errors import VlaunchError
from launcher.lab import host_configs, machine, processes
from launcher.lab.layout import HF_HOME, Host, Lab

SERVICES = {
    "sshd": ("/usr/sbin/sshd", "-D", "-e"),
    "dockerd": ("dockerd",),
}

# Copied from the machine, whose programs need them.
_BORROWED = (
    "alternatives",
    "bash.bashrc",
    "crypto-policies",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "os-release",
    "pam.d",
    "profile",
    "protocols",
    "security",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "debian_version",
)
_DIRECTORIES = (
    "etc/ssh",
    "etc/docker",
    "etc/ssl",
    "var/lib/docker",
    "var/log",
    "var/tmp",
    "run/sshd",
    "tmp",
    "root/.ssh",
    "home/ops/.ssh",
    "srv",
    "mnt",
)


def prepare(lab: Lab, host: Host) -> None:
    """Write a host's own files; keeps those of containers and users."""
    for name in _DIRECTORIES:
        (host.root / name).mkdir(parents=True, exist_ok=True)
    hf_home(host).mkdir(parents=True, exist_ok=True)
    if not (host.root / "var/run").is_symlink():
        (host.root / "var/run").symlink_to("/run")
    for name, mode in (
        ("tmp", 0o1777),
        ("var/tmp", 0o1777),
        ("root", 0o700),
        ("home/ops", 0o700),
        ("run/sshd", 0o755),
    ):
        (host.root / name).chmod(mode)
    etc = host.root / "etc"
    for name in _BORROWED:
        _borrow(Path("/etc") / name, etc / name)
    for name, text in host_configs.etc_files(lab, host).items():
        (etc / name).write_text(text)
    (etc / "shadow").chmod(0o600)
    (etc / "sudoers").chmod(0o440)
    _write_keys(lab, host)


def _borrow(source: Path, target: Path) -> None:
    if target.is_symlink() or target.exists() or not source.exists():
        return
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def _write_keys(lab: Lab, host: Host) -> None:
    key = host.root / "etc/ssh/ssh_host_ed25519_key"
    for path, comment in ((lab.identity, lab.name), (key, host.name)):
        if not path.exists():
            machine.run(
                "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)
            )
    accepted = lab.identity.with_suffix(".pub").read_text()
    for home, owner in (("root", 0), ("home/ops", 1000)):
        directory = host.root / home
        (directory / ".ssh/authorized_keys").write_text(accepted)
        (directory / ".ssh").chmod(0o700)
        for path in (directory, directory / ".ssh", directory / ".ssh/authorized_keys"):
            shutil.chown(path, owner, owner)


def hf_home(host: Host) -> Path:
    """Return the path of a host's Hugging Face directory on the machine."""
    return host.root / HF_HOME.lstrip("/")


def public_key(host: Host) -> str:
    """Return a host's public host key."""
    return (host.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text()


def boot(host: Host) -> bool:
    """Start a host's init process unless it runs; True if started.

    Reboots a host whose network namespace has been replaced.
    """
    running = processes.host_processes(host)
    netns = (Path("/run/netns") / host.netns).stat().st_ino
    init = next((p for p in running if p.is_init), None)
    if init is not None and init.netns == netns:
        return False
    processes.kill_processes(running)
    clear_run(host)
    script = Path(__file__).with_name("host.sh")
    machine.run(
        *(
            "setsid",
            "--fork",
            "sh",
            "-c",
            'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null',
            "sh",
            str(service_log(host, "boot")),
        ),
        *_server_environment(host),
        *("nsenter", f"--net=/run/netns/{host.netns}"),
        *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
        *("sh", str(script), str(host.dir), host.name),
    )
    machine.await_true(
        lambda: (host.root / "run/booted").exists() and processes.is_booted(host),
        what=f"the start of `{host.name}`",
        timeout=30,
        evidence=lambda: machine.tail(service_log(host, "boot")),
    )
    return True


def clear_run(host: Host) -> None:
    """Empty a host's `/run`, as a reboot does."""
    shutil.rmtree(host.root / "run")
    (host.root / "run/sshd").mkdir(parents=True, mode=0o755)


def start_service(host: Host, service: str) -> bool:
    """Start `sshd` or `dockerd` on a host unless it runs, without waiting; True if started."""
    if ANSWERS[service](host):
        return False
    if service == "dockerd":
        if any(
            p.name == service and p.marker == host.marker for p in processes.host_processes(host)
        ):
            return False  # still starting
        # A killed dockerd leaves these; its successor would mistake any process with that id for
        # a running daemon.
        for leftover in ("docker.pid", "docker/containerd/containerd.pid"):
            (host.root / "run" / leftover).unlink(missing_ok=True)
    machine.run(
        *(
            "setsid",
            "--fork",
            "sh",
            "-c",
            'log=$1; shift; exec "$@" >>"$log" 2>&1 </dev/null',
            "sh",
        ),
        str(service_log(host, service)),
        *enter_argv(host, *SERVICES[service]),
    )
    return True


def await_services(host: Host, *, timeout: float = 60.0) -> None:
    """Wait until a host's sshd and dockerd answer; raises DeadlineError with the end of the log."""
    for service, answers in ANSWERS.items():
        machine.await_true(
            partial(answers, host),
            what=f"a response from `{service}` on `{host.name}`",
            timeout=timeout,
            evidence=partial(machine.tail, service_log(host, service)),
        )


def ssh_answers(host: Host) -> bool:
    """Return True if an SSH server answers at the host's address."""
    try:
        with socket.create_connection((host.ip, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def docker_answers(host: Host) -> bool:
    """Return True if the host's Docker daemon answers on its socket."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(host.docker_socket))
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


ANSWERS = {"sshd": ssh_answers, "dockerd": docker_answers}


def docker_argv(host: Host, *arguments: str) -> tuple[str, ...]:
    """Return the argv of a Docker command on the machine for a host's daemon."""
    return ("docker", "--host", f"unix://{host.docker_socket}", *arguments)


def enter_argv(host: Host, *argv: str) -> tuple[str, ...]:
    """Return the argv that runs `argv` inside a host; raises VlaunchError when it is off."""
    pid = processes.init_pid(host)
    if pid is None:
        raise VlaunchError(
            f"`{host.name}` of the lab cluster `{host.lab}` is not running",
            hint="run `vlaunch lab up`",
        )
    return (
        *_server_environment(host),
        "nsenter",
        f"--target={pid}",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--",
        *argv,
    )


def _server_environment(host: Host) -> tuple[str, ...]:
    """Return the prefix that gives a process a server's environment and its host's marker."""
    return ("env", "-i", f"PATH={machine.PATH}", "HOME=/root", "LANG=C.UTF-8", host.marker)


def service_log(host: Host, service: str) -> Path:
    """Return the path of a service's log."""
    return host.dir / f"{service}.log"
