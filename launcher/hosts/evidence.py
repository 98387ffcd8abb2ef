"""Evidence for `vlaunch check`: a survey of each node, then the queries of selected checks."""

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
from launcher.core.transport import run_by_node
from launcher.hosts import container_view, pairs, preflight
from launcher.hosts.check import Check, Evidence, Group, HubAccess
from launcher.hosts.checks.rdma import active_port_names, lacks_shared_switch
from launcher.tools import model as models
from launcher.tools.host import HostFacts, node_probes
from launcher.tools.site import Site

if TYPE_CHECKING:
    import requests

_PROBED_GROUPS: tuple[Group, ...] = ("ports", "network")
_CONTAINER_GROUPS: tuple[Group, ...] = ("rdma", "image", "memory", "accelerator")
_HIGH_PORTS = range(40000, 60000)
_HUB_TIMEOUT = 10.0
_HUB = "https://huggingface.co"


def gather_evidence(
    session: Session,
    checks: Sequence[Check],
    *,
    model: str,
    expectations: Expectations,
    offline: bool,
) -> Evidence:
    """Collect the evidence that the checks need, with the reasons for missing parts."""
    groups = {check.group for check in checks}
    evidence = _survey_nodes(session, model, expectations)
    if groups & set(_CONTAINER_GROUPS):
        evidence = _inspect_containers(session, evidence)
    if groups & set(_PROBED_GROUPS) and len(evidence.facts) > 1:
        evidence = _probe_ports(session, evidence)
    if "model" in groups and model:
        files = _query_model_files(session, evidence, model)
        evidence = replace(evidence, files=files, hub=_hub_access(session, model, offline=offline))
    return evidence


