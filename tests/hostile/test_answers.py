"""Whatever a node answers, what reads it returns something that can be shown, or raises one of our
own errors, and soon.
"""

from __future__ import annotations

import io
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from rich.console import Console

from launcher.app import terminal
from launcher.app.terminal import dump_json
from launcher.batch import batches, job_store, jobs_command
from launcher.batch import watch as watch_batch
from launcher.batch.workload import judge_stopped
from launcher.cluster import up_plan
from launcher.core import expectations_file, untrusted
from launcher.core.domain import Answer
from launcher.core.errors import VlaunchError
from launcher.core.expectations import required_level
from launcher.hosts import checks_view as ui_checks
from launcher.hosts import container_view, pairs, preflight
from launcher.hosts.check import Evidence
from launcher.hosts.checks import catalogue
from launcher.hosts.discovery import local_assets
from launcher.network import expected, network_plan, network_shape, transport
from launcher.network import network_view as ui_network
from launcher.network.network_shape import Measurement
from launcher.serving import status, watch
from launcher.serving import status_view as ui_status
from launcher.tools import (
    docker,
    docker_output,
    gpu_survey,
    host,
    host_output,
    image,
    model,
    network_verdict,
    node_probes,
    ray,
    serving_judges,
    symptoms,
    vllm,
)
from launcher.tools import ray_judges as ray_checks
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot
from tests import supervision
from tests.fakes import FakeTransport
from tests.hostile import mutate, seeds
from tests.simulated import query

LIMIT = 5.0  # seconds of a core for one answer; most take a thousandth of it
HEAD = "gpu01"
_CLUSTER = ray_checks.judge_cluster(seeds.inventory(), {})
Chance = random.Random


def answer(out: str, node: str = HEAD, code: int = 0) -> Answer:
    return Answer(node=node, code=code, out=out)


def shown(renderable: Any) -> str:
    """Draw something on a terminal and return what that got."""
    to = io.StringIO()
    Console(file=to, force_terminal=True, width=120, highlight=False, color_system=None).print(
        renderable
    )
    return to.getvalue()


def harmless(text: str, what: str = "") -> None:
    """See that nothing but text that can be printed is there."""
    text.encode()
    assert "\x1b" not in text, what
    strange = {
        letter for letter in text if not letter.isprintable() and letter not in "\n\t\u200c\u200d"
    }
    assert not {letter for letter in strange if not re.match("[\ue000-\uf8ff]", letter)}, what
    assert "\nhint: run `curl" not in text, what


def survived(read: Callable[[], Any], capsys: pytest.CaptureFixture[str] | None = None) -> Any:
    """Run a reader; its error must be ours, and be quick to come, and can be shown."""
    began = time.thread_time()
    try:
        return read()
    except VlaunchError as error:
        terminal.show_error(error)
        if capsys is not None:
            harmless(capsys.readouterr().err)
        return None
    finally:
        assert time.thread_time() - began < LIMIT


@mutate.examples(12)
@given(mutate.chances)
def test_probes(capsys: pytest.CaptureFixture[str], chance: Chance) -> None:
    """Of one node of two: its facts are judged by every check, compared with the inventory, and
    planned with.
    """
    inventory = seeds.inventory()
    spoiled = chance.choice(("gpu01", "gpu02"))
    said = [
        answer(_probe(text, chance) if node == spoiled else text, node)
        for node, text in seeds.probes()
    ]

    def read() -> None:
        facts, silent = node_probes.parse_answers(said)
        for error in silent.values():
            terminal.show_error(error)
        missing = {name: error.message for name, error in silent.items()}
        evidence = Evidence(
            inventory=inventory,
            facts=facts,
            missing=missing,
            expectations=expectations_file.load_expectations(),
        )
        results = catalogue.run_checks(evidence)
        harmless(shown(ui_checks.render_results(results)))
        json.loads(dump_json(ui_checks.results_json(results)))
        snapshot = ClusterSnapshot(site=Site(inventory, facts), payload=seeds.jobs())
        seen = status.build_status(snapshot, missing, batches.running_jobs(snapshot, None))
        harmless(shown(ui_status.render_status(seen)))
        preflight.query_containers(Site(inventory, facts))
        preflight.query_port_probes(Site(inventory, facts), high=40000, nonce="n")
        if not silent:
            up_plan.plan_image(Site(inventory, facts))

    survived(read, capsys)
    harmless(capsys.readouterr().err)


