"""Redaction of known secrets in all outputs and encodings."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import click
import markupsafe
import pytest
from hypothesis import given
from hypothesis import strategies as st

import launcher
from launcher.app import terminal
from launcher.app.progress import JsonLines, PlainLines
from launcher.core import redaction, untrusted
from launcher.core.domain import Secret
from launcher.core.errors import VlaunchError
from launcher.core.events import Event

VALUE = "p\"ss wörd/+'=&hf_0123456789"


def test_text_is_unchanged_without_secrets() -> None:
    """And after they were cleared."""
    assert redaction.redact(VALUE) == VALUE
    redaction.add_secrets(Secret(VALUE))
    redaction.clear_secrets()
    assert redaction.redact(VALUE) == VALUE


def test_the_longest_value_is_redacted_first() -> None:
    """A value that contains another is removed completely."""
    redaction.add_secrets("secret")
    redaction.add_secrets("secret-and-more")

    assert redaction.redact("x=secret-and-more y=secret") == "x=*** y=***"


def test_short_values_stay() -> None:
    """They would remove ordinary text."""
    redaction.add_secrets("12345")

    assert redaction.redact("12345") == "12345"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("401: key sk-0123456789", "401: key ***"),
        ("a sk-01234\nb", "a ***\nb"),
        ('{"error": "a sk-01234567"}', '{"error": "a ***"}'),
        ("a sk-01234567…", "a ***…"),
        ("89abcdef is wrong", "*** is wrong"),
        ("sk-0123", "sk-0123"),
        ("sk-01234 and more", "sk-01234 and more"),
        ("a sk-01234-other", "a sk-01234-other"),
        ("6789abc is wrong", "6789abc is wrong"),
    ],
)
def test_a_truncated_value_is_redacted(text: str, clean: str) -> None:
    """From eight characters, at the end of a line or a JSON text, or at the start of a text."""
    redaction.add_secrets("sk-0123456789abcdef")

    assert redaction.redact(text) == clean


def test_a_short_value_has_no_truncated_form() -> None:
    """Its beginning is all of it."""
    redaction.add_secrets("abcdef")

    assert redaction.redact("abcd\nabcdef\n\nword") == "abcd\n***\n\nword"


@pytest.mark.parametrize(
    "written",
    [
        json.dumps({"a": VALUE}),
        json.dumps({"a": VALUE}, ensure_ascii=False),
        repr(VALUE),
        html.escape(VALUE),
        str(markupsafe.escape(VALUE)),
        f"https://x/?key={quote(VALUE, safe='')}&n=1",
        f"https://x/{quote(VALUE)}",
        "Basic " + base64.b64encode(f"user:{VALUE}".encode()).decode(),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
    ],
)
def test_a_value_is_redacted_in_every_form(written: str) -> None:
    """JSON, URLs, Python literals, base64."""
    redaction.add_secrets(VALUE)
    clean = redaction.redact(written)

    assert redaction.MASK in clean
    assert "0123456789" not in clean
    assert len(clean) < len(written)


@given(
    value=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=80),
    around=st.binary(max_size=7),
)
def test_base64_is_redacted_at_every_offset(value: str, around: bytes) -> None:
    """At most the characters shared with neighbours stay: two before and three after."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(around + value.encode() + around).decode()
        longest = max(
            (len(form) for form in redaction.encoded_forms(value) if form in text), default=0
        )

        assert longest >= len(value.encode()) * 8 // 6 - 1 or longest >= len(value)


def test_lines_from_nodes_are_redacted_before_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrapped value no longer matches; colour codes inside do not hide it."""
    redaction.add_secrets("hf_thisMustStayHidden")

    assert untrusted.sanitize("token hf_this\x1b[31mMustStayHidden end") == "token *** end"


def test_every_output_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    """Events, JSON, errors with evidence and hints, bytes, and written lines."""
    redaction.add_secrets("hf_thisMustStayHidden")
    text = "say hf_thisMustStayHidden"
    with redaction.redact_output():
        PlainLines().show(Event(kind="note", text=text))
        JsonLines().show(Event(kind="note", text="x", data={text: [text]}))
        terminal.show_error(VlaunchError(text, evidence=text, hint=text))
        click.echo(text.encode())
        sys.stdout.writelines([text])
        sys.stdout.buffer.write(text.encode())
    out, err = capsys.readouterr()

    assert "hf_" not in out + err
    assert (out + err).count("***") == 9
    assert json.loads(out.splitlines()[0])["data"] == {"say ***": ["say ***"]}


def test_bytes_without_a_secret_pass_unchanged() -> None:
    """Archives use standard output, too."""
    redaction.add_secrets("hf_thisMustStayHidden")
    raw = io.BytesIO()
    redaction.RedactedStream(raw).write(bytes(range(256)))

    assert raw.getvalue() == bytes(range(256))


def test_the_traceback_of_a_bug_is_redacted() -> None:
    """The interpreter prints an unexpected exception at exit."""
    program = (
        "from launcher.core import redaction\n"
        "redaction.add_secrets('hf_this' + 'MustStayHidden')\n"
        "with redaction.redact_output():\n"
        "    raise KeyError('hf_this' + 'MustStayHidden')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 1
    assert "KeyError: '***'" in ran.stderr


def test_no_module_bypasses_the_redaction() -> None:
    """By writing to the terminal, or to Python's original streams."""
    folder = Path(launcher.__file__).parent
    paths = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not {"agent", "driver", "lab", "node", "probe"} & set(path.relative_to(folder).parts)
    ]

    assert len(paths) > 100
    assert [
        path.name
        for path in paths
        if re.search(r"sys\.__std|os\.write\([12]\b|/dev/(?:tty|stdout|stderr)\b", path.read_text())
    ] == []