def query_hub(model: str, token: Secret | None) -> HubAccess:
    """Request the model's page from the Hub API (https://huggingface.co/docs/hub/api);
    `HF_ENDPOINT` sets another hub.

    Every connection failure is `offline` with the reason: an air-gapped control machine is not a
    fault.
    """
    if model.startswith("/"):
        return HubAccess(status="not asked", text="the model is a path, which needs no token")
    import requests

    endpoint = os.environ.get("HF_ENDPOINT") or _HUB
    value = token.reveal() if token is not None else ""
    if not value.isascii() or not value.isprintable():
        return HubAccess(status="unauthorized", text="the token has invalid characters")

    def with_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`: a login in ~/.netrc would replace a header. A redirect to another host drops
        # it.
        if value:
            request.headers["Authorization"] = f"Bearer {value}"
        return request

    url = f"{endpoint.rstrip('/')}/api/models/{urllib.parse.quote(model)}/revision/main"
    try:
        # Ignore the body, which may be endless.
        with requests.get(
            url, auth=with_token, timeout=_HUB_TIMEOUT, allow_redirects=True, stream=True
        ) as response:
            return _parse_hub_response(model, token, response)
    except requests.RequestException as error:
        if isinstance(error, ValueError):
            return HubAccess(status="offline", text=f"HF_ENDPOINT is not a valid URL: {endpoint}")
        host = urllib.parse.urlsplit(endpoint).hostname
        return HubAccess(status="offline", text=f"{host}: {type(error).__name__}")


def _survey_nodes(session: Session, model: str, expectations: Expectations) -> Evidence:
    inventory = session.inventory
    nodes = session.reached
    started = time.monotonic()
    session.begin("check", "Scan the nodes")
    session.wait("check", "surveying every node")
    commands = node_probes.probe_commands(
        inventory, [inventory.image], nodes, survey=True, clock=time.time, compiled=True
    )
    facts, failures = node_probes.parse_answers(session.transport.run(commands))
    missing = {name: error.brief for name, error in (session.missing | failures).items()}
    evidence = Evidence(
        inventory=inventory,
        facts=facts,
        missing=missing,
        model=model,
        expectations=expectations,
        required=_required_level(inventory, facts, expectations),
    )
    session.step("check", "surveyed", seconds=time.monotonic() - started)
    return evidence


def _required_level(
    inventory: Inventory, facts: Mapping[str, HostFacts], expectations: Expectations
) -> Level:
    level, _ = required_level(
        inventory,
        gpus=[gpu.name for host in facts.values() for gpu in host.gpus or ()],
        rdma=[
            name
            for name, host in facts.items()
            if host.survey is not None and active_port_names(host.survey)
        ],
        expectations=expectations,
        distant_nodes=[
            name for name, host in facts.items() if host.survey and lacks_shared_switch(host.survey)
        ],
    )
    return level


def _query_model_files(
    session: Session, evidence: Evidence, model: str
) -> dict[str, Mapping[str, int] | None]:
    answers = run_by_node(
        session.transport,
        models.query_scans(Site(session.inventory, evidence.facts), model, hosts=True),
    )
    files: dict[str, Mapping[str, int] | None] = {}
    for node, (answer, *_) in answers.items():
        scan = models.parse_scan(answer)
        # A node without an entry in `files` is a SKIP: its query failed.
        if scan.listed:
            files[node] = scan.files
    return files


def _inspect_containers(session: Session, evidence: Evidence) -> Evidence:
    site = Site(session.inventory, evidence.facts)
    queries = preflight.query_containers(site)
    started = time.monotonic()
    session.wait("check", "inspecting the containers")
    views: dict[str, container_view.ContainerView] = {}
    missing = dict(queries.missing)
    for answer in session.transport.run(queries.commands):
        try:
            views[answer.node] = container_view.parse_view(answer)
        except UnreadableAnswer as error:
            missing[answer.node] = _parse_failure(answer, error)
    if views:
        seconds = time.monotonic() - started
        session.step("check", "inspected the containers", seconds=seconds)
    return replace(evidence, inside=views, inside_missing=missing)


def _probe_ports(session: Session, evidence: Evidence) -> Evidence:
    candidates = [_HIGH_PORTS[secrets.randbelow(len(_HIGH_PORTS))] for _ in range(20)]
    high = preflight.pick_high_port(evidence.facts, candidates)
    queries = preflight.query_port_probes(
        Site(session.inventory, evidence.facts), high=high, nonce=secrets.token_hex(8)
    )
    started = time.monotonic()
    session.wait("check", "testing connections between all nodes")
    probes: list[pairs.PortProbe] = []
    missing = dict(queries.missing)
    for answer in session.transport.run(queries.commands):
        try:
            probes += pairs.parse_probes(answer)
        except UnreadableAnswer as error:
            missing[answer.node] = _parse_failure(answer, error)
    seconds = time.monotonic() - started
    session.step("check", "tested connections between all nodes", seconds=seconds)
    return replace(evidence, port_probes=tuple(probes), probes_missing=missing)


def _parse_failure(answer: Answer, error: UnreadableAnswer) -> str:
    return f"{error.message}: {error.evidence or answer.tail}".strip(": ")


def _hub_access(session: Session, model: str, *, offline: bool) -> HubAccess:
    inventory = session.inventory
    if offline:
        return HubAccess(status="not asked", text="offline, as requested")
    if all(node.env.get("HF_HUB_OFFLINE", "0") not in ("", "0") for node in inventory.nodes):
        return HubAccess(
            status="not asked", text="HF_HUB_OFFLINE is set: the nodes do not query it either"
        )
    source = {name: item for name, item in inventory.secrets.items() if name == "HF_TOKEN"}
    if any(item.prompt is not None for item in source.values()):
        return HubAccess(
            status="not asked",
            text="HF_TOKEN is entered at a prompt, and checks never prompt",
        )
    try:
        token: Secret | None = resolve(source, inventory.path.parent).get("HF_TOKEN")
    except RequestError as error:
        # The preflight reports everything it can; `up` needs the value and will fail.
        return HubAccess(status="not asked", text=error.brief)
    return query_hub(model, token)


def _parse_hub_response(model: str, token: Secret | None, response: requests.Response) -> HubAccess:
    if response.ok:
        return HubAccess(
            status="ok",
            text=f"{model} is readable" + ("" if token is not None else " without a token"),
        )
    message = response.headers.get("X-Error-Message") or f"HTTP {response.status_code}"
    if token is None and response.status_code in (401, 403):
        return HubAccess(status="no token", text=message)
    if response.headers.get("X-Error-Code") == "GatedRepo" or response.status_code == 403:
        return HubAccess(status="gated", text=message)
    if response.status_code == 401:
        return HubAccess(status="unauthorized", text=message)
    if response.status_code == 404:
        return HubAccess(status="not found", text=message)
    return HubAccess(status="offline", text=message)
