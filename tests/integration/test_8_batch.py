"""Batches on real parts: real Ray Data and real vLLM on two practice hosts, with what goes wrong
there made to happen.

Rows are few where the number does not matter, and jobs whose point is not the model use a class of
their own: each start of an engine costs half a minute on two cores.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.faults import host_faults
from launcher.core.domain import Ports
from launcher.lab import hosts
from launcher.tools import agent_queries
from tests.integration.batches import (
    ARGS,
    EMBEDS,
    MIXTURE,
    MODEL,
    Batch,
    kill_one,
    ray_state,
    running,
    worked,
)
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice, Ran, ended

pytestmark = pytest.mark.lab

# Long answers, whatever the model would say: rows must be on their way when something happens to
# them.
LONG = {"max_tokens": 128, "ignore_eos": True, "temperature": 0}
EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "{{ question }} ({{ id }})"},
]


@dataclass(frozen=True)
class Store:
    """An S3 server that the practice hosts can reach, and its only user."""

    url: str
    key: str
    secret: str

    def files(self) -> Any:
        """Return pyarrow's view of it."""
        return pyarrow.fs.S3FileSystem(
            access_key=self.key,
            secret_key=self.secret,
            endpoint_override=self.url,
            region="us-east-1",
        )


@pytest.fixture(scope="module")
def store(practice: Practice) -> Iterator[Store]:
    """An S3 server on this machine, on the practice hosts' network."""
    program = str(Path(__file__).with_name("s3_server.py"))
    with subprocess.Popen(
        [sys.executable, program, practice.lab.gateway, "rows"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Store(**json.loads(process.stdout.readline()))
        process.stdin.close()
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def up(practice: Practice, store: Store) -> Iterator[Practice]:
    """A cluster that is up and may use the S3 server; jobs of earlier runs are gone.

    Tensor parallel ranks on CPUs of several hosts would otherwise want a compiler, which the image
    lacks.
    """

    def change(document: dict[str, Any]) -> None:
        document["secrets"] |= {
            "AWS_ACCESS_KEY_ID": {"file": "s3.key"},
            "AWS_SECRET_ACCESS_KEY": {"file": "s3.secret"},
        }
        document["env"] |= {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "TORCHDYNAMO_DISABLE": "1",
        }

    for name, value in (("s3.key", store.key), ("s3.secret", store.secret)):
        (practice.folder / name).write_text(value)
        (practice.folder / name).chmod(0o600)
    practice.write(change)
    shutil.rmtree(Batch(practice, "any").work.parent, ignore_errors=True)
    ran = practice.vlaunch("up")
    assert ran.code == 0, ran.said
    yield practice
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


def questions(number: int) -> list[dict[str, Any]]:
    """Make rows of a chat."""
    return [
        {"id": f"q{index}", "question": f"What comes after {index}?"} for index in range(number)
    ]


def code(practice: Practice, name: str, text: str) -> str:
    """Write a Python file beside the job files; return its name."""
    (practice.folder / name).write_text(textwrap.dedent(text))
    return name


def predictor(practice: Practice, **changes: Any) -> dict[str, Any]:
    """Return the section of a class that takes its time and says where it ran.

    Two of them claim every CPU of the cluster: what reads and writes rows must find its way without
    one.
    """
    name = code(
        practice,
        "slow.py",
        """
        import os
        import time


        class Slow:
            def __init__(self, seconds=0.0, trap=""):
                self.seconds, self.trap = seconds, trap

            def __call__(self, batch):
                if self.trap and os.path.exists(self.trap) and "q3" in list(batch["id"]):
                    raise ValueError("the trap is set")
                time.sleep(self.seconds * len(batch["id"]))
                lengths = [len(question) for question in batch["question"]]
                return {"length": lengths, "node": [os.uname().nodename] * len(lengths)}
        """,
    )
    return {"class": f"{name}:Slow", "batch_size": 10, "replicas": 2, "num_cpus": 2, **changes}


def refused(ran: Ran, *words: str) -> None:
    """Check the form of a refusal: what it names, a hint, no traceback."""
    assert ran.code in (1, 2), ran.said
    assert "Traceback" not in ran.said
    assert "hint: " in ran.err
    for word in words:
        assert word in ran.err, ran.err


# -- A thousand rows -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(up: Practice) -> Batch:
    """A thousand chat rows for two replicas of vLLM on two nodes."""
    return Batch(up, "thousand").write(
        questions(1000),
        model=MODEL,
        prompt={"chat": CHAT},
        sampling=LONG,
        engine={"args": ARGS, "replicas": 2, "batch_size": 25},
    )


def test_ctrl_c_leaves_the_job_alone(chat: Batch) -> None:
    """The launcher stops watching and says how to watch again; the driver goes on."""
    process = chat.practice.start("batch", str(chat.path))
    chat.under_way()
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 60)

    assert process.returncode == 130, out + err
    assert "the job continues" in err
    assert list(running(chat.practice, "vlaunch_batch"))


def test_a_server_is_refused_while_a_batch_has_the_slots(chat: Batch) -> None:
    """With the job that has them."""
    assert not chat.over(), chat.progress
    ran = chat.practice.vlaunch("serve", "--skip-network-check", "--no-wait")
    if ran.code == 0:
        chat.practice.vlaunch("stop")

    refused(ran, chat.name)


def test_no_secret_is_in_a_command_line(chat: Batch, store: Store) -> None:
    """Of any process of any host, nor in what Docker knows of the containers, nor in what Ray knows
    of its jobs.
    """
    practice = chat.practice
    token = practice.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    places = {
        "command lines": practice.command_lines(),
        "docker inspect": practice.docker("node1", "inspect", "vlaunch-lab-node1"),
        "jobs": practice.docker("node1", "exec", "vlaunch-lab-node1", *agent_queries.jobs(Ports())),
        "dry run": practice.vlaunch("batch", str(chat.path), "--dry-run").out,
        "all that was said": "\n".join(practice.said),
    }

    assert "vlaunch_batch" in places["command lines"]
    for value in (token, HF_TOKEN, API_KEY, store.key, store.secret):
        assert [place for place, text in places.items() if value in text] == []


def test_jobs_shows_how_far_it_is(chat: Batch) -> None:
    """By name, with rows done and in all."""
    ran = chat.practice.vlaunch("jobs", "--json")

    assert ran.code == 0, ran.said
    (job,) = [each for each in json.loads(ran.out)["jobs"] if each["name"] == chat.name]
    assert job["rows"] == 1000
    assert 0 < job["done"] <= 1000


def test_a_thousand_rows_on_two_nodes_each_once(chat: Batch) -> None:
    """The same command watches the job to its end and gathers Parquet; both nodes have answered."""
    ran = chat.run()

    assert ran.code == 0, ran.said
    chat.each_once(1000)
    rows = chat.answers()
    assert [row["id"] for row in rows] == [f"q{index}" for index in range(1000)]
    assert {(row["output_tokens"], row["finish_reason"]) for row in rows} == {(128, "length")}
    assert all(path.suffix == ".parquet" for path in (chat.out / "rows").iterdir())
    by_node = worked(chat.practice, chat.progress["submission"])
    assert set(by_node) == {host.ip for host in chat.practice.lab.hosts}
    assert min(by_node.values()) >= 5, by_node


def test_the_summary_counts_what_is_there(chat: Batch) -> None:
    """Beside the answers."""
    summary = chat.summary

    assert (summary["rows"], summary["done"], summary["errors"]) == (1000, 1000, 0)
    assert summary["tokens_out"] == sum(row["output_tokens"] for row in chat.answers())
    assert summary["versions"]["vllm"].startswith("0.32.0")
    assert len(summary["runs"]) == 1


def test_a_second_run_has_nothing_to_do(chat: Batch) -> None:
    """Within seconds, without a driver, and the output stays as it is."""
    before = {path: path.stat().st_mtime_ns for path in chat.out.rglob("*")}

    ran = chat.run()

    assert ran.code == 0, ran.said
    assert "nothing was submitted" in ran.err
    assert ran.seconds < 15
    assert {path: path.stat().st_mtime_ns for path in chat.out.rglob("*")} == before


def test_another_job_or_another_input_is_refused(chat: Batch) -> None:
    """With what is different, and how to begin anew; what is there stays."""
    text, rows = chat.path.read_text(), chat.input.read_bytes()
    try:
        chat.path.write_text(text.replace("max_tokens: 128", "max_tokens: 129"))
        job = chat.run()
        chat.path.write_text(text)
        chat.input.write_bytes(rows + b'{"id": "late", "question": "And?"}\n')
        data = chat.run()
    finally:
        chat.path.write_text(text)
        chat.input.write_bytes(rows)

    refused(job, "sampling.max_tokens", "128", "129", "--discard-results")
    refused(data, chat.input.name, "--discard-results")
    chat.each_once(1000)


# -- Hostile rows, and a replica over two nodes ----------------------------------------------------

HOSTILE: dict[int, tuple[bytes, str]] = {
    3: (b"", "empty"),
    5: (b'{"id": "cut", "question": ', "JSON"),
    7: (b'["a list"]', "object"),
    11: (b'{"id": "latin", "question": "caf\xe9"}', "UTF-8"),
    13: (b'{"id": "no key"}', "question"),
    17: (json.dumps({"id": "huge", "question": "x" * 70_000}).encode(), "row_bytes"),
    19: (json.dumps({"id": "type", "question": "How many?", "size": "large"}).encode(), "size"),
    23: (json.dumps({"id": "long", "question": "word " * 3000}).encode(), ""),
}


@pytest.fixture(scope="module")
def spread(up: Practice) -> Batch:
    """A job of one replica whose two ranks are on two nodes; some of its rows cannot be
    answered.
    """
    rows: list[Any] = [{**row, "size": index} for index, row in enumerate(questions(40))]
    for index, (line, _) in HOSTILE.items():
        rows[index] = line
    return Batch(up, "spread").write(
        rows,
        read={"paths": "spread.jsonl", "row_bytes": "64KiB", "id": "id"},
        keep={"id": "text", "size": "integer"},
        model=MODEL,
        prompt="Say: {{ question }}",
        sampling={"max_tokens": 4, "temperature": 0},
        engine={"args": ARGS, "tp": 2, "placement": "strict-spread", "batch_size": 16},
    )


def test_hostile_rows_are_error_rows_and_the_others_are_answered(spread: Batch) -> None:
    """Each with its reason and what it was; none ends the job."""
    ran = spread.run()

    assert ran.code == 0, ran.said
    spread.each_once(40)
    errors = {row["row"]: row for row in spread.errors()}
    assert set(errors) == set(HOSTILE)
    for index, (_, word) in HOSTILE.items():
        assert word in errors[index]["reason"], errors[index]
    assert all(row["output_tokens"] > 0 and row["size"] == row["row"] for row in spread.answers())
    assert errors[13]["stage"] == "prompt"
    assert len(errors[17]["input"]) <= 4096


def test_tensor_parallel_ranks_are_on_two_nodes(spread: Batch) -> None:
    """One bundle per node, by Ray's own records."""
    program = """
groups = list_placement_groups(detail=True)
found = [[str(each.state), [bundle["node_id"] for bundle in each.bundles]] for each in groups]
"""
    groups = ray_state(spread.practice, program)

    assert [len(set(nodes)) for _, nodes in groups if len(nodes) == 2 and all(nodes)] == [2], groups


# -- Killed ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_driver_is_killed(up: Practice) -> None:
    """The run fails; the same command goes on from what is committed, which stays as it is."""
    job = Batch(up, "driver").write(
        questions(200),
        model=MODEL,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ARGS, "batch_size": 10},
    )
    job.detach().under_way()
    kill_one(up, "-m vlaunch_batch", "node1")
    before = job.committed()
    again = job.run()

    assert again.code == 0, again.said
    assert 0 < before < 200
    job.each_once(200)
    assert len(job.summary["runs"]) == 2


