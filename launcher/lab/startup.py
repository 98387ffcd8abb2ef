"""Start or repair of a lab cluster: network, hosts, services, image, models, files."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from launcher.core.errors import RequestError
from launcher.core.sizes import format_count
from launcher.lab import (
    devices,
    front_image,
    gpu_image,
    gpus,
    host_configs,
    hosts,
    image,
    layout,
    machine,
    models,
    network,
    processes,
)
from launcher.lab.layout import Host, Lab
from launcher.lab.machine import Say


def start_lab(lab: Lab, *, cache: Path, with_image: bool, say: Say) -> None:
    """Start `lab`; keeps running parts.

    Raises RequestError when the directory or subnet is in use, VlaunchError when a part fails.
    """
    check_directory(lab)
    layout.save_lab(lab)
    with lab_lock(lab.dir):
        archive = image.ensure(cache, say) if with_image else None
        say(f"{format_count(lab.nodes, 'host')} on {lab.subnet}: starting those that are stopped")
        network.ensure(lab)
        for host in lab.hosts:
            hosts.prepare(lab, host)
            if any([gpus.prepare(lab, host), devices.prepare(lab, host)]):
                processes.kill_processes(processes.host_processes(host))
        _write_files(lab)
        for host in lab.hosts:
            if hosts.boot(host):
                say(f"{host.name}: booted as {host.ip}")
            for service in hosts.SERVICES:
                hosts.start_service(host, service)
        for host in lab.hosts:
            hosts.await_services(host)
        for host in lab.hosts:
            gpus.hold_memory(lab, host)
        if archive is not None:
            load_image(lab, archive, image.NAME, say)
            load_image(lab, front_image.ensure(cache, say), front_image.NAME, say)
            if lab.accelerator != "cpu":
                load_image(lab, gpu_image.ensure(cache, archive), gpu_image.NAME, say)
            models.ensure_models(lab, cache, archive, say)


def check_directory(lab: Lab) -> None:
    """Raise RequestError when the directory holds anything else, or a lab of another shape."""
    if len(str(lab.hosts[-1].docker_socket)) > 107:  # the limit of socket addresses (unix(7))
        raise RequestError(
            f"`{lab.dir}` is too long: sockets below it would not fit",
            hint="choose a shorter `--dir`",
        )
    if lab.dir.is_dir() and any(lab.dir.iterdir()) and not (lab.dir / layout.RECORD).exists():
        raise RequestError(
            f"`{lab.dir}` is not the folder of a lab cluster",
            hint="choose another `--dir`",
        )
    existing = layout.load_lab(lab.dir)
    if existing is None:
        return
    for field in ("name", "subnet", "accelerator", "rdma"):
        old, new = (getattr(source, field) or "none" for source in (existing, lab))
        if old != new:
            raise RequestError(
                f"the lab cluster in `{lab.dir}` has the {field} {old}, not {new}",
                hint=f"run `vlaunch lab down --name {existing.name} --dir {lab.dir}` first",
            )
    if existing.nodes > lab.nodes:
        raise RequestError(
            f"the lab cluster `{lab.name}` has {existing.nodes} hosts, more than {lab.nodes}",
            hint=f"run `vlaunch lab down --name {lab.name} --dir {lab.dir}` first",
        )


def load_image(lab: Lab, archive: Path, name: str, say: Say) -> None:
    """Load an image into Docker on all hosts that lack it, two at a time: the disk is the limit."""
    image_id = image.image_id(archive)
    outdated_hosts = [host for host in lab.hosts if _find_image(host, name) != image_id]
    if outdated_hosts:
        say(f"loading {name} into {format_count(len(outdated_hosts), 'host')}")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda host: _load(host, archive), outdated_hosts))


def _load(host: Host, archive: Path) -> None:
    with archive.open("rb") as file:
        machine.run(
            *hosts.docker_argv(host, "load", "--quiet"),
            stdin=file,
            timeout=900,
            what=f"loading the image on `{host.name}`",
        )


def _find_image(host: Host, name: str) -> str:
    return machine.attempt(
        *hosts.docker_argv(host, "image", "inspect", "--format", "{{.Id}}", name)
    ).stdout.strip()


def _write_files(lab: Lab) -> None:
    keys = {host.name: hosts.public_key(host) for host in lab.hosts}
    lab.known_hosts.write_text(host_configs.known_hosts(lab, keys))
    lab.inventory.write_text(host_configs.inventory(lab))
    (lab.dir / "hosts").chmod(0o700)
    give_to_caller([lab.inventory, lab.known_hosts, lab.identity, lab.identity.with_suffix(".pub")])


def give_to_caller(paths: list[Path]) -> None:
    """Under `sudo`, change the owner to the calling user, who can then run `vlaunch up`."""
    owner = os.environ.get("SUDO_UID", "")
    if owner.isdigit():
        for path in paths:
            shutil.chown(path, int(owner), int(os.environ.get("SUDO_GID", owner)))


@contextmanager
def lab_lock(directory: Path) -> Iterator[None]:
    """Lock a lab directory until the block or the process ends.

    Raises RequestError when another process holds the lock.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"another `vlaunch lab` is working on `{directory}`",
                hint="wait until it has finished",
            ) from None
        yield
    finally:
        os.close(handle)
