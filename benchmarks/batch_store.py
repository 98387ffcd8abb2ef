"""Rows lost and duplicated by a batch job whose object store is killed, frozen or throttled.

    npm install --prefix DIR s3rver@3.7.1
    python -m benchmarks.batch_store --modules DIR/node_modules [--only NAME …] [--runs 10]

The driver is a process that answers rows without a model and writes many small files to `s3://`, to
s3rver, an S3 server that stores objects on disk. A fault happens at a seeded random moment while
files are committed. Then the job runs until it is done, and all objects are read. As real stores
do, the server is made to show only complete objects, and only complete parts of uploads.
"""

from __future__ import annotations

import argparse
import base64
import collections
import hashlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs, parquet

from launcher.batch.driver import __main__ as driver
from launcher.batch.driver.bitmap import decompress_words, row_numbers
from launcher.batch.driver.results import Converter

ROWS, ROWS_PER_FILE = 1_500, 50
SLOW_ROWS = 250  # at 5 kB/s
LIMIT = 240.0  # seconds: a driver that takes longer hangs
ATTEMPTS = 12
# server modes that disturb requests; the others kill processes at a moment
MODES = {
    "a third of the answers are 503 SlowDown": "slowdown",
    "connections at 5 kB/s": "slow",
    "connections reset amid uploads": "reset",
    "three answers to writes lost": "lost",
    "answers after 200 ms": "far",
}
DEATHS = {
    "store killed, back after 1 s": (True, False, 1.0),
    "store killed, back after 15 s": (True, False, 15.0),
    "store killed, back after the job failed": (True, False, None),
    "store frozen for 8 s": (False, False, 8.0),
    "driver killed": (False, True, None),
    "driver and store killed": (True, True, None),
}
SERVER = r"""
const [modules, root, port, mode] = process.argv.slice(1);
const fs = require('fs'), http = require('http'), net = require('net');
const { createHash, randomUUID } = require('crypto'), { pipeline } = require('stream/promises');
const S3rver = require(modules + '/s3rver');
const Store = require(modules + '/s3rver/lib/stores/filesystem');
const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));
async function writeWhole(path, content) {
  const aside = `${root}/${randomUUID()}`, hash = createHash('md5');
  let size = 0;
  await pipeline(content, async function* (chunks) {
    for await (const chunk of chunks) { hash.update(chunk); size += chunk.length; yield chunk; }
  }, fs.createWriteStream(aside));
  const md5 = hash.digest('hex');
  fs.mkdirSync(path.replace(/[^/]*$/, ''), { recursive: true });
  fs.writeFileSync(path + '.md5', md5);
  fs.renameSync(aside, path);
  return { size, md5 };
}
Store.prototype.putObject = function (object) {
  const content = Buffer.isBuffer(object.content) ? [object.content] : object.content;
  return writeWhole(this.getResourcePath(object.bucket, object.key, 'object'), content);
};
Store.prototype.putPart = function (bucket, upload, number, content) {
  const uploads = this.getResourcePath(bucket, undefined, 'uploads');
  return writeWhole(`${uploads}/${upload}/${number}`, content);
};
const BUSY = 'SlowDown</Code><Message>Please reduce your request rate.';
const GONE = 'NoSuchUpload</Code><Message>The specified upload does not exist.';
function refuse(req, res, status, error) {
  req.resume();
  res.writeHead(status, { 'Content-Type': 'application/xml' });
  res.end(`<?xml version="1.0"?><Error><Code>${error}</Message></Error>`);
}
let losses = 3;
async function trickle(source, target) {
  try {
    for await (const chunk of source)
      for (let at = 0; at < chunk.length; at += 512) {
        target.write(chunk.subarray(at, at + 512));
        await sleep(100);
      }
  } catch {}
  target.end();
}
const app = new S3rver({
  directory: root, silent: true, configureBuckets: [{ name: 'bucket' }],
  allowMismatchedSignatures: true,
});
app.configureBuckets().then(() => {
  const answer = app.callback();
  const server = http.createServer((req, res) => {
    const reset = () => req.socket.resetAndDestroy(), hit = Math.random();
    if (mode == 'slowdown' && hit < 1 / 3) return refuse(req, res, 503, BUSY);
    const upload = /uploadId=(\w+)/.exec(req.url);
    if (upload && !fs.existsSync(`${root}/bucket/._S3rver_uploads/${upload[1]}`))
      return refuse(req, res, 404, GONE);
    const writes = req.method == 'PUT' || upload;
    if (mode == 'reset' && hit < 0.1 && writes)
      return req.once('data', reset);
    if (mode == 'lost' && hit < 0.1 && writes && losses-- > 0) {
      res.write = () => true;
      res.end = reset;
    }
    setTimeout(() => answer(req, res), mode == 'far' ? 200 : 0);
  });
  if (mode != 'slow') return server.listen(port, '127.0.0.1');
  server.listen(0, '127.0.0.1', () => net.createServer(client => {
    const inner = net.connect(server.address().port, '127.0.0.1');
    client.on('error', () => inner.destroy());
    inner.on('error', () => client.destroy());
    trickle(client, inner);
    trickle(inner, client);
  }).listen(port, '127.0.0.1'));
});
"""


