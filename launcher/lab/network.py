"""The practice cluster's network: a bridge, and per host a network namespace with one cable
(`eth0`) to it.
"""

from __future__ import annotations

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
CUT = "vlaunch-lab-cut"  # the comment on every packet filter rule of a practised fault


def ensure(lab: Lab) -> None:
    """Make the bridge and every host's namespace and cable, or what is missing of them.

    Raises RequestError when the subnet is in use for something else.
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
    if not usable(host):
        machine.attempt("ip", "netns", "delete", host.netns)
        machine.run("ip", "netns", "add", host.netns)
    inside = ("ip", "-n", host.netns)
    if not _exists(host.link) or machine.attempt(*inside, "link", "show", "eth0").returncode != 0:
        machine.attempt("ip", "link", "delete", host.link)
        machine.attempt(*inside, "link", "delete", "eth0")
        peer = ("peer", "name", "eth0", "address", _mac(host.ip), "netns", host.netns)
        machine.run("ip", "link", "add", host.link, "type", "veth", *peer)
    machine.run("ip", "link", "set", host.link, "master", lab.bridge, "up")
    machine.run(*inside, "link", "set", "lo", "up")
    machine.run(*inside, "link", "set", "eth0", "up")
    machine.run(*inside, "address", "replace", f"{host.ip}/{lab.prefix}", "dev", "eth0")
    machine.run(*inside, "route", "replace", "default", "via", lab.gateway)
    unfilter(host)


def _mac(ip: str) -> str:
    """Return the hardware address for an address: always the same, so that neighbours find a remade
    host at once.
    """
    return "02:76:" + ":".join(f"{int(part):02x}" for part in ip.split("."))


def usable(host: Host) -> bool:
    """Tell whether a host's namespace exists and can be entered (after a crash its file may be an
    empty shell).
    """
    return machine.attempt("ip", "-n", host.netns, "link", "show", "lo").returncode == 0


def address(host: Host) -> str:
    """Return the IPv4 address that is up on a host's `eth0`, or nothing."""
    answer = machine.attempt(
        "ip", "-n", host.netns, "-json", "-4", "address", "show", "dev", "eth0", "up"
    )
    interfaces: list[dict[str, Any]] = (
        json.loads(answer.stdout or "[]") if answer.returncode == 0 else []
    )
    return next((info["local"] for item in interfaces for info in item.get("addr_info", ())), "")


def unfilter(host: Host, *matching: str) -> None:
    """Remove the packet filter rules of practised faults from a host; `matching` words narrow the
    choice.
    """
    prefix = ("ip", "netns", "exec", host.netns, "iptables")
    for rule in rules(machine.attempt(*prefix, "-S").stdout, CUT):
        if all(word in rule for word in matching):
            machine.run(*prefix, "-D", *rule[1:])


def rules(listing: str, comment: str) -> Iterator[list[str]]:
    """Yield the rules that carry `comment`, as words, from what `iptables -S` prints."""
    for line in listing.splitlines():
        words = shlex.split(line)
        if words[:1] == ["-A"] and comment in words:
            yield words


def _ensure_forwarding(lab: Lab) -> None:
    """Let frames cross the bridge where a packet filter sees them and might drop them (any Docker
    daemon sets that up).
    """
    if not _FILTERED.exists() or _FILTERED.read_text().strip() != "1":
        return
    listing = machine.run("iptables", "-S", "FORWARD")
    if (
        any(rules(listing, lab.name))
        or listing.split("\n", 1)[0] == listing.strip() == "-P FORWARD ACCEPT"
    ):
        return
    machine.run("iptables", "-I", "FORWARD", *forwarding_rule(lab))


def forwarding_rule(lab: Lab) -> tuple[str, ...]:
    """Return the packet filter rule that lets hosts reach each other."""
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
    """Remove every namespace, cable, bridge and packet filter rule of the lab called `name`."""
    for netns in namespaces(name):
        machine.attempt("ip", "netns", "delete", netns)
        (_NETNS / netns).unlink(missing_ok=True)
    for link in links(name):
        machine.attempt("ip", "link", "delete", link)
    for rule in forwarding(name):
        machine.attempt("iptables", "-D", *rule[1:])


def namespaces(name: str) -> list[str]:
    """Return the network namespaces of a lab that are there."""
    return sorted(
        path.name for path in _NETNS.glob(f"{name}-*") if layout.is_netns(path.name, name)
    )


def links(name: str) -> list[str]:
    """Return the interfaces of a lab that are there on the machine, cables first."""
    found = machine.attempt("ip", "-json", "link", "show").stdout
    names = [str(link["ifname"]) for link in json.loads(found or "[]")]
    return [n for n in names if n.startswith(f"vle{layout.tag(name)}-")] + [
        n for n in names if n == layout.bridge(name)
    ]


def forwarding(name: str) -> list[list[str]]:
    """Return the machine's packet filter rules that a lab added."""
    listing = machine.attempt("iptables", "-S", "FORWARD").stdout
    return [rule for rule in rules(listing, name) if layout.bridge(name) in rule]


def _exists(link: str) -> bool:
    return machine.attempt("ip", "link", "show", link).returncode == 0


def _refuse_overlap(lab: Lab) -> None:
    wanted = ipaddress.IPv4Network(lab.subnet)
    for route in json.loads(machine.run("ip", "-json", "-4", "route", "show", "table", "all")):
        destination = str(route.get("dst", ""))
        device = str(route.get("dev", ""))
        if device == lab.bridge or not destination[:1].isdigit():
            continue
        if ipaddress.IPv4Network(destination, strict=False).overlaps(wanted):
            raise RequestError(
                f"the subnet {lab.subnet} is in use on this machine: {destination} is reached"
                f" through `{device}`",
                hint="choose another with `--subnet 10.78.0.0/24`",
            )
