"""What the tests of `vlaunch batch` share: job files, what a job has come to on the head's disk,
and what its output holds.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from launcher.lab import hosts, processes
from launcher.lab.layout import HF_HOME
from tests.integration.conftest import Practice, Ran

MODEL = f"{HF_HOME}/tiny-llama"
MIXTURE = f"{HF_HOME}/tiny-moe"
EMBEDS = f"{HF_HOME}/tiny-embed"
# vLLM on the CPUs of a small machine, quick to start.
ARGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 67108864,
    "max_num_seqs": 16,
}
_OVER = ("done", "failed", "refused", "stopped")


@dataclass(frozen=True)
class Batch:
    """One batch job: its file, its input and its output on the control machine, and its folder on
    the head.
    """

    practice: Practice
    name: str
    folder: Path | None = None

    @property
    def path(self) -> Path:
        """The job file."""
        return (self.folder or self.practice.folder) / f"{self.name}.yaml"

    @property
    def input(self) -> Path:
        """The input that `write` makes."""
        return self.path.with_suffix(".jsonl")

    @property
    def out(self) -> Path:
        """Where its answers are gathered."""
        return self.path.parent / "out" / self.name

    @property
    def work(self) -> Path:
        """Its folder on the head, past SSH."""
        return hosts.hf_home(self.practice.lab.hosts[0]) / "vlaunch/lab/batch" / self.name

    def write(self, rows: list[Any] | None = None, **sections: Any) -> Batch:
        """Write the job file, and its input: rows as JSON, or lines as they are where they are
        bytes.
        """
        if rows is not None:
            lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
            self.input.write_bytes(b"".join(line + b"\n" for line in lines))
        document = {
            "read": self.input.name,
            "write": {"path": f"out/{self.name}", "rows_per_file": 50, "seconds": 1},
            **sections,
        }
        self.path.write_text(yaml.safe_dump(document))
        return self

    def run(self, *words: str, timeout: float = 400) -> Ran:
        """Run the job as a user would, to its end."""
        return self.practice.vlaunch("batch", str(self.path), *words, timeout=timeout)

    def detach(self) -> Batch:
        """Start the job and leave it alone."""
        ran = self.run("--detach", timeout=120)
        assert ran.code == 0, ran.said
        return self

    @property
    def progress(self) -> dict[str, Any]:
        """What the driver says of itself; empty before it has said anything."""
        try:
            said: dict[str, Any] = json.loads((self.work / "progress.json").read_text())
        except FileNotFoundError:
            return {}
        return said

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that was gathered with the answers."""
        said: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return said

    def committed(self) -> int:
        """Return how many rows are in committed files on the head."""
        return sum(
            json.loads(path.read_text())["count"]
            for path in (self.work / "output/ledger").glob("part-*.json")
            if any(
                (self.work / "output" / kind).glob(f"{path.stem}.*") for kind in ("rows", "errors")
            )
        )

    def under_way(self, least: int = 1, *, timeout: float = 300) -> Batch:
        """Wait until some rows are committed, and others are not."""
        until(
            lambda: self.committed() >= least or self.over(),
            f"committed rows of {self.name}",
            timeout,
        )
        assert not self.over(), self.progress
        return self

    def over(self) -> bool:
        """Tell whether the driver has ended by its own account."""
        return self.progress.get("state") in _OVER

    def ended(self, *, timeout: float = 300) -> dict[str, Any]:
        """Wait for the end of a job that nobody watches; return its last progress."""
        until(self.over, f"the end of {self.name}", timeout)
        return self.progress

    def answers(self) -> list[dict[str, Any]]:
        """Return all answered rows in the order of the input."""
        return rows_of(self.out)

    def errors(self) -> list[dict[str, Any]]:
        """Return all error rows in the order of the input."""
        return errors_of(self.out)

    def each_once(self, rows: int) -> None:
        """Check that every row of the input is in the output, once, and that nothing half-written
        lies there.
        """
        counted = Counter(each["row"] for each in [*self.answers(), *self.errors()])
        assert counted == Counter(range(rows)), (
            counted - Counter(range(rows)),
            Counter(range(rows)) - counted,
        )
        hidden = [path for kind in ("rows", "errors") for path in (self.out / kind).glob(".*")]
        assert not hidden, hidden


def until(condition: Callable[[], Any], what: str, timeout: float) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.1)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Read a folder of answers, sorted by their rows."""
    found: list[dict[str, Any]] = []
    for path in sorted((folder / "rows").glob("*")):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda row: int(row["row"]))


def errors_of(folder: Path) -> list[dict[str, Any]]:
    """Read a folder of error rows, sorted by their rows."""
    lines = [
        line
        for path in (folder / "errors").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((json.loads(line) for line in lines), key=lambda row: int(row["row"]))


def running(practice: Practice, words: str, host: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield process id, as this machine sees it, and command line of the practice hosts' processes
    that have `words` in it.
    """
    everything = (
        processes.host_processes(practice.lab.host(host))
        if host
        else processes.lab_processes(practice.lab.name)
    )
    for process in everything:
        try:
            line = (
                Path(f"/proc/{process.pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            continue
        if words in line:
            yield process.pid, line


def kill_one(practice: Practice, words: str, host: str | None = None) -> int:
    """Kill a process by a part of its command line, as a crash or the kernel does; return how many
    had it.
    """
    found = [pid for pid, _ in running(practice, words, host)]
    assert found, f"no process `{words}`: {sorted(line[:90] for _, line in running(practice, ''))}"
    os.kill(found[0], signal.SIGKILL)
    return len(found)


def ray_state(practice: Practice, program: str) -> Any:
    """Ask Ray's state API on the head; `program` leaves its answer in `found`."""
    text = f"import json\nfrom ray.util.state import *\n{program}\nprint(json.dumps(found))"
    return json.loads(
        practice.docker("node1", "exec", "vlaunch-lab-node1", "python3", "-c", text).splitlines()[
            -1
        ]
    )


def worked(practice: Practice, submission: str, actor: str = "Replica") -> Counter[str]:
    """Return how many batches each node answered in a job, by Ray's own records."""
    program = f"""
job = next(each.job_id for each in list_jobs(detail=True) if each.submission_id == {submission!r})
nodes = {{each.node_id: each.node_ip for each in list_nodes()}}
done = [("job_id", "=", job), ("state", "=", "FINISHED")]
tasks = list_tasks(filters=done, detail=True, limit=9999)
found = [nodes[each.node_id] for each in tasks if {actor!r} in each.name and "submit" in each.name]
"""
    return Counter(ray_state(practice, program))