@pytest.mark.long
def test_a_replica_is_killed(up: Practice) -> None:
    """Ray starts it anew within the same run, and the job counts the restart."""
    job = Batch(up, "replica").write(
        questions(300),
        model=MODEL,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ARGS, "batch_size": 10},
    )
    job.detach().under_way()
    assert kill_one(up, "VLLM::EngineCore") == 1
    ran = job.run()

    assert ran.code == 0, ran.said
    job.each_once(300)
    assert job.progress["restarts"] >= 1


def test_a_nodes_container_is_killed(up: Practice) -> None:
    """The job ends well or ill; after `up` the same command ends well."""
    job = Batch(up, "container").write(
        questions(300), predict=predictor(up, args={"seconds": 0.02})
    )
    job.detach().under_way()
    up.docker("node2", "kill", "vlaunch-lab-node2")
    assert up.vlaunch("up").code == 0
    again = job.run()

    assert again.code == 0, again.said
    job.each_once(300)


def test_the_whole_cluster_is_powered_off(up: Practice) -> None:
    """Every process of every host ends at once; when the hosts and the cluster are up again, the
    same command completes.
    """
    job = Batch(up, "power").write(questions(300), predict=predictor(up, args={"seconds": 0.03}))
    job.detach().under_way(least=50)
    for host in up.lab.hosts:
        host_faults.power_off(host)
    before = job.committed()
    for host in up.lab.hosts:
        host_faults.power_on(up.lab, host)
    assert up.vlaunch("up").code == 0
    again = job.run()

    assert again.code == 0, again.said
    assert 50 <= before < 300
    job.each_once(300)
    assert {row["node"] for row in job.answers()} == {"node1", "node2"}


