"""Keys of the front's users; a node stores their SHA-256, with the user's name and limits."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

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


def make_key() -> tuple[str, str]:
    """Return a new random key and its digest."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()
