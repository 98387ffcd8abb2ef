"""Plan of the front: its files, its container, and the gate that requires its configuration to run.

HAProxy itself validates a new configuration before it replaces the old one, and a reload keeps
connections: after a bad change the old configuration keeps serving. The agent changes states of
replicas at run time through `haproxy.sock`, which is in the node's container as well.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.agent.front import router_process
from launcher.agent.front.haproxy import FOLDER
from launcher.core.check import Finding, failed, passed, waiting
from launcher.core.domain import Answer, ExistingMount, Inventory, Mount, Node, Secret, fold
from launcher.core.plan import Gate, Plan, Stage, Step, precomputed_gate
from launcher.core.transport import Answers, Command
from launcher.front import configuration, node_program
from launcher.front.certificates import covers, served_names
from launcher.front.configuration import FILES, SECRETS, FrontServer
from launcher.front.keys import merge_maps
from launcher.front.node_program import REVOKED
from launcher.front.status import parse_status
from launcher.tools import containers, docker
from launcher.tools.site import Site
from launcher.tools.site.ray_judges import explain_logs

SERVER_KEY = "VLLM_API_KEY"
_TABLE = router_process.TABLE
_CONFIG, _LUA, _KEYS, _TLS, _KEY_FILE = (
    *("haproxy.cfg", "front.lua", "keys.map"),
    *("tls.pem", "server-key"),
)
_MASTER = "master.sock"  # for the requests of workers before a reload
_PROGRAM = Path(node_program.__file__).read_text(encoding="utf-8")
_QUERY = (
    'for f in "$1/haproxy.cfg" "$1/front.lua" "$1/router.json" "$1/targets.json" "$2/tls.pem"'
    ' "$2/server-key"; do sha256sum "$f" 2>/dev/null; done;'
    ' sed -n "/BEGIN CERT/,/END CERT/p" "$2/tls.pem" 2>/dev/null;'
    ' sed "s/^/key /" "$1/keys.map" 2>/dev/null; [ ! -e "$1/keys.map" ] || echo keys'
)
# `hand_over` has shared a set-group-ID folder with the image's user, who runs the router.
_WRITE = (
    'umask 077 && mkdir -p "$1" && if [ -g "$1" ]; then umask 007; chmod g+rwx,o+x "$1"; fi &&'
    ' new=$1/.$2.$$ && cat > "$new" && mv "$new" "$1/$2"'
)

# FRONT_MAXCONN is a third of HAProxy's connections, each of which takes two files: dockerd's limit
# may be below the `fd-hard-limit` of the configuration.
START = (
    "files=$(ulimit -Hn); [ $files -lt 100000 ] 2>/dev/null || files=100000;"
    ' export FRONT_MAXCONN=$((files / 6)); exec haproxy -W -db -S "$1,mode,660" -f "$2"'
)
_VALIDATE = 'sed "$2" "$1" >/tmp/haproxy.cfg && haproxy -c -f /tmp/haproxy.cfg'
_REPLACE = 'for f; do mv "$f.new" "$f" || exit; done'


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the front, and the shell command that prints a secret content, for display."""

    folder: str
    name: str
    content: str = field(repr=False)
    shown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontFiles:
    """The front's files on a node: digests by name, its certificate (PEM), and its map of keys
    (None without a file). `running` is the digest of the configuration that runs.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    certificate: str = ""
    keys: str | None = None
    running: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontInputs:
    """Inputs of the plan besides the nodes' facts: the servers, files by node, and the certificate
    and the key of the servers (None to keep those on the nodes).
    """

    servers: tuple[FrontServer, ...] = ()
    files: Mapping[str, FrontFiles] = field(default_factory=dict)
    certificate: Secret | None = None
    server_key: Secret | None = None


def preflight_gates(site: Site) -> tuple[Gate, ...]:
    """Return the gate for an image that `up` cannot pull, before anything changes."""
    inventory = site.inventory
    missing = nodes_without_image(site)
    if inventory.front is None or inventory.image_source != "nodes" or not missing:
        return ()
    image = inventory.front.image
    text, fix = f"lacks {image}, the front's image", f"run `vlaunch image copy {image}`"
    return (
        precomputed_gate(
            "front-image",
            "the front's image is on its nodes",
            lambda: [failed(node, text, fix=fix) for node in missing],
        ),
    )


def nodes_without_image(site: Site) -> list[Node]:
    """Return the front's nodes that lack its image, as far as observed."""
    front = site.inventory.front
    nodes = site.inventory.front_nodes
    return [node for node in nodes if front and site.image(node, front.image) is None]