class Outcome(NamedTuple):
    """Result of one run; `problems` are violations besides lost and duplicated rows."""

    lost: int
    duplicated: int
    seconds: float
    errors: list[str]
    problems: list[str]
    uploads: int


class Store:
    """The S3 server, a process that can be killed and started again on its data."""

    def __init__(self, modules: str, root: Path) -> None:
        self.modules, self.root = modules, root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, mode: str = "") -> None:
        words = ["node", "-e", SERVER, self.modules, str(self.root), str(self.port), mode]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def objects(self, folder: str) -> int:
        """Return the number of objects in a folder of the output, on disk."""
        return len(list((self.root / "bucket/out" / folder).glob("part-*_object")))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark's processes do not start")
        time.sleep(0.01)


def run_driver(work: str) -> int:
    """Run the driver with a pipeline that answers every row at once, one in 97 with an error."""

    def run(job: Any, manifest: Any, pending: dict[int, bytes], *_: Any) -> Iterator[list[Any]]:
        convert = Converter(job, manifest.types).convert
        for split in manifest.splits:
            numbers = list(row_numbers(pending.get(split.index, b""), split.first))
            for start in range(0, len(numbers), 25):
                yield convert([answer(number) for number in numbers[start : start + 25]])

    driver.MODES["engine"] = SimpleNamespace(run=run)  # type: ignore[assignment]
    return driver.main(work)


def answer(number: int) -> dict[str, Any]:
    row = {"_row": number, "_error": "", "_stage": "", "_raw": "", "_keep": b""}
    if number % 97 == 0:
        return {**row, "_error": "too bad", "_stage": "inference"}
    counts = {"prompt_tokens": 3, "output_tokens": 2}
    return {**row, "answer": f"answer {number}", "finish_reason": "stop", **counts}


def start_driver(work: Path, store: Store) -> subprocess.Popen[bytes]:
    access = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
    # s3rver does not know checksums in trailers.
    checksums = {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_REQUIRED"}
    place = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": store.url}
    words = [sys.executable, "-m", "benchmarks.batch_store", "--driver", str(work)]
    with (work / "log").open("ab") as log:
        environment = {**os.environ, **access, **checksums, **place}
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


def write_job(folder: Path, rows: int, form: str) -> Path:
    work = folder / "work"
    work.mkdir()
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(rows)))
    job = {"version": 1, "job": "bench", "cluster": "bench", "mode": "engine", "work": str(work)}
    job |= {"identity": {}, "digest": "d", "model": "none", "keep": {}}
    job |= {"prompt": {"column": "text"}, "read": {"paths": [str(source)], "format": "jsonl"}}
    job |= {
        "write": {
            "path": "s3://bucket/out",
            "format": form,
            "rows_per_file": ROWS_PER_FILE,
            "seconds": 30,
        }
    }
    (work / "job.json").write_text(json.dumps(job))
    return work


def run_case(scenario: str, seed: int, modules: str) -> Outcome:
    """Run a job with one fault until it is done, and read its output."""
    rng = random.Random(f"{scenario} {seed}")
    mode = MODES.get(scenario, "")
    rows = SLOW_ROWS if mode == "slow" else ROWS
    form = ("parquet", "jsonl")[seed % 2]
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        folder = Path(name)
        (folder / "store").mkdir()
        store, work = Store(modules, folder / "store"), write_job(folder, rows, form)
        store.start(mode)
        began, exit_code, attempts = time.monotonic(), None, 0
        while exit_code != 0 and attempts < ATTEMPTS:
            process = start_driver(work, store)
            try:
                if not attempts and scenario in DEATHS:
                    inject(process, store, rng, *DEATHS[scenario])
                exit_code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                errors.append("hang")
            if exit_code and exit_code > 0:
                error = json.loads((work / "progress.json").read_text())["error"]
                errors.append(f"{error['message']}: {error['evidence']} (hint: {error['hint']})")
            attempts += 1
            if store.process is not None and store.process.poll() is not None:
                store.start()
        seconds = time.monotonic() - began
        store.signal(signal.SIGKILL)
        store.start()
        lost, duplicated, problems = read_output(store, rows, form)
        if exit_code != 0:
            problems.append(f"not done after {attempts} runs: {errors[-1:]}")
        uploads = len(list((store.root / "bucket/._S3rver_uploads").glob("*/key")))
        store.signal(signal.SIGKILL)
    return Outcome(lost, duplicated, seconds, errors, problems, uploads)


