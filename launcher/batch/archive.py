"""Archive of batch jobs: the package `vlaunch_batch` (the driver), and `desk.py` to start it."""

from functools import cache

from launcher.core.registry import Files
from launcher.failures import data
from launcher.tools.shipped import zipapps

NAME = "batch.pyz"
_SHARED = ("desk", "folder", "identity", "job", "job_values")
_DESK = b"import sys\n\nfrom vlaunch_batch.batch.desk import main\n\nsys.exit(main())\n"
_MAIN = b"from .batch.driver.__main__ import run\n\nrun()\n"


@cache
def files() -> Files:
    """Return the files of the archive."""
    return {
        **zipapps.package_files(
            "vlaunch_batch",
            *(f"batch/{name}.py" for name in _SHARED),
            *("batch/driver/**/*.py", "core/values.py", "core/sizes.py"),
            "agent/cause.py",
            "core/interrupts.py",
            "failures/frames.py",
            "failures/match.py",
            "failures/table.py",
            "inventory/engine_args.py",
        ),
        **zipapps.upstream_files("vlaunch_batch"),
        "vlaunch_batch/failures/data.py": data.pack_entries(),
        "vlaunch_batch/__main__.py": _MAIN,
        "__main__.py": _DESK,
    }
