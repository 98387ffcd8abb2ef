"""What looks like a secret is taken out of text; what only speaks of one stays."""

from __future__ import annotations

import json

import pytest

from launcher import redaction
from launcher.secret_patterns import clean

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
    ],
)
def test_what_looks_like_a_secret_goes(text: str, secret: str) -> None:
    """What stood around it stays, so that a reader sees what it was."""
    said = clean(text)

    assert secret in text
    assert secret not in said
    assert "***" in said


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
def test_what_only_speaks_of_secrets_stays(text: str) -> None:
    """A bundle of asterisks helps nobody."""
    assert clean(text) == text


def test_json_stays_json() -> None:
    """Whatever is taken out of it."""
    value = {
        "api_key": 'with "quotes" and more',
        "env": ["HF_TOKEN=hf_abcdefghijklmnop"],
        "argv": "--token abcdefgh x",
    }

    assert set(json.loads(clean(json.dumps(value)))) == {"api_key", "env", "argv"}


def test_values_that_the_program_knows_go_first() -> None:
    """Whatever they look like."""
    redaction.learn("plain words")
    try:
        assert clean("these plain words") == "these ***"
    finally:
        redaction.forget()
