"""Programs that a lab cluster needs on the machine, and the packages that provide them."""

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
class Prerequisite:
    """Program or file, and the Debian package that provides it."""

    name: str
    package: str


PREREQUISITES = (
    Prerequisite(name="dockerd", package="docker.io"),
    Prerequisite(name="docker", package="docker.io"),
    Prerequisite(name="sshd", package="openssh-server"),
    Prerequisite(name="ssh-keygen", package="openssh-client"),
    Prerequisite(name="ip", package="iproute2"),
    Prerequisite(name="iptables", package="iptables"),
    Prerequisite(name="mmdebstrap", package="mmdebstrap"),
    Prerequisite(name=_KEYRING, package="debian-archive-keyring"),
    Prerequisite(name="nsenter", package="util-linux"),
    Prerequisite(name="unshare", package="util-linux"),
    Prerequisite(name="pivot_root", package="util-linux"),
    Prerequisite(name="setsid", package="util-linux"),
    Prerequisite(name="sudo", package="sudo"),
    # for simulated GPUs
    Prerequisite(name="python3", package="python3"),
    Prerequisite(name="flock", package="util-linux"),
    Prerequisite(name="setpriv", package="util-linux"),
)


def missing_parts(is_present: Callable[[str], bool]) -> list[Prerequisite]:
    """Return the missing parts; `is_present` takes a program's name or an absolute path."""
    return [part for part in PREREQUISITES if not is_present(part.name)]


def on_this_machine(name: str) -> bool:
    """Return True if a program is on the administrator's PATH, or an absolute path exists."""
    return (
        Path(name).exists()
        if name.startswith("/")
        else shutil.which(name, path=machine.PATH) is not None
    )


def required_packages(parts: list[Prerequisite], *, split_client: bool) -> list[str]:
    """Return the packages that provide `parts`.

    Newer Debian releases package Docker's client separately (`split_client`).
    """
    names = {
        "docker-cli" if split_client and part.name == "docker" else part.package for part in parts
    }
    return sorted(names)


def ensure_installed(*, install: bool, say: Say) -> None:
    """Install missing packages, or raise RequestError with all of them."""
    require_linux_root()
    absent = missing_parts(on_this_machine)
    if not absent:
        return
    apt = shutil.which("apt-get", path=machine.PATH) is not None
    package_names = required_packages(absent, split_client=apt and _has_package("docker-cli"))
    if not install or not apt:
        raise missing_error(absent, package_names, apt=apt)
    say(f"installing {', '.join(package_names)}")
    machine.run("apt-get", "update", "--quiet", timeout=300, what="`apt-get update`")
    if "docker" in {part.name for part in absent}:  # the package list may have been empty
        package_names = required_packages(absent, split_client=_has_package("docker-cli"))
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
        *package_names,
        timeout=900,
        what="installing packages",
    )
    if still := missing_parts(on_this_machine):
        raise missing_error(still, required_packages(still, split_client=False), apt=True)


def missing_error(
    parts: list[Prerequisite], package_names: list[str], *, apt: bool
) -> RequestError:
    """Return the error that lists all missing parts and one command to install them."""
    names = ", ".join(f"`{part.name}`" for part in parts)
    hint = (
        f"run `sudo apt-get install --no-install-recommends {' '.join(package_names)}`, or add"
        " `--install-missing`"
        if apt
        else (
            f"install what Debian packages as {', '.join(package_names)} with this system's package"
            " manager"
        )
    )
    return RequestError(f"this machine lacks {names}", hint=hint)


def require_linux_root() -> None:
    """Raise RequestError unless this is Linux and the user is root."""
    if not sys.platform.startswith("linux"):
        raise RequestError("a lab cluster needs Linux", hint="run it in a Linux virtual machine")
    if os.geteuid() != 0:
        raise RequestError("a lab cluster needs root", hint=f"run `sudo {sys.argv[0]} lab …`")


def _has_package(name: str) -> bool:
    return machine.attempt("apt-cache", "show", "--no-all-versions", name).returncode == 0
