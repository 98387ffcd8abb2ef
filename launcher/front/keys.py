"""Keys of the front's users; a node stores their SHA-256, with the user's name and limits."""

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.front.node_program import REVOKED

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._@-]{0,62}[A-Za-z0-9])?")
ALL = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A user's key by its `digest`; 0 means no limit, no models all of them."""

    name: str
    digest: str
    rpm: int = 0
    concurrent: int = 0
    models: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Its value in HAProxy's map, whose rules split it; commas enclose each model."""
        models = f",{','.join(self.models)}," if self.models else ALL
        return f"{self.name}:{self.rpm}:{self.concurrent}:{models}"


def parse_key(digest: str, line: str) -> Key:
    """Parse an entry of the map; raises ValueError."""
    name, rpm, concurrent, models = line.split(":")
    names = () if models == ALL else tuple(models.strip(",").split(","))
    return Key(name=name, digest=digest, rpm=int(rpm), concurrent=int(concurrent), models=names)


def merge_maps(texts: Iterable[str]) -> list[str]:
    """Return the lines of all nodes' maps, without keys that were revoked on any of them."""
    lines = sorted({line for text in texts for line in text.splitlines()})
    revoked = {line.removeprefix(REVOKED) for line in lines if line.startswith(REVOKED)}
    return [line for line in lines if line.partition(" ")[0] not in revoked]


def make_key() -> tuple[str, str]:
    """Return a new random key and its digest."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()
