"""`vlaunch payload` (hidden): the archive of helper files that `up` puts on nodes, for the script
of `--dry-run`.
"""

from __future__ import annotations

import sys

import click


@click.command(hidden=True)
def payload() -> None:
    """Print the helper files as a tar archive."""
    from launcher.plan.files import payload_tar

    sys.stdout.buffer.write(payload_tar())
