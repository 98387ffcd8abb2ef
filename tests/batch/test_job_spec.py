"""`job.json`, and the identity of a job's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.batch import inputs, job_spec
from launcher.batch.checked_job import CheckedJob
from launcher.batch.driver.job_file import read_job
from launcher.batch.job import to_json
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.ssh import output
from tests.batch.conftest import Load

_CHAT = "prompt: {chat: [{role: user, content: '{{ text }}'}], chat_args: {thinking: false}}"


def _described(job: CheckedJob, inventory: Inventory) -> dict[str, Any]:
    return job_spec.job_spec(job, inputs.read_shipped(job), inventory)


def _digest(job: CheckedJob, inventory: Inventory) -> str:
    return str(_described(job, inventory)["digest"])


def test_the_spec_is_complete(load_text: Load, inventory: Inventory) -> None:
    """With the container's paths: shipped input is in the job's folder on the head."""
    job = load_text(
        f"{_CHAT}\nkeep: {{id: integer}}\nengine: {{placement: strict-pack}}",
        read="read: [data, 'nodes:/data/in/*.jsonl']",
    )

    payload = _described(job, inventory)

    work = "/data/huggingface/vlaunch/pair/batch/test"
    assert (payload["version"], payload["job"], payload["cluster"], payload["mode"]) == (
        1,
        "test",
        "pair",
        "engine",
    )
    assert (payload["work"], payload["write"]["path"]) == (work, f"{work}/output")
    assert payload["read"]["paths"] == [
        f"{work}/input/0000-chat.jsonl",
        f"{work}/input/0001-more.jsonl",
        "/data/in/*.jsonl",
    ]
    assert payload["prompt"] == {
        "chat": [{"role": "user", "content": "{{ text }}"}],
        "chat_args": {"thinking": False},
    }
    assert payload["engine"]["placement"] == "strict-pack"
    assert payload["keep"] == {"id": "integer"}
    assert not {"predict", "data_parallel"} & payload.keys()
    assert json.loads(json.dumps(payload)) == payload


def test_prompts_belong_to_the_identity(load_text: Load, inventory: Inventory) -> None:
    """A vector is no answer; the identity of jobs without a task is unchanged."""
    text, vector = load_text(), load_text("task: embed")

    assert "task" not in _described(text, inventory)["identity"]
    assert _described(vector, inventory)["identity"]["task"] == "embed"


@pytest.mark.parametrize(
    ("extra", "model"),
    [
        (_CHAT, "model: m"),
        (
            "lora: {sql: /l/sql}\nprompt: {messages: chat, tools: tools}",
            "model: m",
        ),
        (
            "data_parallel: {size: 4, expert_parallel: true}\nengine: {tp: 2, args: {dtype: half}}",
            "model: m",
        ),
        (
            (
                "predict: {class: 'mine.py:Mine', args: {a: 1.5}, num_gpus: 0.5}\npreprocess:"
                " mine.py:ready"
            ),
            None,
        ),
    ],
)
def test_launcher_and_driver_agree(
    load_text: Load, inventory: Inventory, tmp_path: Path, extra: str, model: str | None
) -> None:
    """On every key."""
    payload = {**_described(load_text(extra, model=model), inventory), "retry_errors": True}
    (tmp_path / "job.json").write_text(json.dumps(payload))

    read = read_job(str(tmp_path))

    assert (read.name, read.mode, read.digest, read.retry_errors) == (
        "test",
        payload["mode"],
        payload["digest"],
        True,
    )
    assert list(read.read.paths) == payload["read"]["paths"]
    assert {"version": 1, **to_json(read), "work": payload["work"]} == payload


def test_ranks_receive_the_nodes_with_the_head_first(load_text: Load, inventory: Inventory) -> None:
    """Rank 0 is where they meet."""
    payload = _described(load_text("data_parallel: 4"), inventory)

    assert payload["data_parallel"] == {"size": 4, "timeout": 600.0, "round_rows": 256}
    assert payload["rank_port"] == 29501
    assert payload["rank_hosts"] == [{"ip": "10.0.0.12", "gpus": 2}, {"ip": "10.0.0.11", "gpus": 2}]


@pytest.mark.parametrize(
    "extra",
    [
        "engine: {tp: 2}",
        "engine: {replicas: 2}",
        "engine: {batch_size: 8}",
        "engine: {placement: spread}",
        (
            "engine: {args: {max_model_len: 512, gpu_memory_utilization: 0.5, enforce_eager: true,"
            " max_num_seqs: 8}}"
        ),
        "limits: {restarts: 1, stall: 5, errors: 2}",
    ],
)
def test_tuning_does_not_change_the_identity(
    load_text: Load, inventory: Inventory, extra: str
) -> None:
    """The answers are the same."""
    assert _digest(load_text(extra), inventory) == _digest(load_text(), inventory)
    other = load_text(write="write: {path: elsewhere, rows_per_file: 5, seconds: 5}")
    assert _digest(other, inventory) == _digest(load_text(), inventory)


@pytest.mark.parametrize(
    ("extra", "top"),
    [
        ("", {"model": "model: n"}),
        ("prompt: {column: text}", {}),
        ("sampling: {seed: 1}", {}),
        ("keep: [id]", {}),
        ("keep: []", {}),
        ("", {"read": "read: {paths: data/chat.jsonl, limit: 1}"}),
        ("", {"read": "read: {paths: data/chat.jsonl, id: id}"}),
        ("", {"read": "read: data"}),
        ("", {"write": "write: {path: out, format: jsonl}"}),
        ("", {"write": "write: s3://b/c"}),
        ("data_parallel: 2", {}),
        ("lora: {sql: /l/sql}", {}),
        ("prompt: {messages: chat}", {}),
        ("engine: {args: {revision: v2}}", {}),
        ("engine: {args: {--tokenizer: other}}", {}),
        ("engine: {args: {tokenizer_mode: slow}}", {}),
        ("engine: {args: {--dtype: half}}", {}),
        ("engine: {args: {quantization: fp8}}", {}),
        ("engine: {args: {kv-cache-dtype: fp8}}", {}),
        ("engine: {args: {seed: 1}}", {}),
        ("engine: {args: {override_generation_config: {eos_token_id: 3}}}", {}),
        ("engine: {args: {reasoning_parser: qwen3}}", {}),
    ],
)
def test_other_changes_change_the_identity(
    load_text: Load, inventory: Inventory, extra: str, top: dict[str, str]
) -> None:
    """Half of the answers would differ."""
    assert _digest(load_text(extra, **top), inventory) != _digest(load_text(), inventory)


def test_contents_count_and_folders_do_not(
    load_text: Load, inventory: Inventory, folder: Path
) -> None:
    """A moved job is the same; one with edited input is not."""
    before = _digest(load_text("predict: mine.py:Mine", model=None), inventory)
    moved = folder / "moved"
    moved.mkdir()
    (folder / "data" / "chat.jsonl").rename(moved / "chat.jsonl")
    assert (
        _digest(
            load_text("predict: mine.py:Mine", read="read: moved/chat.jsonl", model=None), inventory
        )
        == before
    )

    (folder / "mine.py").write_text("class Mine: x = 1\n")
    assert (
        _digest(
            load_text("predict: mine.py:Mine", read="read: moved/chat.jsonl", model=None), inventory
        )
        != before
    )


def test_the_order_of_input_counts(load_text: Load, inventory: Inventory) -> None:
    """Rows are identified by number."""
    spec = load_text(read="read: [data/chat.jsonl, data/more.jsonl]")
    other = load_text(read="read: [data/more.jsonl, data/chat.jsonl]")

    assert _digest(spec, inventory) != _digest(other, inventory)


@pytest.mark.parametrize("length", [8, 80])
def test_a_job_with_too_many_files_is_rejected(
    load_text: Load, inventory: Inventory, length: int
) -> None:
    """Before any transfer: the head's description of the job must fit in one answer."""

    def make_spec(number: int) -> tuple[dict[str, Any], dict[str, int]]:
        names = [f"{at:0{length}}" for at in range(number)]
        files = [
            inputs.ShippedFile(
                to=f"input/{at:04d}-{name}",
                label=name,
                path=Path(),
                bytes=10**9,
                sha256="a" * 64,
                source=0,
            )
            for at, name in enumerate(names)
        ]
        return job_spec.job_spec(load_text(), files, inventory), {
            file.to: file.bytes for file in files
        }

    item = len(json.dumps(make_spec(10_000)[0])) / 10_000
    answer = json.dumps(make_spec(int(0.97 * job_spec.MAX_BYTES / item)))
    with pytest.raises(RequestError, match="the description of `test` is too long") as caught:
        make_spec(int(1.03 * job_spec.MAX_BYTES / item))

    assert job_spec.MAX_BYTES < len(answer) < 0.9 * output.LIMIT
    assert "at most 5,242,880" in caught.value.evidence
    assert "fewer files" in caught.value.hint


def test_an_input_of_any_name_counts(load_text: Load, inventory: Inventory, folder: Path) -> None:
    """Even one named like a key of the identity."""
    (folder / "data" / "order").write_text('{"text": "a"}\n')
    text = "read: {paths: data/order, format: jsonl}"
    before = _digest(load_text(read=text), inventory)
    (folder / "data" / "order").write_text('{"text": "b"}\n')

    assert _digest(load_text(read=text), inventory) != before
