"""Stand-in NVIDIA GPUs of practice hosts: their programs, what these tell, and processes that hold
memory.

There is no GPU and no CUDA behind them. vLLM's CPU build computes in their place.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from launcher.lab import devices, gpu_trouble, hosts, machine, nvidia_smi, processes
from launcher.lab.gpu_models import BUSES, CUDA, DRIVER, MODELS
from launcher.lab.gpu_trouble import Trouble
from launcher.lab.layout import Host, Lab

FOLDER = nvidia_smi.FOLDER
HOOK = "nvidia-container-runtime-hook"

# Holds a GPU's memory: writes down who it is, then locks that file for as long as it lives, as the
# login `ops`.
_HOLD = (
    'umask 022; printf "%s\\n" "$$" >"$1";'
    " exec setpriv --reuid 1000 --regid 1000 --clear-groups"
    f' flock --no-fork "$1" {nvidia_smi.HOLDER} infinity'
)


def prepare(lab: Lab, host: Host) -> bool:
    """Write the stand-in programs of a host and what they tell; True when the host must boot
    before that is so.

    dockerd looks for the toolkit at its start alone; and programs lie under a mount that is made
    when a host boots.
    """
    if lab.accelerator != "nvidia":
        return False
    programs = {"nvidia-smi": Path(nvidia_smi.__file__)}
    if not any(each.kind == gpu_trouble.NO_TOOLKIT for each in of_host(lab, host)):
        programs[HOOK] = Path(nvidia_smi.__file__).with_name("nvidia_hook.py")
    folder = host.programs
    folder.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in folder.iterdir()}
    for name in before - set(programs):
        (folder / name).unlink()
    for name, source in programs.items():
        _replace(folder / name, "#!/usr/bin/env python3\n" + source.read_text(), 0o755)
    told = _told(host)
    told.mkdir(parents=True, exist_ok=True)
    _replace(told / "gpus.json", json.dumps(document(lab, host), indent=1) + "\n", 0o644)
    return before != set(programs)


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace a file in one go: somebody may be reading it."""
    if path.exists() and path.read_text() == text:
        return
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def _told(host: Host) -> Path:
    return host.root / str(FOLDER).lstrip("/")


def of_host(lab: Lab, host: Host) -> list[Trouble]:
    """Return what is wrong with a host's GPUs."""
    return [each for each in lab.troubles if each.host == host.name]


def document(lab: Lab, host: Host) -> dict[str, object]:
    """Return what `nvidia-smi` tells on a host, as its stand-in reads it."""
    model, wrong = MODELS[lab.gpu_model], of_host(lab, host)

    def has(kind: str, index: int) -> bool:
        return any((each.kind, each.index) == (kind, index) for each in wrong)

    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{host.name}.{lab.name}')}",
            "name": f"{model.name} (practice)",
            "pci": f"00000000:{BUSES[index]:02X}:00.0",
            "memory": model.memory,
            "capability": model.capability,
            "numa": index * 2 // lab.gpus,
            "ecc": 2 if has(gpu_trouble.ECC, index) else 0,
            "display": has(gpu_trouble.DISPLAY, index),
            "lost": has(gpu_trouble.LOST, index),
            "near": devices.near(lab, index),
        }
        for index in range(lab.gpus)
    ]
    return {"driver": DRIVER, "cuda": CUDA, "gpus": gpus}


def hold(lab: Lab, host: Host) -> None:
    """Have somebody hold the memory of the GPUs that are to be busy, and nobody that of others."""
    busy = {each.index or 0 for each in of_host(lab, host) if each.kind == gpu_trouble.BUSY}
    held = dict(_holders(host))
    for index in held.keys() - busy:
        processes.kill(held[index], signal.SIGKILL)
    for index in busy - held.keys():
        file = f"held-{index}"
        machine.run(
            *("setsid", "--fork", "sh", "-c", 'exec "$@" >/dev/null 2>&1 </dev/null', "sh"),
            *hosts.enter_argv(host, "sh", "-c", _HOLD, "sh", f"{FOLDER}/{file}"),
        )
        machine.await_true(
            partial(_held, _told(host) / file),
            what=f"the process that holds GPU {index} of `{host.name}`",
            timeout=10,
        )


def _held(file: Path) -> bool:
    return nvidia_smi.holder(file) != ""


def _holders(host: Host) -> Iterator[tuple[int, int]]:
    """Yield the GPUs whose memory is held, and the machine's process ids of who holds it."""
    of_host = processes.on_host(host)
    for file in _told(host).glob("held-*"):
        pid = nvidia_smi.holder(file)
        for process in of_host:
            if pid and process.marker == host.marker and process.pids[-1] == int(pid):
                yield int(file.name.partition("-")[2]), process.pid
