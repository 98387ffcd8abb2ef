"""Helpers for the tests of `vlaunch batch`: job files, progress on the head's disk, and output."""

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
from tests.integration.conftest import CommandResult, LabCluster

MODEL = f"{HF_HOME}/tiny-llama"
MOE_MODEL = f"{HF_HOME}/tiny-moe"
EMBEDDING_MODEL = f"{HF_HOME}/tiny-embed"
# vLLM on the CPUs of a small machine, quick to start.
ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 67108864,
    "max_num_seqs": 16,
}
_FINAL_STATES = ("done", "failed", "refused", "stopped")


@dataclass(frozen=True)
class Batch:
    """A batch job: its file, input and output on the control machine, and its folder on the
    head.
    """

    lab_cluster: LabCluster
    name: str
    folder: Path | None = None

    @property
    def path(self) -> Path:
        """The job file."""
        return (self.folder or self.lab_cluster.folder) / f"{self.name}.yaml"

    @property
    def input(self) -> Path:
        """The input that `write` creates."""
        return self.path.with_suffix(".jsonl")

    @property
    def out(self) -> Path:
        """The folder of its answers."""
        return self.path.parent / "out" / self.name

    @property
    def work(self) -> Path:
        """Its folder on the head, without SSH."""
        return hosts.hf_home(self.lab_cluster.lab.hosts[0]) / "vlaunch/lab/batch" / self.name

    def write(self, rows: list[Any] | None = None, **sections: Any) -> Batch:
        """Write the job file and its input: rows as JSON, bytes as they are."""
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

    def run(self, *arguments: str, timeout: float = 400) -> CommandResult:
        """Run the job as a user would."""
        return self.lab_cluster.vlaunch("batch", str(self.path), *arguments, timeout=timeout)

    def detach(self) -> Batch:
        """Start the job in the background."""
        result = self.run("--detach", timeout=120)
        assert result.code == 0, result.output
        return self

    @property
    def progress(self) -> dict[str, Any]:
        """The driver's progress; empty before the first report."""
        try:
            report: dict[str, Any] = json.loads((self.work / "progress.json").read_text())
        except FileNotFoundError:
            return {}
        return report

    @property
    def summary(self) -> dict[str, Any]:
        """The summary beside the answers."""
        report: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return report

    def count_committed(self) -> int:
        """Return the number of rows in committed files on the head."""
        return sum(
            json.loads(path.read_text())["count"]
            for path in (self.work / "output/ledger").glob("part-*.json")
            if any(
                (self.work / "output" / kind).glob(f"{path.stem}.*") for kind in ("rows", "errors")
            )
        )

    def await_progress(self, minimum: int = 1, *, timeout: float = 600) -> Batch:
        """Wait until some rows are committed, and others are not."""
        wait_until(
            lambda: self.count_committed() >= minimum or self.is_over(),
            f"committed rows of {self.name}",
            timeout,
        )
        assert not self.is_over(), self.progress
        return self

    def is_over(self) -> bool:
        """Return whether the driver has reported a final state."""
        return self.progress.get("state") in _FINAL_STATES

    def await_end(self, *, timeout: float = 300) -> dict[str, Any]:
        """Wait for the end of a detached job; return its last progress."""
        wait_until(self.is_over, f"the end of {self.name}", timeout)
        return self.progress

    def answers(self) -> list[dict[str, Any]]:
        """Return all answered rows in the order of the input."""
        return read_rows(self.out)

    def errors(self) -> list[dict[str, Any]]:
        """Return all error rows in the order of the input."""
        return read_errors(self.out)

    def assert_complete(self, rows: int) -> None:
        """Assert that every row of the input is in the output exactly once, without partial
        files.
        """
        counted = Counter(row["row"] for row in [*self.answers(), *self.errors()])
        assert counted == Counter(range(rows)), (
            counted - Counter(range(rows)),
            Counter(range(rows)) - counted,
        )
        hidden = [path for kind in ("rows", "errors") for path in (self.out / kind).glob(".*")]
        assert not hidden, hidden


def wait_until(condition: Callable[[], Any], description: str, timeout: float) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{description}: not within {timeout:g} s"
        time.sleep(0.1)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read a folder of answers, sorted by their rows."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "rows").glob("*")):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["row"]))


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """Read a folder of error rows, sorted by their rows."""
    lines = [
        line
        for path in (folder / "errors").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((json.loads(line) for line in lines), key=lambda row: int(row["row"]))


def find_processes(
    lab_cluster: LabCluster, pattern: str, host: str | None = None
) -> Iterator[tuple[int, str]]:
    """Yield pid, as this machine sees it, and command line of the lab hosts' processes that match
    `pattern`.
    """
    candidates = (
        processes.host_processes(lab_cluster.lab.host(host))
        if host
        else processes.lab_processes(lab_cluster.lab.name)
    )
    for process in candidates:
        try:
            line = (
                Path(f"/proc/{process.pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            continue
        if pattern in line:
            yield process.pid, line


def kill_process(lab_cluster: LabCluster, pattern: str, host: str | None = None) -> int:
    """Kill a process by a part of its command line, as a crash or the kernel does; return the
    number of matches.
    """
    pids = [pid for pid, _ in find_processes(lab_cluster, pattern, host)]
    lines = sorted(line[:90] for _, line in find_processes(lab_cluster, ""))
    assert pids, f"no process `{pattern}`: {lines}"
    os.kill(pids[0], signal.SIGKILL)
    return len(pids)


def query_ray(lab_cluster: LabCluster, program: str) -> Any:
    """Query Ray's state API on the head; `program` assigns its result to `result`."""
    text = f"import json\nfrom ray.util.state import *\n{program}\nprint(json.dumps(result))"
    return json.loads(
        lab_cluster.docker(
            "node1", "exec", "vlaunch-lab-node1", "python3", "-c", text
        ).splitlines()[-1]
    )


def count_batches(lab_cluster: LabCluster, submission: str, actor: str = "Replica") -> Counter[str]:
    """Return the number of batches that each node answered in a job, by Ray's own records."""
    program = f"""
job = next(job.job_id for job in list_jobs(detail=True) if job.submission_id == {submission!r})
nodes = {{node.node_id: node.node_ip for node in list_nodes()}}
done = [("job_id", "=", job), ("state", "=", "FINISHED")]
tasks = list_tasks(filters=done, detail=True, limit=9999)
result = [nodes[task.node_id] for task in tasks if {actor!r} in task.name and "submit" in task.name]
"""
    return Counter(query_ray(lab_cluster, program))