def inject(
    process: subprocess.Popen[bytes],
    store: Store,
    rng: random.Random,
    kill_store: bool,
    kill_driver: bool,
    back: float | None,
) -> None:
    """Kill or freeze processes when a random number of files is stored."""
    files = rng.randrange(1, ROWS // ROWS_PER_FILE - 2)
    wait_for(lambda: store.objects("rows") >= files or process.poll() is not None)
    time.sleep(rng.uniform(0, 0.1))
    if kill_driver:
        process.kill()
    if kill_store:
        store.signal(signal.SIGKILL)
    if back is None:
        return
    if not kill_store:
        store.signal(signal.SIGSTOP)
    time.sleep(back)
    if kill_store:
        store.start()
    else:
        store.signal(signal.SIGCONT)


def read_output(store: Store, rows: int, form: str) -> tuple[int, int, list[str]]:
    """Return the rows lost and duplicated in all objects, and where the ledger disagrees."""
    access = {"access_key": "S3RVER", "secret_key": "S3RVER", "region": "us-east-1"}
    s3 = fs.S3FileSystem(endpoint_override=store.url, request_timeout=60, **access)

    def read(folder: str) -> dict[str, bytes]:
        listed = s3.get_file_info(fs.FileSelector(f"bucket/out/{folder}", allow_not_found=True))
        return {
            f"{folder}/{info.base_name}": s3.open_input_file(info.path).read()
            for info in listed
            if info.is_file and info.base_name.startswith("part-")
        }

    files = {**read("rows"), **read("errors")}
    counts: collections.Counter[int] = collections.Counter()
    for name, data in files.items():
        if name.startswith("rows/") and form == "parquet":
            counts.update(parquet.read_table(pa.BufferReader(data))["row"].to_pylist())
        else:
            counts.update(json.loads(line)["row"] for line in data.splitlines())
    problems, entries = [], set()
    for data in read("ledger").values():
        for line in data.splitlines():
            entry = json.loads(line)
            entries.add(entry["part"])
            numbers = decompress_words(base64.b64decode(entry["bitmap"])).row_count
            stored = files.get(entry["part"])
            if stored is not None and hashlib.sha256(stored).hexdigest() != entry["sha256"]:
                problems.append(f"{entry['part']} is not the file of its entry")
            if numbers != entry["count"]:
                problems.append(f"the entry of {entry['part']} is inconsistent")
    problems += [f"{name} is not in the ledger" for name in set(files) - entries]
    lost = sum(row not in counts for row in range(rows))
    return lost, sum(counts.values()) - len(counts), problems


def render(scenario: str, outcomes: list[Outcome]) -> str:
    seconds = [outcome.seconds for outcome in outcomes]
    errors = collections.Counter(outcome.errors[0] for outcome in outcomes if outcome.errors)
    text = " ".join(errors.most_common(1)[0][0].split()) if errors else "–"
    lost = sum(outcome.lost for outcome in outcomes)
    duplicated = sum(outcome.duplicated for outcome in outcomes)
    broken = sum(bool(outcome.problems) for outcome in outcomes)
    uploads = sum(outcome.uploads for outcome in outcomes)
    span = f"{statistics.median(seconds):.0f} ({min(seconds):.0f}–{max(seconds):.0f})"
    return (
        f"| {scenario} | {len(outcomes)} | {lost} | {duplicated} | {broken} | {uploads} | {span} |"
        f" {sum(bool(outcome.errors) for outcome in outcomes)} | {text} |"
    )


def main() -> int:
    """Run the scenarios and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--modules")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", action="append", choices=[*DEATHS, *MODES])
    options = parser.parse_args()
    if options.driver:
        return run_driver(options.driver)
    scenarios = options.only or [*DEATHS, *MODES]
    print(
        "| fault | runs | rows lost | duplicated | other violations | uploads left over"
        " | seconds until done | failed first | error |\n|---|---|---|---|---|---|---|---|---|"
    )
    bad = False
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = {
            scenario: [
                pool.submit(run_case, scenario, seed, options.modules)
                for seed in range(options.runs)
            ]
            for scenario in scenarios
        }
        for scenario, futures in cases.items():
            outcomes = [future.result() for future in futures]
            print(render(scenario, outcomes), flush=True)
            for outcome in outcomes:
                bad = bad or bool(outcome.lost or outcome.duplicated or outcome.problems)
                for problem in outcome.problems:
                    print(f"{scenario}: {problem}", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
