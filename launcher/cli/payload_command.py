"""`vlaunch payload` (hidden): the archive of node programs that `up` puts on nodes, for the script
of `--dry-run`.
"""

import sys

import click


@click.command(hidden=True)
@click.option("--py-spy", "architecture", help="Print py-spy for this architecture instead.")
def payload(architecture: str | None) -> None:
    """Print the node programs as a tar archive."""
    from launcher.cluster.up_inputs import cache_dir
    from launcher.cluster.wheels import fetch_py_spy
    from launcher.tools.shipped.node_files import payload_tar
    from launcher.tools.shipped.py_spy import BUILDS

    if architecture is None:
        data = payload_tar()
    elif architecture in BUILDS:
        data = fetch_py_spy(BUILDS[architecture], cache_dir() / "py-spy")
    else:
        raise click.BadParameter(f"one of {', '.join(BUILDS)}", param_hint="--py-spy")
    sys.stdout.buffer.write(data)
