"""The stand-in `nvidia-smi` of practice hosts; it runs there and in their containers, alone.

Standard library only. It answers what vlaunch asks of the real one, in the same forms: queries of
GPUs and of processes as CSV, `-L`, `topo -m`, `--version`; it says of anything else that it does
not know it. What it tells lies in FOLDER: `gpus.json`, and `held-N` for GPU N, which is locked by
the process that holds the GPU's memory for as long as that lives. Ranks of vLLM claim memory by a
name of a file that they keep open (`gpu_claim.py`). In a container VISIBLE names the GPUs that
Docker has handed out, one UUID a line, and they are numbered from 0.

Forms: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`; a lost GPU as drivers from 545 on
report it, on standard error, the others being listed with their own numbers; processes of other
PID namespaces are `[Not Found]`. With which status the real one ends then is not known to us; 255
is what it ends with on other unknown errors.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("PRACTICE_GPUS", "/etc/practice-gpus"))
VISIBLE = FOLDER.with_name(FOLDER.name + ".visible")
HOLDER = "/usr/bin/sleep"  # what locks `held-N`

Gpu = dict[str, Any]
_NA = "[N/A]"
# Some of all that the real one can be asked for.
_GPU_FIELDS: dict[str, Callable[[Gpu], str]] = {
    "index": lambda gpu: str(gpu["index"]),
    "name": lambda gpu: str(gpu["name"]),
    "uuid": lambda gpu: str(gpu["uuid"]),
    "pci.bus_id": lambda gpu: str(gpu["pci"]),
    "driver_version": lambda gpu: str(gpu["driver"]),
    "compute_cap": lambda gpu: str(gpu["capability"]),
    "display_active": lambda gpu: _switch(gpu["display"]),
    "display_attached": lambda gpu: "Yes" if gpu["display"] else "No",
    "memory.total": lambda gpu: _mib(gpu["memory"]),
    "memory.used": lambda gpu: _mib(gpu["memory"] and _used(gpu)),
    "memory.free": lambda gpu: _mib(gpu["memory"] and gpu["memory"] - _used(gpu)),
    "utilization.gpu": lambda gpu: "97 %" if gpu["holder"] else "0 %",
    "utilization.memory": lambda _: "0 %",
    "power.draw": lambda gpu: "310.00 W" if gpu["holder"] else "62.00 W",
    "power.limit": lambda _: "700.00 W",
    "fabric.state": lambda _: "N/A",
    "mig.mode.current": lambda gpu: "Disabled",
    "ecc.errors.uncorrected.volatile.total": lambda gpu: str(gpu["ecc"]),
}
_APP_FIELDS: dict[str, Callable[[Gpu], str]] = {
    "gpu_name": lambda gpu: str(gpu["name"]),
    "gpu_uuid": lambda gpu: str(gpu["uuid"]),
    "gpu_bus_id": lambda gpu: str(gpu["pci"]),
    "pid": lambda gpu: str(gpu["pid"]),
    "process_name": lambda gpu: str(gpu["process"]),
    "used_gpu_memory": lambda gpu: _mib(gpu["held"]),
}
_APP_ALIASES = {"used_memory": "used_gpu_memory", "name": "process_name"}
_UNITS = {" MiB": "MiB", " %": "%", " W": "W"}


class Unanswered(Exception):
    """What cannot be answered: the words of the real one and the status it ends with."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.said, self.status = said, status


def main(argv: Sequence[str]) -> int:
    """Answer a command line; return the exit status."""
    try:
        document = _document()
        wanted = _options(argv)
        found = list(_visible(document))
        lost = [gpu for gpu in found if gpu["lost"]]
        for gpu in lost:
            sys.stderr.write(
                f"Unable to determine the device handle for GPU{gpu['index']}:"
                f" {gpu['pci'][4:]}: Unknown Error\n"
            )
        chosen = _chosen([gpu for gpu in found if not gpu["lost"]], wanted.get("--id"))
        sys.stdout.write(_answer(wanted, document, chosen))
    except Unanswered as error:
        sys.stdout.write(f"{error.said}\n")
        return error.status
    return 255 if lost else 0


