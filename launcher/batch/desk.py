"""Manage the folders of batch jobs inside the head container, and print one JSON object.

Standard library only, without Ray or pyarrow, so that an answer costs a Python start. Paths in
arguments are relative and stay in their folder. Usage: batch.pyz list FOLDER | look|outputs|remove
WORK | put WORK PATH --offset N [--last SHA256] | follow WORK --job SUBMISSION …
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from .folder import FOLDERS, is_marked, is_output, is_own, ledger_number

# seconds to wait for a job's lock: a check for a living driver holds it for an instant
LOCK_TIMEOUT = 1.0
POLL_INTERVAL = 0.25  # seconds between reads of a driver's files
CHUNK = 1 << 20
RAY_LOGS = os.environ.get("VLAUNCH_RAY_LOGS", "/tmp/ray/session_latest/logs")
FINAL_STATES = ("done", "failed", "refused", "stopped")  # last states of a driver
NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?", re.ASCII)
WORK = re.compile(rf"/(?:.+/)?vlaunch/[^/]+/batch/{NAME.pattern}", re.ASCII)


class StoreError(Exception):
    """A request that is refused."""


def list_jobs(args: argparse.Namespace) -> dict[str, object]:
    """Return the status of every job below a folder, without specs: they would exceed the answer's
    limit.
    """
    paths = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(args.work) as jobs:
        paths = [
            job.path
            for job in jobs
            if NAME.fullmatch(job.name) and job.is_dir(follow_symlinks=False)
        ]
    return {"jobs": [job_status(work) for work in sorted(paths) if read_json(work, "job.json")]}


def describe_job(args: argparse.Namespace) -> dict[str, object]:
    """Return one job's status, its spec, its received files, and if rows of it are written.

    The launcher bounds the number of files, so that the answer stays within its limit.
    """
    if not os.path.isdir(args.work):
        return {"absent": True}
    sent: dict[str, int] = {}
    for folder in ("input", "code"):
        for above, _, names in os.walk(os.path.join(args.work, folder)):
            for name in names:
                info = os.lstat(os.path.join(above, name))
                if stat.S_ISREG(info.st_mode):
                    sent[os.path.relpath(os.path.join(above, name), args.work)] = info.st_size
    job = read_json(args.work, "job.json")
    details = {"job": job, "written": has_rows(args.work, job), "inputs": sent}
    return {**job_status(args.work), **details}


def has_rows(work: str, job: dict[str, Any]) -> bool:
    """Return True if the ledger lists rows; for an object store, if the input was counted.

    A job without written rows can be replaced without losing anything.
    """
    out = output_of(job)
    if not out.startswith("/"):
        # written after the input was counted
        return os.path.exists(os.path.join(work, "manifest.json"))
    return has_mark(out, job) and any(
        ledger_number(name) is not None for name in os.listdir(os.path.join(out, "ledger"))
    )


def output_of(job: dict[str, Any]) -> str:
    """Return the output folder of `job.json`; empty without one."""
    write = job.get("write")
    return str(write.get("path") or "") if isinstance(write, dict) else ""


def has_mark(out: str, job: dict[str, Any]) -> bool:
    """Return True if an output folder belongs to this job."""
    mark = read_json(os.path.join(out, "ledger"), "job.json")
    return is_marked(mark, str(job.get("job")), str(job.get("cluster")))


def job_status(work: str) -> dict[str, object]:
    """Return a job's progress, and if its driver is alive."""
    return {
        "name": os.path.basename(work.rstrip("/")),
        "progress": read_json(work, "progress.json"),
        "alive": is_driver_alive(work),
    }


