"""Network of a lab cluster: a bridge, and per host a namespace with a veth pair (`eth0`)."""

import ipaddress
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.core.errors import RequestError
from launcher.lab import layout, machine
from launcher.lab.layout import Host, Lab

_NETNS = Path("/run/netns")
_FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
CUT = "vlaunch-lab-cut"  # comment on packet filter rules that simulate faults


def ensure(lab: Lab) -> None:
    """Create the bridge and all hosts' namespaces and cables where they are missing.

    Raises RequestError when the subnet is in use.
    """
    _refuse_overlap(lab)
    if not _exists(lab.bridge):
        machine.run("ip", "link", "add", lab.bridge, "address", _mac(lab.gateway), "type", "bridge")
    machine.run("ip", "address", "replace", f"{lab.gateway}/{lab.prefix}", "dev", lab.bridge)
    machine.run("ip", "link", "set", lab.bridge, "up")
    for host in lab.hosts:
        _ensure_host(lab, host)
    _ensure_forwarding(lab)


def _ensure_host(lab: Lab, host: Host) -> None:
    if not is_usable(host):
        machine.attempt("ip", "netns", "delete", host.netns)
        machine.run("ip", "netns", "add", host.netns)
    ip_argv = ("ip", "-n", host.netns)
    if not _exists(host.link) or machine.attempt(*ip_argv, "link", "show", "eth0").returncode != 0:
        machine.attempt("ip", "link", "delete", host.link)
        machine.attempt(*ip_argv, "link", "delete", "eth0")
        peer = ("peer", "name", "eth0", "address", _mac(host.ip), "netns", host.netns)
        machine.run("ip", "link", "add", host.link, "type", "veth", *peer)
    machine.run("ip", "link", "set", host.link, "master", lab.bridge, "up")
    machine.run(*ip_argv, "link", "set", "lo", "up")
    machine.run(*ip_argv, "link", "set", "eth0", "up")
    machine.run(*ip_argv, "address", "replace", f"{host.ip}/{lab.prefix}", "dev", "eth0")
    machine.run(*ip_argv, "route", "replace", "default", "via", lab.gateway)
    unfilter(host)


def _mac(ip: str) -> str:
    """Return the MAC address for an IP; it is fixed, so that neighbours find a recreated host."""
    return "02:76:" + ":".join(f"{int(part):02x}" for part in ip.split("."))


def is_usable(host: Host) -> bool:
    """Return True if a host's namespace can be entered; after a crash only its file may exist."""
    return machine.attempt("ip", "-n", host.netns, "link", "show", "lo").returncode == 0


def address(host: Host) -> str:
    """Return the active IPv4 address of a host's `eth0`; empty if none."""
    answer = machine.attempt(
        "ip", "-n", host.netns, "-json", "-4", "address", "show", "dev", "eth0", "up"
    )
    interfaces: list[dict[str, Any]] = (
        json.loads(answer.stdout or "[]") if answer.returncode == 0 else []
    )
    return next((info["local"] for item in interfaces for info in item.get("addr_info", ())), "")


def unfilter(host: Host, *matching: str) -> None:
    """Remove a host's packet filter rules of simulated faults that contain all of `matching`."""
    prefix = ("ip", "netns", "exec", host.netns, "iptables")
    for rule in tagged_rules(machine.attempt(*prefix, "-S").stdout, CUT):
        if all(text in rule for text in matching):
            machine.run(*prefix, "-D", *rule[1:])


def tagged_rules(listing: str, comment: str) -> Iterator[list[str]]:
    """Yield the rules with `comment`, as argument lists, from the output of `iptables -S`."""
    for line in listing.splitlines():
        arguments = shlex.split(line)
        if arguments[:1] == ["-A"] and comment in arguments:
            yield arguments


def _ensure_forwarding(lab: Lab) -> None:
    """Allow traffic across the bridge where iptables filters it, as any Docker daemon sets up."""
    if not _FILTERED.exists() or _FILTERED.read_text().strip() != "1":
        return
    listing = machine.run("iptables", "-S", "FORWARD")
    if (
        any(tagged_rules(listing, lab.name))
        or listing.split("\n", 1)[0] == listing.strip() == "-P FORWARD ACCEPT"
    ):
        return
    machine.run("iptables", "-I", "FORWARD", *forwarding_rule(lab))


def forwarding_rule(lab: Lab) -> tuple[str, ...]:
    """Return the packet filter rule that allows traffic between hosts."""
    return (
        "-i",
        lab.bridge,
        "-o",
        lab.bridge,
        "-m",
        "comment",
        "--comment",
        lab.name,
        "-j",
        "ACCEPT",
    )


def remove(name: str) -> None:
    """Remove all namespaces, cables, bridges and packet filter rules of a lab."""
    for netns in namespaces(name):
        machine.attempt("ip", "netns", "delete", netns)
        (_NETNS / netns).unlink(missing_ok=True)
    for link in links(name):
        machine.attempt("ip", "link", "delete", link)
    for rule in forwarding_rules(name):
        machine.attempt("iptables", "-D", *rule[1:])


def namespaces(name: str) -> list[str]:
    """Return the existing network namespaces of a lab."""
    return sorted(
        path.name for path in _NETNS.glob(f"{name}-*") if layout.is_netns(path.name, name)
    )


def links(name: str) -> list[str]:
    """Return the existing interfaces of a lab on the machine, cables first."""
    listing = machine.attempt("ip", "-json", "link", "show").stdout
    names = [str(link["ifname"]) for link in json.loads(listing or "[]")]
    return [n for n in names if n.startswith(f"vle{layout.name_hash(name)}-")] + [
        n for n in names if n == layout.bridge(name)
    ]


def forwarding_rules(name: str) -> list[list[str]]:
    """Return the packet filter rules that a lab has added to the machine."""
    listing = machine.attempt("iptables", "-S", "FORWARD").stdout
    return [rule for rule in tagged_rules(listing, name) if layout.bridge(name) in rule]


def _exists(link: str) -> bool:
    return machine.attempt("ip", "link", "show", link).returncode == 0


def _refuse_overlap(lab: Lab) -> None:
    subnet = ipaddress.IPv4Network(lab.subnet)
    for route in json.loads(machine.run("ip", "-json", "-4", "route", "show", "table", "all")):
        destination = str(route.get("dst", ""))
        device = str(route.get("dev", ""))
        if device == lab.bridge or not destination[:1].isdigit():
            continue
        if ipaddress.IPv4Network(destination, strict=False).overlaps(subnet):
            raise RequestError(
                f"the subnet {lab.subnet} is in use on this machine: {destination} is reached"
                f" through `{device}`",
                hint="choose another with `--subnet 10.78.0.0/24`",
            )
