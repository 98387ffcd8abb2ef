"""Simulated NVIDIA GPUs: programs, their data, and processes that occupy memory.

There are no GPUs and no CUDA: vLLM's CPU build does the computing.
"""

import json
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from launcher.lab import devices, gpu_trouble, hosts, machine, nvidia_smi, processes
from launcher.lab.gpu_models import BUSES, CUDA, DRIVER, MODELS
from launcher.lab.gpu_trouble import GpuTrouble
from launcher.lab.layout import Host, Lab

FOLDER = nvidia_smi.FOLDER
HOOK = "nvidia-container-runtime-hook"

# Occupies a GPU's memory as the user `ops`: writes its process id to a file, which it then locks
# until it exits.
_HOLD = (
    'umask 022; printf "%s\\n" "$$" >"$1";'
    " exec setpriv --reuid 1000 --regid 1000 --clear-groups"
    f' flock --no-fork "$1" {nvidia_smi.HOLDER} infinity'
)


def prepare(lab: Lab, host: Host) -> bool:
    """Write a host's simulated programs and their data; True when the host must reboot.

    Booting mounts the programs, and dockerd looks for the toolkit only when it starts.
    """
    if lab.accelerator != "nvidia":
        return False
    programs = {"nvidia-smi": Path(nvidia_smi.__file__)}
    if not any(trouble.kind == gpu_trouble.NO_TOOLKIT for trouble in host_troubles(lab, host)):
        programs[HOOK] = Path(nvidia_smi.__file__).with_name("nvidia_hook.py")
    folder = host.programs
    folder.mkdir(parents=True, exist_ok=True)
    existing = {path.name for path in folder.iterdir()}
    for name in existing - set(programs):
        (folder / name).unlink()
    for name, source in programs.items():
        _replace(folder / name, "#!/usr/bin/env python3\n" + source.read_text(), 0o755)
    document_dir = _document_dir(host)
    document_dir.mkdir(parents=True, exist_ok=True)
    _replace(
        document_dir / "gpus.json", json.dumps(smi_document(lab, host), indent=1) + "\n", 0o644
    )
    return existing != set(programs)


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace a file atomically, since it may be in use."""
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def _document_dir(host: Host) -> Path:
    return host.root / str(FOLDER).lstrip("/")


def host_troubles(lab: Lab, host: Host) -> list[GpuTrouble]:
    """Return the faults of a host's GPUs."""
    return [trouble for trouble in lab.troubles if trouble.host == host.name]


def smi_document(lab: Lab, host: Host) -> dict[str, object]:
    """Return the data that the simulated `nvidia-smi` reads on a host."""
    model, troubles = MODELS[lab.gpu_model], host_troubles(lab, host)

    def has(kind: str, index: int) -> bool:
        return any((trouble.kind, trouble.index) == (kind, index) for trouble in troubles)

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
            "near": devices.gpu_affinity(lab, index),
        }
        for index in range(lab.gpus)
    ]
    return {"driver": DRIVER, "cuda": CUDA, "gpus": gpus}


def hold_memory(lab: Lab, host: Host) -> None:
    """Start processes that occupy the memory of busy GPUs, and kill those of other GPUs."""
    busy = {
        trouble.index or 0
        for trouble in host_troubles(lab, host)
        if trouble.kind == gpu_trouble.BUSY
    }
    holders = dict(_memory_holders(host))
    for index in holders.keys() - busy:
        processes.send_signal(holders[index], signal.SIGKILL)
    for index in busy - holders.keys():
        file = f"held-{index}"
        machine.run(
            *("setsid", "--fork", "sh", "-c", 'exec "$@" >/dev/null 2>&1 </dev/null', "sh"),
            *hosts.enter_argv(host, "sh", "-c", _HOLD, "sh", f"{FOLDER}/{file}"),
        )
        machine.await_true(
            partial(_is_locked, _document_dir(host) / file),
            what=f"the process that holds GPU {index} of `{host.name}`",
            timeout=10,
        )


def _is_locked(file: Path) -> bool:
    return nvidia_smi.holder(file) != ""


def _memory_holders(host: Host) -> Iterator[tuple[int, int]]:
    """Yield each GPU with occupied memory, and the process id on the machine."""
    host_processes = processes.host_processes(host)
    for file in _document_dir(host).glob("held-*"):
        pid = nvidia_smi.holder(file)
        for process in host_processes:
            if pid and process.marker == host.marker and process.pids[-1] == int(pid):
                yield int(file.name.partition("-")[2]), process.pid
