"""Whether each node could be asked at all: the login, and the right to call Docker without a
password.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checks import sudo
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    ssh_command,
)
from launcher.model import Inventory


def _ssh(evidence: Evidence) -> Sequence[Finding]:
    findings = []
    for node in evidence.inventory.nodes:
        if node.name in evidence.facts:
            user = evidence.facts[node.name].user
            how = "is this machine" if node.connection == "local" else "answers"
            findings.append(passed(node, f"{how}, as {user}" if user else how))
            continue
        lines = evidence.missing.get(node.name, "it gave no answer").strip().splitlines() or [
            "it gave no answer"
        ]
        findings.append(
            failed(
                node,
                f"cannot be reached: {lines[0]}",
                evidence="\n".join(lines[1:]),
                fix=(
                    f"make `{ssh_command(node)} true` work without a question, or correct `host:`"
                    f" and `ssh:` of {node.name}"
                ),
            )
        )
    return findings


def _sudo(host: Host) -> Finding:
    node, facts = host.node, host.facts
    said = facts.said.get("docker", "") or facts.said.get("info", "")
    if facts.docker_version is None:
        user = facts.user or node.ssh.user or "USER"
        if (refused := sudo.refused(node, user, said)) is not None:
            return refused
        if "docker" in facts.late:
            return skipped(node, "sudo was not done in time: see `docker`")
    command = " ".join(node.docker)
    return passed(
        node,
        f"`{command}` asks for no password" if node.docker[:1] == ("sudo",) else "sudo is not used",
    )


def _no_sudo(inventory: Inventory) -> str:
    used = any(node.docker[:1] == ("sudo",) for node in inventory.nodes)
    return "" if used else "docker: is called without sudo"


CHECKS = (
    Check(
        id="ssh",
        what="every node can be logged in to",
        why=(
            "nothing is known of a node that does not answer, and the cluster cannot be whole"
            " without it"
        ),
        judge=_ssh,
        group="reach",
    ),
    Check(
        id="sudo",
        what="sudo starts docker without a password",
        why="nobody is there to type one while a cluster comes up",
        judge=each(_sudo),
        skip_reason=_no_sudo,
        group="reach",
    ),
)