def read_json(work: str, name: str) -> dict[str, Any]:
    """Return a JSON file's object; empty if the file is missing or incomplete."""
    try:
        # Non-blocking: a pipe in its place would block forever.
        descriptor = os.open(os.path.join(work, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            content = json.load(file)
            return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def is_driver_alive(work: str) -> bool:
    """Return True if a driver holds the lock: the kernel releases it however the driver exits."""
    try:
        lock = os.open(os.path.join(work, "lock"), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def put_file(args: argparse.Namespace) -> dict[str, object]:
    """Write standard input at an offset of a partial file, which is truncated there.

    With `--last`, verify the file's checksum and rename it.
    """
    os.makedirs(check_work(args.work), exist_ok=True)
    path = resolve_inside(args.work, args.path)
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
    with open_file(part, os.O_RDWR | os.O_CREAT) as file:
        have = os.fstat(file.fileno()).st_size
        if args.offset > have:
            raise StoreError(f"{args.path} has {have} bytes, not {args.offset}")
        file.truncate(args.offset)
        file.seek(args.offset)
        shutil.copyfileobj(sys.stdin.buffer, file, CHUNK)
        size = file.tell()
        if args.last:
            file.flush()
            file.seek(0)
            sha256 = file_digest(file)
            if sha256 != args.last:
                file.truncate(0)
                raise StoreError(f"{args.path} arrived with sha256 {sha256}, not {args.last}")
            os.fsync(file.fileno())
            os.replace(part, path)
    return {"bytes": size}


def file_digest(file: BinaryIO) -> str:
    sha256 = hashlib.sha256()
    for block in iter(lambda: file.read(CHUNK), b""):
        sha256.update(block)
    return sha256.hexdigest()


def write_outputs(args: argparse.Namespace) -> dict[str, object]:
    """Write `outputs.json`: the committed files of the ledger, and the summary."""
    out = os.path.join(args.work, "output")
    listed = {}
    for entry in ledger_entries(os.path.join(out, "ledger")):
        path = str(entry.get("part") or "")
        if is_output(path) and size_of(os.path.join(out, path)) == entry.get("bytes"):
            listed[path] = {
                "path": path,
                "bytes": entry["bytes"],
                "sha256": entry.get("sha256", ""),
            }
    files = list(listed.values())
    summary = os.path.join(out, "summary.json")
    if size_of(summary) is not None:
        with open_file(summary, os.O_RDONLY) as file:
            data = file.read()
        digest = hashlib.sha256(data).hexdigest()
        files.append({"path": "summary.json", "bytes": len(data), "sha256": digest})
    path = os.path.join(args.work, "outputs.json")
    # World-readable: Docker reads it as root, which has no rights on some network file systems.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
        json.dump({"files": files}, file)
    return {"files": len(files)}


def ledger_entries(ledger: str) -> Iterator[dict[str, Any]]:
    """Yield the readable entries of a ledger, some of them twice after a crash."""
    for name in os.listdir(ledger) if os.path.isdir(ledger) else []:
        path = os.path.join(ledger, name)
        if ledger_number(name) is None or size_of(path) is None:
            continue
        unreadable = contextlib.suppress(OSError, ValueError, RecursionError)
        with unreadable, open_file(path, os.O_RDONLY) as file:
            yield from (entry for entry in map(json.loads, file) if isinstance(entry, dict))


def size_of(path: str) -> int | None:
    """Return the size of a regular file; None for anything else."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def remove_job(args: argparse.Namespace) -> dict[str, object]:
    """Remove a job's folder and its files in the output folder.

    Holds the job's lock, so that no driver starts meanwhile.
    """
    work = check_work(args.work)
    if not os.path.lexists(work):
        return {"removed": []}
    with open_file(os.path.join(work, "lock"), os.O_RDWR | os.O_CREAT) as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError(f"the driver of {os.path.basename(work)} still runs") from None
                time.sleep(0.05)
        job = read_json(work, "job.json")
        out = output_of(job)
        removed = remove_output(out, job) if out.startswith("/") else []
        shutil.rmtree(work)
    return {"removed": [*removed, work]}


def remove_output(out: str, job: dict[str, object]) -> list[str]:
    """Remove a job's files from a folder with its mark; the mark goes last, other files stay."""
    if not has_mark(out, job):
        return []
    for folder in FOLDERS:
        path = os.path.join(out, folder)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        for name in sorted(os.listdir(path), key=lambda name: name == "job.json"):
            if is_own(name):
                os.unlink(os.path.join(path, name))
    for name in ("summary.json", ".summary.json.new"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(out, name))
    for path in (*(os.path.join(out, folder) for folder in FOLDERS), out):
        with contextlib.suppress(OSError):  # it contains other files
            os.rmdir(path)
    return [out]


def follow_job(args: argparse.Namespace) -> dict[str, object]:
    """Return Ray's status of a job, the log since an offset, and the driver's progress.

    Waits up to `--patience` seconds for a change, and as long for Ray to notice that a driver has
    exited: frequent polling takes the cores that engines need.
    """
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "agent.pyz"))
    from vlaunch_agent.agent.health import api
    from vlaunch_agent.agent.processes import submissions

    path = os.path.join(RAY_LOGS, f"job-driver-{args.job}.log")
    began = time.monotonic()
    while time.monotonic() < began + args.patience and is_unchanged(args, path):
        time.sleep(POLL_INTERVAL)
    where = api.QueryTarget(dashboard=args.dashboard)
    began, state = time.monotonic(), submissions.query_job(where, args.job)
    while state.get("status") not in submissions.OVER and driver_state(args) in FINAL_STATES:
        if time.monotonic() >= began + args.patience:
            break
        time.sleep(POLL_INTERVAL)
        state = submissions.query_job(where, args.job)
    try:
        with open(path, "rb") as file:
            file.seek(args.offset)
            chunk = file.read(CHUNK)
    except FileNotFoundError:
        chunk = b""
    # Only complete lines, as in `queries.py`: half a line would match twice, or not at all.
    end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
    if end == 0 and (len(chunk) == CHUNK or state.get("status") in submissions.OVER):
        end = len(chunk)
    return {
        "job": submissions.select_fields(state),
        "log": chunk[:end].decode(errors="replace"),
        "offset": args.offset + end,
        "progress": read_json(args.work, "progress.json"),
    }


def is_unchanged(args: argparse.Namespace, log: str) -> bool:
    """Return True if the driver's state is the one last reported and its log has not grown."""
    last_state: str = args.known
    offset: int = args.offset
    return driver_state(args) == last_state not in FINAL_STATES and (size_of(log) or 0) <= offset


def driver_state(args: argparse.Namespace) -> object:
    """Return the state reported by this run's driver; empty before its first report."""
    progress = read_json(args.work, "progress.json")
    return progress.get("state") if progress.get("submission") == args.job else ""


def check_work(work: str) -> str:
    """Return the path if it is a valid job folder and no link; raises StoreError."""
    if not WORK.fullmatch(work) or os.path.normpath(work) != work or os.path.islink(work):
        raise StoreError(f"{work} is not the folder of a batch job")
    return work


def resolve_inside(folder: str, path: str) -> str:
    """Return a path in a folder, without links or `..`, creating its parents."""
    parts = path.split("/")
    if (
        not path
        or os.path.isabs(path)
        or any(part in ("", ".", "..") for part in parts)
        or "\0" in path
    ):
        raise StoreError(f"{path!r} is not a path inside a job's folder")
    current = folder
    for part in parts[:-1]:
        current = os.path.join(current, part)
        if os.path.islink(current):
            raise StoreError(f"{path!r} passes through a symbolic link")
        os.makedirs(current, exist_ok=True)
    target = os.path.join(current, parts[-1])
    if os.path.islink(target):
        raise StoreError(f"{path!r} is a symbolic link")
    return target


def open_file(path: str, flags: int) -> BinaryIO:
    """Open a file, but no link; new ones are readable by the owner only."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    if flags == os.O_RDONLY:
        return os.fdopen(descriptor, "rb")
    return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "wb")


VERBS = {
    "list": list_jobs,
    "look": describe_job,
    "put": put_file,
    "outputs": write_outputs,
    "remove": remove_job,
    "follow": follow_job,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("work")
    parser.add_argument("path", nargs="?", default="")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--last", default="")
    parser.add_argument("--job", default="")
    parser.add_argument("--dashboard", type=int, default=8265)
    parser.add_argument("--known", default="")
    parser.add_argument("--patience", type=float, default=0.0)
    args = parser.parse_args()
    try:
        answer = VERBS[args.verb](args)
    except (StoreError, OSError, ValueError, KeyError, TypeError) as error:
        answer = {"error": str(error) or type(error).__name__}
    print(json.dumps(answer), flush=True)
    return 1 if "error" in answer else 0
