"""Inputs of `up` and `serve` besides the nodes: Ray's image, the cluster's secrets, and py-spy."""

import contextlib
import secrets as random
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from launcher.app import certificates as issue_certificates
from launcher.app.session import Session
from launcher.cluster import wheels as resolver
from launcher.cluster.up_plan import RayImage, base_image
from launcher.cluster.wheels import fetch_py_spy
from launcher.core import redaction
from launcher.core.domain import Inventory, Secret
from launcher.core.errors import NodeError, VlaunchError
from launcher.core.registry import program_files
from launcher.core.transport import Command
from launcher.tools import image, ray
from launcher.tools.host import HostFacts
from launcher.tools.shipped import certificates, derived
from launcher.tools.shipped.certificates import Renewal
from launcher.tools.shipped.node_files import missing_py_spy
from launcher.tools.shipped.py_spy import BUILDS
from launcher.tools.site import Site

_MAX_PROBES = 100  # cached probe results
_PLACEHOLDER = "made-from-the-image"


def cache_dir() -> Path:
    """Return vlaunch's cache folder: wheels, and probe results of images."""
    from platformdirs import user_cache_path

    return user_cache_path("vlaunch")


def add_token(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    secrets: Mapping[str, Secret],
    *,
    make: bool = True,
) -> dict[str, Secret]:
    """Add the cluster's token: the head's existing one, or a new one of 32 random bytes (empty
    unless `make`).

    Agents authenticate to each other with it and, if the inventory says so, Ray's programs. A token
    that is among the secrets already stays.
    """
    if ray.TOKEN in secrets:
        return dict(secrets)
    existing = facts[inventory.head.name].token if inventory.head.name in facts else ""
    token = Secret(existing or (random.token_hex(32) if make else ""))
    redaction.add_secrets(token)
    return {**secrets, ray.TOKEN: token}


def renew_certificates(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    *,
    make: bool = True,
    force: bool = False,
) -> Renewal | None:
    """Issue certificates if one is missing, wrong or expiring; placeholders without `make`."""
    now = datetime.now(timezone.utc)
    reasons = certificates.renewal_reasons(inventory, facts, now)
    if not reasons and not force:
        return None
    if not make:
        return Renewal(nodes={node.name: Secret("") for node in inventory.nodes}, reasons=reasons)
    authority, issued = issue_certificates.issue_certificates(inventory, now)
    return Renewal(authority=authority, nodes=issued, reasons=reasons)


def placeholder_image(inventory: Inventory) -> RayImage:
    """Return a placeholder for an unprobed image, for a script with named gaps."""
    if inventory.ray.off:
        return base_image(inventory)
    version = inventory.ray.version
    recipe = derived.ImageRecipe(
        tag=f"{derived.REPOSITORY}:{version}-{_PLACEHOLDER}", dockerfile="", files={}
    )
    return RayImage(
        tag=recipe.tag,
        ray_version=version,
        python_version="",
        recipe=recipe,
        context_command=(
            'cat "${CONTEXT:?the build context is made when the image has been asked what it has}"'
        ),
    )


def resolve_ray_image(session: Session, facts: Mapping[str, HostFacts]) -> RayImage:
    """Probe the image, resolve the missing packages on this machine, and return the image for the
    containers.

    Without Ray it is the inventory's image unchanged.

    Raises:
        NodeError: the image could not be probed.
        RequestError: its vLLM or Ray cannot work, or it lacks programs that the agents need.
        VlaunchError: the wheels are unavailable or do not fit the image.
    """
    inventory = session.inventory
    base = facts[inventory.head.name].images[inventory.image]
    assert base is not None  # noqa: S101 - the image stage has just put it there
    python = _probe_image(session, base.identity)
    version = "" if inventory.ray.off else python.ray or inventory.ray.version
    for warning in image.check_supported(python, inventory.image, version):
        session.warn("image", f"{inventory.image}: {warning.text}; hint: {warning.fix}")
    if inventory.ray.off:
        return base_image(inventory)
    missing = image.ray_version_to_add(python, inventory.ray.version)
    plugin = program_files(derived.PLUGIN_PACKAGE) if inventory.accelerator == "cpu" else None
    if missing or plugin:
        derived_tag = _common_image(inventory, facts, base.identity, version, plugin)
        if derived_tag is not None:
            return RayImage(tag=derived_tag, ray_version=version, python_version=python.python)
    wheels = _resolve_wheels(session, python, missing) if missing is not None else None
    recipe = derived.make_recipe(
        base=inventory.image, identity=base.identity, image=python, wheels=wheels, plugin=plugin
    )
    return RayImage(
        tag=recipe.tag if recipe else inventory.image,
        ray_version=version,
        python_version=python.python,
        recipe=recipe,
        context_command=_write_context(recipe),
    )


