"""`vlaunch lab`: lab hosts on this machine, for learning and testing without servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.app.terminal import confirm, say
from launcher.core.errors import RequestError, VlaunchError
from launcher.core.sizes import format_count
from launcher.lab import layout, prerequisites, removal, startup
from launcher.lab import status as observed
from launcher.lab.gpu_models import MODELS, PLAINLY
from launcher.lab.layout import Lab

_NAME = click.option("--name", default="vlaunch-lab", show_default=True, help="Name of the lab.")
_DIR = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the lab's files.  [default: /var/lib/NAME]",
)
_CACHE = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    default="/var/cache/vlaunch-lab",
    show_default=True,
    help="Cache for wheels and the image.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def lab() -> None:
    """Run a test cluster on one Linux machine: hosts with sshd and Docker, vLLM's CPU build, a tiny
    model.
    """


def _lab_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _NAME(_DIR(command))


@lab.command(short_help="Start or repair lab hosts")
@_lab_options
@click.option("--nodes", default=2, show_default=True, help="Number of hosts.")
@click.option(
    "--gpus",
    default=1,
    show_default=True,
    help="CPU slots or simulated GPUs per host.",
)
@click.option(
    "--accelerator",
    type=click.Choice(["cpu", "nvidia", "amd"]),
    default="cpu",
    show_default=True,
    help="GPUs of the hosts. cpu: CPU slots count as GPUs. nvidia: simulated GPUs, visible to"
    " `nvidia-smi` and Docker. amd: simulated devices without a driver. vLLM's CPU build runs the"
    " model in all cases.",
)
@click.option(
    "--gpu-model",
    default="h100",
    show_default=True,
    help="Model of the simulated GPUs: h100, a100, l4 or gb10.",
)
@click.option(
    "--gpu-trouble",
    multiple=True,
    metavar="HOST:KIND[:INDEX]",
    help="Simulate a GPU fault: busy, display, ecc or lost; or no-toolkit for a host;"
    " repeatable. `lab up` without it repairs the fault.",
)
@click.option(
    "--rdma",
    type=click.Choice(["infiniband", "roce"]),
    help="Simulate the device files of one RDMA card per GPU.",
)
@click.option(
    "--subnet",
    default="10.77.0.0/24",
    show_default=True,
    help="Unused private subnet.",
)
@_CACHE
@click.option("--install-missing", is_flag=True, help="Install missing Debian packages.")
@click.option(
    "--no-image", is_flag=True, help="Start hosts only, without the vLLM image and the model."
)
@_JSON
def up(
    name: str,
    directory: Path | None,
    nodes: int,
    gpus: int,
    accelerator: str,
    gpu_model: str,
    gpu_trouble: tuple[str, ...],
    rdma: str | None,
    subnet: str,
    cache: Path,
    install_missing: bool,
    no_image: bool,
    as_json: bool,
) -> None:
    """Start the lab hosts, or repair what is missing or dead.

    Creates network namespaces, a bridge and files below --dir; `vlaunch lab down` removes all of
    it.
    """
    lab_spec = layout.make_lab(
        name=name,
        directory=directory,
        subnet=subnet,
        nodes=nodes,
        gpus=gpus,
        accelerator=accelerator,
        gpu_model=gpu_model,
        rdma=rdma or "",
        troubles=gpu_trouble,
    )
    prerequisites.ensure_installed(install=install_missing, say=say)
    startup.start_lab(lab_spec, cache=cache, with_image=not no_image, say=say)
    path = str(lab_spec.inventory)
    click.echo(observed.to_json(lab_spec, observed.observe(lab_spec)) if as_json else path)
    say(f"the lab is up: {format_count(nodes, 'host')}; next: `vlaunch up {path}`")
    say(f"`vlaunch lab down{_repeat_options(name, directory)}` removes them completely")
    _print_gpu_notes(lab_spec)


@lab.command(short_help="Install the Debian packages that lab hosts need")
def install() -> None:
    """Install the Debian packages that lab hosts need, if any are missing."""
    prerequisites.ensure_installed(install=True, say=say)
    say("this machine has everything that lab hosts need; next: `vlaunch lab up`")


@lab.command(short_help="Show the state of every lab host")
@_lab_options
@_JSON
def status(name: str, directory: Path | None, as_json: bool) -> None:
    """Show the state of every lab host; exit with 1 if one is down."""
    prerequisites.require_linux_root()
    location = directory or layout.default_dir(name)
    existing = layout.load_lab(location)
    if existing is None or existing.name != name:
        raise RequestError(
            f"there is no lab cluster `{name}` in `{location}`", hint="run `vlaunch lab up`"
        )
    states = observed.observe(existing)
    click.echo(observed.to_json(existing, states) if as_json else observed.to_text(states))
    _print_gpu_notes(existing)
    if down := [state.name for state in states if not state.up]:
        raise VlaunchError(
            f"not everything is running on {', '.join(down)}",
            hint=f"run `vlaunch lab up{_repeat_options(name, directory)}`",
        )


@lab.command(short_help="Remove all lab hosts and verify that nothing is left")
@_lab_options
@_CACHE
@click.option("--purge-cache", is_flag=True, help="Remove the cached wheels and image too.")
@click.option("--yes", is_flag=True, help="With --purge-cache: skip the confirmation.")
def down(name: str, directory: Path | None, cache: Path, purge_cache: bool, yes: bool) -> None:
    """Remove all lab hosts and verify that nothing is left.

    Works on a partly created or crashed lab as well, and after a reboot. Cached wheels and the
    image stay unless --purge-cache is given.
    """
    prerequisites.require_linux_root()
    location = (directory or layout.default_dir(name)).absolute()
    if purge_cache and cache.exists() and not yes:
        confirm(f"Delete the wheels and the image in `{cache}`?")
    removal.remove_lab(name, location, say)
    if leftovers := removal.leftovers(name, location):
        raise VlaunchError(
            f"leftovers of the lab cluster `{name}`",
            evidence=leftovers,
            hint="run the same command again",
        )
    say(f"nothing of `{name}` is left")
    if purge_cache:
        removal.remove_cache(cache)
    elif cache.exists():
        say(f"wheels and image stay in `{cache}` for the next time; `--purge-cache` removes them")


def _print_gpu_notes(lab: Lab) -> None:
    """Print that the GPUs are simulated, and their faults."""
    if lab.accelerator != "cpu":
        kind = MODELS[lab.gpu_model].name if lab.accelerator == "nvidia" else "AMD GPU"
        say(f"{lab.gpus} × {kind} on each host; {PLAINLY}")
    for trouble in lab.troubles:
        say(f"{trouble}: {trouble.meaning}")


def _repeat_options(name: str, directory: Path | None) -> str:
    options = "" if name == "vlaunch-lab" else f" --name {name}"
    return options + (f" --dir {directory}" if directory else "")