def pull_steps(site: Site) -> tuple[Step, ...]:
    """Return the steps that pull the front's image where it is missing."""
    front = site.inventory.front
    return tuple(
        Step(
            title=f"pulling {front.image}",
            command=Command(
                node=node.name, argv=docker.pull(node.docker, front.image), timeout=600
            ),
        )
        for node in nodes_without_image(site)
        if front and site.inventory.image_source == "registry"
    )


def query_files(site: Site) -> list[Command]:
    """Query the front's files on its nodes, and HAProxy where it runs."""
    queries = [
        (
            Command(
                node=node.name,
                argv=("sh", "-c", _QUERY, "front", files_dir(site, node), secrets_dir(site, node)),
                timeout=30,
            ),
            *([node_command(site, node, "status")] if front_container(site, node) else ()),
        )
        for node in site.inventory.front_nodes
    ]
    return [query for node_queries in queries for query in node_queries]


def parse_files(answers: Sequence[Answer]) -> FrontFiles:
    """Parse a node's answers to `query_files`."""
    answer, *status = answers
    lines = answer.out.splitlines()
    digests = re.findall(r"^([0-9a-f]{64})  .*/([a-z.-]+)$", answer.out, re.MULTILINE)
    keys = "".join(f"{line[4:]}\n" for line in lines if line.startswith("key "))
    pem = re.search(r"-----BEGIN CERT.*-----END CERTIFICATE-----", answer.out, re.DOTALL)
    return FrontFiles(
        digests={name: digest for digest, name in digests},
        certificate=pem[0] if pem else "",
        keys=keys if "keys" in lines else None,
        running=parse_status(status[0]).digest if status else "",
    )


def uses_tls(inventory: Inventory) -> bool:
    """Return True if clients connect with TLS."""
    return inventory.front is not None and inventory.front.tls.kind != "off"


def needs_certificate(inventory: Inventory, files: Mapping[str, FrontFiles]) -> bool:
    """Return True if a self-signed certificate is missing, wrong, or not the same on all nodes."""
    if not uses_tls(inventory) or (inventory.front and inventory.front.tls.cert):
        return False
    texts = {files[node.name].certificate for node in inventory.front_nodes if node.name in files}
    return len(texts) != 1 or certificate_source(inventory, files) is None


def certificate_source(inventory: Inventory, files: Mapping[str, FrontFiles]) -> Node | None:
    """Return the first node with a self-signed certificate for all names; the others get it too."""
    names = served_names(inventory)
    nodes = [node for node in inventory.front_nodes if node.name in files]
    return next((node for node in nodes if covers(files[node.name].certificate, names)), None)


def read_certificate(site: Site, node: Node) -> Command:
    """Read a node's certificate and its private key."""
    return Command(node=node.name, argv=("cat", f"{secrets_dir(site, node)}/{_TLS}"), timeout=30)


def front_spec(site: Site, node: Node) -> docker.ContainerSpec:
    """Return the front's container. Its files change without a restart, so it depends on the
    inventory only; with new ports it is replaced.
    """
    front = site.inventory.front
    assert front is not None  # noqa: S101 - callers have one
    return docker.ContainerSpec(
        name=container_name(site, node),
        image=front.image,
        entrypoint="sh",
        command=(
            *("-c", START, "start", f"{FILES}/{_MASTER}", f"{FILES}/{_CONFIG}"),
            # for the check of ports: those of a running front, whatever the inventory says now
            *("--port", str(front.port), "--metrics-port", str(front.metrics)),
        ),
        cluster=site.inventory.cluster,
        role="front",
        node=node.name,
        user="0:0",  # the worker gives up its rights
        mounts=_mounts(site, node),
        log_driver=site.inventory.logging.driver or "",
        log_options=containers.log_options(site, node),
    ).labelled()


