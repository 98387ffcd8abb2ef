"""Docker's troubles on a node, as errors with the command that mends them.

The SDK's and urllib3's exceptions stop here.
"""

from __future__ import annotations

import re
import tarfile
from typing import Final

import docker.errors
import paramiko
import requests
import urllib3

from launcher.errors import NodeError

KINDS: Final = (
    docker.errors.DockerException,
    docker.errors.StreamParseError,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    paramiko.SSHException,
    OSError,
    EOFError,
    tarfile.TarError,
)

_SUDO: Final = "set `docker: [sudo, -n, docker]` under `ssh` in the inventory"

# What the docker client, sudo and the kernel print, and what to do about it; the first that matches
# counts.
_KNOWN: Final = (
    (
        r"sudo: .*(password|terminal|askpass)",
        "sudo asks for a password",
        (
            'allow it without one: `echo "$USER ALL=(root) NOPASSWD: $(command -v docker)" | sudo'
            " tee /etc/sudoers.d/docker`"
        ),
    ),
    (
        r"permission denied",
        "the login may not use the Docker socket",
        f"`sudo usermod -aG docker $USER` on the node and log in again, or {_SUDO}",
    ),
    (
        r"docker: (command )?not found|no such file or directory: .?docker|docker.?: no such file",
        "Docker is not installed",
        "install it on the node: https://docs.docker.com/engine/install/",
    ),
    (
        (
            r"cannot connect to the docker daemon|connection refused|docker\.sock.*no such file|no"
            r" such file or directory"
        ),
        "the Docker daemon is not running",
        "`sudo systemctl start docker` on the node",
    ),
    (
        r"is not a docker command|unknown command",
        "this docker has no `system dial-stdio`",
        "install Docker 18.09 or newer",
    ),
)


def node_error(node: str, error: BaseException, complaint: str = "") -> NodeError:
    """Return `error` as a NodeError; `complaint` is what the docker client on the node printed, if
    it was one.
    """
    if isinstance(error, docker.errors.APIError):
        said = str(error.explanation or error)
        return NodeError(
            node, f"Docker refused: {said.splitlines()[0] if said else error}", evidence=said
        )
    evidence = complaint.strip() or str(error)
    for pattern, message, hint in _KNOWN:
        if re.search(pattern, f"{complaint}\n{error}", re.IGNORECASE | re.MULTILINE):
            return NodeError(node, message, evidence=evidence, hint=hint)
    if (
        isinstance(error, (requests.exceptions.Timeout, TimeoutError))
        or "timed out" in str(error).lower()
    ):
        return NodeError(
            node,
            "Docker did not answer in time",
            evidence=evidence,
            hint="`sudo systemctl status docker`",
        )
    return NodeError(
        node, "Docker's API did not answer", evidence=evidence, hint="`docker version` on the node"
    )
