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

from launcher.model import Secret

MASK = "***"
# Shorter values would blank out ordinary words.
SHORTEST = 6
_SHORTEST_ENCODED = 8
_NESTED = 4  # JSON that is text in JSON, so many times

_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def learn(value: Secret | str) -> None:
    """Hide a value from now on, in every form that `forms` knows; one of less than six characters
    cannot be hidden.
    """
    # one set of values for the whole program: a value is secret wherever it turns up
    global _pattern  # noqa: PLW0603
    text = value.reveal() if isinstance(value, Secret) else value
    if len(text) >= SHORTEST and text not in _known:
        _known.add(text)
        _pattern = matching(_known)


def forget() -> None:
    """Know nothing again, as at the start of the program."""
    global _pattern  # noqa: PLW0603
    _known.clear()
    _pattern = None


def redact(text: str) -> str:
    """Replace every known value by `***`, the longest first."""
    return text if _pattern is None else _pattern.sub(MASK, text)


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
    found = set()
    for before in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            data = value.encode()
            encoded = encode(b"\0" * before + data).decode()
            # The first and the last characters also hold bits of the neighbours.
            start, bits = -(-before * 8 // 6), (before + len(data)) * 8
            found.add(encoded[start : bits // 6])
    return found


class Guarded:
    """A stream of text or bytes without known values; for everything but writing it is the stream
    behind it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        # Who goes around the text finds the same guard on the bytes.
        return Guarded(found) if name == "buffer" else found

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