def find_drift(site: Site, node: Node) -> tuple[str, ...]:
    """Describe how a node's front differs from the inventory; nothing without a container."""
    container = front_container(site, node)
    if container is None:
        return ()
    if node not in site.inventory.front_nodes:
        return ("its front is not in the inventory",)
    spec, image = front_spec(site, node), site.image(node, container.image)
    if container.spec == spec.hash:
        return ()
    env = image.env if image else container.env
    return tuple(f"front: {text}" for text in docker.describe_differences(container, spec, env))


def front_container(site: Site, node: Node) -> docker.Container | None:
    """Return the front's container on a node, running or not."""
    facts = site.facts_of(node)
    return facts.container(container_name(site, node)) if facts else None


def container_name(site: Site, node: Node) -> str:
    """Return the name of a node's front."""
    return f"{site.container_name(node)}-front"


def files_dir(site: Site, node: Node) -> str:
    """Return the folder of the front's configuration, keys and socket, which the agent sees."""
    return f"{site.state_dir(node)}/server/.front"


def secrets_dir(site: Site, node: Node) -> str:
    """Return the folder of its private key and of the servers' key, apart from other secrets."""
    return f"{containers.secrets_base(site, node)}/front"


def node_command(site: Site, node: Node, *command: str) -> Command:
    """Return a command of `node_program`: as root, in the node's image, which has Python, with the
    folders of the front's container. It needs neither the node's container nor GPUs.
    """
    container = site.container(node)
    argv = docker.run_throwaway(
        node.docker,
        container.image if container else site.inventory.image,
        *("python3", "-c", _PROGRAM, FILES, f"{FILES}/{_KEYS}", *command),
        cluster=site.inventory.cluster,
        node=node.name,
        options=(
            *("--network", "none", "--user", "0:0", "--env", "NVIDIA_VISIBLE_DEVICES=void"),
            *("--volumes-from", container_name(site, node)),
        ),
    )
    return Command(node=node.name, argv=argv, timeout=60)


def front_target(server: str) -> dict[str, Any]:
    """Return fields of `QueryTarget` for a server through the front on a node, from its container;
    who reaches the front's socket needs no key.
    """
    socket = f"{containers.SERVERS}/{FOLDER}/{router_process.SERVERS}"
    return {"api_host": socket, "headers": {router_process.SERVER: server}}


def plan_front(site: Site, inputs: FrontInputs, *, verb: str, start: bool = True) -> Plan:
    """Plan the front's files, validation, container and gate; without `start`, no new container.

    What is as it should be stays; a changed configuration is reloaded and closes no connection.
    """
    inventory, nodes = site.inventory, site.inventory.front_nodes
    configs = {node.name: _render(inventory, node, inputs) for node in nodes}
    leftovers = _leftover_steps(site) if start else []
    stages = [Stage(id="front", title="Remove the front", steps=tuple(leftovers))]
    keys, write, validate, begin = list[Step](), list[Step](), list[Step](), list[Step]()
    merged = merge_maps(files.keys for files in inputs.files.values() if files.keys is not None)
    for node in nodes:
        files, config = inputs.files.get(node.name, FrontFiles()), configs[node.name]
        changed = _changed_files(site, node, inputs, files, config)
        keys += _key_steps(site, node, files.keys, merged)
        if changed:
            write += [_write(node, file, suffix=".new") for file in changed]
            validate += _validation_steps(site, node, changed)
        outdated = bool(changed) or f"description {files.running}\n" not in config
        begin += _start_steps(site, node, reload=outdated, start=start)
    stages += [
        Stage(id="keys", title="Give all nodes the same keys", steps=tuple(keys)),
        Stage(id="front", title="Write the front's files", steps=tuple(write)),
        Stage(id="front", title="Validate the front's configuration", steps=tuple(validate)),
        Stage(
            id="front",
            title="Start the front" if start else "Reload the front",
            steps=tuple(begin),
            gates=(_serving_gate(site, configs),) if begin else (),
        ),
    ]
    return Plan(verb=verb, stages=tuple(stages), notes=tuple(describe_drift(site) if start else ()))


