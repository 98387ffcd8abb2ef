"""`vlaunch secrets`: the sources and files of secrets, and their rotation.

Values are never shown.
"""

import secrets as random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.app.terminal import dump_json, show
from launcher.cluster import secret_files
from launcher.cluster.secret_files import SecretFile
from launcher.cluster.secrets_view import render_secrets
from launcher.core import redaction, untrusted
from launcher.core.domain import Inventory, Secret, SecretSource, fold
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools import ray
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site, serving_judges


@click.group()
def secrets() -> None:
    """List and rotate secrets. Values are never shown."""


@command(
    "list",
    under=secrets,
    shows="none",
    flags=[options.JSON],
    short_help="List secrets with their sources, users and files",
)
def list_(call: CommandContext) -> int:
    """List all secrets: sources, users, files on the nodes and their ages, and expiry dates of
    certificates.

    The exit code is 1 when a node cannot be reached, when a file is readable by others or belongs
    to no secret, or when a certificate expires within 30 days.
    """
    from launcher.tools.shipped import certificates

    inventory = call.inventory
    with call.session(partial=True) as session:
        files, pem_texts = _query_files(session)
    rows = _secret_rows(inventory, pem_texts)
    names = [row["name"] for row in rows]
    remarks = [
        f"{name}: {error.message.removeprefix(f'{name}: ')}"
        for name, error in session.missing.items()
    ]
    for node, listed in files.items():
        remarks += _file_remarks(node, listed, names)
    if warning := certificates.expiry_warning(pem_texts, datetime.now(timezone.utc)):
        remarks.append(warning)
    if call.as_json:
        data = {
            "cluster": inventory.cluster,
            "secrets_in": inventory.secrets_in,
            "secrets": rows,
            "nodes": {node: [asdict(file) for file in listed] for node, listed in files.items()},
            "remarks": remarks,
        }
        click.echo(dump_json(data))
    else:
        show(render_secrets(rows, files, remarks, fold([node.name for node in inventory.nodes])))
    return 1 if remarks else 0


@command(
    under=secrets,
    flags=[options.LOCK_WAIT, options.YES, options.JSON],
    short_help="Renew certificates and Ray's token; fetch other secrets again",
)
@click.argument("names", metavar="[NAME…]", nargs=-1)
@options.JOIN_TIMEOUT
def rotate(call: CommandContext, names: tuple[str, ...], join_timeout: float) -> None:
    """Renew the agents' certificates and Ray's token, and fetch the other secrets from their
    sources again.

    AGENT_CERTIFICATE alone renews only the certificates, and nothing stops. RAY_AUTH_TOKEN is
    renewed if it is named or if no secret is named. All other secrets get the current values of
    their sources, named or not. If one of these values changes, containers restart and stop what
    runs in them; supervised servers start again.
    """
    from launcher.tools.shipped import certificates

    inventory = call.inventory
    token = _new_token(inventory, names)
    renew = not names or not set(names).isdisjoint(certificates.SECRET_NAMES)
    if names and set(names) <= set(certificates.SECRET_NAMES):
        with call.session() as session, call.locked(session) as locked:
            _renew_certificates(locked)
        return
    values = {**resolve(inventory.secrets, inventory.path.parent), **token}
    with call.session() as session, call.locked(session) as locked:
        _rotate_secrets(call, locked, values, renew=renew, join_timeout=join_timeout)


def _new_token(inventory: Inventory, names: Sequence[str]) -> dict[str, Secret]:
    """Return a new token if named, or if Ray uses it and none is. Raises RequestError."""
    defined = [row["name"] for row in _secret_rows(inventory)]
    if unknown := [name for name in names if name not in defined]:
        raise RequestError(
            f"no secret `{unknown[0]}` in this cluster"
            if len(unknown) == 1
            else f"no secrets {', '.join(unknown)} in this cluster",
            hint=f"defined secrets: {', '.join(defined)}"
            if defined
            else "the inventory defines none under `secrets:`",
        )
    used = inventory.ray.token_auth and not inventory.ray.off
    rotates = ray.TOKEN in names if names else used
    if ray.TOKEN in inventory.secrets or not rotates:
        return {}
    token = Secret(random.token_hex(32))
    redaction.add_secrets(token)
    return {ray.TOKEN: token}


def _renew_certificates(session: Session) -> None:
    """Give every node a new certificate; containers and servers keep running."""
    from launcher.cluster import up_inputs
    from launcher.cluster.up_plan import plan_certificates

    inventory = session.inventory
    site = Site(inventory, probe_nodes(inventory, session.transport, [inventory.image]))
    _refuse_without_containers(site)
    renewal = up_inputs.renew_certificates(inventory, site.facts, force=True)
    assert renewal is not None  # noqa: S101 - `force`
    session.apply(plan_certificates(site, renewal))
    text = "the agents have new certificates; no container was restarted"
    session.done(text, stage="secrets", data={"changed": len(inventory.nodes)})


def _refuse_without_containers(site: Site) -> None:
    if not any(site.container(node) for node in site.nodes):
        raise RequestError(
            f"cluster {site.inventory.cluster} has no containers to update",
            hint="run `vlaunch up`, which fetches every secret",
        )