def _document() -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((FOLDER / "gpus.json").read_text())
    except (OSError, ValueError):
        raise Unanswered(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make"
            " sure that the latest NVIDIA driver is installed and running.\n",
            9,
        ) from None
    return document


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Read the command line: options by their long names. Raises Unanswered."""
    long = {"-L": "--list-gpus", "-i": "--id", "-q": "--query"}
    wanted: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        name = long.get(name, name)
        if name in ("--list-gpus", "--version", "topo", "-m", "--matrix"):
            wanted[name] = ""
        elif name in ("--query-gpu", "--query-compute-apps", "--format", "--id"):
            wanted[name] = value if equals else next(words, "")
        else:
            raise Unanswered(f"nvidia-smi of a practice host does not know `{word}`", 2)
    return wanted


def _visible(document: dict[str, Any]) -> Iterator[Gpu]:
    """Yield the GPUs that can be seen from here, numbered from 0 in the order of the bus."""
    gpus: list[Gpu] = document["gpus"]
    if VISIBLE.exists():
        handed_out = VISIBLE.read_text().split()
        gpus = [gpu for gpu in gpus if gpu["uuid"] in handed_out]
    for index, gpu in enumerate(gpus):
        more = {"driver": document["driver"], "holder": holder(FOLDER / f"held-{gpu['index']}")}
        yield {**gpu, **more, "index": index}


def holder(file: Path) -> str:
    """Return the process id of who holds a GPU's memory; empty when nobody does.

    A lock ends with its process, whatever namespace that is in.
    """
    try:
        with file.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return file.read_text().strip()
    except OSError:
        return ""
    return ""


def _chosen(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """Return the GPUs that `--id` names, all without it. Raises Unanswered."""
    if wanted is None:
        return gpus
    found = [
        gpu
        for gpu in gpus
        if {str(gpu["index"]), gpu["uuid"], gpu["pci"], gpu["pci"][4:]} & set(wanted.split(","))
    ]
    if not found:
        raise Unanswered("No devices were found", 6)
    return found


def _answer(wanted: dict[str, str], document: dict[str, Any], gpus: list[Gpu]) -> str:
    if "--version" in wanted:
        driver = document["driver"]
        return (
            f"NVIDIA-SMI version  : {driver}\nNVML version        : {driver.rpartition('.')[0]}\n"
            f"DRIVER version      : {driver}\nCUDA Version        : {document['cuda']}\n"
        )
    if "topo" in wanted:
        return _topology(gpus)
    if not gpus and "--list-gpus" in wanted:
        return "No devices found.\n"
    if not gpus and "--query-compute-apps" not in wanted:
        raise Unanswered("No devices were found", 6)
    if "--list-gpus" in wanted:
        return "".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n" for gpu in gpus)
    form = wanted.get("--format", "")
    if "--query-gpu" in wanted:
        return _table(wanted["--query-gpu"], form, gpus, _GPU_FIELDS, {})
    if "--query-compute-apps" in wanted:
        apps = [{**gpu, **app} for gpu in gpus for app in _apps(gpu)]
        return _table(wanted["--query-compute-apps"], form, apps, _APP_FIELDS, _APP_ALIASES)
    return _summary(document, gpus)


def _table(
    query: str,
    form: str,
    rows: list[Gpu],
    fields: dict[str, Callable[[Gpu], str]],
    aliases: dict[str, str],
) -> str:
    """Return the answer to a query as CSV. Raises Unanswered."""
    names = [aliases.get(name.strip(), name.strip()) for name in query.split(",")]
    words = form.split(",")
    if "csv" not in words:
        raise Unanswered('"--format=" switch is missing or not valid. Use "--format=csv".', 2)
    for name in names:
        if name not in fields:
            raise Unanswered(f'Field "{name}" is not a valid field to query.\n', 2)
    cells = [[fields[name](row) for name in names] for row in rows]
    if "nounits" in words:
        cells = [[_bare(cell) for cell in row] for row in cells]
    if "noheader" not in words:
        cells.insert(0, [_heading(name, fields, rows) for name in names])
    return "".join(", ".join(row) + "\n" for row in cells)


def _heading(name: str, fields: dict[str, Callable[[Gpu], str]], rows: list[Gpu]) -> str:
    unit = next(
        (_UNITS[end] for row in rows for end in _UNITS if fields[name](row).endswith(end)), ""
    )
    return f"{name} [{unit}]" if unit else name


def _bare(cell: str) -> str:
    return next((cell.removesuffix(end) for end in _UNITS if cell.endswith(end)), cell)


def _topology(gpus: list[Gpu]) -> str:
    """Return `topo -m`: every GPU reaches every other one by NVLink; rows of network cards are left
    out.
    """
    heads = [f"GPU{gpu['index']}" for gpu in gpus]
    cards = {f"NIC{at}": name for at, name in enumerate(gpus[0].get("near", {}) if gpus else ())}
    lines = ["\t" + "\t".join([*heads, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    lines[0] = f"\x1b[4m{lines[0]}\x1b[0m"
    for head, gpu in zip(heads, gpus, strict=True):
        cells = [" X " if other == head else "NV18" for other in heads]
        cells += [gpu["near"][name] for name in cards.values()]
        lines.append("\t".join([head, *cells, "0-1", str(gpu["numa"]), "\tN/A"]))
    legend = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks"
    named = (
        ["\nNIC Legend:\n", *(f"  {head}: {name}" for head, name in cards.items())] if cards else []
    )
    return "\n".join([*lines, legend, *named, ""])


def _summary(document: dict[str, Any], gpus: list[Gpu]) -> str:
    """Return what it prints when nothing is asked: the versions, and a line for each GPU."""
    head = (
        f"NVIDIA-SMI {document['driver']}  Driver Version: {document['driver']}"
        f"  CUDA Version: {document['cuda']}"
    )
    rows = (
        f"{gpu['index']}  {gpu['name']}  {gpu['pci']}  {_mib(gpu['memory'] and _used(gpu))} /"
        f" {_mib(gpu['memory'])}  {'pid ' + gpu['holder'] if gpu['holder'] else ''}".rstrip()
        for gpu in gpus
    )
    return "\n".join((head, *rows, ""))


def _used(gpu: Gpu) -> int:
    """Return the memory in use in MiB: a little is the driver's own."""
    return 4 + sum(int(app["held"]) for app in _apps(gpu))


def _apps(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Yield the processes that hold a GPU's memory, those of vLLM's ranks by what they claim."""
    if gpu["holder"]:
        name = "[Not Found]" if VISIBLE.exists() else HOLDER
        yield {"pid": gpu["holder"], "process": name, "held": int((gpu["memory"] or 0) * 3 / 4)}
    for pid, size in _claims().get(gpu["uuid"], ()):
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        yield {"pid": pid, "process": title.partition("\0")[0], "held": size}


@cache
def _claims() -> dict[str, list[tuple[str, int]]]:
    """Return the number of each process that claims memory, and the MiB, by the GPU's UUID."""
    found: dict[str, list[tuple[str, int]]] = {}
    for file in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - pathlib's fails when one ends
        with suppress(OSError):
            if claim := re.match(r"/memfd:gpu-memory:(\S+):(\d+) ", str(Path(file).readlink())):
                found.setdefault(claim[1], []).append((file.split("/")[2], int(claim[2])))
    return found


def _mib(size: int | None) -> str:
    """Return a size; a GPU that shares the host's memory tells none."""
    return _NA if size is None else f"{size} MiB"


def _switch(on: bool) -> str:
    return "Enabled" if on else "Disabled"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
