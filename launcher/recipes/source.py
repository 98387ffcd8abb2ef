"""Recipes from where they lie: a folder, a git checkout, an archive, or what a site answers.

Only the files that are read here are taken. They are text of a bounded size, whoever made them.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.errors import RequestError
from launcher.recipes.library import Library, Origin, digest, listed
from launcher.tools import archive as archives

MOST_OF_A_FILE = 1 << 20
MOST = 64 << 20
_MOST_FILES = 5000
_MOST_UNPACKED = 256 << 20
_OWN = re.compile(r"taxonomy\.yaml|LICENSE|strategies/[\w.-]+\.ya?ml|models/[\w.-]+/[\w.-]+\.ya?ml")
_KEPT = re.compile(rf"(?:.*/)?(?:{_OWN.pattern}|[\w.-]+\.json)")
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile("[0-9a-f]{40}")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
_ROOTS = ("taxonomy.yaml", "taxonomy.json")

Get = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class Taken:
    """What was found, and at which commit."""

    files: dict[str, str]
    commit: str = ""


def is_archive(name: str) -> bool:
    """True when a file's name is one of an archive."""
    return name.endswith(_ARCHIVES)


def library(taken: Taken, source: str, now: float = 0.0) -> Library:
    """Return the recipes that were taken from a source, at a time in seconds since 1970."""
    origin = Origin(source=source, commit=taken.commit, taken=now, digest=digest(taken.files))
    return Library(files=taken.files, origin=origin)


def local(path: Path) -> Taken:
    """Take recipes from a folder or an archive; raises RequestError."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file() and is_archive(path.name):
            with path.open("rb") as file:
                return archive(file.read(MOST + 1), str(path))
    except OSError as error:
        raise RequestError(f"{path} cannot be read", evidence=str(error)) from None
    raise RequestError(
        f"{path} is neither a folder nor an archive",
        hint="name a folder of recipes, a .tar, .tar.gz or .zip of one, or a URL",
    )


def archive(content: bytes, name: str) -> Taken:
    """Take recipes from a tar or zip archive; raises RequestError."""
    if len(content) > MOST:
        raise RequestError(f"{name} is larger than {MOST >> 20} MiB, which no recipes need")
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            return _zip(content, name)
        return _tar(content, name)
    except (*archives.ERRORS, zipfile.BadZipFile) as error:
        raise RequestError(
            f"{name} is no archive that can be read",
            evidence=str(error) or type(error).__name__,
            hint="take it again",
        ) from None


def collect(names: Iterable[str] | None, get: Get, name: str) -> dict[str, str]:
    """Return the files of recipes, from the root that has them; `names` are all that are there,
    None where nobody can list them and a site's JSON is asked for.

    Raises RequestError: these are no recipes, or far too many.
    """
    wanted = [each for each in names or () if _OWN.fullmatch(each)]
    if "taxonomy.yaml" not in wanted:
        found = listed(_text(get("models.json"), "models.json"))
        pages = [f"{each}.json" for each in found if _NAME.fullmatch(each)]
        if not pages:
            raise RequestError(
                f"{name} has no recipes: neither `taxonomy.yaml` nor `models.json`",
                hint="recipes are those of github.com/vllm-project/recipes; see docs/recipes.md",
            )
        wanted = ["models.json", "taxonomy.json", "strategies.json", *pages]
    if len(wanted) > _MOST_FILES:
        raise RequestError(f"{name} has {len(wanted)} recipes; {_MOST_FILES} are the most")
    files: dict[str, str] = {}
    total = 0
    for each in wanted:
        content = get(each)
        if content is not None:
            files[each] = _text(content, each)
            total += len(content)
        if total > MOST:
            raise RequestError(f"{name} is larger than {MOST >> 20} MiB, which no recipes need")
    return files


def _text(content: bytes | None, name: str) -> str:
    if content is None:
        return ""
    if len(content) > MOST_OF_A_FILE:
        raise RequestError(f"{name} is larger than {MOST_OF_A_FILE >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{name} is not UTF-8") from None


def _folder(path: Path) -> Taken:
    if (path / "HEAD").is_file() and (path / "objects").is_dir():
        raise RequestError(
            f"{path} is a git directory without its files",
            hint=f"take an archive of it: `git -C {path} archive -o recipes.tar HEAD`",
        )
    names = [
        each.relative_to(path).as_posix()
        for pattern in ("taxonomy.yaml", "LICENSE", "strategies/*", "models/*/*")
        for each in sorted(path.glob(pattern))
    ]

    def get(name: str) -> bytes | None:
        try:
            with (path / name).open("rb") as file:
                return file.read(MOST_OF_A_FILE + 1)
        except OSError:
            return None

    return Taken(collect(names, get, str(path)), _checked_out(path / ".git"))


def _checked_out(git: Path) -> str:
    """Return the commit of a checkout; empty where there is none."""
    try:
        if git.is_file():  # of another worktree
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else ""
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        if common.is_file():
            git = git / common.read_text(encoding="utf-8").strip()
        if (git / name).is_file():
            found = (git / name).read_text(encoding="utf-8").strip()
        else:
            packed = (git / "packed-refs").read_text(encoding="utf-8")
            found = next(
                (line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), ""
            )
        return found if _COMMIT.fullmatch(found) else ""
    except (OSError, ValueError):
        return ""


def _tar(content: bytes, name: str) -> Taken:
    # Read once, from its beginning to its end: to go back is to unpack all of it again.
    files, total, commit = dict[str, bytes](), 0, ""
    for member, file in archives.members(io.BytesIO(content), _MOST_UNPACKED):
        commit = str(member.pax_headers.get("comment", ""))  # as `git archive` writes it
        if _KEPT.fullmatch(member.name):
            files[member.name] = file.read(MOST_OF_A_FILE + 1)
            total += len(files[member.name])
        if total > MOST:
            raise ValueError(f"its recipes are larger than {MOST >> 20} MiB")
    root = _root(files)
    taken = _collected(files, root, lambda path: files.get(root + path), name)
    return Taken(taken, _commit(commit))


def _zip(content: bytes, name: str) -> Taken:
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        members = {each.filename: each for each in packed.infolist() if not each.is_dir()}
        root = _root(members)

        def get(path: str) -> bytes | None:
            member = members.get(root + path)
            if member is None:
                return None
            with packed.open(member) as file:
                return file.read(MOST_OF_A_FILE + 1)

        commit = packed.comment.decode(errors="replace")  # as `git archive` writes it
        return Taken(_collected(members, root, get, name), _commit(commit))


def _root(names: Iterable[str]) -> str:
    """Return the folder within an archive that has the recipes, with its last slash."""
    found = [each for each in names if PurePosixPath(each).name in _ROOTS]
    first = min(found, key=lambda each: each.count("/"), default="")
    return first[: first.rfind("/") + 1]


def _collected(names: Iterable[str], root: str, get: Get, name: str) -> dict[str, str]:
    inside = [each.removeprefix(root) for each in names if each.startswith(root)]
    return collect(inside, get, name)


def _commit(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""
