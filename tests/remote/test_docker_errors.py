"""What Docker's client complains about, as sentences and commands."""

from __future__ import annotations

import docker.errors
import pytest
import requests

from launcher.remote import docker_errors

DIAL = "/var/run/docker.sock: connect"


TROUBLES = [
    (
        (
            "permission denied while trying to connect to the Docker daemon socket at"
            " unix:///var/run/docker.sock"
        ),
        "may not use the Docker socket",
        "usermod -aG docker",
    ),
    (
        f"dial unix {DIAL}: permission denied",
        "may not use the Docker socket",
        "docker: [sudo, -n, docker]",
    ),
    (
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?",
        "not running",
        "systemctl start",
    ),
    (f"dial unix {DIAL}: no such file or directory", "not running", "systemctl start docker"),
    ("sh: 1: exec: docker: not found", "not installed", "docs.docker.com"),
    ("bash: line 1: docker: command not found", "not installed", "docs.docker.com"),
    ("env: ‘docker’: No such file or directory", "not installed", "docs.docker.com"),
    ("sudo: docker: command not found", "not installed", "docs.docker.com"),
    ("sudo: a password is required", "asks for a password", "NOPASSWD"),
    ("sudo: a terminal is required to read the password", "asks for a password", "NOPASSWD"),
    ("docker: 'system' is not a docker command.", "dial-stdio", "18.09"),
    ("something new", "did not answer", "docker version"),
]


@pytest.mark.parametrize(("said", "message", "hint"), TROUBLES)
def test_troubles(said: str, message: str, hint: str) -> None:
    """What the docker client or sudo complains about becomes a sentence and a command."""
    error = docker_errors.node_error(
        "gpu01", requests.exceptions.ConnectionError("('Connection aborted.')"), said
    )
    assert message in error.message
    assert hint in error.hint
    assert error.evidence == said


def test_all_of_dockers_exceptions_are_mapped() -> None:
    """A new class in the SDK that is outside the mapped kinds fails here."""
    for value in vars(docker.errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, docker_errors.KINDS), value