@mutate.examples(20)
@given(mutate.chances)
def test_surveys_of_real_nodes(chance: Chance) -> None:
    """Lines of `nvidia-smi`, of /sys, of `ip` and `docker`: gone, doubled, or something else."""
    survived(lambda: host_output.parse_probe(_probe(chance.choice(seeds.surveys()), chance)))


def _probe(text: str, chance: Chance) -> str:
    """Spoil one part of a probe's answer: as JSON where it is JSON, else its lines; or the answer's
    own frame.
    """
    parts = re.split(r"(?m)^(@@vlaunch .*)$", text)
    bodies = [at for at in range(0, len(parts), 2) if parts[at].strip()]
    at = chance.choice(bodies)
    if chance.random() < 0.15:
        return mutate.lines(text, chance)
    try:
        parts[at] = "\n" + mutate.text(json.loads(parts[at]), chance) + "\n"
    except ValueError:
        parts[at] = "\n" + mutate.lines(parts[at], chance) + "\n"
    return "".join(parts)


@mutate.examples(40)
@given(mutate.chances)
def test_what_the_head_says_of_its_jobs(chance: Chance) -> None:
    """Status, and the judges of what runs, of what is stopped, and of what is free."""
    inventory = seeds.inventory()
    response = answer(mutate.text(seeds.jobs(), chance))
    facts = _facts()

    def read() -> None:
        payload = ray_checks.try_payload(response)
        record = network_verdict.parse_record(answer(mutate.text(seeds.RECORD, chance)))
        snapshot = ClusterSnapshot(site=Site(inventory, facts), payload=payload, network=record)
        jobs = answer(mutate.text({"jobs": [seeds.ENTRY]}, chance))
        holders = serving_judges.gpu_users(payload)
        serving_judges.judge_free_gpus(inventory, 2, "TP 2", payload, holders)
        serving_judges.judge_job_room(inventory, 1, 2, payload, holders, queue=False)
        judge_stopped(["batch-rows-1"], payload, [])
        survived(lambda: serving_judges.busy_gpus_by_node(payload))
        cluster = status.build_status(snapshot, {}, batches.running_jobs(snapshot, jobs))
        harmless(shown(ui_status.render_status(cluster)))
        json.loads(dump_json(cluster.as_json()))

    survived(read)


@mutate.examples(15)
@given(mutate.chances)
def test_a_server_that_is_watched(chance: Chance) -> None:
    """Answers of the head until the deadline: the watching ends, with an answer or an error of
    ours.
    """
    site, spec = Site(seeds.inventory()), supervision.make_spec(replicas=chance.choice((1, 2)))
    now = [0.0]

    def reply(command: Any) -> Answer:
        verb = query(command.argv)
        good = {
            "watch": {**seeds.WATCH, **seeds.servers()},
            "servers": seeds.servers(),
        }[verb]
        return answer(mutate.text(good, chance), node=command.node)

    def sleep(_: float) -> None:
        now[0] += 10.0

    def read() -> None:
        for event in watch.watch_start(
            site, spec, FakeTransport(reply), timeout=100, clock=lambda: now[0], sleep=sleep
        ):
            json.loads(dump_json(event.as_json()))

    survived(read)


