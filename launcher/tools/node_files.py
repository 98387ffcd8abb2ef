"""The small files a node keeps for a cluster: the payload and the secrets, both mounted read-only
into its containers.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from launcher.core import shell
from launcher.core.domain import Argv, Inventory, Node, Secret
from launcher.core.plan import Plan, Stage, Step
from launcher.core.transport import Command
from launcher.tools import certificates, containers, docker, zipapps
from launcher.tools.certificates import Renewal
from launcher.tools.host import HostFacts
from launcher.tools.py_spy import BUILDS, FILE
from launcher.tools.site import Site

_ENTRY = Path(__file__).parents[1] / "agent" / "entry.sh"
# The directory is made private first; tar and mv replace files whole, so that a container never
# reads half of one. The name on the way is the node's own: several nodes may share a home. `server`
# and the folder of what engines compile are made by the login, so that it may remove them: Docker
# would make them as root's. What runs in the container is root, or the login itself, where Docker
# is rootless.
# What another user could change is refused before anything is written: a folder of somebody else,
# one that every user may write in, or a link. The folder around the cluster's may be a link of the
# login's, or one like /tmp. A network file system may take the login for another user, such as root
# for nobody: whose a new file is tells.
_OWNED = (
    'd=$1; shift; in=${d%/*}; umask 022; mkdir -p "$in" || exit; new=$in/.owner.$(uname -n).$$;'
    ' me=$(set -C; exec 2>/dev/null 9>"$new" && stat -L -c %u /dev/fd/9 && rm "$new");'
    ' own="( -user 0 -o -user $(id -u) -o -user ${me:-0} )";'
    ' bad=$(find "$in" "$in/." -maxdepth 0 ! "(" $own "(" -type l -o ! -perm -2 -o -perm -1000 ")"'
    ' ")" -exec ls -ld {} +; find "$d" "$d/payload" "$d/secrets" "$d/server" "$@" -maxdepth 0 ! "("'
    ' $own -type d ! -perm -2 ")" -exec ls -ld {} + 2>/dev/null); [ -z "$bad" ] || { echo "$bad:'
    " another user could change what is kept there: correct it, or set another state_dir or"
    ' cache_dir" >&2; exit 1; };'
)
# The logs of engines hold prompts. A folder with the set-group-ID bit was handed over to a group.
_PRIVATE = '{ [ -g "$d/server" ] || chmod 700 "$d/server" || :; }'
_UNPACK = (
    f'{_OWNED} mkdir -p "$d/payload" "$d/server" "$@" && chmod 711 "$d" && {_PRIVATE} &&'
    ' tar -xf - -C "$d/payload"'
)
_FOLDERS = f'{_OWNED} mkdir -p "$d/server" "$@" && chmod 711 "$d" && {_PRIVATE}'
# A directory in /dev/shm may be somebody else's, who was there first.
_OWN = (
    'umask 077 && mkdir -p "$1/secrets" && for d in "${1%/*}" "$1" "$1/secrets"; do [ -O "$d" ] &&'
    ' [ ! -L "$d" ] || { echo "$d belongs to somebody else" >&2; exit 1; }; done && '
)
# A directory that holds something else is left.
_FORGET = 'rm -rf "$1/secrets" && { rmdir "$1" "${1%/*}" 2>/dev/null || true; }'
_STORE = (
    'umask 077 && mkdir -p "$1/secrets" && chmod 711 "$1" && chmod 700 "$1/secrets" &&'
    ' new=$1/secrets/.$2.$(uname -n).$$ && cat > "$new" && mv "$new" "$1/secrets/$2"'
)
# The same, followed by what the file has had.
_EXTEND = _STORE.replace(
    "cat >", '{ cat && if [ -f "$1/secrets/$2" ]; then cat "$1/secrets/$2"; fi; } >'
)
# Running containers see the new file at once: their mount is the folder.
_PROGRAM = (
    'umask 022 && new=$1.$(uname -n).$$ && cat > "$new" && chmod 755 "$new" && mv "$new" "$1"'
)

ISSUED = 'cat "$certificates"/'  # what prints one of the certificates that `script` issues


@cache
def payload_tar() -> bytes:
    """Return the payload as a tar archive, the same bytes every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in _files().items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@cache
