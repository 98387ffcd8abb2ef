"""Fault injection: what to break on a practice host, and how to put it right; for the campaign and
for tests.
"""

from __future__ import annotations

import json
import mmap
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.core.errors import VlaunchError
from launcher.lab import host_configs, hosts, machine, network, processes
from launcher.lab.layout import Host, Lab

_INSIDE, _OUTSIDE = "inside", "outside"  # the two ends of a host's cable
_FILLER = ".filler"
_SMALL = "vlaunch-small"
_GARBLE = "vlaunch-garble"
_RDMA = Path(__file__).with_name("practice_rdma.sh")


def enter(host: Host, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command as root on a host, past sshd; it may fail.

    Raises DeadlineError after `timeout` seconds.
    """
    return machine.attempt(*hosts.enter_argv(host, *argv), timeout=timeout)


def cut(host: Host, other: Host, *, port: int | None = None) -> None:
    """Drop what `host` and `other` send each other (to TCP `port` of either, when given); SSH to
    both still works.
    """
    narrow = (
        [("-p", "tcp", "--dport", str(port)), ("-p", "tcp", "--sport", str(port))] if port else [()]
    )
    for words in narrow:
        for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
            _filter(
                host,
                "-I",
                chain,
                side,
                other.ip,
                *words,
                "-m",
                "comment",
                "--comment",
                network.CUT,
                "-j",
                "DROP",
            )


@contextmanager
def apart(host: Host, other: Host) -> Iterator[None]:
    """Let no packet pass between two hosts for a while."""
    cut(host, other)
    try:
        yield
    finally:
        heal(host)


def block(host: Host, other: Host) -> None:
    """Drop TCP connections that `other` opens to `host`, and only those: a firewall that is open
    one way. SSH still works.
    """
    rule = ("INPUT", "-s", other.ip, "-p", "tcp", "--syn", "!", "--dport", "22")
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def deafen(host: Host, other: Host) -> None:
    """Drop whatever `other` sends to `host`, but not what `host` sends: a cable that is broken one
    way. SSH still works.
    """
    _filter(
        host, "-I", "INPUT", "-s", other.ip, "-m", "comment", "--comment", network.CUT, "-j", "DROP"
    )


def reset_ssh(host: Host) -> int:
    """Reset a host's SSH connections, as a firewall does that forgets them; new ones work.

    Returns how many there were.

    The kernel must be able to close sockets (`ss --kill`, CONFIG_INET_DIAG_DESTROY); without that
    it is always 0.
    """
    words = ("--kill", "--no-header", "--tcp", "state", "established", "sport", "=", ":22")
    return len(machine.run("ip", "netns", "exec", host.netns, "ss", *words).splitlines())


def close_port(host: Host, port: int) -> None:
    """Drop TCP connections that anybody opens to one port of `host`: a firewall with a list of what
    is allowed.
    """
    rule = ("INPUT", "!", "-i", "lo", "-p", "tcp", "--syn", "--dport", str(port))
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def drop_large(host: Host, other: Host, size: int) -> None:
    """Drop packets of more than `size` bytes that `other` sends to `host`, without a word: a switch
    with a smaller MTU.

    Packets then come to `host` as they are on a wire, not many in one, as virtual cards hand them
    over.
    """
    machine.run("ip", "link", "set", host.link, "gso_max_segs", "1")
    rule = ("INPUT", "-s", other.ip, "-m", "length", "--length", f"{size + 1}:65535")
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def set_mtu(host: Host, mtu: int) -> None:
    """Change the MTU of a host's network card; 1500 is what it had."""
    _ip(host, "link", "set", "eth0", "mtu", str(mtu))


def rename(host: Host, old: str, new: str) -> None:
    """Give a host's network card another name, as another driver or slot does; its address
    stays.
    """
    routes = _ip(host, "route", "show", "default", "dev", old).splitlines()
    for words in (("set", old, "down"), ("set", old, "name", new), ("set", new, "up")):
        _ip(host, "link", *words)
    for route in routes:
        _ip(host, "route", "replace", *route.split(), "dev", new)


def add_nic(host: Host, name: str, address: str) -> None:
    """Give a host one more network card, with an address such as `10.99.0.11/24`; its cable ends at
    the host itself.
    """
    wire = f"{name}-wire"
    _ip(host, "link", "add", name, "type", "veth", "peer", "name", wire)
    _ip(host, "address", "add", address, "dev", name)
    for each in (name, wire):
        _ip(host, "link", "set", each, "up")


def remove_nic(host: Host, name: str) -> None:
    """Take out what `add_nic` put in."""
    _ip(host, "link", "delete", name)


def show_rdma(host: Host, *names: str) -> None:
    """Let a host's kernel show InfiniBand devices of these names, up at 400 Gbit/s; there is
    nothing behind them.
    """
    machine.run(*hosts.enter_argv(host, "sh", "-c", _RDMA.read_text(), "rdma", *names))


def hide_rdma(host: Host) -> None:
    """Undo `show_rdma`."""
    machine.run(*hosts.enter_argv(host, "umount", "/sys/class/net", "/sys/class"))


def slow(host: Host, rate: str, other: Host | None = None) -> None:
    """Limit what `host` sends to `other`, or all that it sends and gets, to a rate such as
    `100mbit`; the last limit counts.
    """
    unslow(host)
    sides = [_INSIDE] if other is not None else [_INSIDE, _OUTSIDE]
    for side in sides:
        _tc(
            host,
            side,
            "qdisc",
            "add",
            "root",
            "handle",
            "1:",
            "htb",
            "default",
            "20" if other is None else "10",
        )
        _tc(
            host,
            side,
            "class",
            "add",
            "parent",
            "1:",
            "classid",
            "1:10",
            "htb",
            "rate",
            "100gbit",
            "quantum",
            "60000",
        )
        _tc(
            host,
            side,
            "class",
            "add",
            "parent",
            "1:",
            "classid",
            "1:20",
            "htb",
            "rate",
            rate,
            "quantum",
            "60000",
        )
    if other is not None:
        match = ("u32", "match", "ip", "dst", f"{other.ip}/32", "flowid", "1:20")
        _tc(host, _INSIDE, "filter", "add", "parent", "1:", "protocol", "ip", "prio", "1", *match)


def unslow(host: Host) -> None:
    """Undo `slow`."""
    for side in (_INSIDE, _OUTSIDE):
        machine.attempt(*_tc_argv(host, side, "qdisc", "del", "root"))


def name_on_loopback(lab: Lab, host: Host, *, yes: bool = True) -> None:
    """Let a host's own name resolve to 127.0.1.1, as installers of Debian and Ubuntu do;
    `yes=False` puts it right.
    """
    path = host.root / "etc/hosts"
    right = host_configs.etc_files(lab, host)["hosts"]
    path.write_text(
        f"127.0.1.1 {host.name}\n{right.replace(f'{host.ip} {host.name}', '')}" if yes else right
    )


@contextmanager
def lost_names(lab: Lab, host: Host) -> Iterator[None]:
    """Let a host ask a name server that never answers, and know no name by itself, for a while."""
    server = next(each for each in lab.hosts if each is not host)
    rule = ("INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")
    etc, right = host.root / "etc", host_configs.etc_files(lab, host)
    _filter(server, "-I", *rule)
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "resolv.conf").write_text(f"nameserver {server.ip}\n")
    (etc / "nsswitch.conf").write_text(
        right["nsswitch.conf"].replace("hosts: files", "hosts: files dns")
    )
    try:
        yield
    finally:
        _filter(server, "-D", *rule)
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            (etc / name).write_text(right[name])