# -- Asking again, and stopping --------------------------------------------------------------------


def test_error_rows_are_tried_again_alone(up: Practice) -> None:
    """What was answered stays as it is; what failed for a while is answered."""
    traps = [hosts.hf_home(host) / "trap" for host in up.lab.hosts]
    for trap in traps:
        trap.touch()
    job = Batch(up, "retried").write(
        questions(20), predict=predictor(up, replicas=1, args={"trap": "/data/huggingface/trap"})
    )
    try:
        first = job.run()
    finally:
        for trap in traps:
            trap.unlink()
    errors, answered = job.errors(), job.answers()
    second = job.run("--retry-errors")

    assert first.code == 0, first.said
    assert [(row["row"], row["stage"]) for row in errors] == [(3, "inference")]
    assert "the trap is set" in errors[0]["reason"]
    assert second.code == 0, second.said
    assert job.errors() == []
    job.each_once(20)
    assert [row for row in job.answers() if row["row"] != 3] == answered


def test_a_job_is_stopped_and_goes_on_later(up: Practice) -> None:
    """`vlaunch stop JOB` frees the slots; what is committed stays."""
    job = Batch(up, "stopped").write(questions(600), predict=predictor(up, args={"seconds": 0.03}))
    job.detach().under_way()
    stopped = up.vlaunch("stop", "stopped")
    left, before = list(running(up, "-m vlaunch_batch")), job.committed()
    free = up.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    again = job.run()

    assert stopped.code == 0, stopped.said
    assert left == []
    assert "0.0/4.0 CPU" in free
    assert 0 < before < 600
    assert again.code == 0, again.said
    job.each_once(600)


