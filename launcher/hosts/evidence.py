"""Everything that `vlaunch check` looks at, gathered: one survey a node, then the questions that
need it, all nodes at once.
"""

from __future__ import annotations

import os
import secrets
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.core.domain import Answer, Inventory, Level, Secret
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.expectations import Expectations, required_level
from launcher.core.transport import by_node
from launcher.hosts import inside, pairs, preflight
from launcher.hosts.check import Check, Evidence, Group, Hub
from launcher.hosts.checks.rdma import active, apart
from launcher.tools import model as models
from launcher.tools import observe
from launcher.tools.host import HostFacts
from launcher.tools.site import Site

if TYPE_CHECKING:
    import requests

_KNOCKS: tuple[Group, ...] = ("ports", "network")
_INSIDE: tuple[Group, ...] = ("rdma", "image", "memory", "accelerator")
_HIGH = range(40000, 60000)
_HUB_TIMEOUT = 10.0
_HUB = "https://huggingface.co"


def gather(
    session: Session,
    checks: Sequence[Check],
    *,
    model: str,
    expectations: Expectations,
    offline: bool,
) -> Evidence:
    """Ask all nodes that were reached what the checks need; what could not be asked is in the
    evidence with its reason.
    """
    groups = {check.group for check in checks}
    evidence = _survey(session, model, expectations)
    if groups & set(_INSIDE):
        evidence = _look_inside(session, evidence)
    if groups & set(_KNOCKS) and len(evidence.facts) > 1:
        evidence = _probe_ports(session, evidence)
    if "model" in groups and model:
        files = _files(session, evidence, model)
        evidence = replace(evidence, files=files, hub=_hub(session, model, offline=offline))
    return evidence


def ask_hub(model: str, token: Secret | None) -> Hub:
    """Ask for a model's page in the API (https://huggingface.co/docs/hub/api); `HF_ENDPOINT` names
    another hub.

    Whatever keeps us from an answer is `offline` with the reason: an air-gapped control machine is
    no fault.
    """
    if model.startswith("/"):
        return Hub(status="not asked", text="the model is a path, which needs no token")
    import requests

    endpoint = os.environ.get("HF_ENDPOINT") or _HUB
    value = token.reveal() if token is not None else ""
    if not value.isascii() or not value.isprintable():
        return Hub(status="unauthorized", text="the token has characters that no token has")

    def with_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, not among `headers`, where a login in ~/.netrc would replace it; a redirect to
        # another host loses it.
        if value:
            request.headers["Authorization"] = f"Bearer {value}"
        return request

    url = f"{endpoint.rstrip('/')}/api/models/{urllib.parse.quote(model)}/revision/main"
    try:
        # The answer's body is of no use, and might come for ever.
        with requests.get(
            url, auth=with_token, timeout=_HUB_TIMEOUT, allow_redirects=True, stream=True
        ) as response:
            return _read_hub(model, token, response)
    except requests.RequestException as error:
        if isinstance(error, ValueError):
            return Hub(status="offline", text=f"HF_ENDPOINT is no address of a hub: {endpoint}")
        host = urllib.parse.urlsplit(endpoint).hostname
        return Hub(status="offline", text=f"{host}: {type(error).__name__}")


def _survey(session: Session, model: str, expectations: Expectations) -> Evidence:
    """Ask what each node is made of; from that follows which level the network must reach."""
    inventory = session.inventory
    nodes = session.reached
    started = time.monotonic()
    session.begin("check", "Look at the nodes")
    session.wait("check", "surveying every node")
    commands = observe.commands(
        inventory, [inventory.image], nodes, survey=True, clock=time.time, compiled=True
    )
    facts, failures = observe.read(session.transport.run(commands))
    missing = {name: error.brief for name, error in (session.missing | failures).items()}
    evidence = Evidence(
        inventory=inventory,
        facts=facts,
        missing=missing,
        model=model,
        expectations=expectations,
        required=_required(inventory, facts, expectations),
    )
    session.step("check", "surveyed", seconds=time.monotonic() - started)
    return evidence


