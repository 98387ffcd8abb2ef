"""Complete output of `check`, `up` and `serve` for GPU faults, as golden files. Answers have the
format of `nvidia-smi` (tests/fixtures/host/README.md), as in the lab's simulation
(tests/lab/test_nvidia_smi.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import golden
from tests.command_line import Cluster, Ran

GOLDEN = Path(__file__).parent / "golden"
CHECK = ("check", "--only", "accelerator,gpu-runtime,gpu-memory,gpu-errors")
SERVE = ("serve", "--model", "org/m", "--no-wait", "--skip-network-check")


def listed(*, lost: int = -1, usage: dict[int, int] | None = None) -> str:
    """Return `nvidia-smi`'s list of eight GPUs, some with memory in use."""
    lines = [
        f"{at}, NVIDIA H100 80GB HBM3, 81559, {(usage or {}).get(at, 4)}, 580.95.05, GPU-{at}"
        for at in range(8)
        if at != lost
    ]
    if lost >= 0:
        lines.append(
            f"Unable to determine the device handle for GPU{lost}: 0000:61:00.0: Unknown Error"
        )
    return "".join(f"{line}\n" for line in lines)


def states(*, display: int = -1) -> str:
    """Return the GPUs' health, display and MIG states."""
    shown = ("Disabled", "Enabled")
    return "".join(f"{at}, 0, {shown[at == display]}, Disabled\n" for at in range(8))


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A fault of gpu02, as parts of its answer. `before`: the fault precedes its first `up`."""

    probed: dict[str, tuple[str, int]] = field(default_factory=dict)
    survey: dict[str, str | None] = field(default_factory=dict)
    before: bool = False


ADA = "GPU-3, 4711, python3, 61169\n@4711 ada 0::/user.slice/user-1000.slice\n"
CASES = {
    "busy": Trouble(
        probed={"gpus": (listed(usage={3: 61173}), 0), "gpuapps": (ADA, 0)},
    ),
    "lost": Trouble(probed={"gpus": (listed(lost=3), 255), "gpuapps": ("", 0)}),
    "no-hook": Trouble(
        probed={"info": (json.dumps({"Runtimes": {"runc": {}}}), 0)},
        before=True,
    ),
    "display": Trouble(
        probed={"gpus": (listed(usage={0: 2612}), 0)},
        survey={"gpustate": states(display=0)},
    ),
}


def transcript(ran: Ran, *args: str) -> str:
    """Return a command with its output and exit code, without durations."""
    text = re.sub(r" \(\d+\.\d+s\)", "", ran.err + ran.out)
    return f"$ vlaunch {' '.join(args)}\n{text}exit code {ran.code}\n"


@pytest.mark.parametrize("name", CASES)
def test_output_for_gpu_faults(name: str, cluster: Cluster) -> None:
    """For `check`, `up` of a running cluster or of a broken one, and `serve`."""
    trouble, machine = CASES[name], cluster.world.machines["gpu02"]
    if not trouble.before:
        assert cluster.run("up").code == 0
    machine.probed.update(trouble.probed)
    machine.survey.update(trouble.survey)
    parts = [transcript(cluster.run(*args), *args) for args in (CHECK, ("up",), SERVE)]

    golden.check(GOLDEN / f"gpu-{name}.txt", "\n".join(parts))
    assert bool(cluster.world.servers()) is (name == "display")