def heal(host: Host, other: Host | None = None) -> None:
    """Undo `cut`, `block`, `deafen`, `close_port` and `drop_large` on a host, towards `other` or
    towards all.
    """
    network.unfilter(host, *(() if other is None else (f"{other.ip}/32",)))
    machine.run("ip", "link", "set", host.link, "gso_max_segs", "65535")


def unplug(host: Host) -> None:
    """Pull a host's network cable: nothing reaches it, SSH neither."""
    machine.run("ip", "link", "set", host.link, "down")


def plug(host: Host) -> None:
    """Put a host's network cable back."""
    machine.run("ip", "link", "set", host.link, "up")


def kill_sshd(host: Host) -> None:
    """Kill a host's SSH server and every session of it, as a crash does."""
    _kill(host, "sshd", "sshd-session", "sshd-auth")


def kill_dockerd(host: Host) -> None:
    """Kill a host's Docker daemon and its containerd; containers go on without them."""
    _kill(host, "dockerd", "containerd")


def stop_dockerd(host: Host) -> None:
    """Stop a host's Docker daemon as `systemctl stop docker` does, and with it, unless it has
    live-restore, the host's containers.
    """
    daemons = [p for p in processes.host_processes(host) if p.name == "dockerd"]
    for daemon in daemons:
        processes.send_signal(daemon.pid, signal.SIGTERM)
    machine.await_true(
        lambda: not any(p.name == "dockerd" for p in processes.host_processes(host)),
        what=f"the end of dockerd on `{host.name}`",
        timeout=60,
    )


