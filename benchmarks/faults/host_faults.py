"""Fault injection on lab hosts: break a host, and repair it. For the campaign and for tests."""

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
_RDMA = Path(__file__).with_name("show_rdma.sh")


def enter(host: Host, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command as root on a host, without SSH; it may fail.

    Raises DeadlineError after `timeout` seconds.
    """
    return machine.attempt(*hosts.enter_argv(host, *argv), timeout=timeout)


def cut(host: Host, other: Host, *, port: int | None = None) -> None:
    """Drop packets between `host` and `other` (only those of TCP `port` of either, if set); SSH to
    both still works.
    """
    port_rules = (
        [("-p", "tcp", "--dport", str(port)), ("-p", "tcp", "--sport", str(port))] if port else [()]
    )
    for port_rule in port_rules:
        for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
            _filter(
                host,
                "-I",
                chain,
                side,
                other.ip,
                *port_rule,
                "-m",
                "comment",
                "--comment",
                network.CUT,
                "-j",
                "DROP",
            )


@contextmanager
def disconnected(host: Host, other: Host) -> Iterator[None]:
    """Drop all packets between two hosts inside the block."""
    cut(host, other)
    try:
        yield
    finally:
        heal(host)


def block(host: Host, other: Host) -> None:
    """Drop TCP connections that `other` opens to `host`, like a firewall that is open one way. SSH
    still works.
    """
    rule = ("INPUT", "-s", other.ip, "-p", "tcp", "--syn", "!", "--dport", "22")
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def drop_incoming(host: Host, other: Host) -> None:
    """Drop packets from `other` to `host`, but not those that `host` sends, like a cable that is
    broken one way. SSH still works.
    """
    _filter(
        host, "-I", "INPUT", "-s", other.ip, "-m", "comment", "--comment", network.CUT, "-j", "DROP"
    )


def reset_ssh(host: Host) -> int:
    """Reset a host's SSH connections, like a firewall that loses its state; new ones work.

    Returns the number of connections. It is 0 on kernels that cannot close sockets (`ss --kill`,
    CONFIG_INET_DIAG_DESTROY).
    """
    arguments = ("--kill", "--no-header", "--tcp", "state", "established", "sport", "=", ":22")
    return len(machine.run("ip", "netns", "exec", host.netns, "ss", *arguments).splitlines())


def close_port(host: Host, port: int) -> None:
    """Drop TCP connections to one port of `host`, like a firewall with an allow list."""
    rule = ("INPUT", "!", "-i", "lo", "-p", "tcp", "--syn", "--dport", str(port))
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def drop_large(host: Host, other: Host, size: int) -> None:
    """Silently drop packets of more than `size` bytes from `other` to `host`, like a switch with a
    smaller MTU.

    Turns off segmentation offload: `host` then receives packets as they are on a wire.
    """
    machine.run("ip", "link", "set", host.link, "gso_max_segs", "1")
    rule = ("INPUT", "-s", other.ip, "-m", "length", "--length", f"{size + 1}:65535")
    _filter(host, "-I", *rule, "-m", "comment", "--comment", network.CUT, "-j", "DROP")


def set_mtu(host: Host, mtu: int) -> None:
    """Change the MTU of a host's network card; the default is 1500."""
    _ip(host, "link", "set", "eth0", "mtu", str(mtu))


def rename(host: Host, old: str, new: str) -> None:
    """Rename a host's network card, as another driver or slot does; its address stays."""
    routes = _ip(host, "route", "show", "default", "dev", old).splitlines()
    for arguments in (("set", old, "down"), ("set", old, "name", new), ("set", new, "up")):
        _ip(host, "link", *arguments)
    for route in routes:
        _ip(host, "route", "replace", *route.split(), "dev", new)


def add_nic(host: Host, name: str, address: str) -> None:
    """Add a network card to a host, with an address such as `10.99.0.11/24`; its cable ends at the
    host itself.
    """
    wire = f"{name}-wire"
    _ip(host, "link", "add", name, "type", "veth", "peer", "name", wire)
    _ip(host, "address", "add", address, "dev", name)
    for link in (name, wire):
        _ip(host, "link", "set", link, "up")


def remove_nic(host: Host, name: str) -> None:
    """Remove a card of `add_nic`."""
    _ip(host, "link", "delete", name)


def show_rdma(host: Host, *names: str) -> None:
    """Show InfiniBand devices of these names in a host's sysfs, up at 400 Gbit/s, with no hardware
    behind them.
    """
    machine.run(*hosts.enter_argv(host, "sh", "-c", _RDMA.read_text(), "rdma", *names))


def hide_rdma(host: Host) -> None:
    """Undo `show_rdma`."""
    machine.run(*hosts.enter_argv(host, "umount", "/sys/class/net", "/sys/class"))


def limit_rate(host: Host, rate: str, other: Host | None = None) -> None:
    """Limit the rate from `host` to `other`, or of all its traffic, to a rate such as `100mbit`;
    replaces an earlier limit.
    """
    unlimit_rate(host)
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


def unlimit_rate(host: Host) -> None:
    """Undo `limit_rate`."""
    for side in (_INSIDE, _OUTSIDE):
        machine.attempt(*_tc_argv(host, side, "qdisc", "del", "root"))


def name_on_loopback(lab: Lab, host: Host, *, yes: bool = True) -> None:
    """Resolve a host's own name to 127.0.1.1, as installers of Debian and Ubuntu do; `yes=False`
    undoes it.
    """
    path = host.root / "etc/hosts"
    right = host_configs.etc_files(lab, host)["hosts"]
    path.write_text(
        f"127.0.1.1 {host.name}\n{right.replace(f'{host.ip} {host.name}', '')}" if yes else right
    )


@contextmanager
def broken_dns(lab: Lab, host: Host) -> Iterator[None]:
    """Make a host depend on a name server that never answers, inside the block."""
    server = next(other for other in lab.hosts if other is not host)
    rule = ("INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")
    etc, files = host.root / "etc", host_configs.etc_files(lab, host)
    _filter(server, "-I", *rule)
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "resolv.conf").write_text(f"nameserver {server.ip}\n")
    (etc / "nsswitch.conf").write_text(
        files["nsswitch.conf"].replace("hosts: files", "hosts: files dns")
    )
    try:
        yield
    finally:
        _filter(server, "-D", *rule)
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            (etc / name).write_text(files[name])


