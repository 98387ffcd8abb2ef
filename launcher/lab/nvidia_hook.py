"""The stand-in `nvidia-container-runtime-hook` of practice hosts: gives a container those GPUs that
Docker hands out, which is the stand-in `nvidia-smi` and what that may tell.

Standard library only; it runs on the host, alone. dockerd registers its driver `nvidia` when it
finds a program of this name in its PATH at its start, and sets NVIDIA_VISIBLE_DEVICES: `--gpus 2`
becomes `0,1`, `--gpus '"device=4,5"'` becomes `4,5` (moby, daemon/nvidia_linux.go). runc then runs
it as a prestart hook, with the container's state as JSON on standard input, in the host's
namespaces, when the container's mounts are made and its root is not yet changed (OCI runtime
specification, "Prestart").

As the real one, it looks at every GPU before it decides which to hand out: one that is lost lets no
container start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOLD = os.environ.get("PRACTICE_GPUS", "/etc/practice-gpus")  # on the host
FOLDER = "etc/practice-gpus"  # below the container's root
VISIBLE = f"{FOLDER}.visible"
PROGRAM = "usr/bin/nvidia-smi"


class Refused(Exception):
    """Why the container cannot have what it asks for, in the real one's words."""


def main(argv: list[str]) -> int:
    """Prepare the container whose state is on standard input; return the exit status."""
    if argv[-1:] != ["prestart"]:
        return 0
    state = json.load(sys.stdin)
    config = json.loads((Path(state["bundle"]) / "config.json").read_text())
    gpus: list[dict[str, Any]] = json.loads((Path(TOLD) / "gpus.json").read_text())["gpus"]
    try:
        uuids = handed_out(_environment(config).get("NVIDIA_VISIBLE_DEVICES", ""), gpus)
    except Refused as error:
        sys.stderr.write(f"Auto-detected mode as 'legacy'\nnvidia-container-cli: {error}\n")
        return 1
    if uuids:
        _give(Path(state["bundle"]) / config["root"]["path"], uuids, int(state["pid"]))
    return 0


def handed_out(wanted: str, gpus: list[dict[str, Any]]) -> list[str]:
    """Return the UUIDs of the GPUs that NVIDIA_VISIBLE_DEVICES names: by number, by UUID, or
    `all`; `none`, `void` and nothing name none. Raises Refused.
    """
    if wanted in ("", "none", "void"):
        return []
    if any(gpu["lost"] for gpu in gpus):
        raise Refused("detection error: nvml error: unknown error")
    known = {key: gpu["uuid"] for gpu in gpus for key in (str(gpu["index"]), gpu["uuid"])}
    names = list(known) if wanted == "all" else wanted.split(",")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise Refused(f"device error: {unknown}: unknown device")
    return list(dict.fromkeys(known[name] for name in names))


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    words: list[str] = config["process"].get("env") or []
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _give(root: Path, uuids: list[str], pid: int) -> None:
    """Put `nvidia-smi` into a container's root, and mount there what it tells: a GPU that gets into
    trouble later does so in containers too.
    """
    (root / VISIBLE).write_text("\n".join(uuids) + "\n")
    shutil.copy(Path(__file__).with_name("nvidia-smi"), root / PROGRAM)
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    target = str(root / FOLDER)
    for mount in (("--bind", TOLD, target), ("-o", "remount,bind,ro", target)):
        subprocess.run(
            ("nsenter", f"--target={pid}", "--mount", "--", "mount", *mount),
            check=True,
            timeout=20,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