def describe_drift(site: Site) -> list[str]:
    """Describe how the fronts of all nodes differ from the inventory."""
    nodes: dict[str, list[str]] = {}
    for node in site.nodes:
        for text in find_drift(site, node):
            nodes.setdefault(text, []).append(node.name)
    return [f"{fold(names)}: {text}" for text, names in nodes.items()]


def _leftover_steps(site: Site) -> list[Step]:
    title = "removing the front, which is not in the inventory"
    return [
        _step(title, node, argv)
        for node in site.nodes
        if node not in site.inventory.front_nodes and (container := front_container(site, node))
        for argv in (
            docker.remove(node.docker, container.id),
            ("rm", "-f", f"{files_dir(site, node)}/{_TABLE}"),  # the router ends with it
        )
    ]


def _render(inventory: Inventory, node: Node, inputs: FrontInputs) -> str:
    assert inventory.front is not None  # noqa: S101 - it has nodes
    return configuration.render(
        inventory.front,
        inputs.servers,
        metrics_address=node.ip,
        server_key=SERVER_KEY in inventory.secrets,
    )


def _changed_files(
    site: Site, node: Node, inputs: FrontInputs, files: FrontFiles, config: str
) -> list[_File]:
    """Return the files with another content than those on the node, apart from the keys."""
    from launcher.tools.shipped.node_files import secret_command

    folder, secrets, inventory = files_dir(site, node), secrets_dir(site, node), site.inventory
    assert inventory.front is not None  # noqa: S101 - it has nodes
    candidates = [
        _File(folder, _CONFIG, config),
        _File(folder, _LUA, configuration.LUA.read_text(encoding="utf-8")),
        _File(folder, _TABLE, configuration.render_table(inventory.front, inputs.servers)),
        _File(
            folder,
            configuration.TARGETS,
            configuration.scrape_targets(inventory, node, inputs.servers),
        ),
    ]
    if inputs.certificate is not None:
        command = _certificate_command(site, inputs)
        candidates.append(_File(secrets, _TLS, inputs.certificate.reveal(), command))
    if inputs.server_key is not None:
        command = secret_command(inventory, SERVER_KEY)
        candidates.append(_File(secrets, _KEY_FILE, inputs.server_key.reveal(), command))
    return [file for file in candidates if files.digests.get(file.name) != _sha256(file.content)]


def _key_steps(site: Site, node: Node, text: str | None, merged: Sequence[str]) -> list[Step]:
    """Return the steps that bring a node's map in line with that of all nodes."""
    missing = [line for line in merged if text is None or line not in text.splitlines()]
    if text is None or (missing and front_container(site, node) is None):
        return [_write(node, _File(files_dir(site, node), _KEYS, "\n".join([*merged, ""])))]
    revoked = [line.removeprefix(REVOKED) for line in missing if line.startswith(REVOKED)]
    changes = [("add", *line.split(" ", 1)) for line in missing if not line.startswith(REVOKED)]
    changes += [("revoke", "", *revoked)] if revoked else []
    title = "giving it the keys of the other nodes"
    return [Step(title=title, command=node_command(site, node, *change)) for change in changes]


def _certificate_command(site: Site, inputs: FrontInputs) -> str:
    """Return the shell command that prints the certificate and its key, for display."""
    inventory = site.inventory
    tls = inventory.front.tls if inventory.front else None
    if tls and tls.cert and tls.key:
        return shlex.join(("cat", *(str(Path(path).expanduser()) for path in (tls.cert, tls.key))))
    if source := certificate_source(inventory, inputs.files):
        return shlex.join(("on", source.name, *read_certificate(site, source).argv))
    names = served_names(inventory)
    alternative = ",".join(
        f"{'IP' if re.fullmatch(r'[0-9.]+|.*:.*', name) else 'DNS'}:{name}" for name in names
    )
    return (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 27000 -subj"
        f" {shlex.quote(f'/CN={names[0]}')} -addext {shlex.quote(f'subjectAltName={alternative}')}"
        " -keyout -"
    )


