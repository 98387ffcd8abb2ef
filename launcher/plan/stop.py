"""Everything that ends servers or batch jobs, and the gates that prove that they are gone.

The cluster stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checks import serving
from launcher.checks.ray import read_payload, try_payload
from launcher.checks.shape import Finding, waiting
from launcher.errors import UnreadableAnswer
from launcher.payload.agent import state
from launcher.plan.shape import Gate, Plan, Stage, Step
from launcher.site import Site
from launcher.state import running, servers
from launcher.state.batches import BatchStatus, query_list
from launcher.state.running import Batch
from launcher.state.servers import Server
from launcher.tools import job_store, payload
from launcher.transport import Answers, Command

_MARGIN = 60.0  # seconds beyond the grace until a server must be gone


def plan_remove(site: Site, found: Sequence[BatchStatus]) -> Plan:
    """Remove the folders of jobs that are over, with the output that lies in them."""
    steps = tuple(
        Step(
            title=f"removing {each.name}",
            command=site.inside(site.head, job_store.ask("remove", each.work), timeout=300),
        )
        for each in found
    )
    return Plan(
        verb="jobs",
        stages=(Stage(id="remove", title="Remove batch jobs", steps=steps),),
        keep_going=True,
    )


def plan_stop(site: Site, found: Sequence[Server], grace: float) -> Plan:
    """Let servers be wanted no more, and wait until the keeper has ended them; `grace` is in
    seconds.

    The files are the head's own, so that it works where no container runs; then nobody can be
    waited for.
    """
    if not found:
        return Plan(verb="stop", stages=())
    steps = tuple(_forget(site, each.name, state.DESIRED) for each in found)
    gates = (_gone(site, found, grace),) if site.head_runs else ()
    title = "Stop the server" if len(found) == 1 else f"Stop {len(found)} servers"
    return Plan(verb="stop", stages=(Stage(id="stop", title=title, steps=steps, gates=gates),))


def plan_forget(site: Site, names: Sequence[str]) -> Plan:
    """Forget servers that are over, with why; what has answered before is remembered."""
    steps = tuple(_forget(site, name, state.DESIRED, state.OBSERVED) for name in names)
    stage = Stage(id="forget", title="Forget what does not run", steps=steps)
    return Plan(verb="stop", stages=(stage,))


def plan_stop_batches(site: Site, found: Sequence[Batch], grace: float) -> Plan:
    """Stop batch jobs; `grace` is in seconds, then they are killed."""

    def judge(answers: Answers) -> Sequence[Finding]:
        try:
            about_ray, about_jobs = answers[site.head.name]
            said, entries = read_payload(about_ray), job_store.parse_list(about_jobs)
        except UnreadableAnswer as error:
            return [waiting("", error.message, fix="look at `vlaunch jobs`")]
        alive = [
            entry.name
            for entry in entries
            if entry.alive and entry.name in {each.name for each in found}
        ]
        return serving.jobs_stopped([each.id for each in found], said, alive)

    gate = Gate(
        id="batch-gone",
        what="the jobs' drivers are gone, and what they held is free",
        ask=(running.ask_jobs(site), query_list(site)),
        judge=judge,
        deadline=60,
    )
    ports, timeout = site.inventory.ports, grace + 60
    steps = tuple(
        Step(
            title=f"stopping batch job {job.name} (Ray job {job.id})",
            command=site.inside(site.head, payload.stop(ports, job.id, grace), timeout=timeout),
        )
        for job in found
    )
    gates = (gate,) if steps else ()
    stage = Stage(id="stop", title="Stop batch jobs", steps=steps, gates=gates)
    return Plan(verb="stop", stages=(stage,))


def _forget(site: Site, name: str, *what: str) -> Step:
    folder = servers.folder(site, name)
    argv = ("rm", "-f", *(f"{folder}/{file}" for file in what))
    title = (
        f"server `{name}` is wanted no more" if len(what) == 1 else f"forgetting server `{name}`"
    )
    return Step(title=title, command=Command(node=site.head.name, argv=argv, timeout=30))


def _gone(site: Site, found: Sequence[Server], grace: float) -> Gate:
    """The keeper says that they are over, their ports are closed, and Ray has their GPUs back."""
    head, names = site.head, {each.name for each in found}
    wanted = [each.desired for each in found if each.desired is not None]
    in_ray = any(each.ray is not None for each in wanted)
    probes = [
        (f"port {each.port} on {api.node}", _probe_port(site, api.node, each.host, each.port))
        for each in wanted
        for api in each.apis
    ]
    tables = [running.ask_jobs(site)] if in_ray else []

    def judge(answers: Answers) -> Sequence[Finding]:
        said, *rest = answers[head.name]
        about_ray = map(try_payload, rest[len(probes) :])
        open_ports = [port for (port, _), answer in zip(probes, rest, strict=False) if answer.ok]
        try:
            kept = servers.read(read_payload(said))
        except UnreadableAnswer as error:
            return [waiting(head, error.message, fix="look at `vlaunch status`")]
        alive = [
            f"{each.what} is {each.state}{_doing(each)}"
            for each in kept.running
            if each.name in names
        ]
        others = sum(each.gpus for each in kept.running if each.name not in names)
        return serving.servers_stopped(alive, open_ports, next(about_ray, None), others)

    grace = max([grace, *(each.policy.grace for each in wanted)])
    return Gate(
        id="server-gone",
        what="the server's processes are gone, its GPUs free and its port closed",
        ask=(servers.ask(site), *(probe for _, probe in probes), *tables),
        judge=judge,
        deadline=grace + _MARGIN,
        every=0.3,
    )


def _doing(server: Server) -> str:
    doing = server.observed.doing if server.observed is not None else ""
    return f": {doing}" if doing else ""


def _probe_port(site: Site, name: str, host: str, port: int) -> Command:
    """Ask from the head's container whether a server's port is open: no other node need be
    reached.
    """
    head = site.head
    node = next((each for each in site.nodes if each.name == name), head)
    address = payload.api_host(host) if node is head else node.ip
    return site.inside(head, payload.port_open(address, port), timeout=20)
