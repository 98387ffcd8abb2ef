"""Downloads by Hugging Face's own client from a fake hub, in separate programs, because the client
caches its environment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Inventory, Secret
from launcher.distribute import chain
from tests.hub_stand_in import COMMIT, Hub
from tests.ssh import processes

pytestmark = pytest.mark.processes
PROGRAM_ARGV = chain.node_runtime(Inventory(path=Path("x"), cluster="c", image="i", nodes=())).argv
SOURCE = random.Random(7)
FILES = {
    "config.json": b"{}",
    "m-1.safetensors": SOURCE.randbytes(3_000_000),
    "m-2.safetensors": SOURCE.randbytes(1_000_000),
    "sub/t.json": b"[]",
    "m.bin": b"x" * 1000,
}
NAMES = ["config.json", "m-1.safetensors", "m-2.safetensors", "sub/t.json"]


def start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    program = subprocess.Popen(
        [sys.executable, *PROGRAM_ARGV[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    assert program.stdin is not None
    program.stdin.write(chain.program_input(request))
    program.stdin.flush()
    return program


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request, and return its last event."""
    with start(request) as program:
        assert program.stdout is not None
        line = program.stdout.read()
    return json.loads(line.splitlines()[-1])  # type: ignore[no-any-return]


def resolve(hub: Hub, token: str = "") -> dict[str, Any]:
    env = {"HF_ENDPOINT": hub.start(), "HF_HUB_OFFLINE": "1"}
    return run_request(
        chain.resolve_request(
            "org/m", revision="main", env=env, token=Secret(token) if token else None
        )
    )


def download(hub: Hub, folder: Path, token: str = "") -> dict[str, Any]:
    return chain.download_request(
        "org/m",
        hub=str(folder),
        revision=COMMIT,
        ref="main",
        files=NAMES,
        env={"HF_ENDPOINT": hub.start()},
        token=Secret(token) if token else None,
    )


def test_files_of_a_hub() -> None:
    """The commit, and all digests; even from a busy hub, and on nodes set to offline."""
    hub = Hub(FILES, busy=1)
    resolved = resolve(hub)

    assert (resolved["event"], resolved["revision"]) == ("resolved", COMMIT)
    assert resolved["files"] == [
        [name, len(data), hub.digest(name)] for name, data in FILES.items()
    ]


def test_a_gated_model(tmp_path: Path) -> None:
    """It is rejected without a token, and listed with one."""
    resolved = resolve(Hub(FILES, token="hf_secret"))
    assert resolved["event"] == "failed"
    assert "GatedRepoError" in resolved["why"]
    assert resolve(Hub(FILES, token="hf_secret"), "hf_secret")["event"] == "resolved"

    assert run_request(download(Hub(FILES, token="hf_secret"), tmp_path))["event"] == "failed"


def test_a_missing_model() -> None:
    """Or a private one."""
    assert "RepositoryNotFoundError" in resolve(Hub(FILES, name="org/other"))["why"]


@pytest.mark.parametrize("redirects", [False, True])
def test_an_interrupted_download_resumes(tmp_path: Path, redirects: bool) -> None:
    """Only requested files are downloaded, even if large files are stored elsewhere."""
    hub = keeps = Hub(FILES, broken=1)
    if redirects:
        hub = Hub(FILES, elsewhere=keeps.start())
    assert run_request(download(hub, tmp_path))["event"] == "downloaded"

    snapshot = tmp_path / "models--org--m" / "snapshots" / COMMIT
    assert {name: (snapshot / name).read_bytes() for name in NAMES} == {
        name: FILES[name] for name in NAMES
    }
    assert not (snapshot / "m.bin").exists()
    assert (snapshot.parents[1] / "refs" / "main").read_text() == COMMIT


def test_the_program_exits_with_its_input(tmp_path: Path) -> None:
    """Like the launcher."""
    program = start(download(Hub(FILES, rate=100_000), tmp_path))
    assert processes.awaited(lambda: any(tmp_path.rglob("*.incomplete")))
    assert program.stdin is not None
    program.stdin.close()

    assert program.wait(60) == 3
    assert program.stdout is not None
    program.stdout.close()