def _write(node: Node, file: _File, suffix: str = "") -> Step:
    return Step(
        title=f"writing the front's {file.name}",
        command=Command(
            node=node.name,
            argv=("sh", "-c", _WRITE, "front-file", file.folder, f"{file.name}{suffix}"),
            timeout=30,
            stdin=partial(str.encode, file.content),
            shown_stdin=file.shown or f"printf %s {shlex.quote(file.content)}",
        ),
    )


def _validation_steps(site: Site, node: Node, changed: Sequence[_File]) -> list[Step]:
    """Return the steps that validate new files with HAProxy and put them in place of the old."""
    spec, names = front_spec(site, node), [file.name for file in changed]
    volumes = (
        word for mount in spec.mounts for word in ("--volume", f"{mount.source}:{mount.target}:ro")
    )
    config = f"{FILES}/{_CONFIG}{'.new' if _CONFIG in names else ''}"
    new_paths = ";".join(f"s|/{name}|&.new|" for name in names if name != _CONFIG)
    check = docker.run_throwaway(
        node.docker,
        spec.image,
        *("sh", "-c", _VALIDATE, "validate", config, new_paths),
        cluster=spec.cluster,
        node=node.name,
        options=("--network", "none", "--user", spec.user, *volumes),
    )
    paths = (f"{file.folder}/{file.name}" for file in changed)
    return [
        _step("validating the front's configuration", node, check),
        _step("using the new files", node, ("sh", "-c", _REPLACE, "front-replace", *paths)),
    ]


def _start_steps(site: Site, node: Node, *, reload: bool, start: bool) -> list[Step]:
    spec, container = front_spec(site, node), front_container(site, node)
    if container is not None and container.running and container.spec == spec.hash:
        if not reload:
            return []
        # After `docker kill` with any signal, Docker would not restart the container (moby's
        # `killWithSignal`).
        argv = docker.exec_(node.docker, spec.name, "sh", "-c", "kill -s USR2 1")
        return [_step("reloading the front", node, argv)]
    if not start:
        return []
    steps = []
    if container is not None:
        steps.append(_step("removing the old front", node, docker.remove(node.docker, spec.name)))
    return [*steps, _step("starting the front", node, docker.run(node.docker, spec))]


def _step(title: str, node: Node, argv: Sequence[str]) -> Step:
    return Step(title=title, command=Command(node=node.name, argv=tuple(argv), timeout=90))


def _serving_gate(site: Site, configs: Mapping[str, str]) -> Gate:
    """Check that HAProxy runs with the new configuration."""
    nodes = site.inventory.front_nodes

    def judge(answers: Answers) -> Sequence[Finding]:
        return [_judge_serving(node, answers[node.name][0], configs[node.name]) for node in nodes]

    return Gate(
        id="front",
        what=f"the front serves on {fold([node.name for node in nodes])}",
        queries=tuple(node_command(site, node, "status") for node in nodes),
        judge=judge,
        deadline=30,
        every=0.3,
        evidence=tuple(
            Command(
                node=node.name,
                argv=docker.logs(node.docker, container_name(site, node), tail=20),
                timeout=20,
            )
            for node in nodes
        ),
        explain=explain_logs,
    )


def _judge_serving(node: Node, answer: Answer, config: str) -> Finding:
    digest = parse_status(answer).digest
    if f"description {digest}\n" in config:
        return passed(node, "the front serves")
    text = "the front still runs its old configuration" if digest else "the front does not run"
    return waiting(node, text, evidence=answer.tail, fix=f"see `vlaunch logs {node.name}`")


def _mounts(site: Site, node: Node) -> tuple[Mount, ...]:
    inventory, folder = site.inventory, secrets_dir(site, node)
    kind = ExistingMount if inventory.secrets_in == "memory" else Mount
    has_secrets = SERVER_KEY in inventory.secrets or uses_tls(inventory)
    return (
        Mount(source=files_dir(site, node), target=FILES),
        *([kind(source=folder, target=SECRETS, read_only=True)] if has_secrets else ()),
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