def payload_digests() -> Mapping[str, str]:
    """Return the sha256 of each payload file under its path below the state directory."""
    return {f"payload/{name}": hashlib.sha256(data).hexdigest() for name, data in _files().items()}


def replaces_agent(site: Site, node: Node) -> bool:
    """True when a node has another agent than this vlaunch."""
    facts, path = site.facts_of(node), f"payload/{zipapps.AGENT}"
    return facts is not None and facts.files.get(path) != payload_digests()[path]


def steps(
    site: Site,
    node: Node,
    secrets: Mapping[str, Secret],
    *,
    fresh: bool,
) -> list[Step]:
    """Return what brings a node's files up to date; secrets are written when `fresh`: its container
    is about to start.
    """
    directory, facts = site.state_dir(node), site.facts_of(node)
    compiled = containers.compiled_by(site, node, site.inventory.image)
    caches = (compiled.rpartition("/")[0], compiled) if fresh else ()
    found = facts.files if facts else {}
    steps = []
    if any(found.get(path) != digest for path, digest in payload_digests().items()):
        steps.append(
            Step(
                title="writing the helper files that containers mount",
                command=Command(
                    node=node.name,
                    argv=("sh", "-c", _UNPACK, "unpack", directory, *caches),
                    timeout=30,
                    stdin=payload_tar,
                    shown_stdin="vlaunch payload",
                ),
            )
        )
    elif fresh:
        argv = ("sh", "-c", _FOLDERS, "folders", directory, *caches)
        steps.append(
            Step(
                title="making the folders that containers write to",
                command=Command(node=node.name, argv=argv, timeout=30),
            )
        )
    if fresh:
        if facts:
            steps += _elsewhere(site, node, facts)
            steps += _unwanted(site, node, facts, secrets)
        steps += _written(site, node, secrets)
    return steps


def plan_files(site: Site, *, verb: str = "serve") -> Plan:
    """Bring the helper programs of running containers up to date: what is asked next must
    understand the question.
    """
    updates = tuple(
        step
        for node in site.nodes
        if site.running(node) is not None
        for step in steps(site, node, {}, fresh=False)
    )
    stage = Stage(id="files", title="Update helper files", steps=updates)
    return Plan(verb=verb, stages=(stage,))


def certificate_stages(site: Site, renewal: Renewal | None) -> list[Stage]:
    """Return the stages that renew the agents' certificates. Agents load new files while they run,
    and accept one another even when the last of the stages are missing.
    """
    if renewal is None:
        return []
    authority = {certificates.AUTHORITY: Secret(renewal.authority)}
    stages: list[tuple[str, str, Callable[[Node], Mapping[str, Secret]]]] = [
        ("Trust the new authority as well", "extend", lambda _: authority),
        (
            "Write certificates",
            "store",
            lambda node: {certificates.CERTIFICATE: renewal.nodes[node.name]},
        ),
        ("Trust the new authority alone", "store", lambda _: authority),
    ]
    return [
        Stage(
            id="certificates",
            title=title,
            steps=tuple(
                step
                for node in site.nodes
                for step in (*_written(site, node, values(node), verb), *handed_over(site, node))
            ),
        )
        for title, verb, values in stages
        if verb == "store" or any(map(site.container, site.nodes))
    ]


def lacks_py_spy(site: Site, node: Node) -> str:
    """Return the architecture for which a node lacks py-spy; empty where it has it, where nobody
    has seen the node, or where there is no build for it.
    """
    facts, image = site.facts_of(node), site.image(node, site.inventory.image)
    build = BUILDS.get(image.architecture) if image is not None else None
    if facts is None or image is None or build is None or facts.files.get(FILE) == build.program:
        return ""
    return image.architecture


def py_spy_steps(site: Site, programs: Mapping[str, Callable[[], bytes]]) -> Iterator[Step]:
    """Yield what writes py-spy where it lacks, of those architectures that `programs` has."""
    for node in site.nodes:
        if (architecture := lacks_py_spy(site, node)) in programs:
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


