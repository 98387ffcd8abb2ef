"""Files of a cluster on a node: programs and secrets, mounted read-only into its containers."""

import hashlib
import io
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from launcher.core import registry, shell
from launcher.core.domain import Argv, Inventory, Node, Secret
from launcher.core.plan import Plan, Stage, Step
from launcher.core.transport import Command
from launcher.tools import containers, docker
from launcher.tools.host import HostFacts
from launcher.tools.shipped import certificates, zipapps
from launcher.tools.shipped.certificates import Renewal
from launcher.tools.shipped.py_spy import BUILDS, FILE
from launcher.tools.site import Site

_ENTRY = Path(__file__).parents[2] / "agent" / "entry.sh"
# Keeps directories that are not empty.
_FORGET = 'rm -rf "$1/secrets" "$1/front" && { rmdir "$1" "${1%/*}" 2>/dev/null || true; }'
# Running containers see the new file at once, because the folder is mounted.
_PROGRAM = (
    'umask 022 && new=$1.$(uname -n).$$ && cat > "$new" && chmod 755 "$new" && mv "$new" "$1"'
)

_AGENT = f"payload/{zipapps.AGENT}"
# A container keeps the agent that it started with until it restarts.
OLD_AGENT = (
    "agent runs another version of vlaunch; to replace it, run `vlaunch down`, then `vlaunch up`:"
    " this stops all servers"
)
ISSUED = 'cat "$certificates"/'  # prints a certificate issued by `script`


@cache
def payload_tar() -> bytes:
    """Return the node programs as a reproducible tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in _payload_files().items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@cache
def payload_digests() -> Mapping[str, str]:
    """Return the sha256 of the node programs by their paths below the state directory."""
    return {
        f"payload/{name}": hashlib.sha256(data).hexdigest()
        for name, data in _payload_files().items()
    }


def agent_digest() -> str:
    """Return the sha256 of the agent's archive, as agents report their own."""
    return payload_digests()[_AGENT]


def replaces_agent(site: Site, node: Node) -> bool:
    """Return True if a node's agent differs from this vlaunch's."""
    facts = site.facts_of(node)
    return facts is not None and facts.files.get(_AGENT) != agent_digest()


def file_steps(
    site: Site,
    node: Node,
    secrets: Mapping[str, Secret],
    *,
    fresh: bool,
) -> list[Step]:
    """Return the steps that update a node's files; with `fresh`, before its container starts, also
    its secrets.
    """
    facts = site.facts_of(node)
    compiled = containers.compile_cache_dir(site, node, site.inventory.image)
    caches = (compiled.rpartition("/")[0], compiled) if fresh else ()
    folders = (site.state_dir(node), *caches)
    digests = facts.files if facts else {}
    steps = []
    if any(digests.get(path) != digest for path, digest in payload_digests().items()):
        steps.append(
            Step(
                title="writing the node programs that containers mount",
                command=Command(
                    node=node.name,
                    argv=("sh", "-c", shell.program_text("node_programs"), "unpack", *folders),
                    timeout=30,
                    stdin=payload_tar,
                    shown_stdin="vlaunch payload",
                ),
            )
        )
    elif fresh:
        argv = ("sh", "-c", shell.program_text("node_folders"), "folders", *folders)
        steps.append(
            Step(
                title="creating the folders that containers write to",
                command=Command(node=node.name, argv=argv, timeout=30),
            )
        )
    if fresh:
        if facts:
            steps += _remove_misplaced_secrets(site, node, facts)
            steps += _remove_unused_secrets(site, node, facts, secrets)
        steps += _write_steps(site, node, secrets)
    return steps


def plan_files(site: Site, *, verb: str = "serve") -> Plan:
    """Plan the update of the programs in running containers, which must match later queries."""
    updates = tuple(
        step
        for node in site.nodes
        if site.running_container(node) is not None
        for step in file_steps(site, node, {}, fresh=False)
    )
    stage = Stage(id="files", title="Update node programs", steps=updates)
    return Plan(verb=verb, stages=(stage,))


def certificate_stages(site: Site, renewal: Renewal | None) -> list[Stage]:
    """Return the stages that renew the agents' certificates.

    Agents reload the files, and accept each other even if only some of the stages are done.
    """
    if renewal is None:
        return []
    authority = {certificates.AUTHORITY: Secret(renewal.authority)}
    stages: list[tuple[str, str, Callable[[Node], Mapping[str, Secret]]]] = [
        ("Trust the new certificate authority, too", "extend", lambda _: authority),
        (
            "Write certificates",
            "store",
            lambda node: {certificates.CERTIFICATE: renewal.nodes[node.name]},
        ),
        ("Trust only the new certificate authority", "store", lambda _: authority),
    ]
    return [
        Stage(
            id="certificates",
            title=title,
            steps=tuple(
                step
                for node in site.nodes
                for step in (
                    *_write_steps(site, node, values(node), verb),
                    *handover_steps(site, node),
                )
            ),
        )
        for title, verb, values in stages
        if verb == "store" or any(map(site.container, site.nodes))
    ]


def missing_py_spy(site: Site, node: Node) -> str:
    """Return the architecture for which a node lacks py-spy; empty if it has it, has not been
    probed, or there is no build.
    """
    facts, image = site.facts_of(node), site.image(node, site.inventory.image)
    build = BUILDS.get(image.architecture) if image is not None else None
    if facts is None or image is None or build is None or facts.files.get(FILE) == build.program:
        return ""
    return image.architecture