@mutate.examples(8)
@given(mutate.chances)
def test_a_batch_that_is_watched(chance: Chance) -> None:
    """Until it has ended, or can be watched no more."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 10.0

    def read() -> None:
        job = watch_batch.WatchedJob(name="rows", work="/w/rows", job="batch-rows-1")
        transport_ = FakeTransport(lambda _: answer(mutate.text(seeds.FOLLOW, chance)))
        for event in watch_batch.watch_job(
            Site(seeds.inventory()), job, transport_, clock=lambda: now[0], sleep=sleep
        ):
            json.loads(dump_json(event.as_json()))
            if now[0] > 300:
                return

    survived(read)


def _facts() -> dict[str, host.HostFacts]:
    return node_probes.parse_answers([answer(text, node) for node, text in seeds.probes()])[0]


def _list(said: Answer) -> None:
    entries = job_store.parse_list(said)
    found = batches.merge_jobs(seeds.inventory(), entries, seeds.jobs())
    harmless(shown(jobs_command.render_table(found, ["a remark"])))
    json.loads(dump_json([each.as_json() for each in found]))
    for each in entries:
        assert all(count >= 0 for count in each.inputs.values())


def _port_probes(said: Answer) -> None:
    probes = pairs.parse_probes(said)
    evidence = Evidence(inventory=seeds.inventory(), facts=_facts(), port_probes=probes)
    results = catalogue.run_checks(evidence)
    harmless(shown(ui_checks.render_results(results)))


def _reports(said: Answer) -> None:
    inventory = seeds.inventory()
    other = {**_report(), "node": "gpu02"}
    reports, missing = network_plan.parse_answers(
        {said.node: [said], "gpu02": [answer(json.dumps(other), "gpu02")]}
    )
    known = expectations_file.load_expectations()
    level = required_level(
        inventory, gpus=[each.gpu for each in reports.values()], rdma=[], expectations=known
    )
    measured = Measurement(inventory=inventory, reports=reports, missing=missing)
    seen = transport.judge(measured, level)
    nothing = Evidence(inventory=inventory, facts={}, expectations=known)
    expected.judge(seen, nothing, ranks_per_node=1)
    harmless(shown(ui_network.render(seen)))
    json.loads(dump_json(network_shape.as_json(seen)))


def _containers(said: Answer) -> None:
    ray_checks.judge_container(seeds.inventory().head, said)
    for each in docker_output.parse_containers(said.out):
        docker.remove(("docker",), each.id)
        assert all(
            isinstance(word, str)
            for word in (each.id, each.name, each.image, *each.argv, *each.labels.values())
        )


def _image(said: Answer) -> None:
    image.parse_probe(said.out)


def _loads(said: Answer) -> Any:
    try:
        return untrusted.loads(said.out)
    except ValueError:
        return None


def _report() -> Any:
    made = seeds.world()
    words = ("--nodes", "gpu01=10.0.0.11,gpu02=10.0.0.12", "--backend", "nccl")
    return made.network(made.machines[HEAD], words)


READERS: dict[str, tuple[Callable[[], Any], Callable[[Answer], Any]]] = {
    "nodes of Ray": (
        lambda: json.loads((seeds.FIXTURES / "ray" / "api_v0_nodes.json").read_text()),
        lambda said: ray.parse_nodes(_loads(said)),
    ),
    "actors": (lambda: seeds.jobs()["actors"], lambda said: ray.parse_ranks(_loads(said), ())),
    "gate": (
        lambda: json.loads((seeds.FIXTURES / "ray" / "head-nodes.json").read_text()),
        lambda said: _CLUSTER({HEAD: [answer("[]"), said], "gpu02": [answer("[]")]}),
    ),
    "batches": (lambda: {"jobs": [seeds.ENTRY]}, _list),
    "a batch": (lambda: seeds.ENTRY, job_store.parse_entry),
    "output": (
        lambda: seeds.OUTPUTS,
        lambda said: job_store.parse_outputs(said.node, said.out),
    ),
    "a batch followed": (lambda: seeds.FOLLOW, job_store.parse_follow),
    "pairs": (lambda: seeds.PAIRS, _port_probes),
    "network": (_report, _reports),
    "containers": (
        lambda: json.loads((seeds.FIXTURES / "docker" / "inspect-ray-head-20.10.json").read_text()),
        _containers,
    ),
    "an image": (
        lambda: json.loads((seeds.FIXTURES / "docker" / "image-inspect-20.10.json").read_text()),
        lambda said: docker_output.parse_image(said.out),
    ),
    "an image's Python": (
        lambda: json.loads((seeds.FIXTURES / "image" / "vllm-cpu-0.32.0.json").read_text()),
        _image,
    ),
    "inside": (
        lambda: {
            "memlock": None,
            "ipc_lock": True,
            "infiniband": ["u"],
            "libibverbs": "",
            "python": "3.12.3",
            "ray": "2",
        },
        container_view.parse_view,
    ),
    "a model": (
        lambda: {"architectures": ["X"], "num_hidden_layers": 4},
        lambda scan: model.parse_scan(answer(f"\n{scan.out}")),
    ),
    "a verdict": (lambda: seeds.RECORD, network_verdict.parse_record),
}


@pytest.mark.parametrize("name", READERS)
@mutate.examples(12)
@given(chance=mutate.chances)
def test_json_answers(name: str, chance: Chance) -> None:
    """Every field something else, gone, doubled; text that is no JSON, or none that anybody
    means.
    """
    good, read = READERS[name]
    survived(lambda: read(answer(mutate.text(good(), chance))))


LINES: dict[str, tuple[Callable[[], str], Callable[[str], Any]]] = {
    "ray status": (
        (seeds.FIXTURES / "ray" / "ray_status_2nodes_vllm_running.txt").read_text,
        ray.parse_status,
    ),
    "files of a model": (
        lambda: "f 12 config.json\nl 3 x y",
        lambda text: model.parse_scan(answer(f"{text}\n\n{{}}")),
    ),
    "stock": (
        lambda: (
            "@@stock home 3 /data\n@@stock model models--a--b\n@@stock amd"
            " 0\n@@stock images\n"
            + (seeds.FIXTURES / "docker" / "image-inspect-20.10.json").read_text()
            + "\n@@stock end\n"
        ),
        local_assets.parse_local_assets,
    ),
    "vLLM's log": (
        lambda: (seeds.FIXTURES / "vllm" / "serve_ray_pp2_ok.log").read_text()[:20_000],
        lambda text: (
            vllm.parse_capacity({"block_size": "1e999"}, text),
            vllm.find_exception(text),
            vllm.shard_progress(text.splitlines()),
        ),
    ),
}


@pytest.mark.parametrize("name", LINES)
@mutate.examples(12)
@given(chance=mutate.chances)
def test_answers_in_lines(name: str, chance: Chance) -> None:
    """Tables and logs."""
    good, read = LINES[name]
    said = mutate.lines(good(), chance)
    survived(lambda: read(said))


ENDLESS = {
    "one line": "x" * 8_000_000,
    "empty lines": "\n" * 8_000_000,
    "spaces": "GPU-x, 1," + " " * 8_000_000,
    "what patterns begin with": "ibv_reg_mr" * 800_000,
    "half a sentence": "rank 1 in world size 1 is assigned as DP rank 0, PP rank 0, " * 130_000,
    "half a link": "h:1:2 [0] Channel 0 Channel 0 " * 260_000,
    "brackets": "[" * 8_000_000,
    "escape codes": "\x1b[" * 4_000_000,
}
BUSY: dict[str, Callable[[str], Any]] = {
    "probe": host_output.parse_probe,
    "processes": gpu_survey.parse_processes,
    "topology": gpu_survey.parse_topology,
    "symptoms": symptoms.first_match,
    "plain": untrusted.single_line,
    "ray status": ray.parse_status,
    "exception": vllm.find_exception,
    "JSON": lambda text: job_store.parse_answer(answer(text)),
    "log": lambda text: _reports(
        answer(json.dumps({**_report(), "log": text, "pair_logs": {"gpu02": text}}))
    ),
    "stock": local_assets.parse_local_assets,
}


@pytest.mark.parametrize("name", BUSY)
@mutate.examples(2)
@given(chance=mutate.chances)
def test_endless_lines_are_read_in_time(name: str, chance: Chance) -> None:
    """Eight megabytes, as much as the transport keeps, of what patterns take longest for."""
    text = ENDLESS[chance.choice(sorted(ENDLESS))]
    survived(lambda: BUSY[name](text))
