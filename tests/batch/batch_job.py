"""A batch job on simulated nodes: its files, and a fake driver with the real one's traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.command_line import INVENTORY, Cluster, Ran

JOB = """\
model: org/m
read: prompts.jsonl
write: {path: out, format: jsonl}
engine: {args: {max_model_len: 512}}
"""


@dataclass
class Batch:
    """A running cluster, a job of ten rows in `job.yaml`, and its fake driver. `errors` are the
    rows that fail; `dies` is called before the driver's final report.
    """

    cluster: Cluster
    folder: Path
    errors: set[int] = field(default_factory=set)
    dies: Callable[[dict[str, Any]], None] | None = None
    per_file: int = 4

    def run(self, *argv: str) -> Ran:
        """Run `vlaunch batch job.yaml` with further arguments."""
        return self.cluster.run("batch", "job.yaml", *argv)

    @property
    def work(self) -> Path:
        """The job's folder on the head."""
        return self.folder / "hf/vlaunch/c/batch/job"

    def verbs(self) -> list[str]:
        """Verbs that changed the head, in order; cleared when read."""
        done = [verb.removeprefix("gpu01: ") for verb in self.cluster.world.verbs()]
        self.cluster.world.changes.clear()
        return done

    def gathered(self) -> dict[str, bytes]:
        """Local files of the output."""
        out = self.folder / "out"
        return {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }

    def answers(self) -> list[dict[str, Any]]:
        """Answered rows, ordered by number."""
        lines = [
            line
            for path in (self.folder / "out/rows").iterdir()
            for line in path.read_text().splitlines()
        ]
        return sorted((json.loads(line) for line in lines), key=lambda row: row["row"])

    def driver(self, job: dict[str, Any]) -> None:
        """Answer every pending row, like the driver in the container."""
        work = Path(job["argv"][-1])
        content = json.loads((work / "job.json").read_text())
        out = Path(content["write"]["path"])
        rows = [
            line
            for source in content["read"]["paths"]
            for line in Path(source).read_text().splitlines()
        ]
        done = self._committed(out, "rows")
        if content["retry_errors"]:
            for path in (out / "errors").glob("*"):
                path.unlink()
        failed = self._committed(out, "errors")
        pending = [row for row in range(len(rows)) if row not in {*done, *failed}]
        for kind, numbers in (
            ("rows", [row for row in pending if row not in self.errors]),
            ("errors", [row for row in pending if row in self.errors]),
        ):
            for at in range(0, len(numbers), self.per_file):
                self._commit(out, kind, numbers[at : at + self.per_file], rows)
        progress = {
            "version": 1,
            "state": "running",
            "submission": job["submission_id"],
            "rows": len(rows),
            "started": 100.0,
            "updated": 104.0,
            "done": len(self._committed(out, "rows")),
            "errors": len(self._committed(out, "errors")),
            "before": len(done) + len(failed),
            "tokens_in": 40,
            "tokens_out": 80,
        }
        if self.dies is None:
            progress["state"], job["status"] = "done", "SUCCEEDED"
            (out / "summary.json").write_text(
                json.dumps({"job": content["job"], "done": progress["done"]})
            )
        else:
            self.dies(progress)
            job["status"] = progress.pop("status", "FAILED")
        (work / "progress.json").write_text(json.dumps(progress))

    def _committed(self, out: Path, kind: str) -> list[int]:
        lines = [
            line for path in (out / kind).glob("part-*") for line in path.read_text().splitlines()
        ]
        return [json.loads(line)["row"] for line in lines]

    def _commit(self, out: Path, kind: str, numbers: Sequence[int], rows: Sequence[str]) -> None:
        for name in (kind, "ledger"):
            (out / name).mkdir(parents=True, exist_ok=True)
        first_rows = [
            int(path.stem.removeprefix("part-")) for path in (out / "ledger").glob("part-*")
        ]
        name = f"part-{max(first_rows, default=0) + 1:06d}"
        lines = "".join(
            f"{json.dumps({'row': row, **json.loads(rows[row]), 'answer': 'x' * 9})}\n"
            for row in numbers
        )
        data = lines.encode()
        entry = {
            "part": f"{kind}/{name}.jsonl",
            "kind": kind,
            "rows": [[row, row] for row in numbers],
            "count": len(numbers),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        (out / "ledger" / f"{name}.json").write_text(json.dumps(entry))
        (out / kind / f"{name}.jsonl").write_bytes(data)
        mark = {"job": "job", "meaning": {}}
        (out / "ledger/job.json").write_text(json.dumps(mark))


def bring_up(cluster: Cluster) -> Batch:
    """Start a cluster whose head stores jobs in a test folder, and write a job of ten rows."""
    folder = cluster.path.parent
    (folder / "hf").mkdir()
    cluster.write(f"{INVENTORY}hf_home: {folder}/hf\n")
    ran = cluster.run("up")
    assert ran.code == 0, ran.err
    cluster.world.changes.clear()
    batch = Batch(cluster=cluster, folder=folder)
    cluster.world.driver = batch.driver
    (folder / "job.yaml").write_text(JOB)
    (folder / "prompts.jsonl").write_text(
        "".join(f'{{"id": {at}, "prompt": "Say {at}"}}\n' for at in range(10))
    )
    return batch
