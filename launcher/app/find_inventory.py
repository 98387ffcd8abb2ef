"""Which inventory a command means, and the memory of the one last brought up (as kubeconfig has a
current context).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launcher.core.errors import RequestError

ENVIRONMENT = "VLAUNCH_INVENTORY"
DEFAULT = "inventory.yaml"


def find_inventory(argument: str | None, option: str | None) -> Path:
    """Return the first that is given: path argument, `-i`, `VLAUNCH_INVENTORY`, ./inventory.yaml,
    the one last brought up.

    What is named is returned as it is, so that a name that does not exist is reported by the
    loader, with its path. Raises RequestError when nothing is named and nothing is found.
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
    """Return what the command line names, or else the environment; raises RequestError when two are
    named.
    """
    if argument and option and Path(argument) != Path(option):
        raise RequestError(
            f"two inventories are named: `{argument}` and, with -i, `{option}`",
            hint="name the inventory once",
        )
    return argument or option or os.environ.get(ENVIRONMENT)


def _missing_error(last_path: Path | None) -> RequestError:
    evidence = [
        "no path was given, as an argument or with -i",
        f"{ENVIRONMENT} is not set",
        f"{Path.cwd() / DEFAULT} does not exist",
        f"the one last brought up, {last_path}, does not exist any more"
        if last_path
        else "none was brought up from here before",
    ]
    return RequestError(
        "no inventory found", evidence=evidence, hint="name one with -i, or write ./inventory.yaml"
    )


def remember(path: Path) -> None:
    """Make `path` the inventory that commands mean when none is named.

    A state folder that cannot be written is no failure.
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
    """Return the inventory last brought up, whether or not it still exists."""
    try:
        name = _memory_path().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(name) if name else None


def _memory_path() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("vlaunch")) / "inventory"