def load_py_spy(
    session: Session, site: Site, *, download: bool = True
) -> dict[str, Callable[[], bytes]]:
    """Return loaders of py-spy for the architectures of the nodes that lack it.

    With `download` it is loaded now, and a failure is a warning.
    """
    loaders: dict[str, Callable[[], bytes]] = {}
    for architecture in sorted({missing_py_spy(site, node) for node in site.nodes} - {""}):
        load = partial(fetch_py_spy, BUILDS[architecture], cache_dir() / "py-spy")
        try:
            loaders[architecture] = partial(bytes, load()) if download else load
        except (VlaunchError, OSError) as error:
            session.warn("py-spy", f"{error}: stacks of hung ranks will not be available")
    return loaders


def _resolve_wheels(session: Session, python: image.ImagePython, version: str) -> derived.WheelSet:
    began = time.monotonic()
    text = f"resolving Ray {version} for the image's Python {python.python}"
    session.step("ray-image", text, state="running")
    wheels = resolver.resolve_wheels(python, version, cache_dir() / "wheels")
    seconds = time.monotonic() - began
    session.step("ray-image", text, seconds=seconds)
    return wheels


def _common_image(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    identity: str,
    ray_version: str,
    plugin: Mapping[str, bytes] | None,
) -> str | None:
    """Return a fitting derived image that every node has, so that nothing needs resolving or
    building.

    Of several, the one that the head runs: a correct running container stays.
    """
    tags_by_node = [
        {
            tag
            for tag, derived_image in node.images.items()
            if derived_image
            and derived.labels_match(
                derived_image.labels, identity=identity, ray=ray_version, plugin=plugin
            )
        }
        for node in facts.values()
    ]
    tags = set.intersection(*tags_by_node)
    head = Site(inventory, facts).container(inventory.head)
    return head.image if head is not None and head.image in tags else min(tags, default=None)


def _probe_image(session: Session, identity: str) -> image.ImagePython:
    """Probe the image once; images never change, so the result is cached under its identity."""
    cached = cache_dir() / "images" / f"{identity[:32]}-{image.PROBE_ID}.json"
    if cached.is_file():
        return image.parse_probe(cached.read_text(encoding="utf-8"))
    head, name = session.inventory.head, session.inventory.image
    text = "reading the image's Python, Ray and packages"
    session.step("ray-image", text, node=head.name, state="running")
    argv = image.probe(head.docker, name, cluster=session.inventory.cluster, node=head.name)
    (answer,) = session.transport.run([Command(node=head.name, argv=argv, timeout=180)])
    if not answer.ok:
        raise NodeError(
            head.name,
            f"cannot run {name} to inspect it",
            evidence=answer.tail,
            hint=f"run there: `docker run --rm --entrypoint python3 {name} -V`",
        )
    image_python = image.parse_probe(answer.out)
    session.step("ray-image", text, node=head.name, seconds=answer.seconds)
    cached.parent.mkdir(parents=True, exist_ok=True)
    part = cached.with_suffix(".part")
    part.write_text(image.significant_line(answer.out), encoding="utf-8")
    part.replace(cached)
    _prune_probes(cached.parent)
    return image_python


def _prune_probes(folder: Path) -> None:
    """Keep the newest probe results."""
    with contextlib.suppress(OSError):  # another run may do the same right now
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[
            _MAX_PROBES:
        ]:
            old.unlink(missing_ok=True)


def _write_context(recipe: derived.ImageRecipe | None) -> str:
    """Write the build context to a folder; return the command with which a script sends it."""
    if recipe is None:
        return ""
    folder = cache_dir() / "contexts" / recipe.content
    if not (folder / "Dockerfile").is_file():
        for name, content in recipe.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                target.symlink_to(content.path)
        (folder / "Dockerfile").write_text(recipe.dockerfile, encoding="utf-8")
    return f"tar -chf - -C {folder} ."
