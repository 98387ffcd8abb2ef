"""What is made of `nvidia-smi`'s answers; a script on PATH gives them, in the words of the real
one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.payload.agent import gpu

GPUS = "0, GPU-aa, 81559, 2, 0\n1, GPU-bb, 81559, 70000, 97\n"
APPS = "GPU-bb, 4711, /usr/bin/python3, 60000\nGPU-bb, 4712, [Not Found], 9000\nGPU-aa, 1, x, 1\n"
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Put an `nvidia-smi` on PATH that says something."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(gpus: str = GPUS, apps: str = APPS, code: int = 0) -> None:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)
        script = (
            f"case $1 in --query-gpu*) cat {tmp_path}/gpus ;; *) cat {tmp_path}/apps ;; esac\nexit"
            f" {code}\n"
        )
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return make


def test_gpus_are_read(smi: Smi) -> None:
    """One a line; what is no line of it is left out."""
    smi(GPUS + "some warning of the driver\n")

    assert [(each.index, each.used, each.busy) for each in gpu.look() or ()] == [
        (0, 2.0, 0.0),
        (1, 70000.0, 97.0),
    ]


def test_memory_that_is_held_names_who_holds_it(smi: Smi) -> None:
    """The process with most of it: somebody has to end it."""
    smi()

    assert (
        gpu.held(0.9, None)
        == "GPU 1 has 68.4 of 79.6 GiB in use, by /usr/bin/python3 (pid 4711, 58.6 GiB)"
    )


def test_who_holds_it_may_be_unknown(smi: Smi) -> None:
    """Processes of other containers have no name here."""
    smi(apps="")

    assert gpu.held(0.9, None) == "GPU 1 has 68.4 of 79.6 GiB in use"


@pytest.mark.parametrize(("share", "chosen"), [(0.9, (0,)), (0.1, None), (0.0, (1,))])
def test_memory_that_is_enough(smi: Smi, share: float, chosen: tuple[int, ...] | None) -> None:
    """Only the GPUs of the server count, and only as much as it claims."""
    smi()

    assert gpu.held(share, chosen) == ""


def test_unified_memory_is_not_judged(smi: Smi) -> None:
    """A GB10 gives no figures."""
    smi("0, GPU-aa, [N/A], [N/A], 3\n")

    assert gpu.held(0.9, None) == ""
    assert gpu.busy(None) == 3.0


@pytest.mark.parametrize(
    "words", ["Failed to initialize NVML: Unknown Error", "No devices were found"]
)
@pytest.mark.parametrize("code", [0, 255])
def test_a_container_that_has_lost_its_gpus(smi: Smi, words: str, code: int) -> None:
    """It must be started anew, which is told from a driver that is not there at all."""
    smi(f"{words}\n", code=code)

    with pytest.raises(gpu.Lost, match=words.partition(":")[0]):
        gpu.held(0.9, None)
    assert gpu.busy(None) is None


@pytest.mark.parametrize("why", ["absent", "failing"])
def test_a_machine_where_nobody_can_say(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A node without `nvidia-smi`, or where it fails: nothing keeps the engine from trying."""
    if why == "absent":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        smi("NVIDIA-SMI has failed because it could not communicate with the driver\n", code=9)

    assert (gpu.look(), gpu.held(0.9, None), gpu.busy(None)) == (None, "", None)


def test_how_busy_they_are(smi: Smi) -> None:
    """The busiest of the chosen ones."""
    smi()

    assert (gpu.busy(None), gpu.busy((0,)), gpu.busy((7,))) == (97.0, 0.0, None)