# -- Data-parallel ---------------------------------------------------------------------------------


@pytest.mark.long
def test_a_rank_of_a_mixture_of_experts_is_killed(up: Practice) -> None:
    """The failure names the rank and its node; the same command completes, with experts shared over
    two nodes.
    """
    job = Batch(up, "experts").write(
        questions(61),
        model=MIXTURE,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ARGS},
        data_parallel={"size": 2, "round_rows": 8, "timeout": 120},
    )
    job.detach().under_way()
    kill_one(up, "ray::Rank", "node2")
    failed = job.ended()
    again = job.run()

    assert failed["state"] == "failed", failed
    assert "rank 1" in failed["error"]["message"]
    assert (
        "node2" in failed["error"]["message"] + failed["error"]["evidence"]
        or up.lab.host("node2").ip in failed["error"]["message"]
    )
    assert again.code == 0, again.said
    assert "expert" in again.said
    job.each_once(61)


# -- Examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["chat", "data-parallel", "embeddings", "preprocess", "text-generation", "torch-module"],
)
def test_an_example_runs(up: Practice, name: str) -> None:
    """As it is, but for the model."""
    folder = up.folder / "examples"
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    job = Batch(up, name, folder)
    document = yaml.safe_load(job.path.read_text())
    if "model" in document:
        document["model"] = EMBEDS if name == "embeddings" else MODEL
    if name == "text-generation":
        document["predict"]["args"] = {"model": MODEL}
    job.path.write_text(yaml.safe_dump(document))
    rows = len((folder / document["read"]).read_text().splitlines())
    ran = job.run()

    assert ran.code == 0, ran.said
    assert job.errors() == []
    job.each_once(rows)
    if name == "data-parallel":
        assert "2 independent engines" in ran.said


# -- Storage, and the server -----------------------------------------------------------------------


def test_from_s3_to_s3(up: Practice, store: Store) -> None:
    """Read and written with the inventory's secrets; nothing is gathered, and no secret is seen."""
    files = store.files()
    for part in range(2):
        with files.open_output_stream(f"rows/in/part-{part}.jsonl") as out:
            out.write("".join(json.dumps(row) + "\n" for row in questions(40)[part::2]).encode())
    job = Batch(up, "s3").write(
        read="s3://rows/in/*.jsonl",
        write={"path": "s3://rows/out", "rows_per_file": 15},
        predict=predictor(up, replicas=1),
    )
    ran = job.run()
    again = job.run()
    found = files.get_file_info(pyarrow.fs.FileSelector("rows/out/rows"))
    rows = [row for each in found for row in pq.read_table(each.path, filesystem=files).to_pylist()]
    seen = "\n".join(
        [
            ran.said,
            again.said,
            up.vlaunch("logs", "--tail", "100000").out,
            up.command_lines(),
            *(path.read_text() for path in job.work.rglob("*.json")),
        ]
    )

    assert ran.code == 0, ran.said
    assert sorted(row["row"] for row in rows) == list(range(40))
    assert {row["id"] for row in rows} == {f"q{index}" for index in range(40)}
    assert "nothing was submitted" in again.err
    assert [value for value in (store.key, store.secret) if value in seen] == []


def test_a_batch_is_refused_while_a_server_has_the_slots(up: Practice) -> None:
    """With the server that has them; nothing is submitted."""
    job = Batch(up, "later").write(
        questions(5), model=MODEL, prompt="{{ question }}", engine={"args": ARGS}
    )
    try:
        serve = up.vlaunch("serve", "--no-wait", "--skip-network-check")
        ran = job.run(timeout=60)
    finally:
        stop = up.vlaunch("stop")

    assert serve.code == 0, serve.said
    refused(ran, "server")
    assert stop.code == 0, stop.said
    assert not job.work.exists()