def _required(
    inventory: Inventory, facts: Mapping[str, HostFacts], expectations: Expectations
) -> Level:
    """Return the level that the network must reach, with the hardware that was found."""
    level, _ = required_level(
        inventory,
        gpus=[gpu.name for host in facts.values() for gpu in host.gpus or ()],
        rdma=[
            name for name, host in facts.items() if host.survey is not None and active(host.survey)
        ],
        expectations=expectations,
        distant_nodes=[name for name, host in facts.items() if host.survey and apart(host.survey)],
    )
    return level


def _files(session: Session, evidence: Evidence, model: str) -> dict[str, Mapping[str, int] | None]:
    """Return which files of the model each node has."""
    answers = by_node(
        session.transport, models.query(Site(session.inventory, evidence.facts), model, hosts=True)
    )
    files: dict[str, Mapping[str, int] | None] = {}
    for node, (answer, *_) in answers.items():
        scan = models.parse(answer)
        # A node that is not in `files` could not be asked, which its SKIP says.
        if scan.listed:
            files[node] = scan.files
    return files


def _look_inside(session: Session, evidence: Evidence) -> Evidence:
    site = Site(session.inventory, evidence.facts)
    queries = preflight.look_inside(site)
    started = time.monotonic()
    session.wait("check", "looking into the containers")
    views: dict[str, inside.Inside] = {}
    missing = dict(queries.missing)
    for answer in session.transport.run(queries.commands):
        try:
            views[answer.node] = inside.parse_look(answer)
        except UnreadableAnswer as error:
            missing[answer.node] = _unread(answer, error)
    if views:
        seconds = time.monotonic() - started
        session.step("check", "looked into the containers", seconds=seconds)
    return replace(evidence, inside=views, inside_missing=missing)


def _probe_ports(session: Session, evidence: Evidence) -> Evidence:
    candidates = [_HIGH[secrets.randbelow(len(_HIGH))] for _ in range(20)]
    high = preflight.high_port(evidence.facts, candidates)
    queries = preflight.probe_ports(
        Site(session.inventory, evidence.facts), high=high, nonce=secrets.token_hex(8)
    )
    started = time.monotonic()
    session.wait("check", "every node knocks at all the others")
    probes: list[pairs.PortProbe] = []
    missing = dict(queries.missing)
    for answer in session.transport.run(queries.commands):
        try:
            probes += pairs.parse(answer)
        except UnreadableAnswer as error:
            missing[answer.node] = _unread(answer, error)
    seconds = time.monotonic() - started
    session.step("check", "every node knocked at all the others", seconds=seconds)
    return replace(evidence, port_probes=tuple(probes), probes_missing=missing)


def _unread(answer: Answer, error: UnreadableAnswer) -> str:
    return f"{error.message}: {error.evidence or answer.tail}".strip(": ")


def _hub(session: Session, model: str, *, offline: bool) -> Hub:
    inventory = session.inventory
    if offline:
        return Hub(status="not asked", text="asked to stay offline")
    if all(node.env.get("HF_HUB_OFFLINE", "0") not in ("", "0") for node in inventory.nodes):
        return Hub(status="not asked", text="HF_HUB_OFFLINE is set: the nodes ask nobody either")
    source = {name: item for name, item in inventory.secrets.items() if name == "HF_TOKEN"}
    if any(item.prompt is not None for item in source.values()):
        return Hub(
            status="not asked",
            text="HF_TOKEN is typed in when it is needed, and a check asks nobody for it",
        )
    try:
        token: Secret | None = resolve(source, inventory.path.parent).get("HF_TOKEN")
    except RequestError as error:
        # A preflight tells all that it found; `up`, which needs the value, will refuse to go on
        # without it.
        return Hub(status="not asked", text=error.brief)
    return ask_hub(model, token)


def _read_hub(model: str, token: Secret | None, response: requests.Response) -> Hub:
    if response.ok:
        return Hub(
            status="ok",
            text=f"{model} may be read" + ("" if token is not None else " without a token"),
        )
    message = response.headers.get("X-Error-Message") or f"HTTP {response.status_code}"
    if token is None and response.status_code in (401, 403):
        return Hub(status="no token", text=message)
    if response.headers.get("X-Error-Code") == "GatedRepo" or response.status_code == 403:
        return Hub(status="gated", text=message)
    if response.status_code == 401:
        return Hub(status="unauthorized", text=message)
    if response.status_code == 404:
        return Hub(status="not found", text=message)
    return Hub(status="offline", text=message)
