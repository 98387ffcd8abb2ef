"""What every host says, asked over open connections: the probe and what they have, in one go."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.cli.session import Session
from launcher.discovery import local_assets
from launcher.discovery.asked import own_ssh
from launcher.discovery.shape import DOCKER, HF_HOME, Probed, Wishes
from launcher.errors import UnreadableAnswer, together
from launcher.model import Argv, Node, fold
from launcher.state import observe
from launcher.tools import compile_cache, host
from launcher.transport import Command

_SUDO: Argv = ("sudo", "-n", "docker")


def look(reached: Session, wishes: Wishes, call: Argv | None) -> list[Probed]:
    """Ask every host; a second time, behind sudo, only where the login may not talk to Docker and
    `call` leaves that open. Raises NodeError, every host's story told.
    """
    nodes = reached.inventory.nodes
    reached.begin("look", "Look at the hosts")
    began = time.monotonic()
    answers = _ask(reached, nodes, {node.name: node.docker for node in nodes}, wishes)
    if call is None:
        answers |= _behind_sudo(reached, answers, wishes)
    seconds = time.monotonic() - began
    who = fold([node.name for node in nodes])
    reached.step("look", "seen", node=who, seconds=seconds)
    return [replace(answers[node.name], ssh=own_ssh(node.ssh, wishes.ssh)) for node in nodes]


def _behind_sudo(
    reached: Session, answers: Mapping[str, Probed], wishes: Wishes
) -> dict[str, Probed]:
    """Ask the hosts whose login may not talk to Docker again; return those that `sudo` helps, or
    would in more time.
    """
    refused = [
        node
        for node in reached.inventory.nodes
        if node.docker == DOCKER and _refused(answers[node.name])
    ]
    if not refused:
        return {}
    again = _ask(reached, refused, {node.name: _SUDO for node in refused}, wishes)
    return {
        name: each
        for name, each in again.items()
        if each.facts.docker_version is not None or "docker" in each.facts.late
    }


def _refused(host: Probed) -> bool:
    return "permission denied" in host.facts.said.get("docker", "").lower()


def _ask(
    reached: Session, nodes: Sequence[Node], docker: Mapping[str, Argv], wishes: Wishes
) -> dict[str, Probed]:
    """Send the probe, and behind it the question for what a host has; raises NodeError, every
    host's story told.
    """
    commands = []
    for node in nodes:
        argv = host.probe(
            docker[node.name],
            cluster=wishes.cluster,
            state_dir="",
            hf_home=wishes.hf_home or HF_HOME,
            accelerator=wishes.accelerator or "nvidia",
            images=(),
            survey=True,
            more=compile_cache.script(None, wishes.cluster) + local_assets.script(),
        )
        commands.append(Command(node=node.name, argv=argv, timeout=240))
    answers = {answer.node: answer for answer in reached.transport.run(commands)}
    facts, failed = observe.read(answers.values())
    if failed:
        raise together(list(failed.values()))
    found = {}
    for node in nodes:
        try:
            has = local_assets.parse(answers[node.name].out)
        except UnreadableAnswer:
            has = local_assets.LocalAssets()  # what it is for can be chosen without it
        found[node.name] = Probed(
            host=node.host, facts=facts[node.name], assets=has, docker=docker[node.name]
        )
    return found