def _rotate_secrets(
    call: CommandContext,
    session: Session,
    values: Mapping[str, Secret],
    *,
    renew: bool,
    join_timeout: float,
) -> None:
    """Report what stops, ask for confirmation, and run `up` with the other secrets."""
    from launcher.app.servers import query_cluster
    from launcher.cluster.bring_up import bring_up, plan_changes

    inventory = session.inventory
    snapshot = query_cluster(session)
    _refuse_without_containers(snapshot.site)
    running = snapshot.servers_state.running
    batches = serving_judges.active_batches(snapshot.payload)
    apply = partial(bring_up, session, values, join_timeout=join_timeout, renew=renew)
    plans = plan_changes(session, values, renew=renew)
    if not any(plan.steps for plan in plans):
        text = "every source returned the value in use; nothing was changed"
        session.done(text, stage="secrets", data={"changed": 0})
        return
    stages = (stage for plan in plans for stage in plan.stages)
    if not any(stage.steps for stage in stages if stage.id in ("head", "workers")):
        apply()  # no container is recreated
        return
    stopped = serving_judges.running_work(snapshot.payload)
    text = f"all containers of {inventory.cluster} will be recreated"
    text += f"; this stops {', '.join(stopped)}" if stopped else ""
    session.warn("secrets", text, data={"ends": stopped})
    if stopped:
        call.confirm(session, f"Recreate the containers, and stop {', '.join(stopped)}?")
    apply()
    for server in running:
        supervised = server.desired is not None and server.desired.policy.restarts != 0
        outcome = "restarts by itself" if supervised else "is stopped: run `vlaunch serve` again"
        session.note("secrets", f"{server.label} {outcome}")
    for job in batches:
        text = f"batch job {job.name} resumes when you run its `vlaunch batch` again"
        session.note("secrets", text)


def _secret_rows(inventory: Inventory, pem_texts: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the facts about each secret, the expiry from the nodes' certificates `pem_texts`."""
    from launcher.tools.shipped import certificates

    sources = {name: _describe_source(source) for name, source in sorted(inventory.secrets.items())}
    sources.setdefault(ray.TOKEN, "created by `vlaunch up`")
    expiry = certificates.earliest_expiry(pem_texts)
    issued, date = "issued by `vlaunch up`", f"{expiry:%Y-%m-%d}" if expiry else ""
    return [_secret_row(name, source) for name, source in sources.items()] + [
        {**_secret_row(name, issued), "ends": date} for name in certificates.SECRET_NAMES
    ]


def _secret_row(name: str, source: str) -> dict[str, str]:
    return {"name": name, "source": source, "used_by": _describe_use(name)}


def _describe_source(source: SecretSource) -> str:
    if source.env is not None:
        return f"environment variable {source.env}"
    if source.file is not None:
        return f"file {source.file}"
    if source.command is not None:
        # Its arguments may be confidential.
        return f"command {source.command.split()[0]}"
    return "typed in the terminal"


def _describe_use(name: str) -> str:
    users = {
        "AGENT_CA": "the agents, to verify certificates",
        "AGENT_CERTIFICATE": "the node's agent: mutual TLS with the others",
        "RAY_AUTH_TOKEN": "Ray: all ports except metrics",
        "VLLM_API_KEY": "required by the endpoint",
        "HF_TOKEN": "downloads from Hugging Face",
    }
    return users.get(name, "environment of the containers")


def _query_files(session: Session) -> tuple[dict[str, tuple[SecretFile, ...]], list[str]]:
    """Query every connected node for its files and certificates. Raises NodeError."""
    inventory = session.inventory
    queries = [
        Command(
            node=node.name,
            timeout=120,
            argv=secret_files.listing_argv(inventory.cluster, node.state_dir or ""),
        )
        for node in session.reached
    ]
    listed: dict[str, tuple[SecretFile, ...]] = {}
    pem_texts = []
    for answer in session.transport.run(queries):
        try:
            listed[answer.node] = secret_files.parse_listing(answer.out)
            pem_texts.append(secret_files.extract_certificates(answer.out))
        except UnreadableAnswer as error:
            raise NodeError(
                answer.node,
                error.message,
                evidence=untrusted.excerpt(answer.err.strip(), last=True),
            ) from None
    names = [node.name for node in inventory.nodes if node.name in listed]
    return {name: listed[name] for name in names}, pem_texts


def _file_remarks(node: str, files: Sequence[SecretFile], secret_names: Sequence[str]) -> list[str]:
    remarks = []
    for file in files:
        if not file.private:
            owner = "" if file.own else ", of another user"
            fix = f"chmod {'700' if not file.name else '600'} {file.path}"
            text = f"{file.path} has mode {file.mode}{owner}; run there: `{fix}`"
            remarks.append(f"{node}: {text}")
        if file.name and file.name not in secret_names:
            text = f"{file.path} is not a secret of this inventory; `vlaunch down` removes it"
            remarks.append(f"{node}: {text}")
    return remarks
