"""What a machine needs before it can carry a practice cluster: named all at once, with the command
that installs it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import RequestError
from launcher.lab import machine
from launcher.lab.machine import Say

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A program or file, and the Debian package that brings it."""

    name: str
    package: str


PARTS = (
    Part(name="dockerd", package="docker.io"),
    Part(name="docker", package="docker.io"),
    Part(name="sshd", package="openssh-server"),
    Part(name="ssh-keygen", package="openssh-client"),
    Part(name="ip", package="iproute2"),
    Part(name="iptables", package="iptables"),
    Part(name="mmdebstrap", package="mmdebstrap"),
    Part(name=_KEYRING, package="debian-archive-keyring"),
    Part(name="nsenter", package="util-linux"),
    Part(name="unshare", package="util-linux"),
    Part(name="pivot_root", package="util-linux"),
    Part(name="setsid", package="util-linux"),
    Part(name="sudo", package="sudo"),
    # for stand-in GPUs
    Part(name="python3", package="python3"),
    Part(name="flock", package="util-linux"),
    Part(name="setpriv", package="util-linux"),
)


def missing(there: Callable[[str], bool]) -> list[Part]:
    """Return the parts that are not there; `there` tells of a program's name or an absolute
    path.
    """
    return [part for part in PARTS if not there(part.name)]


def on_this_machine(name: str) -> bool:
    """Tell whether a program is on the administrator's PATH, or whether a path exists."""
    return (
        Path(name).exists()
        if name.startswith("/")
        else shutil.which(name, path=machine.PATH) is not None
    )


def packages(parts: list[Part], *, split_client: bool) -> list[str]:
    """Return the packages that bring `parts`; newer Debians ship Docker's client apart from its
    daemon (`split_client`).
    """
    found = {
        "docker-cli" if split_client and part.name == "docker" else part.package for part in parts
    }
    return sorted(found)


def ensure(*, install: bool, say: Say) -> None:
    """Raise RequestError naming all that the machine lacks, or install it when asked to."""
    require_linux_root()
    lacking = missing(on_this_machine)
    if not lacking:
        return
    apt = shutil.which("apt-get", path=machine.PATH) is not None
    wanted = packages(lacking, split_client=apt and _has_package("docker-cli"))
    if not install or not apt:
        raise lacks(lacking, wanted, apt=apt)
    say(f"installing {', '.join(wanted)}")
    machine.run("apt-get", "update", "--quiet", timeout=300, what="`apt-get update`")
    if "docker" in {part.name for part in lacking}:  # an empty package list knew no better
        wanted = packages(lacking, split_client=_has_package("docker-cli"))
    machine.run(
        *(
            "env",
            "DEBIAN_FRONTEND=noninteractive",
            "apt-get",
            "install",
            "--yes",
            "--quiet",
            "--no-install-recommends",
        ),
        *wanted,
        timeout=900,
        what="installing packages",
    )
    if still := missing(on_this_machine):
        raise lacks(still, packages(still, split_client=False), apt=True)


def lacks(parts: list[Part], wanted: list[str], *, apt: bool) -> RequestError:
    """Return the error that names every missing part and how to get them all at once."""
    names = ", ".join(f"`{part.name}`" for part in parts)
    hint = (
        f"run `sudo apt-get install --no-install-recommends {' '.join(wanted)}`, or add"
        " `--install-missing`"
        if apt
        else (
            f"install what Debian packages as {', '.join(wanted)} with this system's package"
            " manager"
        )
    )
    return RequestError(f"this machine lacks {names}", hint=hint)


def require_linux_root() -> None:
    """Raise RequestError unless this is Linux and the caller may make namespaces."""
    if not sys.platform.startswith("linux"):
        raise RequestError(
            "a practice cluster needs Linux", hint="run it in a Linux virtual machine"
        )
    if os.geteuid() != 0:
        raise RequestError("a practice cluster needs root", hint=f"run `sudo {sys.argv[0]} lab …`")


def _has_package(name: str) -> bool:
    return machine.attempt("apt-cache", "show", "--no-all-versions", name).returncode == 0
