"""Missing prerequisites are listed at once."""

from __future__ import annotations

from launcher.lab import prerequisites


def test_all_missing_parts_are_listed_at_once() -> None:
    """All missing programs and one command that installs them."""
    absent = prerequisites.missing_parts(lambda _: False)
    error = prerequisites.missing_error(
        absent, prerequisites.required_packages(absent, split_client=False), apt=True
    )

    assert all(f"`{part}`" in error.message for part in prerequisites.PACKAGES)
    assert (
        error.hint
        == "run `sudo apt-get install --no-install-recommends debian-archive-keyring docker.io"
        " iproute2 iptables mmdebstrap openssh-client openssh-server python3 sudo util-linux`, or"
        " add `--install-missing`"
    )
    assert error.exit_code == 2


def test_only_missing_parts_are_listed() -> None:
    """Only iptables, if nothing else is missing."""
    absent = prerequisites.missing_parts(lambda name: name != "iptables")

    assert prerequisites.required_packages(absent, split_client=True) == ["iptables"]


def test_docker_client_has_its_own_package_where_available() -> None:
    """Newer Debians split the client from the daemon."""
    absent = prerequisites.missing_parts(lambda name: name != "docker")

    assert prerequisites.required_packages(absent, split_client=True) == ["docker-cli"]
    assert prerequisites.required_packages(absent, split_client=False) == ["docker.io"]


def test_without_apt_the_hint_is_general() -> None:
    """Without apt, no apt command is suggested."""
    absent = prerequisites.missing_parts(lambda name: name != "sshd")

    hint = prerequisites.missing_error(
        absent, prerequisites.required_packages(absent, split_client=False), apt=False
    ).hint

    assert "apt-get" not in hint
    assert "openssh-server" in hint


def test_programs_and_paths_are_detected() -> None:
    """A part is a program on the PATH or an absolute path."""
    assert prerequisites.on_this_machine("sh")
    assert prerequisites.on_this_machine("/")
    assert not prerequisites.on_this_machine("no-such-program-here")
    assert not prerequisites.on_this_machine("/no/such/file")
