"""Simulated `nvidia-smi`: a single file for lab hosts and their containers.

It uses the standard library only and supports the queries that vlaunch makes, in the same formats:
GPUs and processes as CSV, `-L`, `topo -m`, `--version`. FOLDER has its data: `gpus.json`, and
`held-N` for GPU N, locked by the process that occupies the GPU's memory. Ranks of vLLM claim memory
by the name of an open file (`gpu_claim.py`). In a container, VISIBLE lists the UUIDs of the exposed
GPUs, one per line; they are numbered from 0.

Formats: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`. Lost GPUs are reported on
standard error as by drivers from 545 on, and the others keep their numbers; processes of other PID
namespaces are `[Not Found]`. The real exit status for a lost GPU is unknown; 255 is the one for
other unknown errors.
"""

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
HOLDER = "/usr/bin/sleep"  # locks `held-N`

Gpu = dict[str, Any]
_NA = "[N/A]"
# A subset of the real fields.
_GPU_FIELDS: dict[str, Callable[[Gpu], str]] = {
    "index": lambda gpu: str(gpu["index"]),
    "name": lambda gpu: str(gpu["name"]),
    "uuid": lambda gpu: str(gpu["uuid"]),
    "pci.bus_id": lambda gpu: str(gpu["pci"]),
    "driver_version": lambda gpu: str(gpu["driver"]),
    "compute_cap": lambda gpu: str(gpu["capability"]),
    "display_active": lambda gpu: _format_flag(gpu["display"]),
    "display_attached": lambda gpu: "Yes" if gpu["display"] else "No",
    "memory.total": lambda gpu: _format_mib(gpu["memory"]),
    "memory.used": lambda gpu: _format_mib(gpu["memory"] and _used_memory(gpu)),
    "memory.free": lambda gpu: _format_mib(gpu["memory"] and gpu["memory"] - _used_memory(gpu)),
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
    "used_gpu_memory": lambda gpu: _format_mib(gpu["held"]),
}
_APP_ALIASES = {"used_memory": "used_gpu_memory", "name": "process_name"}
_UNITS = {" MiB": "MiB", " %": "%", " W": "W"}


