"""Programs that a lab cluster needs on the machine, and the packages that provide them."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.core.errors import RequestError
from launcher.lab import machine
from launcher.lab.machine import Say

# packages of Debian by the program or file that a lab cluster needs
PACKAGES = {
    **dict.fromkeys(("dockerd", "docker"), "docker.io"),
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    **dict.fromkeys(("nsenter", "unshare", "pivot_root", "setsid"), "util-linux"),
    "sudo": "sudo",
    # for simulated GPUs
    "python3": "python3",
    **dict.fromkeys(("flock", "setpriv"), "util-linux"),
}


def missing_parts(is_present: Callable[[str], bool]) -> list[str]:
    """Return the missing parts; `is_present` takes a program's name or an absolute path."""
    return [name for name in PACKAGES if not is_present(name)]


def on_this_machine(name: str) -> bool:
    """Return True if a program is on the administrator's PATH, or an absolute path exists."""
    return (
        Path(name).exists()
        if name.startswith("/")
        else shutil.which(name, path=machine.PATH) is not None
    )


def required_packages(parts: list[str], *, split_client: bool) -> list[str]:
    """Return the packages that provide `parts`.

    Newer Debian releases package Docker's client separately (`split_client`).
    """
    packages = {**PACKAGES, "docker": "docker-cli"} if split_client else PACKAGES
    return sorted({packages[part] for part in parts})


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
    if "docker" in absent:  # the package list may have been empty
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


def missing_error(parts: list[str], package_names: list[str], *, apt: bool) -> RequestError:
    """Return the error that lists all missing parts and one command to install them."""
    names = ", ".join(f"`{part}`" for part in parts)
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
