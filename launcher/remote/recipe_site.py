"""Recipes from a URL: an archive of them, or the static JSON that their site is made of."""

from __future__ import annotations

import concurrent.futures
import time
import urllib.parse

import requests

from launcher.errors import VlaunchError
from launcher.recipes import source
from launcher.recipes.source import Taken

# What `vlaunch recipes update` asks when it is told of nothing else.
OFFICIAL = "https://github.com/vllm-project/recipes"
_BRANCH = "/archive/refs/heads/main.tar.gz"
_SECONDS = (10.0, 30.0)  # to connect, and between two pieces
_MOST_SECONDS = 300.0
_AT_ONCE = 8
_PIECE = 1 << 16


def take(url: str) -> Taken:
    """Take the recipes at a URL; raises VlaunchError when they cannot be had, RequestError when
    there are none.
    """
    until = time.monotonic() + _MOST_SECONDS
    url = address(url)
    with requests.Session() as session:
        if source.is_archive(urllib.parse.urlsplit(url).path):
            return source.archive(_get(session, url, source.MOST, until), url)
        return _site(session, url, until)


def address(url: str) -> str:
    """Return what to ask for at a URL: of a repository on GitHub, its main branch's archive."""
    plain = url.rstrip("/")
    repository = plain.startswith("https://github.com/") and plain.count("/") == 4
    return plain + _BRANCH if repository else plain


def _site(session: requests.Session, url: str, until: float) -> Taken:
    """Ask a site for its list first, and then for the pages on it, some at a time."""
    pages: dict[str, bytes] = {}

    def get(path: str) -> bytes:
        return _get(session, f"{url}/{path}", source.MOST_OF_A_FILE, until)

    asked: list[str] = []
    pages["models.json"] = get("models.json")

    def note(path: str) -> bytes | None:
        asked.append(path)
        return pages.get(path, b"")

    source.collect(None, note, url)
    rest = [path for path in dict.fromkeys(asked) if path not in pages]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        pages |= dict(zip(rest, pool.map(get, rest), strict=True))
    return Taken(source.collect(None, pages.get, url))


def _get(session: requests.Session, url: str, most: int, until: float) -> bytes:
    try:
        with session.get(url, timeout=_SECONDS, stream=True) as answer:
            if not answer.ok:
                raise _unreachable(url, f"HTTP {answer.status_code}")
            content = bytearray()
            for piece in answer.iter_content(_PIECE):
                content += piece
                if len(content) > most or time.monotonic() > until:
                    raise _unreachable(url, "it is too large, or takes too long")
            return bytes(content)
    except (requests.RequestException, ValueError) as error:
        raise _unreachable(url, f"{type(error).__name__}: {error}"[:300]) from None


def _unreachable(url: str, why: str) -> VlaunchError:
    return VlaunchError(
        f"{url} cannot be had",
        evidence=why,
        hint="without internet: take an archive elsewhere, and name it with `--from FILE`",
    )
