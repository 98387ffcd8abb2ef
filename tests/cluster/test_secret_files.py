"""Locations of secrets on a node, and the report about them; scripts run on temporary folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cluster import secret_files
from launcher.core import shell
from launcher.core.domain import Argv
from launcher.core.errors import UnreadableAnswer
from launcher.tools import host
from launcher.tools.host import host_output

pytestmark = pytest.mark.processes

Fake = Callable[..., None]


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put the test's programs before the machine's on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


def _probe(state: Path, cluster: str = "c") -> str:
    argv = host.probe(
        ("false",),
        cluster=cluster,
        state_dir=str(state),
        hf_home=str(state),
        accelerator="cpu",
        images=(),
    )
    return _run(argv)


def _run(argv: Argv) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stdout


def test_roots_folder_in_run(bin_: Fake, tmp_path: Path) -> None:
    """If /run is in memory: the file system's type decides, not its name."""
    bin_("id", "case $1 in -u) echo 0 ;; *) echo root ;; esac")
    for kind, place in (("tmpfs", "/run/vlaunch-root"), ("ext2/ext3", "")):
        bin_("stat", f"echo {kind}")
        facts = host_output.parse_probe(_probe(tmp_path))
        assert facts.memory_dir == place
    assert "is a writable file system in memory" in facts.part_errors["memory"]


def test_a_user_without_lingering_has_no_folder_in_memory(bin_: Fake, tmp_path: Path) -> None:
    """With logind, a user's files in memory are removed with the session; elsewhere they stay."""
    bin_("id", "case $1 in -u) echo 12345 ;; *) echo nobody-of-ours ;; esac")
    bin_("stat", "echo tmpfs")
    facts = host_output.parse_probe(_probe(tmp_path))
    if Path("/run/systemd/seats").is_dir():
        assert facts.memory_dir == ""
        assert "lingering is off" in facts.part_errors["memory"]
    else:
        assert facts.memory_dir == "/dev/shm/vlaunch-nobody-of-ours"


