"""The values that nobody may see, and the one function that takes them out of text.

It finds values, not names.

Whatever learns a secret's value tells `learn`; whatever shows or keeps text runs it through
`redact`. The streams of a command line are guarded as a whole, so that no message, event, traceback
or table can be forgotten; what is written to files or sent elsewhere calls `redact` itself.
"""

from __future__ import annotations

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
# Shorter values would blank out ordinary words.
SHORTEST = 6
_SHORTEST_ENCODED = 8
_NESTED = 4  # JSON that is text in JSON, so many times

_WORD = re.compile(r"[^\s\"]{8,}")
_CUT = 8  # characters of a value that are secret where a text was cut within it

_known: set[str] = set()
_pattern: re.Pattern[str] | None = None
_beginnings: re.Pattern[str] | None = None
_forms: tuple[str, ...] = ()


def learn(*values: Secret | str) -> None:
    """Hide values from now on, in every form that `forms` knows; one of less than six characters
    cannot be hidden.
    """
    # one set of values for the whole program: a value is secret wherever it turns up
    global _pattern, _beginnings, _forms  # noqa: PLW0603
    texts = (value.reveal() if isinstance(value, Secret) else value for value in values)
    new = {text for text in texts if len(text) >= SHORTEST} - _known
    if new:
        _known.update(new)
        _forms = tuple({form for secret in _known for form in forms(secret)})
        _pattern = matching(_known)
        heads = "|".join({re.escape(form[:_CUT]) for form in _forms if len(form) > _CUT})
        # At the end of a line, of a text in JSON, or before the sign that something was left out.
        _beginnings = re.compile(rf"(?:{heads})[^\s\"…]*(?=$|[\"…])", re.M) if heads else None


def forget() -> None:
    """Know nothing again, as at the start of the program."""
    global _pattern, _beginnings, _forms
    _known.clear()
    _pattern, _beginnings, _forms = None, None, ()


def redact(text: str) -> str:
    """Replace every known value by `***`, the longest first; also the part of a value that is left
    at the start of a text, or at the end of a line, where a node cut it.
    """
    if _pattern is None:
        return text
    text = _pattern.sub(MASK, text)
    start = _WORD.match(text)
    if start and any(form.endswith(start[0]) for form in _forms):
        text = MASK + text[start.end() :]
    return text if _beginnings is None else _beginnings.sub(_mask_beginning, text)


def _mask_beginning(match: re.Match[str]) -> str:
    return MASK if any(form.startswith(match[0]) for form in _forms) else match[0]


def matching(values: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds each of the values in all its forms; None when there is none to
    find.
    """
    every = sorted(
        {form for value in values for form in forms(value)}, key=lambda form: (-len(form), form)
    )
    return re.compile("|".join(re.escape(form) for form in every)) if every else None


def forms(value: str) -> set[str]:
    """Return a value as it looks when it is written plainly, in JSON (also nested), for a shell, in
    an address, in HTML, and in base64.
    """
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
        for _ in range(_NESTED):
            text = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            quoted.add(text)
    escaped = html.escape(value)
    quoted |= {escaped, escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")}
    return {value, *(form for form in {*quoted, *_base64(value)} if len(form) >= _SHORTEST_ENCODED)}


def _base64(value: str) -> set[str]:
    """Return what of a value is the same in base64 whatever stands around it (`user:VALUE` is how
    HTTP sends passwords).
    """
    fragments = set()
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            data = value.encode()
            encoded = encode(b"\0" * offset + data).decode()
            # The first and the last characters also hold bits of the neighbours.
            start, bits = -(-offset * 8 // 6), (offset + len(data)) * 8
            fragments.add(encoded[start : bits // 6])
    return fragments


class Guarded:
    """A stream of text or bytes without known values; for everything but writing it is the stream
    behind it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        # Who goes around the text finds the same guard on the bytes.
        return Guarded(attribute) if name == "buffer" else attribute

    def write(self, data: Any) -> int:
        """Write text or bytes, and return how much was asked for: callers compare."""
        if isinstance(data, str):
            self._inner.write(redact(data))
        else:
            text = bytes(data).decode("utf-8", "surrogateescape")
            clean = redact(text)
            self._inner.write(data if clean == text else clean.encode("utf-8", "surrogateescape"))
        return len(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and standard error inside the block.

    When an exception leaves the block the guard stays: the interpreter prints it after that.
    """
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _guard(out), _guard(err)
    yield
    sys.stdout, sys.stderr = out, err


def _guard(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, Guarded) else Guarded(stream)
