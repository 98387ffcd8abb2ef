"""Batches on real parts: Ray Data and vLLM on two lab hosts, with injected faults.

Rows are few where the number does not matter, and jobs that do not test the model use a class: each
start of an engine costs half a minute on two cores.
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
from launcher.inventory.engine_args import to_flags
from launcher.lab import hosts
from launcher.lab.layout import HF_HOME
from launcher.tools import agent_queries
from tests.integration.batches import (
    EMBEDDING_MODEL,
    ENGINE_ARGS,
    MODEL,
    MOE_MODEL,
    Batch,
    count_batches,
    find_processes,
    kill_process,
    query_ray,
)
from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster, assert_error, wait_for_output

pytestmark = pytest.mark.lab

# Long answers, so that rows are in flight when a fault is injected.
LONG = {"max_tokens": 128, "ignore_eos": True, "temperature": 0}
EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "{{ question }} ({{ id }})"},
]


@dataclass(frozen=True)
class Store:
    """An S3 server that the lab hosts can reach, and its only user."""

    url: str
    key: str
    secret: str

    def files(self) -> Any:
        """Return a file system of pyarrow."""
        return pyarrow.fs.S3FileSystem(
            access_key=self.key,
            secret_key=self.secret,
            endpoint_override=self.url,
            region="us-east-1",
        )


@pytest.fixture(scope="module")
def store(lab_cluster: LabCluster) -> Iterator[Store]:
    """An S3 server on this machine, on the lab hosts' network."""
    program = str(Path(__file__).with_name("s3_server.py"))
    with subprocess.Popen(
        [sys.executable, program, lab_cluster.lab.gateway, "rows"],
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
def up(lab_cluster: LabCluster, store: Store) -> Iterator[LabCluster]:
    """A cluster that may use the S3 server, without jobs of earlier runs.

    Tensor parallel ranks on CPUs of several hosts would otherwise need a compiler, which the image
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
        (lab_cluster.folder / name).write_text(value)
        (lab_cluster.folder / name).chmod(0o600)
    lab_cluster.write(change)
    shutil.rmtree(Batch(lab_cluster, "any").work.parent, ignore_errors=True)
    result = lab_cluster.vlaunch("up")
    assert result.code == 0, result.output
    yield lab_cluster
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def questions(number: int) -> list[dict[str, Any]]:
    """Return the rows of a chat."""
    return [
        {"id": f"q{index}", "question": f"What comes after {index}?"} for index in range(number)
    ]


def write_code(lab_cluster: LabCluster, name: str, text: str) -> str:
    """Write a Python file beside the job files; return its name."""
    (lab_cluster.folder / name).write_text(textwrap.dedent(text))
    return name


def predictor(lab_cluster: LabCluster, **changes: Any) -> dict[str, Any]:
    """Return the section of a class that takes its time and reports its node.

    Two replicas claim every CPU of the cluster: reading and writing rows must work without one.
    """
    name = write_code(
        lab_cluster,
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


# -- A thousand rows -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(up: LabCluster) -> Batch:
    """A thousand chat rows for two replicas of vLLM on two nodes."""
    return Batch(up, "thousand").write(
        questions(1000),
        model=MODEL,
        prompt={"chat": CHAT},
        sampling=LONG,
        engine={"args": ENGINE_ARGS, "replicas": 2, "batch_size": 25},
    )


def test_ctrl_c_keeps_the_job_running(chat: Batch) -> None:
    """The launcher stops watching and shows how to watch again; the driver continues."""
    process = chat.lab_cluster.start("batch", str(chat.path))
    chat.await_progress()
    process.send_signal(signal.SIGINT)
    out, err = wait_for_output(process, 60)

    assert process.returncode == 130, out + err
    assert "the job continues" in err
    assert list(find_processes(chat.lab_cluster, "vlaunch_batch"))


def test_a_server_is_refused_while_a_batch_has_the_slots(chat: Batch) -> None:
    """The error names the job."""
    assert not chat.is_over(), chat.progress
    result = chat.lab_cluster.vlaunch("serve", "--skip-network-check", "--no-wait")
    if result.code == 0:
        chat.lab_cluster.vlaunch("stop")

    assert_error(result, chat.name, codes=(1, 2))


def test_no_secret_is_in_a_command_line(chat: Batch, store: Store) -> None:
    """Of any process of any host, nor in Docker's or Ray's records."""
    lab_cluster = chat.lab_cluster
    token = lab_cluster.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    texts = {
        "command lines": lab_cluster.command_lines(),
        "docker inspect": lab_cluster.docker("node1", "inspect", "vlaunch-lab-node1"),
        "jobs": lab_cluster.docker(
            "node1", "exec", "vlaunch-lab-node1", *agent_queries.jobs(Ports())
        ),
        "dry run": lab_cluster.vlaunch("batch", str(chat.path), "--dry-run").out,
        "all that was said": "\n".join(lab_cluster.outputs),
    }

    assert "vlaunch_batch" in texts["command lines"]
    for value in (token, HF_TOKEN, API_KEY, store.key, store.secret):
        assert [place for place, text in texts.items() if value in text] == []


def test_jobs_shows_progress(chat: Batch) -> None:
    """By name, with finished and total rows."""
    result = chat.lab_cluster.vlaunch("jobs", "--json")

    assert result.code == 0, result.output
    (job,) = [row for row in json.loads(result.out)["jobs"] if row["name"] == chat.name]
    assert job["rows"] == 1000
    assert 0 < job["done"] <= 1000


def test_a_thousand_rows_on_two_nodes(chat: Batch) -> None:
    """The same command watches the job to its end and gathers Parquet; both nodes have answered."""
    result = chat.run()

    assert result.code == 0, result.output
    chat.assert_complete(1000)
    rows = chat.answers()
    assert [row["id"] for row in rows] == [f"q{index}" for index in range(1000)]
    assert {(row["output_tokens"], row["finish_reason"]) for row in rows} == {(128, "length")}
    assert all(path.suffix == ".parquet" for path in (chat.out / "rows").iterdir())
    by_node = count_batches(chat.lab_cluster, chat.progress["submission"])
    assert set(by_node) == {host.ip for host in chat.lab_cluster.lab.hosts}
    assert min(by_node.values()) >= 5, by_node


def test_the_summary_agrees_with_the_answers(chat: Batch) -> None:
    """The summary agrees with the answers."""
    summary = chat.summary

    assert (summary["rows"], summary["done"], summary["errors"]) == (1000, 1000, 0)
    assert summary["tokens_out"] == sum(row["output_tokens"] for row in chat.answers())
    assert summary["versions"]["vllm"].startswith("0.32.0")
    assert len(summary["runs"]) == 1


def test_a_second_run_has_nothing_to_do(chat: Batch) -> None:
    """It ends within seconds, without a driver, and does not change the output."""
    before = {path: path.stat().st_mtime_ns for path in chat.out.rglob("*")}

    result = chat.run()

    assert result.code == 0, result.output
    assert "nothing was submitted" in result.err
    assert result.seconds < 15
    assert {path: path.stat().st_mtime_ns for path in chat.out.rglob("*")} == before


def test_another_job_or_another_input_is_refused(chat: Batch) -> None:
    """With the difference, and the option to start over; the output stays."""
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

    assert_error(job, "sampling.max_tokens", "128", "129", "--discard-results", codes=(1, 2))
    assert_error(data, chat.input.name, "--discard-results", codes=(1, 2))
    chat.assert_complete(1000)


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
def spread(up: LabCluster) -> Batch:
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
        engine={"args": ENGINE_ARGS, "tp": 2, "placement": "strict-spread", "batch_size": 16},
    )


def test_hostile_rows_are_error_rows_and_the_others_are_answered(spread: Batch) -> None:
    """Each error row has its reason and input; none stops the job."""
    result = spread.run()

    assert result.code == 0, result.output
    spread.assert_complete(40)
    errors = {row["row"]: row for row in spread.errors()}
    assert set(errors) == set(HOSTILE)
    for index, (_, reason) in HOSTILE.items():
        assert reason in errors[index]["reason"], errors[index]
    assert all(row["output_tokens"] > 0 and row["size"] == row["row"] for row in spread.answers())
    assert errors[13]["stage"] == "prompt"
    assert len(errors[17]["input"]) <= 4096


def test_tensor_parallel_ranks_are_on_two_nodes(spread: Batch) -> None:
    """One bundle per node, by Ray's own records."""
    program = """
groups = list_placement_groups(detail=True)
result = [[str(group.state), [bundle["node_id"] for bundle in group.bundles]] for group in groups]
"""
    groups = query_ray(spread.lab_cluster, program)

    assert [len(set(nodes)) for _, nodes in groups if len(nodes) == 2 and all(nodes)] == [2], groups
    spread.lab_cluster.assert_healthy()


# -- Requests --------------------------------------------------------------------------------------


def describe_response(entry: dict[str, Any]) -> tuple[int, Any]:
    """Return the status of a response, and its answers."""
    if entry["response"]["status_code"] != 200:
        return entry["response"]["status_code"], None
    body = entry["response"]["body"]
    answers = [
        (choice["message"]["content"], choice["finish_reason"], choice["logprobs"] is None)
        for choice in body["choices"]
    ]
    return 200, (body["model"], answers, body["usage"])


@pytest.mark.long
def test_requests_have_the_responses_of_run_batch(up: LabCluster) -> None:
    """The same ids, statuses and greedy answers, from the fields of vLLM's example file and some
    parameters.
    """
    requests: list[dict[str, Any]] = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": "Answer in one word."},
                    {"role": "user", "content": f"What comes after {number}?"},
                ],
                "max_completion_tokens": 8 + number,
                "temperature": 0,
            },
        }
        for number in range(8)
    ]
    for number, change in {
        3: {"logprobs": True, "top_logprobs": 2},
        4: {"stop": ["e"]},
        5: {"model": "another"},
        6: {"max_completion_tokens": -1},
    }.items():
        requests[number]["body"] |= change
    job = Batch(up, "requests").write(
        requests,
        model=MODEL,
        write={"path": "out/requests", "format": "openai"},
        engine={"args": ENGINE_ARGS, "replicas": 2, "batch_size": 2},
    )
    result = job.run()
    folder = f"{HF_HOME}/vlaunch/lab/batch/requests"
    files = ("-i", f"{folder}/input/0000-requests.jsonl", "-o", f"{folder}/run-batch.jsonl")
    program = ("vllm", "run-batch", *files, "--model", MODEL, *to_flags(ENGINE_ARGS))
    up.on("node1", "docker", "exec", "vlaunch-lab-node1", *program, timeout=400)
    lines = [
        line
        for path in sorted(job.out.glob("*/part-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    expected_lines = (job.work / "run-batch.jsonl").read_bytes().splitlines()
    responses, expected = (
        {entry["custom_id"]: describe_response(entry) for entry in map(json.loads, part)}
        for part in (lines, expected_lines)
    )

    assert result.code == 0, result.output
    assert len(lines) == len(expected_lines) == len(requests)
    assert responses == expected
    assert sorted(status for status, _ in responses.values()) == [200] * 6 + [400, 404]
    assert (job.progress["done"], job.progress["errors"]) == (6, 2)


# -- Killed ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_driver_is_killed(up: LabCluster) -> None:
    """The run fails; the same command continues after the committed rows, which do not change."""
    job = Batch(up, "driver").write(
        questions(200),
        model=MODEL,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ENGINE_ARGS, "batch_size": 10},
    )
    job.detach().await_progress()
    kill_process(up, "-m vlaunch_batch", "node1")
    before = job.count_committed()
    again = job.run()

    assert again.code == 0, again.output
    assert 0 < before < 200
    job.assert_complete(200)
    assert len(job.summary["runs"]) == 2


@pytest.mark.long
def test_a_replica_is_killed(up: LabCluster) -> None:
    """Ray restarts it within the same run, and the job counts the restart."""
    job = Batch(up, "replica").write(
        questions(300),
        model=MODEL,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ENGINE_ARGS, "batch_size": 10},
    )
    job.detach().await_progress()
    assert kill_process(up, "VLLM::EngineCore") == 1
    result = job.run()

    assert result.code == 0, result.output
    job.assert_complete(300)
    assert job.progress["restarts"] >= 1


@pytest.mark.long
def test_a_nodes_container_is_killed(up: LabCluster) -> None:
    """The job may succeed or fail; after `up` the same command succeeds."""
    job = Batch(up, "container").write(
        questions(300), predict=predictor(up, args={"seconds": 0.02})
    )
    job.detach().await_progress()
    up.docker("node2", "kill", "vlaunch-lab-node2")
    assert up.vlaunch("up").code == 0
    again = job.run()

    assert again.code == 0, again.output
    job.assert_complete(300)


@pytest.mark.long
def test_the_whole_cluster_is_powered_off(up: LabCluster) -> None:
    """All processes of all hosts die at once; when hosts and cluster are up again, the same command
    completes the job.
    """
    job = Batch(up, "power").write(questions(300), predict=predictor(up, args={"seconds": 0.03}))
    job.detach().await_progress(minimum=50)
    for host in up.lab.hosts:
        host_faults.power_off(host)
    before = job.count_committed()
    for host in up.lab.hosts:
        host_faults.power_on(up.lab, host)
    assert up.vlaunch("up").code == 0
    again = job.run()

    assert again.code == 0, again.output
    assert 50 <= before < 300
    job.assert_complete(300)
    assert {row["node"] for row in job.answers()} == {"node1", "node2"}


# -- Retry and stop --------------------------------------------------------------------------------


def test_only_error_rows_are_retried(up: LabCluster) -> None:
    """Answered rows do not change; temporary failures are answered."""
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

    assert first.code == 0, first.output
    assert [(row["row"], row["stage"]) for row in errors] == [(3, "inference")]
    assert "the trap is set" in errors[0]["reason"]
    assert second.code == 0, second.output
    assert job.errors() == []
    job.assert_complete(20)
    assert [row for row in job.answers() if row["row"] != 3] == answered


def test_a_stopped_job_continues_later(up: LabCluster) -> None:
    """`vlaunch stop JOB` frees the slots; committed rows stay."""
    job = Batch(up, "stopped").write(questions(600), predict=predictor(up, args={"seconds": 0.03}))
    job.detach().await_progress()
    stopped = up.vlaunch("stop", "stopped")
    drivers, before = list(find_processes(up, "-m vlaunch_batch")), job.count_committed()
    free = up.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    again = job.run()

    assert stopped.code == 0, stopped.output
    assert drivers == []
    assert "0.0/4.0 CPU" in free
    assert 0 < before < 600
    assert again.code == 0, again.output
    job.assert_complete(600)


# -- Data-parallel ---------------------------------------------------------------------------------


@pytest.mark.long
def test_a_rank_of_a_mixture_of_experts_is_killed(up: LabCluster) -> None:
    """The failure names the rank and its node; the same command completes, with experts on both
    nodes.
    """
    job = Batch(up, "experts").write(
        questions(61),
        model=MOE_MODEL,
        prompt="{{ question }}",
        sampling=LONG,
        engine={"args": ENGINE_ARGS},
        data_parallel={"size": 2, "round_rows": 8, "timeout": 120},
    )
    job.detach().await_progress()
    kill_process(up, "ray::Rank", "node2")
    failed = job.await_end()
    again = job.run()

    assert failed["state"] == "failed", failed
    assert "rank 1" in failed["error"]["message"]
    assert (
        "node2" in failed["error"]["message"] + failed["error"]["evidence"]
        or up.lab.host("node2").ip in failed["error"]["message"]
    )
    assert again.code == 0, again.output
    assert "expert" in again.output
    job.assert_complete(61)


# -- Examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        # other tests run jobs of these kinds
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("chat", "data-parallel", "preprocess", "text-generation")
        ),
        "embeddings",
        "torch-module",
    ],
)
def test_an_example_runs(up: LabCluster, name: str) -> None:
    """Unchanged, except for the model."""
    folder = up.folder / "examples"
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    job = Batch(up, name, folder)
    document = yaml.safe_load(job.path.read_text())
    if "model" in document:
        document["model"] = EMBEDDING_MODEL if name == "embeddings" else MODEL
    if name == "text-generation":
        document["predict"]["args"] = {"model": MODEL}
    job.path.write_text(yaml.safe_dump(document))
    rows = len((folder / document["read"]).read_text().splitlines())
    result = job.run()

    assert result.code == 0, result.output
    assert job.errors() == []
    job.assert_complete(rows)
    if name == "data-parallel":
        assert "2 independent engines" in result.output


