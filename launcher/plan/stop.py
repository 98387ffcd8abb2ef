"""Everything that ends a server or batch jobs, and the gates that prove that they are gone. The cluster stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.checks import serving
from launcher.checks.ray import read_payload
from launcher.checks.shape import Finding
from launcher.errors import UnreadableAnswer
from launcher.model import Argv, Inventory, Node
from launcher.plan import containers, running
from launcher.plan.batch import ask_list
from launcher.plan.running import Batch, Running
from launcher.plan.shape import Answers, Gate, Plan, Stage, Step
from launcher.tools import desk, payload
from launcher.tools.host import HostFacts
from launcher.transport import Command

# Not wanted any more, whatever becomes of the rest. Asked to end first, so that vLLM frees its GPUs and shared memory itself.
# Of payload/record.py; in a folder of the login's, who may remove what root has put there.
_WANTED, _SERVER = "wanted.json", "server.json"
_END = (
    f'g=$1 n=$2; rm -f "$3/server/{_WANTED}"; shift 3; "$@" stop --time "$g" "$n" >/dev/null; '
    'exec "$@" rm --force --volumes "$n"'
)
_FORGET = 'cd "$1/server" && shift && rm -f "$@"'


def plan_stop(inventory: Inventory, facts: Mapping[str, HostFacts], found: Sequence[Running], grace: float) -> Plan:
    """Stop jobs and rank containers, also those that have ended; `grace` is in seconds, then they are killed."""
    jobs = [each for each in found if each.backend == "ray"]
    ended = running.ended_ranks(inventory, facts)
    live = [inventory.node(name) for each in found if each.backend == "mp" for name in each.nodes]
    ranks = list({node.name: node for node in (*live, *ended)}.values())
    stages = []
    if jobs:
        stages.append(
            Stage(
                id="stop", title="Stop the server",
                steps=tuple(_stop_job(inventory, job, grace) for job in jobs),
                gates=(_gone(inventory, jobs),),
            )
        )  # fmt: skip
    if ranks:
        steps = tuple(
            Step(
                title="stopping the rank's container",
                command=Command(node=node.name, argv=_end(inventory, node, facts, grace), timeout=grace + 60),
            )
            for node in ranks
        )
        stages.append(Stage(id="ranks", title="Stop the ranks", steps=steps, gates=(_no_rank(inventory, ranks),)))
    return Plan(verb="stop", stages=tuple(stages))


def plan_forget(inventory: Inventory, facts: Mapping[str, HostFacts], stops: Plan, *, gave_up: bool) -> Plan:
    """Forget a server that is wanted and does not run, as it would come back with the head's container; and one that `gave_up`.

    Whatever `stops` ends on the head forgets it by itself.
    """
    head = inventory.head
    seen = facts.get(head.name)
    if seen is None or any(step.command.node == head.name for step in stops.steps):
        return Plan(verb="stop", stages=())
    names = [*([_WANTED] if f"server/{_WANTED}" in seen.files else []), *([_SERVER] if gave_up else [])]
    if not names:
        return Plan(verb="stop", stages=())
    argv = ("sh", "-c", _FORGET, "unwant", containers.state_dir(inventory, head, seen), *names)
    step = Step(title="forgetting the server that does not run", command=Command(node=head.name, argv=argv, timeout=30))
    return Plan(verb="stop", stages=(Stage(id="forget", title="Forget what would come back", steps=(step,)),))


def plan_stop_batches(inventory: Inventory, found: Sequence[Batch], grace: float) -> Plan:
    """Stop batch jobs; `grace` is in seconds, then they are killed."""

    def judge(answers: Answers) -> Sequence[Finding]:
        try:
            about_ray, about_jobs = answers[inventory.head.name]
            said, entries = read_payload(about_ray), desk.parse_list(about_jobs)
        except UnreadableAnswer as error:
            return [Finding(node="", status="wait", text=error.message, fix="look at `vlaunch jobs`")]
        alive = [entry.name for entry in entries if entry.alive and entry.name in {each.name for each in found}]
        return serving.batch_stopped([each.id for each in found], said, alive)

    gate = Gate(
        id="batch-gone",
        what="the jobs' drivers are gone, and what they held is free",
        ask=(running.ask_jobs(inventory, inventory.serve.bind, inventory.ports.api), ask_list(inventory)),
        judge=judge,
        deadline=60,
    )
    steps = tuple(
        Step(
            title=f"stopping batch job {each.name} (Ray job {each.id})",
            command=running.in_ray(inventory, payload.stop(inventory.ports, each.id, grace), timeout=grace + 60),
        )
        for each in found
    )
    return Plan(verb="stop", stages=(Stage(id="stop", title="Stop batch jobs", steps=steps, gates=(gate,)),) if steps else ())


def _stop_job(inventory: Inventory, job: Running, grace: float) -> Step:
    argv = payload.stop(inventory.ports, job.id, grace)
    return Step(title=f"stopping Ray job {job.id}", command=running.in_ray(inventory, argv, timeout=grace + 60))


def _gone(inventory: Inventory, jobs: Sequence[Running]) -> Gate:
    def judge(answers: Answers) -> Sequence[Finding]:
        try:
            said = read_payload(answers[inventory.head.name][0])
        except UnreadableAnswer as error:
            said = {"error": error.message}
        return serving.stopped(inventory, [job.id for job in jobs], said)

    return Gate(
        id="server-gone",
        what="the server's processes are gone, its GPUs free and its port closed",
        ask=(running.ask_jobs(inventory, jobs[0].host, jobs[0].port),),
        judge=judge,
        deadline=60,
    )


def _end(inventory: Inventory, node: Node, facts: Mapping[str, HostFacts], grace: float) -> Argv:
    directory = containers.state_dir(inventory, node, facts.get(node.name))
    name = containers.rank_name(inventory, node)
    return ("sh", "-c", _END, "end", f"{grace:.0f}", name, directory, *node.docker)


def _no_rank(inventory: Inventory, nodes: Sequence[Node]) -> Gate:
    def judge(answers: Answers) -> Sequence[Finding]:
        return [_absent(node, answers) for node in nodes]

    def ask(node: Node) -> Command:
        name = containers.rank_name(inventory, node)
        listing = (*node.docker, "ps", "--all", "--quiet", "--filter", f"name=^{name}$")
        return Command(node=node.name, argv=listing, timeout=30)

    return Gate(
        id="ranks-gone",
        what="no rank container is left",
        ask=tuple(ask(node) for node in nodes),
        judge=judge,
        deadline=20,
    )


def _absent(node: Node, answers: Answers) -> Finding:
    answer = answers[node.name][0]
    fix = "run `vlaunch stop` again"
    if not answer.ok:
        return Finding(node=node.name, status="fail", text="cannot be asked any more", evidence=answer.tail, fix=fix)
    if answer.out.strip():
        return Finding(node=node.name, status="wait", text="its rank container is still there", fix=fix)
    return Finding(node=node.name, status="pass", text="its rank is gone")
