"""Redaction of secret-like values; text about secrets stays."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable

import pytest

from launcher.core import redaction
from launcher.core.secret_patterns import redact_secrets
from launcher.diagnose import log_files
from launcher.diagnose.doctor import diagnose
from launcher.failures.explain import explain
from launcher.tools import vllm
from launcher.tools.diagnosis import NodeReport, make_log

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE\n-----END OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("login with hf_abcdefghijklmnop now", "hf_abcdefghijklmnop"),
        ("key sk-proj-abcdefghijklmnop", "sk-proj-abcdefghijklmnop"),
        ("ghp_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst"),
        ("AKIAIOSFODNN7EXAMPLE in the log", "AKIAIOSFODNN7EXAMPLE"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ('"password": "two words here"', "two words here"),
        (json.dumps(json.dumps({"password": "two words here"})), "two words here"),
        ("VLLM_API_KEY=0123456789", "0123456789"),
        ("https://user:pa55word@host/x", "pa55word"),
        ("https://b.s3.amazonaws.com/x?X-Amz-Signature=0a1b2c3d&y=1", "0a1b2c3d"),
        ("vllm serve m --api-key letmein99", "letmein99"),
        ('["--hf-token", "foobarbaz"]', "foobarbaz"),
        (f"x {KEY} y", "b3BlbnNzaC1rZXktdjE"),
        (json.dumps({"key": KEY}), "b3BlbnNzaC1rZXktdjE"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        (r"x\neyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        (KEY.partition("\n-----END")[0] + "\n" + KEY, "b3BlbnNzaC1rZXktdjE"),
    ],
)
def test_values_like_secrets_are_redacted(text: str, secret: str) -> None:
    """The text around them stays as context."""
    redacted = redact_secrets(text)

    assert secret in text
    assert secret not in redacted
    assert "***" in redacted


@pytest.mark.parametrize(
    "text",
    [
        "secrets: {HF_TOKEN: {env: HF_TOKEN}}",
        (
            "secrets:\n  VLLM_API_KEY:\n    command: pass show x\n  HF_TOKEN:\n    file:"
            " ~/.secrets/hf_token"
        ),
        "GPU KV cache size: 643,232 tokens, max_tokens=100000",
        "--max-num-batched-tokens 819200",
        "RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN",
        "InvalidAuthToken: Authentication token is missing or incorrect",
        "api_key=None, tokenizer='org/model-name'",
        "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    ],
)
def test_text_about_secrets_stays(text: str) -> None:
    """Over-redaction makes a bundle useless."""
    assert redact_secrets(text) == text


def test_json_stays_json() -> None:
    """After any redaction."""
    value = {
        "api_key": 'with "quotes" and more',
        "env": ["HF_TOKEN=hf_abcdefghijklmnop"],
        "argv": "--token abcdefgh x",
    }

    assert set(json.loads(redact_secrets(json.dumps(value)))) == {"api_key", "env", "argv"}


def test_known_values_are_redacted_first() -> None:
    """In any form."""
    redaction.add_secrets("plain words")
    try:
        assert redact_secrets("these plain words") == "these ***"
    finally:
        redaction.clear_secrets()


# Characters of typical passwords, and those escaped in JSON.
PASSWORDS = (
    'quote"inside-it', "back\\slash-in-it", "tab\tand more of it", "naïve-пароль-密码",
    "p@$$w0rd!{}[]",
    "it's-a-secret-here", "ends-with-a-backslash\\", "</script>&amp;#34;", 'two""quotes"',
)  # fmt: skip


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_secret_in_nested_json_is_redacted(password: str, depth: int) -> None:
    """By the name of its key, or by its known value."""
    text: object = {"api_key": password, "model": "org/m"}
    alone: object = {"x": [f"a {password} b"]}
    for _ in range(depth):
        text, alone = json.dumps(text), json.dumps(alone)
    redacted = redact_secrets(str(text))

    assert redacted.endswith(str(text)[str(text).index("model") :])
    assert redacted.startswith(str(text)[: str(text).index("api_key")])
    assert [part for part in re.findall(r"\w{4,}", password) if part in redacted] == []
    redaction.add_secrets(password)
    assert [
        part for part in re.findall(r"\w{4,}", password) if part in redact_secrets(str(alone))
    ] == []


def test_an_unterminated_key_hides_no_errors() -> None:
    """Its base64 is removed, later text stays."""
    text = f"{KEY.partition('-----END')[0]}ValueError: no memory\n"
    redacted = redact_secrets(text)

    assert redacted == "***\nValueError: no memory\n"


PIECES = (
    "eyJ", "eyJ0eXAiOiJK.eyJ0eXAiOiJK", "-----BEGIN ", "PRIVATE ", "PRIVATE KEY-----",
    "-----BEGIN A PRIVATE KEY-----", "-----END ", "authorization: ", "Bearer ", "token", "TOKEN=",
    'token="', 'token=\\"', "api_key: ", "password", "secret='", "hf_", "sk-", "xoxb-", "AKIA",
    "AIza",
    "://", "a://x:", "@", "?token=", "&sig=", "--", "--a-password ", "a", "A0", "_", "-", ".", ":",
    "=", '"', "'", "\\", '\\"', "\\n", " ", "\t", "\n", "{", "é", "\x1b]", "\x1b[", "]", "Error",
    "A.", "Error: ", "marked dead", "NET/", "Channel ", "[pod/", " |",
)  # fmt: skip


def report_of(text: str) -> dict[str, NodeReport]:
    """Return the report of a node with one log."""
    return {"gpu01": NodeReport(logs=(make_log("engine-1", "server x", text),))}


def _seconds(read: Callable[[str], object], text: str) -> float:
    """Return the CPU time of redacting a text."""
    began = time.process_time()
    read(text)
    return time.process_time() - began


def _ratio(read: Callable[[str], object], text: str) -> float:
    """Return the CPU time relative to a plain loop over the characters."""
    return _seconds(read, text) / _seconds(lambda text: sum(1 for _ in text), text)


@pytest.mark.parametrize(
    ("read", "most"),
    [
        (redact_secrets, 60),
        (lambda text: list(log_files.split_logs(text, "log")), 60),
        (explain, 200),
        (lambda text: diagnose(report_of(text), {}, rdma=True, now=0.0), 200),
        (vllm.find_exception, 60),
    ],
    ids=["secrets", "log", "failures", "doctor", "cause"],
)
def test_redaction_takes_linear_time(read: Callable[[str], object], most: float) -> None:
    """Relative to a loop over the characters: for any text, on any machine."""
    chance = random.Random(int(os.environ.get("VLAUNCH_EXAMPLES", "0")))
    length = 30_000
    mixed = [tuple(chance.choices(PIECES, k=chance.choice((2, 3)))) for _ in range(25)]
    for pieces in [*((piece,) for piece in PIECES), *mixed]:
        unit = "".join(pieces)
        text = (unit * (length // len(unit) + 1))[:length]
        # On a busy machine two of three runs may be slow.
        assert any(_ratio(read, text) < most for _ in range(3)), pieces
