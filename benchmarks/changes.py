"""Requests lost while a command changes a server: `python -m benchmarks.changes … -- COMMAND`.

Three clients send requests to the endpoint, one of them short ones and two streams, from before the
command until after it.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.faults.judge import Losses, count_losses
from benchmarks.faults.traffic import Traffic

_CALM = 3.0  # seconds of traffic before and after the command


def measure(
    traffic: Traffic, argv: tuple[str, ...], **options: Any
) -> tuple[Losses, subprocess.CompletedProcess[str]]:
    """Run a command under traffic."""
    with traffic:
        time.sleep(_CALM)
        completed = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **options
        )
        time.sleep(_CALM)
    return count_losses(traffic.samples), completed


@click.command(help=__doc__)
@click.option("--url", required=True, help="Endpoint, up to /v1.")
@click.option("--key", default="", help="API key.")
@click.option("--model", required=True, help="Name of the served model.")
@click.option("--ca", type=click.Path(path_type=Path, exists=True), help="Certificate (PEM).")
@click.option("--timeout", default=120.0, show_default=True, help="Limit of one request, seconds.")
@click.argument("argv", nargs=-1, required=True)
def main(
    url: str, key: str, model: str, ca: Path | None, timeout: float, argv: tuple[str, ...]
) -> None:
    """Print the losses as JSON, and end with the command's exit code."""
    context = ssl.create_default_context(cafile=ca) if ca else None
    traffic = Traffic(
        url, key, model, clients=3, streams=2, context=context, pause=0.2, timeout=timeout
    )
    began = time.monotonic()
    losses, completed = measure(traffic, argv)
    seconds = round(time.monotonic() - began, 1)
    click.echo(completed.stderr[-4000:] + completed.stdout[-2000:], err=True)
    click.echo(json.dumps({**asdict(losses), "seconds": seconds, "code": completed.returncode}))
    sys.exit(completed.returncode)


if __name__ == "__main__":
    main()
