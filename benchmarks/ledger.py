"""Cost of reading the ledger of a batch job again: seconds, CPU, memory and size.

Files of 10,000 rows, nine of ten of which are complete: `mixed` has the rows of ten files in random
order, as many replicas answer them; `random` has those of all files; `simulated` repeats a pattern
of `mixed`, for a billion rows. `--before` alternates with the ledger of an older checkout. Writing
is not measured, and does not wait for the disk.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from launcher.batch.driver import ledger, storage
from launcher.batch.driver.manifest import Manifest, Split

ROWS_PER_FILE = 10_000
SPLIT_ROWS = 2_000
FILES_MIXED = 10
ORDERS = ("mixed", "random", "simulated")


def answered_files(rows: int, order: str) -> Iterator[list[int]]:
    """Yield the ascending row numbers of complete files."""
    generator = np.random.default_rng(1)
    window = ROWS_PER_FILE * FILES_MIXED if order == "mixed" else rows
    for start in range(0, rows, window):
        numbers = start + generator.permutation(min(window, rows - start))
        for at in range(0, len(numbers) * 9 // 10, ROWS_PER_FILE):
            yield np.sort(numbers[at : at + ROWS_PER_FILE]).tolist()


def write(folder: Path, rows: int, order: str) -> dict[str, Any]:
    """Write a ledger as the driver does, with empty answer files; return its rows and bytes."""
    os.fsync = lambda fd: None
    out = storage.open_location(str(folder))
    for name in ("ledger", "rows", "errors"):
        out.child(name).make_folder()
    book, count = ledger.Ledger(out, rows), 0
    for numbers in answered_files(rows, order):
        book.commit("rows", numbers, b"", "jsonl")
        count += len(numbers)
    return {"rows": count, "bytes": sum(out.child("ledger").sizes().values())}


def simulate(folder: Path, rows: int) -> dict[str, Any]:
    """Write the ledger of `mixed` quickly: every ten files have the pattern of the first ten."""
    from launcher.batch.driver import bitmap  # older checkouts have none

    for name in ("ledger", "rows", "errors"):
        (folder / name).mkdir()
    window = ROWS_PER_FILE * FILES_MIXED // bitmap.BITS * bitmap.BITS  # of complete words
    patterns = [
        bitmap.to_words([number for number in numbers if number < window])
        for numbers in answered_files(ROWS_PER_FILE * FILES_MIXED, "mixed")
    ]
    tails = []
    for pattern in patterns:
        raw = zlib.decompress(bitmap.compress_words(pattern))[bitmap.WORD.itemsize :]
        deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        tails.append((pattern, raw, deflate.compress(raw) + deflate.flush()))
    lines, count, size = [], 0, 0
    windows = range(0, rows - window + 1, window)
    for number, (start, tail) in enumerate(itertools.product(windows, tails), 1):
        pattern, raw, compressed = tail
        # RFC 1950 and 1951: the first gap as a stored block, then that of the pattern
        gap = struct.pack("<Q", start // bitmap.BITS + int(pattern.positions[0]))
        check = struct.pack(">I", zlib.adler32(raw, zlib.adler32(gap)))
        stored = struct.pack("<BHH", 0, len(gap), len(gap) ^ 0xFFFF) + gap
        name = f"part-{number:06d}"
        entry = {
            "part": f"rows/{name}.jsonl",
            "kind": "rows",
            "count": pattern.row_count,
            "bytes": 0,
            "sha256": "0" * 64,
            "bitmap": base64.b64encode(b"\x78\x9c" + stored + compressed + check).decode(),
        }
        (folder / "rows" / f"{name}.jsonl").touch()
        lines.append(json.dumps(entry).encode() + b"\n")
        count, size = count + pattern.row_count, size + len(lines[-1])
        last = number == len(windows) * len(tails)
        if last or len(lines) == ledger.MERGED_FILES * 8 // 10:
            (folder / "ledger" / f"{name}.json").write_bytes(b"".join(lines))
            lines = []
    return {"rows": count, "bytes": size}


def read(folder: Path, rows: int) -> dict[str, Any]:
    """Read a ledger and find the pending rows; return the cost of both."""
    splits = tuple(
        Split(index=index, file=0, start=0, end=0, first=first, rows=min(SPLIT_ROWS, rows - first))
        for index, first in enumerate(range(0, rows, SPLIT_ROWS))
    )
    manifest = Manifest(files=(), splits=splits, rows=rows)
    began, cpu = time.monotonic(), time.process_time()
    book = ledger.load_ledger(storage.open_location(str(folder)), manifest, retry_errors=False)
    pending = book.all_pending(manifest)
    cost = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return {**cost, "peak": peak, "rows": book.done, "splits": len(pending)}


def run_child(checkout: Path, *options: object) -> dict[str, Any]:
    """Run this file with the ledger of a checkout, and return the JSON object that it prints."""
    result = subprocess.run(
        [sys.executable, __file__, *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def format_range(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def compare(checkouts: dict[str, Path], rows: int, order: str, rounds: int) -> None:
    """Write a ledger per candidate, read them in alternation, and print rows of the table."""
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        folders = {title: Path(name) / title for title in checkouts}
        written = {}
        for title, checkout in checkouts.items():
            folders[title].mkdir()
            written[title] = run_child(checkout, "--write", folders[title], rows, order)
        costs: dict[str, list[dict[str, Any]]] = {title: [] for title in checkouts}
        for _ in range(rounds):
            for title, checkout in checkouts.items():
                cost = run_child(checkout, "--read", folders[title], rows)
                if cost["rows"] != written[title]["rows"]:
                    sys.exit(f"{title}: {cost['rows']} rows, not {written[title]['rows']}")
                costs[title].append(cost)
    last = list(checkouts)[-1]
    for title in checkouts:
        ratios = [
            mine["cpu"] / its["cpu"] for mine, its in zip(costs[title], costs[last], strict=True)
        ]
        cells = (
            f"{rows:,} {order}: {title}",
            format_range([cost["seconds"] for cost in costs[title]], 1),
            format_range([cost["cpu"] for cost in costs[title]], 2),
            f"{statistics.median(ratios):.0f}×",
            f"{max(cost['peak'] for cost in costs[title]):,.0f}",
            f"{written[title]['bytes'] / 1e6:,.1f}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--order", choices=ORDERS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--write", nargs=3, metavar=("FOLDER", "ROWS", "ORDER"))
    parser.add_argument("--read", nargs=2, metavar=("FOLDER", "ROWS"))
    args = parser.parse_args()
    if args.write:
        folder, rows, order = args.write
        writer = simulate if order == "simulated" else partial(write, order=order)
        print(json.dumps(writer(Path(folder), int(rows))))
        return 0
    if args.read:
        folder, rows = args.read
        print(json.dumps(read(Path(folder), int(rows))))
        return 0
    checkouts = {"before": args.before} if args.before else {}
    checkouts["now"] = Path(__file__).parents[1]
    print("| rows | s | CPU, s | against now | peak, MB | ledger, MB |")
    print("|---|---|---|---|---|---|")
    for order in args.order or ORDERS[:2]:
        compare(checkouts, args.rows, order, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
