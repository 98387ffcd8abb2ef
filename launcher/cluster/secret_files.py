"""Secret files on a node: their paths, ages and permissions."""

import re
from dataclasses import dataclass

from launcher.core import shell
from launcher.core.domain import Argv
from launcher.core.errors import UnreadableAnswer

_MARK = "@@secrets"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretFile:
    """A file with a secret, or (`name` is empty) their directory.

    `own` means that it belongs to the SSH user, `handed` that its group is that of the image's
    user, who is not root.
    """

    name: str
    path: str
    place: str
    mode: str
    own: bool
    age: float
    handed: bool = False

    @property
    def private(self) -> bool:
        """True if the SSH user owns it and only the image's user may read it, too."""
        alone, handed = ("600", "640") if self.name else ("700", "750")
        return self.own and (self.mode == alone or (self.handed and self.mode == handed))


def listing_argv(cluster: str, state_dir: str) -> Argv:
    """Return the command that lists a cluster's files; "" is the default state directory."""
    return ("sh", "-c", shell.program_text("secret_files"), "secrets", cluster, state_dir)


def extract_certificates(text: str) -> str:
    """Return the public certificates (PEM) in the answer to `listing_argv`."""
    return text.rpartition(f"{_MARK} end\n")[2]


def parse_listing(text: str) -> tuple[SecretFile, ...]:
    """Parse the answer to `listing_argv`; raises UnreadableAnswer if it is incomplete."""
    listing = re.search(
        rf"^{_MARK} (\d{{1,12}}) (\d{{1,10}}) (-|\d{{1,10}})\n(.*?)^{_MARK} end$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    if listing is None:
        raise UnreadableAnswer("cannot list the secrets on the node")
    now, user, handed, rows = int(listing[1]), listing[2], listing[3], listing[4]
    files = []
    for row in rows.splitlines():
        match = re.fullmatch(
            r"(disk|memory) ([0-7]{1,4}) (\d{1,10}) (\d{1,10}) (\d{1,12})"
            r" (/.*/secrets(?:/([^/]+))?)",
            row,
        )
        if match is None:
            raise UnreadableAnswer("cannot parse the node's list of secrets")
        place, mode, owner, group, changed, path, name = match.groups()
        files.append(
            SecretFile(
                name=name or "",
                path=path,
                place=place,
                mode=mode,
                own=owner == user,
                age=float(max(0, now - int(changed))),
                handed=group == handed,
            )
        )
    return tuple(files)