def py_spy_steps(site: Site, programs: Mapping[str, Callable[[], bytes]]) -> Iterator[Step]:
    """Yield steps that write py-spy where it is missing, for the architectures in `programs`."""
    for node in site.nodes:
        if (architecture := missing_py_spy(site, node)) in programs:
            yield Step(
                title="writing py-spy, which shows where ranks hang",
                command=Command(
                    node=node.name,
                    argv=("sh", "-c", _PROGRAM, "program", f"{site.state_dir(node)}/{FILE}"),
                    timeout=60,
                    stdin=programs[architecture],
                    shown_stdin=f"vlaunch payload --py-spy {architecture}",
                ),
            )


def handover_steps(site: Site, node: Node) -> list[Step]:
    """Return the steps that let an image's unprivileged user read secrets and write its files."""
    name = site.inventory.image
    image = site.image(node, name)
    if image is None or image.runs_as_root:
        return []
    folders = (
        f"{containers.secrets_base(site, node)}/secrets",
        f"{site.state_dir(node)}/server",
        containers.compile_cache_dir(site, node, name),
    )
    cluster = site.inventory.cluster
    argv = hand_over(node.docker, name, image.user, *folders, cluster=cluster, node=node.name)
    return [
        Step(
            title=f"giving the image's user {image.user} read access to the secrets",
            command=Command(node=node.name, argv=argv, timeout=120),
        )
    ]


@cache
def _payload_files() -> Mapping[str, bytes]:
    return {
        "entry.sh": _ENTRY.read_bytes(),
        zipapps.AGENT: zipapps.pack(zipapps.agent_files()),
        **{
            name: zipapps.pack(registry.program_files(name))
            for _, name, _ in registry.entries("NODE_PROGRAMS")
            if name.endswith(".pyz")
        },
    }


def _remove_unused_secrets(
    site: Site, node: Node, facts: HostFacts, secrets: Mapping[str, Secret]
) -> list[Step]:
    """Remove secrets that are no longer in the inventory."""
    stored = (
        facts.secrets_in_memory if site.inventory.secrets_in == "memory" else facts.secret_names
    )
    base = containers.secrets_base(site, node)
    expected = {*secrets, *certificates.SECRET_NAMES}
    paths = [f"{base}/secrets/{name}" for name in stored or () if name not in expected]
    if not paths:
        return []
    return [
        Step(
            title="removing secrets that are no longer in the inventory",
            command=Command(node=node.name, argv=("rm", "-f", *paths), timeout=30),
        )
    ]


def _write_steps(
    site: Site, node: Node, secrets: Mapping[str, Secret], verb: str = "store"
) -> list[Step]:
    program = (
        shell.program_text("secret_extend")
        if verb == "extend"
        else shell.program_text("secret_store")
    )
    base, place = containers.secrets_base(site, node), site.inventory.secrets_in
    return [
        Step(
            title=f"writing secret {name}",
            command=Command(
                node=node.name,
                argv=("sh", "-c", program, verb, base, name, place),
                timeout=30,
                stdin=partial(_secret_bytes, value),
                shown_stdin=_node_secret_command(site.inventory, node, name),
            ),
        )
        for name, value in sorted(secrets.items())
    ]


def _remove_misplaced_secrets(site: Site, node: Node, facts: HostFacts) -> list[Step]:
    """Remove secrets from other locations, after `secrets_in` or the memory folder has changed."""
    base = containers.secrets_base(site, node)
    argvs: list[Argv] = [
        ("sh", "-c", _FORGET, "forget", folder) for folder in facts.folders if folder != base
    ]
    if site.inventory.secrets_in == "memory" and facts.secret_names:
        disk = site.state_dir(node)
        argvs.append(("rm", "-f", *(f"{disk}/secrets/{name}" for name in facts.secret_names)))
    title = "removing secrets from their previous location"
    return [
        Step(title=title, command=Command(node=node.name, argv=argv, timeout=30)) for argv in argvs
    ]


def _secret_bytes(value: Secret) -> bytes:
    return value.reveal().encode()


def _node_secret_command(inventory: Inventory, node: Node, name: str) -> str:
    """Return the shell command that prints a secret of a node; `script` issues certificates."""
    if name == certificates.AUTHORITY:
        return f"{ISSUED}.ca.pem"
    if name == certificates.CERTIFICATE:
        return f"{ISSUED}{shlex.quote(node.name)}.pem"
    return secret_command(inventory, name)


def secret_command(inventory: Inventory, name: str) -> str:
    """Return the shell command that prints a secret, for display; it fails for empty secrets."""
    source = inventory.secrets.get(name)
    if source is None or source.prompt is not None:
        return f'printf %s "${{{name}:?}}"'
    if source.env is not None:
        return f'printf %s "${{{source.env}:?}}"'
    if source.command is not None:
        return f'printf %s "$({shlex.join(shlex.split(source.command))})"'
    path = str(source.file)
    if path.startswith("~/"):
        return f'printf %s "$(cat ~/{shlex.quote(path[2:])})"'
    return f'printf %s "$(cat {shlex.quote(str(inventory.path.parent / path))})"'


def hand_over(
    docker_: Argv, image: str, user: str, secrets: str, *folders: str, cluster: str, node: str
) -> Argv:
    """Let the group of an image's user read the secrets and write the other folders; the SSH user
    stays the owner.
    """
    mount_points = {
        f"/handed/{number}": folder for number, folder in enumerate((secrets, *folders))
    }
    options = ["--network", "none", "--user", "0:0"]
    for mount_point, folder in mount_points.items():
        options += ["--volume", f"{folder}:{mount_point}"]
    command = ("sh", "-c", shell.program_text("hand_over"), "hand-over", user, *mount_points)
    return docker.run_throwaway(
        docker_, image, *command, cluster=cluster, node=node, options=tuple(options)
    )