def handed_over(site: Site, node: Node) -> list[Step]:
    """Let an image's user who is not root read the secrets, and write what its containers write."""
    name = site.inventory.image
    image = site.image(node, name)
    if image is None or image.root:
        return []
    folders = (
        f"{containers.secrets_base(site, node)}/secrets",
        f"{site.state_dir(node)}/server",
        containers.compiled_by(site, node, name),
    )
    cluster = site.inventory.cluster
    argv = hand_over(node.docker, name, image.user, *folders, cluster=cluster, node=node.name)
    return [
        Step(
            title=f"letting the image's user {image.user} read the secrets",
            command=Command(node=node.name, argv=argv, timeout=120),
        )
    ]


@cache
def _files() -> Mapping[str, bytes]:
    return {
        "entry.sh": _ENTRY.read_bytes(),
        zipapps.AGENT: zipapps.pack(zipapps.agent()),
        zipapps.BATCH: zipapps.pack(zipapps.batch()),
        zipapps.NETWORK: zipapps.pack(zipapps.network()),
    }


def _unwanted(
    site: Site, node: Node, facts: HostFacts, secrets: Mapping[str, Secret]
) -> list[Step]:
    """Remove the secrets that the inventory names no more."""
    there = facts.in_memory if site.inventory.secrets_in == "memory" else facts.secret_names
    base = containers.secrets_base(site, node)
    kept = {*secrets, *certificates.NAMES}
    paths = [f"{base}/secrets/{name}" for name in there or () if name not in kept]
    if not paths:
        return []
    return [
        Step(
            title="removing secrets that are not in the inventory any more",
            command=Command(node=node.name, argv=("rm", "-f", *paths), timeout=30),
        )
    ]


def _written(
    site: Site, node: Node, secrets: Mapping[str, Secret], verb: str = "store"
) -> list[Step]:
    script = _EXTEND if verb == "extend" else _STORE
    script = _OWN + script if site.inventory.secrets_in == "memory" else script
    base = containers.secrets_base(site, node)
    return [
        Step(
            title=f"writing secret {name}",
            command=Command(
                node=node.name,
                argv=("sh", "-c", script, verb, base, name),
                timeout=30,
                stdin=partial(_bytes, value),
                shown_stdin=_shown(site.inventory, node, name),
            ),
        )
        for name, value in sorted(secrets.items())
    ]


def _elsewhere(site: Site, node: Node, facts: HostFacts) -> list[Step]:
    """Remove the secrets from wherever they lay before `secrets_in`, or the node's place in memory,
    was another one.
    """
    base = containers.secrets_base(site, node)
    argvs: list[Argv] = [
        ("sh", "-c", _FORGET, "forget", folder) for folder in facts.folders if folder != base
    ]
    if site.inventory.secrets_in == "memory" and facts.secret_names:
        disk = site.state_dir(node)
        argvs.append(("rm", "-f", *(f"{disk}/secrets/{name}" for name in facts.secret_names)))
    title = "removing secrets from where they lay before"
    return [
        Step(title=title, command=Command(node=node.name, argv=argv, timeout=30)) for argv in argvs
    ]


def _bytes(value: Secret) -> bytes:
    return value.reveal().encode()


def _shown(inventory: Inventory, node: Node, name: str) -> str:
    """Return the shell command that prints one of a node's secrets; `script` makes certificates."""
    if name == certificates.AUTHORITY:
        return f"{ISSUED}.ca.pem"
    if name == certificates.CERTIFICATE:
        return f"{ISSUED}{shlex.quote(node.name)}.pem"
    return shown(inventory, name)


def shown(inventory: Inventory, name: str) -> str:
    """Return the shell command that prints a secret, for people to read and run; it fails where
    there is none to print.
    """
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
    """Let the group of an image's user read the secrets and write the other folders; what is there
    stays the login's.
    """
    places = {f"/handed/{at}": folder for at, folder in enumerate((secrets, *folders))}
    options = ["--network", "none", "--user", "0:0"]
    for place, folder in places.items():
        options += ["--volume", f"{folder}:{place}"]
    words = ("sh", "-c", shell.program("hand_over"), "hand-over", user, *places)
    return docker.throw_away(
        docker_, image, *words, cluster=cluster, node=node, options=tuple(options)
    )