def test_the_token_is_read_from_both_places(tmp_path: Path) -> None:
    """A change of `secrets_in` keeps it."""
    for name in ("one", "two"):
        (tmp_path / name / "secrets").mkdir(parents=True)
    (tmp_path / "two" / "secrets" / "RAY_AUTH_TOKEN").write_text("t")
    script = shell.program_text("probe").split("sh_c token '")[1].split("'")[0]
    ran = subprocess.run(
        ["sh", "-c", script, "x", tmp_path / "one", tmp_path / "two"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout == "t"


def test_a_token_of_another_user_is_not_used(bin_: Fake, tmp_path: Path) -> None:
    """In /dev/shm any user can create a folder with the SSH user's name."""
    place = Path(f"/dev/shm/vlaunch-test-{os.getpid()}")
    bin_("id", f"case $1 in -u) echo 0 ;; *) echo test-{os.getpid()} ;; esac")
    bin_("stat", "case $4 in /dev/shm) echo tmpfs ;; *) echo other ;; esac")
    planted = tmp_path / "planted"
    (planted / "c" / "secrets").mkdir(parents=True)
    (planted / "c" / "secrets" / "RAY_AUTH_TOKEN").write_text("chosen-by-somebody")
    try:
        place.symlink_to(planted)
        facts = host_output.parse_probe(_probe(tmp_path / "state"))
        assert (facts.token, facts.secrets_in_memory, facts.folders) == ("", None, ())
        place.unlink()
        shutil.move(planted, place)
        facts = host_output.parse_probe(_probe(tmp_path / "state"))
        assert (facts.token, facts.secrets_in_memory) == ("chosen-by-somebody", ("RAY_AUTH_TOKEN",))
        assert facts.folders == (f"{place}/c",)
        bin_("stat", "echo other")  # the folder is unusable now, but its files are still ours
        facts = host_output.parse_probe(_probe(tmp_path / "state"))
        assert (facts.memory_dir, facts.secrets_in_memory, facts.folders) == (
            "",
            None,
            (f"{place}/c",),
        )
    finally:
        place.unlink() if place.is_symlink() else shutil.rmtree(place, ignore_errors=True)


def test_files_in_all_memory_folders_are_reported(bin_: Fake, tmp_path: Path) -> None:
    """Including outdated ones."""
    place = Path(f"/dev/shm/vlaunch-test-{os.getpid()}")
    bin_("id", f"case $1 in -u) echo 0 ;; *) echo test-{os.getpid()} ;; esac")
    bin_("stat", 'case $1 in -f) echo other ;; *) exec /usr/bin/stat "$@" ;; esac')
    for folder in (tmp_path / "c" / "secrets", place / "c" / "secrets"):
        folder.mkdir(parents=True)
        (folder / "A").touch()
    try:
        facts = host_output.parse_probe(_probe(tmp_path))
        out = _run(secret_files.listing_argv("c", str(tmp_path)))
    finally:
        shutil.rmtree(place)

    assert facts.memory_dir == ""
    assert [(file.place, file.path) for file in secret_files.parse_listing(out) if file.name] == [
        ("disk", f"{tmp_path}/c/secrets/A"),
        ("memory", f"{place}/c/secrets/A"),
    ]


def test_files_are_shown_with_mode_owner_and_age(tmp_path: Path) -> None:
    """The list includes partial files of a killed launcher."""
    folder = tmp_path / "c" / "secrets"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    for name, mode in (("A", 0o600), ("B", 0o640), (".A.node.17", 0o600)):
        (folder / name).write_text("hidden-value")
        (folder / name).chmod(mode)
    os.utime(folder / "A", (1, 1))
    out = _run(secret_files.listing_argv("c", str(tmp_path)))
    files = {file.name: file for file in secret_files.parse_listing(out)}

    assert "hidden-value" not in out
    assert set(files) == {"", "A", "B", ".A.node.17"}
    assert (files[""].private, files["A"].private, files["B"].private) == (True, True, False)
    assert (files["B"].mode, files["B"].place, files["B"].own) == ("640", "disk", True)
    assert files["A"].age > 1e9
    assert files["B"].age < 3600


def test_files_shared_with_an_images_user_are_private(tmp_path: Path) -> None:
    """To its group alone, which owns the folder of servers."""
    folder, server = tmp_path / "c" / "secrets", tmp_path / "c" / "server"
    folder.mkdir(parents=True)
    server.mkdir()
    (folder / "A").write_text("x")
    (folder / "A").chmod(0o640)
    folder.chmod(0o750)

    def private() -> list[bool]:
        out = _run(secret_files.listing_argv("c", str(tmp_path)))
        return [file.private for file in secret_files.parse_listing(out)]

    assert private() == [False, False]
    server.chmod(0o2775)
    assert private() == [True, True]
    (folder / "A").chmod(0o644)
    assert private() == [True, False]


def test_certificates_are_reported_without_their_private_keys(tmp_path: Path) -> None:
    """By the probe and by the list alike, the authority's first."""
    folder = tmp_path / "c" / "secrets"
    folder.mkdir(parents=True)
    public = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"
    private = "-----BEGIN PRIVATE KEY-----\nhidden\n-----END PRIVATE KEY-----\n"
    assert host_output.parse_probe(_probe(tmp_path)).certificates == ""
    (folder / "AGENT_CERTIFICATE").write_text(public.format("own") + private)
    (folder / "AGENT_CA").write_text(public.format("authority"))
    probed, listed = _probe(tmp_path), _run(secret_files.listing_argv("c", str(tmp_path)))
    certificates = public.format("authority") + public.format("own")

    assert host_output.parse_probe(probed).certificates.strip() == certificates.strip()
    assert secret_files.extract_certificates(listed) == certificates
    assert {file.name for file in secret_files.parse_listing(listed)} == {
        "",
        "AGENT_CA",
        "AGENT_CERTIFICATE",
    }
    assert "hidden" not in probed + listed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@@secrets 1 0 -\n",
        "@@secrets 1 0 -\nnoise\n@@secrets end\n",
        "@@secrets x 0 -\n@@secrets end\n",
        "@@secrets 1 0 -\ndisk 600 0 0 1 relative/secrets/A\n@@secrets end\n",
    ],
)
def test_other_output_is_unreadable(text: str) -> None:
    """It never counts as an empty list."""
    with pytest.raises(UnreadableAnswer):
        secret_files.parse_listing(text)


def test_a_folder_of_another_user_in_memory_is_rejected(tmp_path: Path) -> None:
    """Another user could have put a token into it."""
    program = shell.program_text("secret_store")
    good = tmp_path / "vlaunch-me" / "c"
    ran = subprocess.run(
        ["sh", "-c", program, "store", good, "A", "memory"],
        input="v",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, (good / "secrets" / "A").read_text()) == (0, "v")
    assert [
        oct(path.stat().st_mode & 0o777) for path in (good / "secrets", good / "secrets" / "A")
    ] == ["0o700", "0o600"]
    (tmp_path / "vlaunch-other").symlink_to(tmp_path / "vlaunch-me")
    bad = tmp_path / "vlaunch-other" / "c"
    ran = subprocess.run(
        ["sh", "-c", program, "store", bad, "B", "memory"],
        input="v",
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 1
    assert "belongs to another user" in ran.stderr
    assert not (good / "secrets" / "B").exists()


def test_the_folder_in_the_login_s_home_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for all of the launcher's files on a node."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".vlaunch" / "c" / "secrets").mkdir(parents=True)
    (file,) = secret_files.parse_listing(_run(secret_files.listing_argv("c", "")))

    assert file.path == f"{tmp_path}/.vlaunch/c/secrets"
