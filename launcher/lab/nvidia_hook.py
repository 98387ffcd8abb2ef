"""Simulated `nvidia-container-runtime-hook`: exposes GPUs to a container by installing the
simulated `nvidia-smi` and its data.

It runs on the host as a single file, with the standard library only. dockerd registers its driver
`nvidia` if its PATH has a program of this name when it starts, and sets NVIDIA_VISIBLE_DEVICES:
`--gpus 2` becomes `0,1`, `--gpus '"device=4,5"'` becomes `4,5` (moby, daemon/nvidia_linux.go). runc
runs it as a prestart hook in the host's namespaces, with the container's state as JSON on standard
input, after the container's mounts and before its change of root (OCI runtime specification,
"Prestart").

Like the real hook, it queries all GPUs first: no container starts while one is lost.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GPUS_DIR = os.environ.get("PRACTICE_GPUS", "/etc/practice-gpus")  # on the host
FOLDER = "etc/practice-gpus"  # below the container's root
VISIBLE = f"{FOLDER}.visible"
PROGRAM = "usr/bin/nvidia-smi"


class GpuRequestError(Exception):
    """Rejected GPU request, with the message of the real hook."""


def main(argv: list[str]) -> int:
    """Prepare the container whose state is on standard input; return the exit status."""
    if argv[-1:] != ["prestart"]:
        return 0
    state = json.load(sys.stdin)
    config = json.loads((Path(state["bundle"]) / "config.json").read_text())
    gpus: list[dict[str, Any]] = json.loads((Path(GPUS_DIR) / "gpus.json").read_text())["gpus"]
    try:
        uuids = select_gpus(_environment(config).get("NVIDIA_VISIBLE_DEVICES", ""), gpus)
    except GpuRequestError as error:
        sys.stderr.write(f"Auto-detected mode as 'legacy'\nnvidia-container-cli: {error}\n")
        return 1
    if uuids:
        _expose_gpus(Path(state["bundle"]) / config["root"]["path"], uuids, int(state["pid"]))
    return 0


def select_gpus(selection: str, gpus: list[dict[str, Any]]) -> list[str]:
    """Return the UUIDs of the GPUs in NVIDIA_VISIBLE_DEVICES: numbers, UUIDs or `all`; none for
    `none`, `void` and an empty value.
    """
    if selection in ("", "none", "void"):
        return []
    if any(gpu["lost"] for gpu in gpus):
        raise GpuRequestError("detection error: nvml error: unknown error")
    uuids = {key: gpu["uuid"] for gpu in gpus for key in (str(gpu["index"]), gpu["uuid"])}
    names = list(uuids) if selection == "all" else selection.split(",")
    unknown = next((name for name in names if name not in uuids), None)
    if unknown is not None:
        raise GpuRequestError(f"device error: {unknown}: unknown device")
    return list(dict.fromkeys(uuids[name] for name in names))


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    entries: list[str] = config["process"].get("env") or []
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def _expose_gpus(root: Path, uuids: list[str], pid: int) -> None:
    """Copy `nvidia-smi` into a container and mount its data, so that later faults show up."""
    (root / VISIBLE).write_text("\n".join(uuids) + "\n")
    shutil.copy(Path(__file__).with_name("nvidia-smi"), root / PROGRAM)
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    target = str(root / FOLDER)
    for mount in (("--bind", GPUS_DIR, target), ("-o", "remount,bind,ro", target)):
        subprocess.run(
            ("nsenter", f"--target={pid}", "--mount", "--", "mount", *mount),
            check=True,
            timeout=20,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
