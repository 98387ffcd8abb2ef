"""Path of the inventory for a command, and the memory of the last one brought up (like kubeconfig's
current context).
"""

import os
import tempfile
from pathlib import Path

from launcher.core.errors import RequestError

ENVIRONMENT = "VLAUNCH_INVENTORY"
DEFAULT = "inventory.yaml"


def find_inventory(argument: str | None, option: str | None) -> Path:
    """Return the first of: path argument, `-i`, `VLAUNCH_INVENTORY`, ./inventory.yaml, the last one
    brought up.

    A named path is returned unchecked, so that the loader reports a missing file. Raises
    RequestError if none is found.
    """
    if named := _explicit_name(argument, option):
        return Path(named).expanduser() if named.startswith("~/") else Path(named)
    if Path(DEFAULT).exists():
        return Path(DEFAULT)
    last = remembered()
    if last is not None and last.exists():
        return last
    raise _missing_error(last)


def _explicit_name(argument: str | None, option: str | None) -> str | None:
    """Return the path from command line or environment; raise RequestError for two paths."""
    if argument and option and Path(argument) != Path(option):
        raise RequestError(
            f"two inventories given: `{argument}` and `-i {option}`",
            hint="pass only one of them",
        )
    return argument or option or os.environ.get(ENVIRONMENT)


def _missing_error(last_path: Path | None) -> RequestError:
    evidence = [
        "no path was given as an argument or with -i",
        f"{ENVIRONMENT} is not set",
        f"{Path.cwd() / DEFAULT} does not exist",
        f"the inventory of the last `vlaunch up`, {last_path}, no longer exists"
        if last_path
        else "no earlier `vlaunch up` from this machine",
    ]
    return RequestError(
        "no inventory found",
        evidence=evidence,
        hint="pass one with -i, or write ./inventory.yaml with `vlaunch init`",
    )


def remember(path: Path) -> None:
    """Make `path` the default inventory.

    A state folder that is not writable is no failure.
    """
    memory = _memory_path()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=memory.parent, delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{path.expanduser().absolute()}\n")
        Path(file.name).replace(memory)
    except OSError:
        return


def remembered() -> Path | None:
    """Return the inventory last brought up, even if it no longer exists."""
    try:
        name = _memory_path().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(name) if name else None


def _memory_path() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("vlaunch")) / "inventory"