def heal(host: Host, other: Host | None = None) -> None:
    """Undo `cut`, `block`, `drop_incoming`, `close_port` and `drop_large` on a host, for `other` or
    for all.
    """
    network.unfilter(host, *(() if other is None else (f"{other.ip}/32",)))
    machine.run("ip", "link", "set", host.link, "gso_max_segs", "65535")


def unplug(host: Host) -> None:
    """Take a host's network link down; SSH stops working too."""
    machine.run("ip", "link", "set", host.link, "down")


def plug(host: Host) -> None:
    """Bring a host's network link up."""
    machine.run("ip", "link", "set", host.link, "up")


def kill_sshd(host: Host) -> None:
    """Kill a host's SSH server and all its sessions, like a crash."""
    _kill(host, "sshd", "sshd-session", "sshd-auth")


def kill_dockerd(host: Host) -> None:
    """Kill a host's Docker daemon and its containerd; containers keep running."""
    _kill(host, "dockerd", "containerd")


def stop_dockerd(host: Host) -> None:
    """Stop a host's Docker daemon like `systemctl stop docker`; without live-restore its containers
    stop too.
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
    """Set whether containers outlive a host's running Docker daemon."""
    path = host.root / "etc/docker/daemon.json"
    settings = {**json.loads(path.read_text()), "live-restore": on}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    for daemon in (p for p in processes.host_processes(host) if p.name == "dockerd"):
        processes.send_signal(daemon.pid, signal.SIGHUP)
    query = hosts.docker_argv(host, "info", "--format", "{{.LiveRestoreEnabled}}")
    machine.await_true(
        lambda: machine.run(*query).strip() == str(on).lower(),
        what=f"live-restore of dockerd on `{host.name}`",
        timeout=10,
    )


def kill_container(host: Host, name: str) -> None:
    """Kill the main process of a container without Docker, like a crash or the kernel: its restart
    policy applies.
    """
    pid = machine.run(
        *hosts.docker_argv(host, "inspect", "--format", "{{.State.Pid}}", name)
    ).strip()
    targets = [
        p for p in processes.host_processes(host) if len(p.pids) > 1 and p.pids[1] == int(pid)
    ]
    if not targets:
        raise VlaunchError(f"`{name}` does not run on `{host.name}`")
    processes.kill_processes(targets)


def kill_inside(host: Host, pid: int) -> bool:
    """Kill a process of a container by its pid in the container; return False when there is
    none.
    """
    # Only containers have a third level of pids: the machine's, the host's, their own.
    targets = [p for p in processes.host_processes(host) if len(p.pids) > 2 and p.pids[-1] == pid]
    for process in targets:
        processes.send_signal(process.pid, signal.SIGKILL)
    return bool(targets)


def small_disk(host: Host, path: str, megabytes: int) -> None:
    """Mount a small file system over a directory of a host, which hides its files until
    `remove_disk`.
    """
    options = ("-t", "tmpfs", "-o", f"size={megabytes}m,mode=711", _SMALL)
    _mount(host, path, *options)


