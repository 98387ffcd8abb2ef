"""A server as units of systemd, one for each node: its container in the foreground, started again
by systemd, and, on the node with the API, started only once the server has answered.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from launcher.export import hosts, proof, yaml_text
from launcher.export.hosts import Cluster
from launcher.export.kubernetes_shape import object_name
from launcher.model import Argv, ExistingMount, Node
from launcher.plan import network
from launcher.site import Site
from launcher.state.verdict import Ask
from launcher.tools import docker, ray

ENDING = ".service"
STATE = "/var/lib/vlaunch"  # where the inventory names no `state_dir`
_DOCKER = "/usr/bin/docker"
_GRACE = 45  # seconds for the agent to end its engine
_SPARE = 60  # seconds beside what Docker does in them


def prepared(made: Cluster) -> Cluster:
    """Return a cluster whose nodes have a folder of root's, for units belong to no login."""
    nodes = tuple(
        replace(node, state_dir=node.state_dir or STATE, docker=(_DOCKER,))
        for node in made.inventory.nodes
    )
    return replace(made, inventory=replace(made.inventory, nodes=nodes))


def texts(made: Cluster) -> Mapping[str, str]:
    """Return the units of each node, the script that installs them, and what all nodes have, by
    name.
    """
    own = {f"{node.name}{ENDING}": _unit(made, node) for node in made.nodes}
    gates = {
        f"{node.name}.network": _gate(made, node)
        for node in made.request.nodes_with_ranks(made.inventory)
        if made.gated
    }
    return {**own, **gates, "install.sh": _install(made), **hosts.files(made)}


def unit_name(made: Cluster) -> str:
    """Return the name of a node's unit, without its ending."""
    return f"vlaunch-{object_name(made.original.cluster)}"