class QueryError(Exception):
    """Failed query, with the message and exit status of the real program."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status


def main(argv: Sequence[str]) -> int:
    """Answer a command line; return the exit status."""
    try:
        document = _document()
        options = _parse_options(argv)
        gpus = list(_visible_gpus(document))
        lost = [gpu for gpu in gpus if gpu["lost"]]
        for gpu in lost:
            sys.stderr.write(
                f"Unable to determine the device handle for GPU{gpu['index']}:"
                f" {gpu['pci'][4:]}: Unknown Error\n"
            )
        selected = _select_gpus([gpu for gpu in gpus if not gpu["lost"]], options.get("--id"))
        sys.stdout.write(_answer(options, document, selected))
    except QueryError as error:
        sys.stdout.write(f"{error.text}\n")
        return error.status
    return 255 if lost else 0


def _document() -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((FOLDER / "gpus.json").read_text())
    except (OSError, ValueError):
        raise QueryError(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make"
            " sure that the latest NVIDIA driver is installed and running.\n",
            9,
        ) from None
    return document


def _parse_options(argv: Sequence[str]) -> dict[str, str]:
    """Parse the command line into options by their long names."""
    long = {"-L": "--list-gpus", "-i": "--id", "-q": "--query"}
    options: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        name, separator, value = argument.partition("=")
        name = long.get(name, name)
        if name in ("--list-gpus", "--version", "topo", "-m", "--matrix"):
            options[name] = ""
        elif name in ("--query-gpu", "--query-compute-apps", "--format", "--id"):
            options[name] = value if separator else next(arguments, "")
        else:
            raise QueryError(f"the simulated nvidia-smi does not support `{argument}`", 2)
    return options


def _visible_gpus(document: dict[str, Any]) -> Iterator[Gpu]:
    """Yield the visible GPUs, numbered from 0 in bus order."""
    gpus: list[Gpu] = document["gpus"]
    if VISIBLE.exists():
        handed_out = VISIBLE.read_text().split()
        gpus = [gpu for gpu in gpus if gpu["uuid"] in handed_out]
    for index, gpu in enumerate(gpus):
        state = {"driver": document["driver"], "holder": holder(FOLDER / f"held-{gpu['index']}")}
        yield {**gpu, **state, "index": index}


def holder(file: Path) -> str:
    """Return the id of the process that occupies a GPU's memory; empty if none does.

    The lock works across namespaces and ends with its process.
    """
    try:
        with file.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return file.read_text().strip()
    except OSError:
        return ""
    return ""


def _select_gpus(gpus: list[Gpu], selection: str | None) -> list[Gpu]:
    """Return the GPUs selected by `--id`; all without it."""
    if selection is None:
        return gpus
    selected = [
        gpu
        for gpu in gpus
        if {str(gpu["index"]), gpu["uuid"], gpu["pci"], gpu["pci"][4:]} & set(selection.split(","))
    ]
    if not selected:
        raise QueryError("No devices were found", 6)
    return selected


def _answer(options: dict[str, str], document: dict[str, Any], gpus: list[Gpu]) -> str:
    if "--version" in options:
        driver = document["driver"]
        return (
            f"NVIDIA-SMI version  : {driver}\nNVML version        : {driver.rpartition('.')[0]}\n"
            f"DRIVER version      : {driver}\nCUDA Version        : {document['cuda']}\n"
        )
    if "topo" in options:
        return _topology(gpus)
    if not gpus and "--list-gpus" in options:
        return "No devices found.\n"
    if not gpus and "--query-compute-apps" not in options:
        raise QueryError("No devices were found", 6)
    if "--list-gpus" in options:
        return "".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n" for gpu in gpus)
    form = options.get("--format", "")
    if "--query-gpu" in options:
        return _table(options["--query-gpu"], form, gpus, _GPU_FIELDS, {})
    if "--query-compute-apps" in options:
        apps = [{**gpu, **app} for gpu in gpus for app in _apps(gpu)]
        return _table(options["--query-compute-apps"], form, apps, _APP_FIELDS, _APP_ALIASES)
    return _summary(document, gpus)


def _table(
    query: str,
    form: str,
    rows: list[Gpu],
    fields: dict[str, Callable[[Gpu], str]],
    aliases: dict[str, str],
) -> str:
    """Format the answer to a query as CSV."""
    names = [aliases.get(name.strip(), name.strip()) for name in query.split(",")]
    flags = form.split(",")
    if "csv" not in flags:
        raise QueryError('"--format=" switch is missing or not valid. Use "--format=csv".', 2)
    for name in names:
        if name not in fields:
            raise QueryError(f'Field "{name}" is not a valid field to query.\n', 2)
    cells = [[fields[name](row) for name in names] for row in rows]
    if "nounits" in flags:
        cells = [[_strip_unit(cell) for cell in row] for row in cells]
    if "noheader" not in flags:
        cells.insert(0, [_heading(name, fields, rows) for name in names])
    return "".join(", ".join(row) + "\n" for row in cells)


def _heading(name: str, fields: dict[str, Callable[[Gpu], str]], rows: list[Gpu]) -> str:
    unit = next(
        (_UNITS[end] for row in rows for end in _UNITS if fields[name](row).endswith(end)), ""
    )
    return f"{name} [{unit}]" if unit else name


def _strip_unit(cell: str) -> str:
    return next((cell.removesuffix(end) for end in _UNITS if cell.endswith(end)), cell)


def _topology(gpus: list[Gpu]) -> str:
    """Format `topo -m`: all GPUs are connected by NVLink; omits the rows of network cards."""
    heads = [f"GPU{gpu['index']}" for gpu in gpus]
    cards = {
        f"NIC{number}": name for number, name in enumerate(gpus[0].get("near", {}) if gpus else ())
    }
    lines = ["\t" + "\t".join([*heads, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    lines[0] = f"\x1b[4m{lines[0]}\x1b[0m"
    for head, gpu in zip(heads, gpus, strict=True):
        cells = [" X " if other == head else "NV18" for other in heads]
        cells += [gpu["near"][name] for name in cards.values()]
        lines.append("\t".join([head, *cells, "0-1", str(gpu["numa"]), "\tN/A"]))
    legend = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks"
    nic_legend = (
        ["\nNIC Legend:\n", *(f"  {head}: {name}" for head, name in cards.items())] if cards else []
    )
    return "\n".join([*lines, legend, *nic_legend, ""])


def _summary(document: dict[str, Any], gpus: list[Gpu]) -> str:
    """Format the output without options: the versions, and a line per GPU."""
    versions = (
        f"NVIDIA-SMI {document['driver']}  Driver Version: {document['driver']}"
        f"  CUDA Version: {document['cuda']}"
    )
    rows = (
        f"{gpu['index']}  {gpu['name']}  {gpu['pci']}"
        f"  {_format_mib(gpu['memory'] and _used_memory(gpu))} / {_format_mib(gpu['memory'])}"
        f"  {'pid ' + gpu['holder'] if gpu['holder'] else ''}".rstrip()
        for gpu in gpus
    )
    return "\n".join((versions, *rows, ""))


def _used_memory(gpu: Gpu) -> int:
    """Return the memory in use in MiB, including a little of the driver's own."""
    return 4 + sum(int(app["held"]) for app in _apps(gpu))


def _apps(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Yield the processes that use a GPU's memory, with the size; ranks of vLLM by their claims."""
    if gpu["holder"]:
        name = "[Not Found]" if VISIBLE.exists() else HOLDER
        yield {"pid": gpu["holder"], "process": name, "held": int((gpu["memory"] or 0) * 3 / 4)}
    for pid, size in _claims().get(gpu["uuid"], ()):
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        yield {"pid": pid, "process": title.partition("\0")[0], "held": size}


@cache
def _claims() -> dict[str, list[tuple[str, int]]]:
    """Return claims as pairs of process id and MiB, by the GPU's UUID."""
    claims: dict[str, list[tuple[str, int]]] = {}
    for file in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - pathlib's fails when one ends
        with suppress(OSError):
            if claim := re.match(r"/memfd:gpu-memory:(\S+):(\d+) ", str(Path(file).readlink())):
                claims.setdefault(claim[1], []).append((file.split("/")[2], int(claim[2])))
    return claims


def _format_mib(size: int | None) -> str:
    """Format a size; None for a GPU that shares the host's memory."""
    return _NA if size is None else f"{size} MiB"


def _format_flag(on: bool) -> str:
    return "Enabled" if on else "Disabled"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