def start_dockerd(host: Host) -> None:
    """Start a host's Docker daemon and wait until it answers."""
    hosts.start_service(host, "dockerd")
    hosts.await_services(host)


def set_live_restore(host: Host, on: bool) -> None:
    """Tell a host's running Docker daemon whether its containers outlive it."""
    path = host.root / "etc/docker/daemon.json"
    settings = {**json.loads(path.read_text()), "live-restore": on}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    for daemon in (p for p in processes.host_processes(host) if p.name == "dockerd"):
        processes.send_signal(daemon.pid, signal.SIGHUP)
    shown = hosts.docker_argv(host, "info", "--format", "{{.LiveRestoreEnabled}}")
    machine.await_true(
        lambda: machine.run(*shown).strip() == str(on).lower(),
        what=f"live-restore of dockerd on `{host.name}`",
        timeout=10,
    )


def kill_container(host: Host, name: str) -> None:
    """Kill the main process of a container past Docker, as a crash or the kernel does: its restart
    policy applies.
    """
    inside = machine.run(
        *hosts.docker_argv(host, "inspect", "--format", "{{.State.Pid}}", name)
    ).strip()
    found = [
        p for p in processes.host_processes(host) if len(p.pids) > 1 and p.pids[1] == int(inside)
    ]
    if not found:
        raise VlaunchError(f"`{name}` does not run on `{host.name}`")
    processes.kill_processes(found)


def kill_inside(host: Host, pid: int) -> bool:
    """Kill a process of a container by the number that it has inside; False when there is none."""
    # Only containers have a third level of numbers: the machine's, the host's, their own.
    found = [p for p in processes.host_processes(host) if len(p.pids) > 2 and p.pids[-1] == pid]
    for process in found:
        processes.send_signal(process.pid, signal.SIGKILL)
    return bool(found)


def small_disk(host: Host, path: str, megabytes: int) -> None:
    """Put a small file system over a directory of a host; what is below it is hidden until
    `remove_disk`.
    """
    words = ("-t", "tmpfs", "-o", f"size={megabytes}m,mode=711", _SMALL)
    _mount(host, path, *words)


def loop_disk(host: Host, path: str, megabytes: int) -> None:
    """Put a disk over a directory of a host that is a file of this machine, where `rot` can reach
    it; gone with `remove_disk`.
    """
    image = _image(host)
    machine.run("truncate", "--size", f"{megabytes}M", str(image))
    machine.run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    device = machine.run("losetup", "--find", "--show", str(image)).strip()
    try:
        _mount(host, path, "-t", "ext4", device)
    finally:
        machine.run("losetup", "--detach", device)  # when it is mounted no more


def _image(host: Host) -> Path:
    return host.dir / "disk.img"


def _mount(host: Host, path: str, *words: str) -> None:
    machine.run(*hosts.enter_argv(host, "mkdir", "-p", path))
    machine.run(*hosts.enter_argv(host, "mount", *words, path))


