"""Certificates of the front: a user's files, and self-signed ones."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher.app.certificates import Authority, make_certificate
from launcher.core import redaction
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.front import certificates
from tests.conftest import Load

NOW = datetime.now(timezone.utc)


def inventory(load: Load, folder: Path, front: str) -> Inventory:
    """Return an inventory in a folder, with a front."""
    return replace(load(f"front: {{{front}}}"), path=folder / "inventory.yaml")


def write(folder: Path, pem: str, name: str = "front") -> None:
    """Write a certificate and its key."""
    start = pem.index("-----BEGIN PRIVATE KEY")
    (folder / f"{name}.pem").write_text(pem[:start])
    (folder / f"{name}.key").write_text(pem[start:])


FILES = "tls: {cert: front.pem, key: front.key}"


@pytest.mark.parametrize("names", [("chat.example",), ("*.example", "10.0.0.11")])
def test_a_valid_certificate_is_used(names: tuple[str, ...], load: Load, tmp_path: Path) -> None:
    """With its key, in one file as HAProxy reads it."""
    write(tmp_path, make_certificate("front", names))
    value = certificates.load_certificate(
        inventory(load, tmp_path, f"{FILES}, address: chat.example"), NOW
    )

    assert value is not None
    (tmp_path / "both.pem").write_text(value.reveal())
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "both.pem")
    line = value.reveal().splitlines()[-3]
    assert line not in redaction.redact(f"x {line} y")


def test_all_mistakes_are_reported(load: Load, tmp_path: Path) -> None:
    """Of an expired certificate for another address, with another key."""
    authority = Authority("c", NOW)
    write(tmp_path, authority.sign("other", "10.9.9.9", NOW - timedelta(days=1)).reveal())
    write(tmp_path, make_certificate("x"), "other")
    (tmp_path / "other.key").rename(tmp_path / "front.key")
    with pytest.raises(RequestError) as caught:
        certificates.load_certificate(inventory(load, tmp_path, FILES), NOW)

    assert caught.value.evidence.splitlines() == [
        "front.key: is not the key of front.pem",
        f"front.pem: expired on {NOW - timedelta(days=1):%Y-%m-%d}",
        "front.pem: is not for 10.0.0.11, the address of the front",
    ]


def test_files_of_another_kind_are_named(load: Load, tmp_path: Path) -> None:
    """So are files that cannot be read."""
    (tmp_path / "front.pem").write_text("x")
    with pytest.raises(RequestError) as caught:
        certificates.load_certificate(inventory(load, tmp_path, FILES))
    assert caught.value.evidence == f"{tmp_path}/front.key: No such file or directory"
    (tmp_path / "front.key").write_text("x")
    with pytest.raises(RequestError) as caught:
        certificates.load_certificate(inventory(load, tmp_path, FILES))
    assert caught.value.evidence.splitlines() == [
        "front.pem: is not a certificate in PEM",
        "front.key: is not a private key in PEM without a passphrase",
    ]


def test_a_self_signed_certificate_is_for_all_addresses(load: Load, tmp_path: Path) -> None:
    """Another address needs a new one."""
    first = inventory(load, tmp_path, "nodes: [gpu01, gpu02], address: chat.example")
    other = inventory(load, tmp_path, "address: models.example")
    pem = certificates.make_self_signed(first).reveal()

    assert certificates.served_names(first) == (
        "chat.example",
        *("10.0.0.11", "10.0.0.12", "127.0.0.1"),
    )
    assert certificates.covers(pem, certificates.served_names(first))
    assert not certificates.covers(pem, certificates.served_names(other))
    assert not certificates.covers("", certificates.served_names(first))
