"""Output of `serve` and `rollback`: notes, warnings and results of a start."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.agent.health.task import task_named
from launcher.app.session import Session
from launcher.core import untrusted
from launcher.core.sizes import format_count
from launcher.serving import endpoints, serve_forecast
from launcher.serving.start import Replica, Replicas
from launcher.serving.watch import ReadyServer, summary_json


def report_forecast(session: Session, replicas: Replicas) -> None:
    """Report the planner's forecast of the first server that is started."""
    for replica in replicas.started[:1]:
        if replica.forecast is not None:
            fixed = replicas.spec.has_fixed_layout(session.inventory)
            serve_forecast.report_plan(session, replica.forecast, fixed=fixed)


def announce(session: Session, replica: Replica) -> None:
    """Show the notes and warnings on a start."""
    request, start = replica.request, replica.start
    if start.attached:
        text = f"already running as server `{start.spec.name}`; watching it"
        for note in (text, *start.plan.notes):
            session.note("serve", note, state="unchanged")
        return
    for note in start.plan.notes:
        session.note("placement", note)
    if replica.spec.skip_network_check and request.placement.networked:
        text = (
            "NETWORK CHECK SKIPPED: traffic between the nodes may use slow TCP, or hang"
            " (`vlaunch check-nccl`)"
        )
        session.warn("network", text)
    local = bool(request.host) and ipaddress.ip_address(request.host).is_loopback
    if "VLLM_API_KEY" not in session.inventory.secrets and not local:
        text = (
            f"the API on port {request.port} needs no key; set VLLM_API_KEY under"
            " `secrets:` to require one"
        )
        session.warn("serve", text)


def report_started(session: Session, replica: Replica) -> list[str]:
    """Report a server that is not awaited; return the rows to print."""
    start = replica.start
    hint = "" if start.attached else "; watch it with the same command without --no-wait"
    verb = "is running" if start.attached else "is starting"
    text = f"server `{start.spec.name}` {verb}; see `vlaunch status`{hint}"
    urls = list(endpoints.client_urls(session.inventory, start.spec))
    _report(session, replica, text, data={"endpoint": urls[0], "endpoints": urls})
    return urls


def report_ready(
    session: Session, replica: Replica, served: ReadyServer, network: str, fetch_seconds: float
) -> list[str]:
    """Report a server that has answered; return the rows to print. `network` describes its
    transport, `fetch_seconds` is the time spent copying its model.
    """
    first, plan, curl_line = served.first, replica.forecast, ""
    task = task_named(first.task)
    if task is not None and not task.generates:
        spec = replica.start.spec
        curl_line = f"`{endpoints.client_curl_line(session.inventory, spec, task, first.model)}`"
    next_step = "try it with the line below" if curl_line else "try it with `vlaunch chat`"
    url, *other_urls = served.endpoints
    others = f" and {len(other_urls)} more" if other_urls else ""
    text = f"{first.model} is ready at {url}{others}; {next_step}"
    data = {**summary_json(served), "network": network, **serve_forecast.plan_json(plan)}
    if fetch_seconds:
        data["fetch_seconds"] = round(fetch_seconds, 1)
    _report(session, replica, text, seconds=served.seconds + fetch_seconds, data=data)
    ranks = "; ".join(f"{node}: {', '.join(names)}" for node, names in served.ranks.items())
    replies = [f"DP{number} in {seconds:.1f}s" for number, seconds in enumerate(first.replicas)]
    tokens, concurrency = served.capacity.tokens, served.capacity.concurrency
    at_once = concurrency and f", {format_count(concurrency, 'request')} of full length at once"
    rows = {
        "model": first.model,
        "placement": ranks or "unknown",
        "replicas": replies and f"all {len(replies)} answered: {', '.join(replies)}",
        "network": network,
        "KV cache": ("unknown" if tokens is None else f"{tokens:,} tokens")
        + serve_forecast.compare_tokens(plan, tokens)
        + (at_once or ""),
        "another node": serve_forecast.describe_extra_node(plan, tokens),
        **({"answer": first.came} if curl_line else {"fingerprint": first.fingerprint or "none"}),
        "ready after": f"{served.seconds + fetch_seconds:.1f}s, of which"
        + (f" {fetch_seconds:.1f}s to copy the model to its nodes," if fetch_seconds else "")
        + f" {first.seconds:.1f}s until the first answer",
        "try it": curl_line,
    }
    lines = [*(("endpoint", url) for url in served.endpoints), *rows.items()]
    return [f"{label:<12} {untrusted.sanitize(value)}" for label, value in lines if value]


def _report(
    session: Session, replica: Replica, text: str, *, data: Mapping[str, Any], seconds: float = 0.0
) -> None:
    """Report the result of a start, which is the command's unless there are others."""
    if replica.spec.partial:
        session.note("serve", f"{replica.spec.label}: {text}", state="ok", data=data)
    else:
        session.done(text, stage="serve", seconds=seconds, data=data)


def report_group(session: Session, replicas: Replicas, seconds: float) -> None:
    """Report the result of the starts of several replicas, which is the command's."""
    inventory, spec = session.inventory, replicas.spec
    specs = [replica.start.spec for replica in replicas.listed]
    names, removed = [s.name for s in specs], [server.name for server in replicas.removed]
    urls = dict.fromkeys(url for s in specs for url in endpoints.client_urls(inventory, s))
    state = "starting; see `vlaunch status`" if spec.no_wait else "ready"
    at = f" at {next(iter(urls))}" if inventory.front else f" ({_list_names(names)})"
    count, verb = ("1 replica", "is") if len(names) == 1 else (f"{len(names)} replicas", "are")
    text = f"{count} of {spec.model} {verb} {state}{at}"
    text += f"; removed {_list_names(removed)}" if removed else ""
    data = {
        "endpoint": next(iter(urls)),
        "endpoints": [*urls],
        "servers": names,
        "removed": removed,
    }
    session.done(text, stage="serve", seconds=seconds, data=data)


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def merge_rows(rows: Mapping[str, list[str]]) -> list[str]:
    """Return all rows of the first replica, then those in which the others differ."""
    merged = list[str]()
    for name, own in rows.items():
        title = [f"{'server':<12} {name}"] if len(rows) > 1 and len(own) > 1 else []
        merged += [*title, *(row for row in own if row not in merged)]
    return merged