def loop_disk(host: Host, path: str, megabytes: int) -> None:
    """Mount a disk over a directory of a host, backed by a file of this machine that
    `corrupt_block` can change; `remove_disk` removes it.
    """
    image = _image(host)
    machine.run("truncate", "--size", f"{megabytes}M", str(image))
    machine.run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    device = machine.run("losetup", "--find", "--show", str(image)).strip()
    try:
        _mount(host, path, "-t", "ext4", device)
    finally:
        machine.run("losetup", "--detach", device)  # takes effect at the unmount


def _image(host: Host) -> Path:
    return host.dir / "disk.img"


def _mount(host: Host, path: str, *arguments: str) -> None:
    machine.run(*hosts.enter_argv(host, "mkdir", "-p", path))
    machine.run(*hosts.enter_argv(host, "mount", *arguments, path))


def corrupt_block(host: Host, path: str, block: bytes) -> bool:
    """Change a byte of the disk of `loop_disk` in `block`, like silent corruption: no program of
    the host wrote it.

    Returns False while the block is not on the disk.
    """
    enter(host, "sync", "--file-system", path)
    with _image(host).open("r+b") as file, mmap.mmap(file.fileno(), 0) as disk:
        offset = disk.find(block)
        if offset < 0:
            return False
        disk[offset] ^= 255
    # The next read comes from the disk.
    enter(host, "sh", "-c", "echo 1 >/proc/sys/vm/drop_caches")
    return True


def fill(host: Host, path: str) -> None:
    """Fill the file system of a directory to its last byte."""
    enter(host, "sh", "-c", 'cat /dev/zero >"$1" 2>/dev/null; true', "fill", f"{path}/{_FILLER}")


def drain(host: Host, path: str) -> None:
    """Undo `fill`."""
    enter(host, "rm", "-f", f"{path}/{_FILLER}")


def remove_disk(host: Host, path: str) -> None:
    """Undo `small_disk` or `loop_disk`, if any."""
    # Some folders of a host are mounts of its own, which stay.
    script = (
        'while grep -qE "^(vlaunch-small|/dev/loop[0-9]+) $1 " /proc/mounts; do'
        ' umount --lazy "$1" || exit; done'
    )
    machine.run(*hosts.enter_argv(host, "sh", "-c", script, "sh", path))
    _image(host).unlink(missing_ok=True)


def garble(host: Host, port: int, every: int) -> None:
    """Change a byte in one of `every` large packets from a TCP port of `host`. Virtual cards
    compute no checksums, so that it arrives.
    """
    large = f"tcp sport {port} ip length > 1400 numgen random mod {every} 0 counter"
    rules = (
        f"table ip {_GARBLE} {{\nchain out {{\ntype filter hook output priority 0;\n"
        f"{large} @th,8000,8 set 0x5a\n}}\n}}\n"
    )
    machine.run("ip", "netns", "exec", host.netns, "nft", rules)


def ungarble(host: Host) -> int:
    """Undo `garble`; return the number of changed packets."""
    nft = ("ip", "netns", "exec", host.netns, "nft")
    listed = machine.run(*nft, "list", "table", "ip", _GARBLE)
    machine.run(*nft, "delete", "table", "ip", _GARBLE)
    return int(listed.partition("counter packets ")[2].split()[0])


def power_off(host: Host) -> None:
    """Turn a host off at once: all its processes and containers exit; its disk stays."""
    processes.kill_processes(processes.host_processes(host))


def reboot(lab: Lab, host: Host) -> None:
    """Turn a host off and on again, and wait until sshd and dockerd answer; its containers are then
    stopped.
    """
    power_off(host)
    power_on(lab, host)


def power_on(lab: Lab, host: Host) -> None:
    """Turn a host on, or start its dead services, and wait until sshd and dockerd answer."""
    hosts.prepare(lab, host)
    hosts.boot(host)
    for service in hosts.SERVICES:
        hosts.start_service(host, service)
    hosts.await_services(host)


def _kill(host: Host, *names: str) -> None:
    processes.kill_processes([p for p in processes.host_processes(host) if p.name in names])


def _tc(host: Host, side: str, kind: str, verb: str, *arguments: str) -> None:
    machine.run(*_tc_argv(host, side, kind, verb, *arguments))


def _tc_argv(host: Host, side: str, kind: str, verb: str, *arguments: str) -> tuple[str, ...]:
    """Return the argv of tc(8) for the traffic that a host sends, or that the bridge sends
    to it.
    """
    if side == _OUTSIDE:
        return ("tc", kind, verb, "dev", host.link, *arguments)
    return ("ip", "netns", "exec", host.netns, "tc", kind, verb, "dev", "eth0", *arguments)


def _ip(host: Host, *arguments: str) -> str:
    return machine.run("ip", "-n", host.netns, *arguments)


def _filter(host: Host, *rule: str) -> None:
    machine.run("ip", "netns", "exec", host.netns, "iptables", *rule)
