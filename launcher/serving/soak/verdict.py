"""Verdict on a soak, from its load and the reports of the agent and the nodes before and after."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.agent.health.verdicts import quiet_after
from launcher.agent.observed import Observed
from launcher.core.sizes import format_duration, format_rate
from launcher.serving.soak.load import DurationHistogram, LoadGenerator
from launcher.serving.soak.retransmits import Retransmits
from launcher.tools.site.servers import shown_state

_WIDTH = 200  # characters of a fault
_HEALTHY = ("answering", "busy", "resting")


def judge_load(
    load: LoadGenerator,
    *,
    planned: float,
    route: str,
    before: Observed,
    after: Observed | None,
    retransmits: Retransmits,
) -> dict[str, Any]:
    """Return the verdict on a finished load that was to take `planned` seconds, ready for JSON;
    times are seconds.

    `before` and `after` are the agent's records, None if the server is gone. A request may wait for
    a token until the agent would call the server quiet.
    """
    now = after if after and (after.id, after.asked) == (before.id, before.asked) else before
    health = "gone" if after is None else after.verdict if now is after else "replaced"
    restarts = now.generation - before.generation
    new = now.fault_count - before.fault_count
    faults = [fault.summary for fault in now.faults[-new:]] if new > 0 else []
    interrupted = load.seconds < planned - 1
    allowed, failed = quiet_after(before.longest_step), load.errors.total()
    problems = {
        f"failed requests: {failed}": failed,
        "no tokens received": not load.tokens and not interrupted,
        f"a request waited {load.longest_wait:.1f} s for a token": load.longest_wait > allowed,
        f"restarts: {restarts}": restarts,
        f"faults: {len(faults)}": faults,
        f"the server is {shown_state(health)}": health not in _HEALTHY,
    }
    failures = [text for text, present in problems.items() if present]
    return {
        "server": before.name,
        "model": load.model,
        "route": route,
        "streams": load.streams,
        "asked": planned,
        "seconds": load.seconds,
        "requests": load.done,
        "open": load.open,
        "errors": dict(load.errors),
        "tokens": load.tokens,
        "first_token": _percentiles(load.first),
        "between_tokens": _percentiles(load.between),
        "longest_gap": {"seconds": load.longest_wait, "until": load.waited_until},
        "allowed_gap": allowed,
        "restarts": restarts,
        "faults": faults,
        "health": health,
        "retransmits": {
            node: {"again": again, "sent": sent} for node, (again, sent) in retransmits[0].items()
        },
        "pairs": [
            {"from": source, "to": target, "again": again}
            for (source, target), again in retransmits[1].items()
        ],
        "interrupted": interrupted,
        "failures": failures,
        "passed": not failures,
    }


def verdict_rows(verdict: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values for the terminal."""
    errors, tokens, seconds = verdict["errors"], verdict["tokens"], verdict["seconds"]
    done, failed = verdict["requests"], sum(errors.values())
    yield "requests", f"{done:,} done, {verdict['open']} open at the end, {failed} failed"
    for kind, count in errors.items():
        yield "", f"{count} x {kind}"
    per_second = f" ({format_rate(tokens / seconds)} per second)" if seconds else ""
    yield "tokens", f"{tokens:,}{per_second}"
    yield "first token", _format_latency(verdict["first_token"])
    yield "next token", _format_latency(verdict["between_tokens"])
    gap, until = verdict["longest_gap"]["seconds"], verdict["longest_gap"]["until"]
    end = format_duration(until) if until >= 60 else _format_seconds(until)
    longest = f"{_format_seconds(gap)}, until {end} after the start" if gap else "none"
    yield "longest gap", f"{longest} (allowed: {verdict['allowed_gap']:.0f} s)"
    health, faults = verdict["health"], verdict["faults"]
    yield "server", f"{shown_state(health)}, restarts: {verdict['restarts']}, faults: {len(faults)}"
    for fault in faults:
        yield "", fault[:_WIDTH]
    for node, segments in verdict["retransmits"].items():
        again, sent = segments["again"], segments["sent"]
        share = f" ({again / sent:.3%})" if sent else ""
        yield "retransmits", f"{node}: {again:,} of {sent:,} segments{share}"
    for pair in verdict["pairs"]:
        yield "", f"{pair['from']} to {pair['to']}: {pair['again']:,} segments"
    failures = "; ".join(verdict["failures"])
    passed = "interrupted" if verdict["interrupted"] else "passed"
    yield "verdict", f"failed: {failures}" if failures else passed


def _percentiles(times: DurationHistogram) -> dict[str, float | None]:
    p50, p99 = times.percentile(0.5), times.percentile(0.99)
    return {"p50": p50, "p99": p99, "longest": times.longest}


def _format_latency(percentiles: Mapping[str, float | None]) -> str:
    if percentiles["p50"] is None:
        return "none"
    return ", ".join(
        f"{name} {_format_seconds(value or 0.0)}" for name, value in percentiles.items()
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
