"""Parsers of nodes' answers: for any input, a printable result or one of our errors, in time."""

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
from launcher.failures.explain import explain
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
from launcher.tools import docker, host, image, model, ray, vllm
from launcher.tools.docker import docker_output
from launcher.tools.host import gpu_survey, host_output, node_probes
from launcher.tools.site import Site, network_verdict, serving_judges
from launcher.tools.site import ray_judges as ray_checks
from launcher.tools.site.snapshot import ClusterSnapshot
from tests import supervision
from tests.fakes import FakeTransport
from tests.hostile import mutate, seeds
from tests.simulated import query

LIMIT = 5.0  # seconds of CPU time for one answer; most take a thousandth of it
HEAD = "gpu01"
_CLUSTER = ray_checks.judge_cluster(seeds.inventory(), {})
Chance = random.Random


def answer(out: str, node: str = HEAD, code: int = 0) -> Answer:
    return Answer(node=node, code=code, out=out)


def shown(renderable: Any) -> str:
    """Return the terminal output of a renderable."""
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=120, highlight=False, color_system=None).print(
        renderable
    )
    return stream.getvalue()


def harmless(text: str, what: str = "") -> None:
    """Check that a text has only printable characters."""
    text.encode()
    assert "\x1b" not in text, what
    unprintable = {
        letter for letter in text if not letter.isprintable() and letter not in "\n\t\u200c\u200d"
    }
    assert not {letter for letter in unprintable if not re.match("[\ue000-\uf8ff]", letter)}, what
    assert "\nhint: run `curl" not in text, what


def survived(read: Callable[[], Any], capsys: pytest.CaptureFixture[str] | None = None) -> Any:
    """Run a parser; only our errors may be raised, in time, and printable."""
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
    """One of two nodes answers badly: every check, the status and the plan use its facts."""
    inventory = seeds.inventory()
    spoiled = chance.choice(("gpu01", "gpu02"))
    answers = [
        answer(_probe(text, chance) if node == spoiled else text, node)
        for node, text in seeds.probes()
    ]

    def read() -> None:
        facts, silent = node_probes.parse_answers(answers)
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
        cluster = status.build_status(snapshot, missing, batches.running_jobs(snapshot, None))
        harmless(shown(ui_status.render_status(cluster)))
        preflight.query_containers(Site(inventory, facts))
        preflight.query_port_probes(Site(inventory, facts), high=40000, nonce="n")
        if not silent:
            up_plan.plan_image(Site(inventory, facts))

    survived(read, capsys)
    harmless(capsys.readouterr().err)


@mutate.examples(20)
@given(mutate.chances)
def test_surveys_of_real_nodes(chance: Chance) -> None:
    """Lines of `nvidia-smi`, /sys, `ip` and `docker`: removed, doubled or replaced."""
    survived(lambda: host_output.parse_probe(_probe(chance.choice(seeds.surveys()), chance)))


def _probe(text: str, chance: Chance) -> str:
    """Spoil one part of a probe's answer, as JSON or by lines; or the whole answer by lines."""
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
def test_the_heads_jobs(chance: Chance) -> None:
    """The status, and the judges of running jobs, stopped jobs and free GPUs."""
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
    """Spoiled answers until the deadline: the wait ends, with a result or one of our errors."""
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
    """Until it ends, or an error stops the wait."""
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


def _list(answer: Answer) -> None:
    entries = job_store.parse_list(answer)
    jobs = batches.merge_jobs(seeds.inventory(), entries, seeds.jobs())
    harmless(shown(jobs_command.render_table(jobs, ["a remark"])))
    json.loads(dump_json([job.as_json() for job in jobs]))
    for entry in entries:
        assert all(count >= 0 for count in entry.inputs.values())


def _port_probes(answer: Answer) -> None:
    probes = pairs.parse_probes(answer)
    evidence = Evidence(inventory=seeds.inventory(), facts=_facts(), port_probes=probes)
    results = catalogue.run_checks(evidence)
    harmless(shown(ui_checks.render_results(results)))


def _reports(response: Answer) -> None:
    inventory = seeds.inventory()
    other = {**_report(), "node": "gpu02"}
    reports, missing = network_plan.parse_answers(
        {response.node: [response], "gpu02": [answer(json.dumps(other), "gpu02")]}
    )
    expectations = expectations_file.load_expectations()
    level = required_level(
        inventory,
        gpus=[report.gpu for report in reports.values()],
        rdma=[],
        expectations=expectations,
    )
    measured = Measurement(inventory=inventory, reports=reports, missing=missing)
    verdict = transport.judge(measured, level)
    evidence = Evidence(inventory=inventory, facts={}, expectations=expectations)
    expected.judge(verdict, evidence, ranks_per_node=1)
    harmless(shown(ui_network.render(verdict)))
    json.loads(dump_json(network_shape.as_json(verdict)))


def _containers(answer: Answer) -> None:
    ray_checks.judge_container(seeds.inventory().head, answer)
    for container in docker_output.parse_containers(answer.out):
        docker.remove(("docker",), container.id)
        texts = (container.id, container.name, container.image, *container.argv)
        assert all(isinstance(text, str) for text in (*texts, *container.labels.values()))


def _image(answer: Answer) -> None:
    image.parse_probe(answer.out)


def _loads(answer: Answer) -> Any:
    try:
        return untrusted.loads(answer.out)
    except ValueError:
        return None


def _report() -> Any:
    world = seeds.world()
    argv = ("--nodes", "gpu01=10.0.0.11,gpu02=10.0.0.12", "--backend", "nccl")
    return world.network(world.machines[HEAD], argv)


READERS: dict[str, tuple[Callable[[], Any], Callable[[Answer], Any]]] = {
    "nodes of Ray": (
        lambda: json.loads((seeds.FIXTURES / "ray" / "api_v0_nodes.json").read_text()),
        lambda answer: ray.parse_nodes(_loads(answer)),
    ),
    "actors": (lambda: seeds.jobs()["actors"], lambda answer: ray.parse_ranks(_loads(answer), ())),
    "gate": (
        lambda: json.loads((seeds.FIXTURES / "ray" / "head-nodes.json").read_text()),
        lambda response: _CLUSTER({HEAD: [answer("[]"), response], "gpu02": [answer("[]")]}),
    ),
    "batches": (lambda: {"jobs": [seeds.ENTRY]}, _list),
    "a batch": (lambda: seeds.ENTRY, job_store.parse_entry),
    "output": (
        lambda: seeds.OUTPUTS,
        lambda answer: job_store.parse_outputs(answer.node, answer.out),
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
        lambda answer: docker_output.parse_image(answer.out),
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
    """Fields replaced, removed, doubled; text that is no JSON, or absurd JSON."""
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
    healthy, parse = LINES[name]
    text = mutate.lines(healthy(), chance)
    survived(lambda: parse(text))


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
    "failures": explain,
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
def test_endless_lines_are_parsed_in_time(name: str, chance: Chance) -> None:
    """Eight megabytes, the transport's limit, of the slowest input for the patterns."""
    text = ENDLESS[chance.choice(sorted(ENDLESS))]
    survived(lambda: BUSY[name](text))
