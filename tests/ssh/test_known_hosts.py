"""known_hosts files, as sshd(8) describes them."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from launcher.ssh.known_hosts import KnownHosts, Verdict

KEY, OTHER_KEY = b"first key", b"second key"


def line(names: str, key: bytes = KEY, kind: str = "ssh-ed25519") -> str:
    return f"{names} {kind} {base64.b64encode(key).decode()}"


@pytest.mark.parametrize(
    ("text", "name", "verdict"),
    [
        ("", "gpu01", "unknown"),
        ("# comment\n\n" + line("gpu01"), "gpu01", "known"),
        (line("gpu01"), "GPU01", "known"),
        (line("gpu01"), "gpu02", "unknown"),
        (line("gpu01,10.0.0.1"), "10.0.0.1", "known"),
        (line("gpu01"), "[gpu01]:2222", "unknown"),
        (line("[gpu01]:2222"), "[gpu01]:2222", "known"),
        (line("gpu01", OTHER_KEY), "gpu01", "changed"),
        (line("gpu01", OTHER_KEY) + "\n" + line("gpu01", KEY), "gpu01", "known"),
        (line("gpu01", OTHER_KEY, "ssh-rsa"), "gpu01", "changed"),
        (line("gpu*"), "gpu07", "known"),
        (line("gpu?"), "gpu07", "unknown"),
        (line("*.cluster,!bad.cluster"), "good.cluster", "known"),
        (line("*.cluster,!bad.cluster"), "bad.cluster", "unknown"),
        (line("[gpu*]:2222"), "[gpu07]:2222", "known"),
        ("@revoked " + line("*"), "gpu01", "revoked"),
        ("@revoked " + line("*") + "\n" + line("gpu01"), "gpu01", "revoked"),
        ("@cert-authority " + line("*"), "gpu01", "unknown"),
        ("gpu01 ssh-ed25519", "gpu01", "unknown"),
        ("|1|broken|hash ssh-ed25519 AAAA", "gpu01", "unknown"),
    ],
)
def test_verdict(tmp_path: Path, text: str, name: str, verdict: Verdict) -> None:
    """For one key and one name of a server."""
    file = tmp_path / "known_hosts"
    file.write_text(text)
    assert KnownHosts([file]).judge(name, "ssh-ed25519", KEY) == verdict


def test_hashed_names(tmp_path: Path) -> None:
    """Names hashed by ssh-keygen match."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    kind, blob = Path(f"{key}.pub").read_text().split()[:2]
    file = tmp_path / "known_hosts"
    file.write_text(f"[gpu01]:2222 {kind} {blob}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "gpu01" not in file.read_text()
    host_keys = KnownHosts([file])
    assert host_keys.judge("[gpu01]:2222", kind, base64.b64decode(blob)) == "known"
    assert host_keys.judge("[gpu02]:2222", kind, base64.b64decode(blob)) == "unknown"


def test_files_together(tmp_path: Path) -> None:
    """Keys of all files count; missing files are empty."""
    (tmp_path / "two").write_text(line("gpu01"))
    host_keys = KnownHosts([tmp_path / "one", tmp_path / "two"])
    assert host_keys.judge("gpu01", "ssh-ed25519", KEY) == "known"
    assert host_keys.types("gpu01") == ("ssh-ed25519",)


def test_adding_makes_a_private_file(tmp_path: Path) -> None:
    """File and folder are created, readable by the owner only."""
    host_keys = KnownHosts([tmp_path / "ssh" / "known_hosts", tmp_path / "other"])
    host_keys.add("gpu01", "ssh-ed25519", KEY)
    host_keys.add("gpu01", "ssh-ed25519", KEY)
    file = tmp_path / "ssh" / "known_hosts"
    assert file.read_text() == line("gpu01") + "\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert host_keys.judge("gpu01", "ssh-ed25519", KEY) == "known"
