"""Whether each node could be asked at all: the login, and the right to call Docker without a
password.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checks.shape import Check, Evidence, Finding, Host, each, failed, passed
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
        login = f"{node.ssh.user}@{node.host}" if node.ssh.user else node.host
        port = f" -p {node.ssh.port}" if node.ssh.port not in (None, 22) else ""
        findings.append(
            failed(
                node,
                f"cannot be reached: {lines[0]}",
                evidence="\n".join(lines[1:]),
                fix=(
                    f"make `ssh{port} {login} true` work without a question, or correct `host:` and"
                    f" `ssh:` of {node.name}"
                ),
            )
        )
    return findings


def _sudo(host: Host) -> Finding:
    node, facts = host.node, host.facts
    said = facts.said.get("docker", "") or facts.said.get("info", "")
    command = " ".join(node.docker)
    if facts.docker_version is None and any(word in said.lower() for word in _REFUSED):
        user = facts.user or node.ssh.user or "USER"
        return failed(
            node,
            f"`{command}` may not be run by `{user}` without a password",
            evidence=said,
            fix=(
                f"run on {node.name}: `echo '{user} ALL=(root) NOPASSWD: /usr/bin/docker' | sudo"
                " tee /etc/sudoers.d/vlaunch`"
            ),
        )
    return passed(
        node,
        f"`{command}` asks for no password" if node.docker[:1] == ("sudo",) else "sudo is not used",
    )


_REFUSED = (
    "password is required",
    "a terminal is required",
    "is not in the sudoers file",
    "is not allowed to execute",
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
