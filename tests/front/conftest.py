"""The two versions of HAProxy that tests of the front run with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.core.domain import FrontSettings

# From Debian's next release, with its libraries: `make machine` unpacks it.
NEWER = Path("/var/cache/vlaunch-lab/haproxy")


@pytest.fixture(scope="module", params=["oldest", "default"])
def haproxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """HAProxy of Debian 12, the oldest supported one, and one like that of the default image."""
    if request.param == "oldest":
        if shutil.which("haproxy") is None:
            pytest.fail("HAProxy is not installed; run `make machine`")
        yield
        return
    folder = _write_program(tmp_path_factory.mktemp("haproxy"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        output = subprocess.run(["haproxy", "-v"], check=True, capture_output=True, text=True)
        version, image = output.stdout.split()[2], FrontSettings().image.partition(":")[2]
        assert tuple(map(int, version.split(".")[:2])) >= tuple(map(int, image.split(".")))
        yield


def _write_program(folder: Path) -> Path:
    """Write a script `haproxy` that starts it with its own libraries, also when it reloads."""
    loaders = sorted(NEWER.glob("usr/lib/*/ld-linux*"))
    if not loaders:
        pytest.fail(f"{NEWER} has no HAProxy; run `make machine`")
    libraries, program = loaders[0].parent, folder / "haproxy"
    program.write_text(
        f'#!/bin/sh\nexec {loaders[0]} --argv0 "$0" --library-path {libraries}'
        f' {NEWER}/usr/sbin/haproxy "$@"\n'
    )
    program.chmod(0o755)
    return folder
