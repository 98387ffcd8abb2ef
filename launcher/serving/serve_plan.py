"""The plan of a start: from a request and a snapshot to the steps that ask for a server.

`launcher/serving/watch.py` waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.agent.desired import Desired, Policy
from launcher.core.errors import RequestError
from launcher.core.plan import Plan, Stage
from launcher.serving import room, wanted
from launcher.serving.serve_request import Request
from launcher.tools.servers import Server
from launcher.tools.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What will be done, and the server as it will be wanted, or as it is already when
    `attached`.
    """

    plan: Plan
    desired: Desired
    attached: bool = False


def plan_serve(
    seen: ClusterSnapshot,
    request: Request,
    *,
    asked: float,
    policy: Policy,
    prove: Sequence[Stage] = (),
    notes: Sequence[str] = (),
    replace_other: bool = False,
    insist: bool = False,
) -> Start:
    """Write the server down as it is wanted, unless the same one runs already; `prove` comes before
    that, `notes` are added to the plan's.

    One that runs, and is kept otherwise than by `policy`, is watched as it is, unless it is to be
    replaced; to `insist` is to refuse one that is supervised where that is not asked for. `asked`
    is the time, in seconds since 1970.

    Raises:
        RequestError: another server of this name runs, and it is not to be replaced.
    """
    there = next((each for each in seen.kept.running if each.name == request.name), None)
    if there is not None:
        attached = _attached(there, request, policy, replace_other=replace_other, insist=insist)
        if attached is not None:
            return attached
    server = wanted.desired(seen, request, asked=asked, policy=policy)
    gates = room.gates(seen, request, there) if seen.site.facts else ()
    stages = (
        Stage(id="preflight", title="Look at the cluster and the model", gates=gates),
        *prove,
        Stage(id="server", title="Ask for the server", steps=(wanted.write(seen.site, server),)),
    )
    plan = Plan(verb="serve", stages=stages, notes=(*_notes(request, there), *notes))
    return Start(plan=plan, desired=server)


def _attached(
    there: Server, request: Request, policy: Policy, *, replace_other: bool, insist: bool
) -> Start | None:
    """Return how the server that runs under this name is watched as it is; `None` when one is to be
    started in its place.

    Raises RequestError when it is another one, or one that is supervised in spite of `insist`, and
    is not to be replaced.
    """
    if there.desired is None:
        return None
    if there.id != request.digest:
        if replace_other:
            return None
        raise RequestError(
            f"{there.what} runs {there.model}",
            hint=(
                "give this one a name of its own with `--name`, or let it take the place with"
                " `--replace`"
            ),
        )
    other = _kept_otherwise(there.desired.policy, policy)
    if other and replace_other:
        return None
    if other and insist and there.desired.policy.restarts != 0:
        raise RequestError(
            f"{request.model} runs already ({there.what}), and {other}",
            hint=(
                "start it anew without supervision: add `--replace`\nwatch it as it is:"
                " leave out `--no-supervise`"
            ),
        )
    notes = (f"{other}; `--replace` starts it anew as asked",) if other else ()
    plan = Plan(verb="serve", stages=(), notes=notes)
    return Start(plan=plan, desired=there.desired, attached=True)


def _kept_otherwise(there: Policy, asked: Policy) -> str:
    """Say how a server that runs is kept otherwise than asked for; how long a start may take is no
    reason to start anew.
    """
    if there.restarts == asked.restarts == 0:
        return ""
    if asked.restarts == 0:
        return "it is supervised"
    if there.restarts == 0:
        return "nobody supervises it: it stays dead when a rank, a node or the engine dies"
    differences = [
        f"{name} {_number(now)} and not {_number(requested)}"
        for name in ("restarts", "canary", "stuck")
        if (now := getattr(there, name)) != (requested := getattr(asked, name))
    ]
    return f"it was started with {', '.join(differences)}" if differences else ""


def _number(value: float | None) -> str:
    return "unlimited" if value is None else f"{value:g}"


def _notes(request: Request, there: Server | None) -> tuple[str, ...]:
    """Say in words what will be placed where, and what makes room for it."""
    split = request.placement
    expected = ", ".join(f"{count} on {name}" for name, count in split.nodes)
    return (
        *([f"{there.what} ({there.model}) is stopped to make room"] if there else []),
        f"{split.words} ({split.why}): ranks expected {expected}",
        *_replicas(request),
        *split.warnings,
    )


def _replicas(request: Request) -> Iterator[str]:
    """Say who hands requests to replicas, where there are several."""
    split = request.placement
    if split.dp == 1:
        return
    whole = ", ".join(f"{count} on {name}" for name, count in split.replicas if count)
    if request.balancing == "internal" or len(split.nodes) == 1:
        behind = "answer behind one endpoint, to which vLLM balances requests"
        yield f"{split.dp} replicas ({whole}) {behind}"
        return
    yield (
        f"{split.dp} replicas ({whole}) answer, each node's behind an endpoint of its own: what"
        " stands before these balances requests"
    )
    if split.experts == 0:
        yield (
            "replicas of a dense model need nothing of each other: started as a server per node"
            " (`--name`, `--nodes`), one that dies comes back without the others"
        )
