"""`vlaunch lab`: lab hosts on this machine, for learning and testing without servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.app.terminal import say
from launcher.core.errors import RequestError, VlaunchError
from launcher.lab import layout, prerequisites, removal, startup
from launcher.lab import status as observed
from launcher.lab.gpu_models import MODELS, PLAINLY
from launcher.lab.layout import Lab

_NAME = click.option(
    "--name", default="vlaunch-lab", show_default=True, help="Which practice cluster."
)
_DIR = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where its files live.  [default: /var/lib/NAME]",
)
_CACHE = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    default="/var/cache/vlaunch-lab",
    show_default=True,
    help="Where wheels and image are kept between practice clusters.",
)


@click.group()
def lab() -> None:
    """Practice on one Linux machine: hosts with sshd and Docker, vLLM's CPU build, a tiny model."""


def _lab_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _NAME(_DIR(command))


@lab.command(short_help="start practice hosts, or mend them")
@_lab_options
@click.option("--nodes", default=2, show_default=True, help="How many hosts.")
@click.option(
    "--gpus",
    default=1,
    show_default=True,
    help="Slots or stand-in GPUs of each host.",
)
@click.option(
    "--accelerator",
    type=click.Choice(["cpu", "nvidia", "amd"]),
    default="cpu",
    show_default=True,
    help="cpu: slots of processors that are counted as GPUs. nvidia: stand-ins that `nvidia-smi`"
    " and Docker know, amd: devices without a driver; vLLM's CPU build answers in"
    " their place.",
)
@click.option(
    "--gpu-model",
    default="h100",
    show_default=True,
    help="What the stand-ins are like: h100, a100, l4 or gb10.",
)
@click.option(
    "--gpu-trouble",
    multiple=True,
    metavar="HOST:KIND[:INDEX]",
    help="Something wrong with a stand-in: busy, display, ecc, lost; or no-toolkit, of a whole"
    " host. Can be given several times; `lab up` again without it mends it.",
)
@click.option(
    "--rdma",
    type=click.Choice(["infiniband", "roce"]),
    help="Give each host RDMA cards as far as files go, one for each GPU.",
)
@click.option(
    "--subnet",
    default="10.77.0.0/24",
    show_default=True,
    help="A private network that is free here.",
)
@_CACHE
@click.option(
    "--install-missing", is_flag=True, help="Install the Debian packages that this machine lacks."
)
@click.option("--no-image", is_flag=True, help="Hosts only: without the vLLM image and the model.")
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
) -> None:
    """Start the practice hosts, or mend what is missing or dead of them.

    Makes network namespaces, a bridge and files below --dir; `vlaunch lab down` removes all of it.
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
    click.echo(lab_spec.inventory)
    say(f"{nodes} hosts are up, their inventory is above; next: `vlaunch up {lab_spec.inventory}`")
    say(f"`vlaunch lab down{_repeat_options(name, directory)}` removes them without a trace")
    _print_gpu_notes(lab_spec)


@lab.command(short_help="install the Debian packages that practice hosts need")
def install() -> None:
    """Install the Debian packages that practice hosts need; nothing when they are there."""
    prerequisites.ensure_installed(install=True, say=say)
    say("this machine has what practice hosts need; next: `vlaunch lab up`")


@lab.command(short_help="how every practice host is")
@_lab_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str, directory: Path | None, as_json: bool) -> None:
    """Show how every practice host is; exit 1 when something is down."""
    prerequisites.require_linux_root()
    location = directory or layout.default_dir(name)
    existing = layout.load_lab(location)
    if existing is None or existing.name != name:
        raise RequestError(
            f"there is no practice cluster `{name}` in `{location}`", hint="run `vlaunch lab up`"
        )
    states = observed.observe(existing)
    click.echo(observed.to_json(existing, states) if as_json else observed.to_text(states))
    _print_gpu_notes(existing)
    if down := [state.name for state in states if not state.up]:
        raise VlaunchError(
            f"not all is up on {', '.join(down)}",
            hint=f"run `vlaunch lab up{_repeat_options(name, directory)}`",
        )


@lab.command(short_help="remove every trace of practice hosts, and prove it")
@_lab_options
@_CACHE
@click.option("--purge-cache", is_flag=True, help="Remove the kept wheels and image too.")
def down(name: str, directory: Path | None, cache: Path, purge_cache: bool) -> None:
    """Remove every trace of the practice hosts, and prove it.

    Works on a half-made or crashed cluster as well, and after a reboot. The kept wheels and image
    stay for the next time unless --purge-cache is given.
    """
    prerequisites.require_linux_root()
    location = (directory or layout.default_dir(name)).absolute()
    removal.remove_lab(name, location, say)
    if leftovers := removal.leftovers(name, location):
        raise VlaunchError(
            f"traces of the practice cluster `{name}` are left",
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
