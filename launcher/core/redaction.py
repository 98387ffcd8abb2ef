"""Redaction of known secret values from text.

Code that obtains a secret calls `add_secrets`; code that writes text to a file or sends it calls
`redact`. Standard output and error are wrapped as a whole, so messages, events, tracebacks and
tables need no call.
"""

import base64
import contextlib
import html
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

from launcher.core.domain import Secret

MASK = "***"
# Redacting shorter values would hide ordinary text.
SHORTEST = 6
_SHORTEST_ENCODED = 8
_JSON_DEPTH = 4  # levels of JSON as text in JSON

_FIRST_TOKEN = re.compile(r"[^\s\"]{8,}")
_PREFIX_LENGTH = 8  # characters of a truncated value that identify it

_secrets: set[str] = set()
_pattern: re.Pattern[str] | None = None
_prefix_pattern: re.Pattern[str] | None = None
_forms: tuple[str, ...] = ()


def add_secrets(*values: Secret | str) -> None:
    """Redact these values from now on; those shorter than six characters stay."""
    # one set for the whole program: a value is secret everywhere
    global _pattern, _prefix_pattern, _forms  # noqa: PLW0603
    texts = (value.reveal() if isinstance(value, Secret) else value for value in values)
    new = {text for text in texts if len(text) >= SHORTEST} - _secrets
    if new:
        _secrets.update(new)
        _forms = tuple({form for secret in _secrets for form in encoded_forms(secret)})
        _pattern = secrets_pattern(_secrets)
        heads = "|".join(
            {re.escape(form[:_PREFIX_LENGTH]) for form in _forms if len(form) > _PREFIX_LENGTH}
        )
        # At the end of a line or of a JSON string, or before an ellipsis.
        _prefix_pattern = re.compile(rf"(?:{heads})[^\s\"…]*(?=$|[\"…])", re.M) if heads else None


def clear_secrets() -> None:
    """Forget all values, as at program start."""
    global _pattern, _prefix_pattern, _forms
    _secrets.clear()
    _pattern, _prefix_pattern, _forms = None, None, ()


def redact(text: str) -> str:
    """Replace known values by `***`, the longest first.

    Includes the rest of a value at the start of the text, and a prefix at the end of a line, where
    a node truncated it.
    """
    if _pattern is None:
        return text
    text = _pattern.sub(MASK, text)
    start = _FIRST_TOKEN.match(text)
    if start and any(form.endswith(start[0]) for form in _forms):
        text = MASK + text[start.end() :]
    return text if _prefix_pattern is None else _prefix_pattern.sub(_mask_prefix, text)


def _mask_prefix(match: re.Match[str]) -> str:
    return MASK if any(form.startswith(match[0]) for form in _forms) else match[0]


def secrets_pattern(values: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for all forms of the values; None without values."""
    every = sorted(
        {form for value in values for form in encoded_forms(value)},
        key=lambda form: (-len(form), form),
    )
    return re.compile("|".join(re.escape(form) for form in every)) if every else None


def encoded_forms(value: str) -> set[str]:
    """Return the forms of a value in JSON (also nested), shells, URLs, HTML and base64."""
    if len(value) < SHORTEST:
        return set()
    quoted = {
        repr(value)[1:-1],
        shlex.quote(value).strip("'"),
        quote(value),
        quote(value, safe=""),
        quote_plus(value),
    }
    for ascii_only in (True, False):
        text = value
        for _ in range(_JSON_DEPTH):
            text = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            quoted.add(text)
    escaped = html.escape(value)
    quoted |= {escaped, escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")}
    return {value, *(form for form in {*quoted, *_base64(value)} if len(form) >= _SHORTEST_ENCODED)}


def _base64(value: str) -> set[str]:
    """Return the base64 of a value inside other text, such as HTTP's `user:VALUE`."""
    fragments = set()
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            data = value.encode()
            encoded = encode(b"\0" * offset + data).decode()
            # The first and last characters also encode bits of their neighbours.
            start, bits = -(-offset * 8 // 6), (offset + len(data)) * 8
            fragments.add(encoded[start : bits // 6])
    return fragments


class RedactedStream:
    """Wrapper of a text or byte stream that redacts known values on write."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        # Writing bytes must redact as well.
        return RedactedStream(attribute) if name == "buffer" else attribute

    def write(self, data: Any) -> int:
        """Write text or bytes; return the length of `data`, which callers compare."""
        if isinstance(data, str):
            self._inner.write(redact(data))
        else:
            text = bytes(data).decode("utf-8", "surrogateescape")
            clean = redact(text)
            self._inner.write(data if clean == text else clean.encode("utf-8", "surrogateescape"))
        return len(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def redact_output() -> Iterator[None]:
    """Redact standard output and error inside the block.

    After an exception the wrappers stay: the interpreter prints the traceback later.
    """
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _wrap_stream(out), _wrap_stream(err)
    yield
    sys.stdout, sys.stderr = out, err


def _wrap_stream(stream: Any) -> Any:
    return (
        stream if stream is None or isinstance(stream, RedactedStream) else RedactedStream(stream)
    )