def rot(host: Host, path: str, block: bytes) -> bool:
    """Change a byte of the disk of `loop_disk` where it holds `block`, as a disk does that forgets:
    no program of the host has written. False while the block is not on the disk.
    """
    enter(host, "sync", "--file-system", path)
    with _image(host).open("r+b") as file, mmap.mmap(file.fileno(), 0) as disk:
        at = disk.find(block)
        if at < 0:
            return False
        disk[at] ^= 255
    # Whoever reads it next reads the disk.
    enter(host, "sh", "-c", "echo 1 >/proc/sys/vm/drop_caches")
    return True


def fill(host: Host, path: str) -> None:
    """Fill the file system of a directory to its last byte."""
    enter(host, "sh", "-c", 'cat /dev/zero >"$1" 2>/dev/null; true', "fill", f"{path}/{_FILLER}")


def drain(host: Host, path: str) -> None:
    """Undo `fill`."""
    enter(host, "rm", "-f", f"{path}/{_FILLER}")


def remove_disk(host: Host, path: str) -> None:
    """Undo `small_disk` or `loop_disk`; nothing happens where there is none."""
    # Some folders of a host are mounts of its own, which stay.
    script = (
        'while grep -qE "^(vlaunch-small|/dev/loop[0-9]+) $1 " /proc/mounts; do'
        ' umount --lazy "$1" || exit; done'
    )
    machine.run(*hosts.enter_argv(host, "sh", "-c", script, "sh", path))
    _image(host).unlink(missing_ok=True)


def garble(host: Host, port: int, every: int) -> None:
    """Change a byte in one of `every` large packets that `host` sends from a TCP port; on virtual
    cards, which compute no checksums, it arrives.
    """
    large = f"tcp sport {port} ip length > 1400 numgen random mod {every} 0 counter"
    rules = (
        f"table ip {_GARBLE} {{\nchain out {{\ntype filter hook output priority 0;\n"
        f"{large} @th,8000,8 set 0x5a\n}}\n}}\n"
    )
    machine.run("ip", "netns", "exec", host.netns, "nft", rules)


def ungarble(host: Host) -> int:
    """Undo `garble`; returns how many packets were changed."""
    nft = ("ip", "netns", "exec", host.netns, "nft")
    listed = machine.run(*nft, "list", "table", "ip", _GARBLE)
    machine.run(*nft, "delete", "table", "ip", _GARBLE)
    return int(listed.partition("counter packets ")[2].split()[0])


def power_off(host: Host) -> None:
    """Turn a host off at once: every process and container of it ends; its disk stays."""
    processes.kill_processes(processes.host_processes(host))


def reboot(lab: Lab, host: Host) -> None:
    """Turn a host off and on again and wait until sshd and dockerd answer; its containers are then
    stopped.
    """
    power_off(host)
    power_on(lab, host)


def power_on(lab: Lab, host: Host) -> None:
    """Turn a host on, or start what is dead on it, and wait until sshd and dockerd answer."""
    hosts.prepare(lab, host)
    hosts.boot(host)
    for service in hosts.SERVICES:
        hosts.start_service(host, service)
    hosts.await_services(host)


def _kill(host: Host, *names: str) -> None:
    processes.kill_processes([p for p in processes.host_processes(host) if p.name in names])


def _tc(host: Host, side: str, what: str, verb: str, *words: str) -> None:
    machine.run(*_tc_argv(host, side, what, verb, *words))


def _tc_argv(host: Host, side: str, what: str, verb: str, *words: str) -> tuple[str, ...]:
    """Return the argv of tc(8) for what a host sends, or for what the bridge sends to it."""
    if side == _OUTSIDE:
        return ("tc", what, verb, "dev", host.link, *words)
    return ("ip", "netns", "exec", host.netns, "tc", what, verb, "dev", "eth0", *words)


def _ip(host: Host, *words: str) -> str:
    return machine.run("ip", "-n", host.netns, *words)


def _filter(host: Host, *rule: str) -> None:
    machine.run("ip", "netns", "exec", host.netns, "iptables", *rule)
