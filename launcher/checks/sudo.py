"""What sudo says where it does not let a login start Docker without a question."""

from __future__ import annotations

from launcher.checks.shape import Finding, failed
from launcher.model import Node

# In sudo's own words, versions 1.8 to 1.9.
_PASSWORD = (
    "a password is required",
    "a terminal is required",
    "is not in the sudoers file",
    "is not allowed to execute",
    "may not run sudo",
)
_TERMINAL = "you must have a tty"


def refused(node: Node, user: str, said: str) -> Finding | None:
    """Return what is wrong where sudo refused, None where it did not."""
    lowered, command = said.lower(), " ".join(node.docker)
    if _TERMINAL in lowered:
        return failed(
            node,
            f"sudo runs `{command}` only from a terminal (`requiretty` in sudoers)",
            evidence=said,
            fix=(
                f"run on {node.name}: `echo 'Defaults:{user} !requiretty' | sudo tee -a"
                " /etc/sudoers.d/vlaunch`"
            ),
        )
    if any(words in lowered for words in _PASSWORD):
        return failed(
            node,
            f"`{command}` may not be run by `{user}` without a password",
            evidence=said,
            fix=(
                f"run on {node.name}: `echo '{user} ALL=(root) NOPASSWD: /usr/bin/docker' | sudo"
                " tee -a /etc/sudoers.d/vlaunch`"
            ),
        )
    return None