# -- Storage, and the server -----------------------------------------------------------------------


def test_from_s3_to_s3(up: LabCluster, store: Store) -> None:
    """Read and written with the inventory's secrets; nothing is gathered, and no secret leaks."""
    files = store.files()
    for part in range(2):
        with files.open_output_stream(f"rows/in/part-{part}.jsonl") as out:
            out.write("".join(json.dumps(row) + "\n" for row in questions(40)[part::2]).encode())
    job = Batch(up, "s3").write(
        read="s3://rows/in/*.jsonl",
        write={"path": "s3://rows/out", "rows_per_file": 15},
        predict=predictor(up, replicas=1),
    )
    result = job.run()
    again = job.run()
    entries = files.get_file_info(pyarrow.fs.FileSelector("rows/out/rows"))
    rows = [
        row for file in entries for row in pq.read_table(file.path, filesystem=files).to_pylist()
    ]
    output = "\n".join(
        [
            result.output,
            again.output,
            up.vlaunch("logs", "--tail", "100000").out,
            up.command_lines(),
            *(path.read_text() for path in job.work.rglob("*.json")),
        ]
    )

    assert result.code == 0, result.output
    assert sorted(row["row"] for row in rows) == list(range(40))
    assert {row["id"] for row in rows} == {f"q{index}" for index in range(40)}
    assert "nothing was submitted" in again.err
    assert [value for value in (store.key, store.secret) if value in output] == []