def _unit(made: Cluster, node: Node) -> str:
    base = Site(made.inventory).state_dir(node)
    spec = hosts.spec(made, node)
    if node.head:
        server = ExistingMount(
            source=f"{base}/{hosts.SERVER_FILE}", target=hosts.SERVER, read_only=True
        )
        spec = replace(spec, mounts=(*spec.mounts, server))
    policy, name = made.desired.policy, spec.name
    answers = hosts.answers(made, node)
    wait = f"until {_DOCKER} exec {name} {shlex.join(hosts.answered(made))}; do sleep 2; done"
    lines = [
        "[Unit]",
        f"Description=vLLM: {made.request.model} ({made.original.cluster}, {node.name})",
        *_AFTER_DOCKER,
        "# Three starts in an hour, then it stays failed: `systemctl reset-failed` allows more.",
        "StartLimitIntervalSec=3600",
        "StartLimitBurst=3",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStartPre=-{_DOCKER} rm --force {name}",
        f"ExecStart={line(docker.run((_DOCKER,), spec, attached=True))}",
    ]
    if answers:
        lines += [
            "# Started is who has answered.",
            f"ExecStartPost={line(('/bin/sh', '-c', wait))}",
            f"TimeoutStartSec={policy.start_timeout:.0f}",
        ]
    lines += [
        f"ExecStop=-{_DOCKER} stop --time {_GRACE} {name}",
        f"ExecStopPost=-{_DOCKER} rm --force {name}",
        f"TimeoutStopSec={_GRACE + _SPARE}",
        "Restart=always",
        "RestartSec=5",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return yaml_text.comment(_header(made, node)) + "\n".join(lines) + "\n"


_AFTER_DOCKER = (
    "Requires=docker.service",
    "After=docker.service network-online.target",
    "Wants=network-online.target",
)


def _gate(made: Cluster, node: Node) -> str:
    spec = hosts.gate_spec(made, node)
    wait = made.desired.policy.start_timeout + network.deadline(made.inventory, Ask(nonce=""))
    lines = [
        "[Unit]",
        f"Description=vLLM: proof of the network ({made.original.cluster}, {node.name})",
        *_AFTER_DOCKER,
        "",
        "[Service]",
        "Type=oneshot",
        f"ExecStartPre=-{_DOCKER} rm --force {spec.name}",
        f"ExecStart={line(docker.run((_DOCKER,), spec, attached=True))}",
        f"ExecStopPost=-{_DOCKER} rm --force {spec.name}",
        f"TimeoutStartSec={wait + _SPARE:.0f}",
    ]
    said = [
        f"The proof of the network on {node.name}; start it on all nodes at about the same time."
    ]
    return yaml_text.comment(said) + "\n".join(lines) + "\n"


def line(argv: Argv) -> str:
    """Return a command as systemd reads it (systemd.service(5), `Command lines`): `$` and `%` are
    its own, and so are quotes and backslashes.
    """
    return " ".join(_word(word) for word in argv)


def _word(word: str) -> str:
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%")
    return text if re.fullmatch(r"[A-Za-z0-9_./:=,@%$+-]+", text) else f'"{text}"'


def _install(made: Cluster) -> str:
    name, base = unit_name(made), Site(made.inventory).state_dir(made.inventory.head)
    return f"""\
#!/bin/sh
# Brings the files beside this script into place on the node that is named; nothing is started.
# Made by `vlaunch export systemd`.
set -eu
node=${{1:?usage: sh install.sh NODE}}
cd "$(dirname "$0")"
[ -e "$node{ENDING}" ] || {{ echo "install.sh: no node $node takes part" >&2; exit 2; }}
[ -e secrets/{ray.TOKEN} ] || {{ echo "install.sh: secrets/{ray.TOKEN} is missing" >&2; exit 2; }}
umask 022
mkdir -p {base}/server
chmod 711 {base}
rm -rf {base}/{hosts.PROGRAMS}
cp -R {hosts.PROGRAMS} {base}/{hosts.PROGRAMS}
cp {hosts.SERVER_FILE} {base}/{hosts.SERVER_FILE}
(umask 077 && rm -rf {base}/secrets && mkdir {base}/secrets && cp secrets/* {base}/secrets/)
cp "$node{ENDING}" /etc/systemd/system/{name}.service
if [ -e "$node.network" ]; then cp "$node.network" /etc/systemd/system/{name}-network.service; fi
systemctl daemon-reload
"""


def _header(made: Cluster, node: Node) -> list[str]:
    request, name, site = made.request, unit_name(made), Site(made.inventory)
    files = (site.state_dir(node), site.cache_dir(node), f"/etc/systemd/system/{name}*.service")
    first = f"  systemctl start {name}-network   # proves the network, on all nodes together"
    return [
        f"{request.model} on the cluster `{made.original.cluster}`: {request.placement.words}; this"
        f" is {node.name} ({node.ip}){', the head' if node.head else ''}.",
        "Made by `vlaunch export systemd`; the same inventory gives the same text.",
        "",
        f"{node.name} must have:",
        f"- Docker at {_DOCKER}, and its service",
        f"- the image {made.inventory.image}",
        f"- the model in {node.hf_home}, or a way to Hugging Face",
        "- the folder that `-o DIR` writes, and in it, of mode 0600, the same on all nodes:",
        f"    secrets/{ray.TOKEN}: `openssl rand -hex 32`, by which the nodes know each other",
        *(f"    secrets/{each}" for each in made.secrets if each != ray.TOKEN),
        "",
        "Install and start it, as root, on each node:",
        f"  sh DIR/install.sh {node.name}",
        *((first,) if made.gated else ()),
        f"  systemctl enable --now {name}",
        *(
            (
                "which ends when the server has answered. Prove it:",
                f"  {proof.chat(hosts.url(made), request, made.original)}",
            )
            if hosts.answers(made, node)
            else ()
        ),
        f"Why not: journalctl --unit {name} --no-pager | vlaunch doctor --from -",
        f"Its end: systemctl disable --now {name}",
        f"Its files: rm -rf {' '.join(files)}",
        "",
        "Not carried over:",
        *(f"- {each}" for each in hosts.left_out(made)),
        "",
    ]
