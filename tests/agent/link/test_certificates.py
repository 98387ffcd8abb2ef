"""The node's certificate files, for any content."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from launcher.agent.link.certificates import Certificates, common_name, describe_error
from tests.agent.authority import Authority


@pytest.mark.parametrize("server", [True, False])
def test_a_context_accepts_the_cluster_only(tmp_path: Path, server: bool) -> None:
    """TLS 1.3, and client certificates are mandatory."""
    Authority().deliver(tmp_path, "gpu1")
    created = Certificates(server=server, folder=str(tmp_path))
    context = created.context()

    assert context is not None
    assert {context.minimum_version, context.maximum_version} == {ssl.TLSVersion.TLSv1_3}
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, not server)
    assert len(context.get_ca_certs()) == 1
    assert created.context() is context
    Authority().deliver(tmp_path, "gpu1")
    assert (renewed := created.context()) not in (context, None)
    (tmp_path / "AGENT_CERTIFICATE").chmod(0o640)  # of an image whose user is not root
    assert created.context() not in (renewed, None)


ENCRYPTED = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b"a password"),
)


@pytest.mark.parametrize(
    ("file", "data", "why"),
    [
        ("AGENT_CA", None, "No such file"),
        ("AGENT_CERTIFICATE", None, "No such file"),
        ("AGENT_CA", b"", "no certificate or crl found"),
        ("AGENT_CERTIFICATE", b"", "TLS failed"),
        ("AGENT_CERTIFICATE", b"\x00\xff" * 99, "TLS failed"),
        ("AGENT_CERTIFICATE", Authority().issue("gpu1")[:-300], "TLS failed"),
        ("AGENT_CERTIFICATE", Authority().issue("gpu1").split(b"-----BEGIN P")[0], "TLS failed"),
        (
            "AGENT_CERTIFICATE",
            Authority().issue("gpu1").split(b"-----BEGIN P")[0] + ENCRYPTED,
            "the private key of AGENT_CERTIFICATE is encrypted",
        ),
    ],
)
def test_unusable_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, data: bytes | None, why: str
) -> None:
    """The cause is printed once, the last good files stay in use, and new ones are loaded."""
    authority = Authority()
    authority.deliver(tmp_path, "gpu1")
    created = Certificates(server=True, folder=str(tmp_path))
    good = created.context()
    (tmp_path / file).unlink()
    if data is not None:
        (tmp_path / file).write_bytes(data)
    fresh = Certificates(server=True, folder=str(tmp_path))
    for _ in range(3):
        assert (created.context(), fresh.context()) == (good, None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(why in line and line.endswith("run `vlaunch up`") for line in lines)

    authority.deliver(tmp_path, "gpu1")
    assert created.context() not in (good, None)
    assert fresh.context() is not None


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        ({"subject": ((("organizationName", "demo"),), (("commonName", "gpu1"),))}, "gpu1"),
        ({"subject": ((("commonName", "gpu1"), ("commonName", "gpu2")),)}, ""),
        ({"subject": ((("organizationName", "demo"),),)}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_certificates_node(certificate: object, expected: str) -> None:
    """The common name, if it has exactly one."""
    assert common_name(certificate) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionResetError(104, "reset"), "the connection was closed"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (TimeoutError(), "no answer in time"),
        (OSError(113, "No route to host"), "No route to host"),
        (ValueError("odd"), "odd"),
        (ValueError(), "ValueError"),
    ],
)
def test_descriptions_of_causes(error: Exception, why: str) -> None:
    """They follow the failed action in the log."""
    assert describe_error(error) == why
