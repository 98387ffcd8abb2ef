"""The data-parallel mode: placement, kinds of models, and every row once, in order."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import cluster, ranks
from launcher.batch.driver import rows as reading
from launcher.batch.driver.bitmap import row_numbers
from launcher.batch.driver.budget import CurrentMonitor
from launcher.batch.driver.job_file import Failed, Refused, parse_job
from launcher.batch.driver.rank_pool import RankSlot
from launcher.batch.driver.results import Converter, Part
from launcher.batch.job import Preprocess
from tests.batch.driver.jobs import bitmap

NODES = [
    {"ip": "10.0.0.1", "gpus": 1},
    {"ip": "10.0.0.2", "gpus": 5},
    {"ip": "10.0.0.3", "gpus": 4},
]


def job(
    *,
    model: str = "m",
    tp: int = 1,
    pp: int = 1,
    args: dict[str, Any] | None = None,
    **parallel: Any,
) -> Any:
    """A data-parallel job as the driver reads it."""
    return parse_job(
        {
            "job": "j",
            "cluster": "c",
            "mode": "data-parallel",
            "work": "/w",
            "model": model,
            "read": {"paths": ["/i"], "format": "jsonl"},
            "prompt": {"column": "t"},
            "write": {"path": "/o", "format": "jsonl"},
            "rank_port": 29600,
            "rank_hosts": NODES,
            "engine": {"tp": tp, "pp": pp, "args": args or {}},
            "data_parallel": {
                "size": 2,
                "round_rows": 4,
                **parallel,
            },
        }
    )


def row(number: int) -> dict[str, Any]:
    """Return a row as read; every seventh one is bad."""
    bad = number % 7 == 6
    return {
        "_row": number,
        "_error": "not JSON" if bad else "",
        "_stage": "read" if bad else "",
        "_raw": f"raw {number}",
        "_keep": pickle.dumps({"kept": number}),
        "_data": b"" if bad else b"data",
    }


def converter() -> Converter:
    """Return the converter of a job."""
    return Converter(job(), {})


class RankPool:
    """Ranks that answer in any order; calls are recorded."""

    def __init__(
        self, size: int, seed: int = 0, slow: int | None = None, spoil: Any = None
    ) -> None:
        self.tasks: list[deque[tuple[Any, Any]]] = [deque() for _ in range(size)]
        self.calls: list[list[list[int]]] = [[] for _ in range(size)]
        self.random, self.slow, self.spoil = random.Random(seed), slow, spoil
        self.most = 0

    def submit(self, rank: int, tag: Any, rows: list[dict[str, Any]]) -> None:
        self.calls[rank].append([row["_row"] for row in rows])
        self.tasks[rank].append((tag, rows))
        self.most = max(self.most, sum(map(len, self.tasks)))

    @property
    def busy(self) -> bool:
        return any(self.tasks)

    def load(self, rank: int) -> int:
        return len(self.tasks[rank])

    def finished(self) -> list[tuple[int, Any, list[Part]]]:
        able = [rank for rank, tasks in enumerate(self.tasks) if tasks]
        quick = [rank for rank in able if rank != self.slow] or able
        rank = self.random.choice(quick)
        tag, rows = self.tasks[rank].popleft()
        answers = [
            {**row, "_error": "too long", "_stage": "prompt"}
            if row["_row"] % 5 == 3
            else {**row, "_raw": "", "answer": f"{row['_row']}!"}
            for row in rows
        ]
        converted = converter().convert(self.spoil(answers) if self.spoil else answers)
        return [(rank, tag, converted)]


def accounted(results: list[list[Part]], numbers: list[int]) -> None:
    """Check that every row came once, with the right result, and slices in order."""
    came: list[int] = []
    for parts in results:
        lines = [
            (part.kind, json.loads(line))
            for part in parts
            for line in part.table["_line"].to_pylist()
        ]
        came += sorted(line["row"] for _, line in lines)
        for kind, line in lines:
            number = line["row"]
            if number % 7 == 6:
                assert (line["reason"], line["stage"]) == ("not JSON", "read")
                assert (kind, line["input"]) == ("errors", f"raw {number}")
            elif number % 5 == 3:
                assert (line["reason"], line["stage"]) == ("too long", "prompt")
                assert (kind, line["input"]) == ("errors", f"raw {number}")
            else:
                assert line == {"row": number, "kept": number, "answer": f"{number}!"}
                assert kind == "rows"
    assert came == numbers


def collect(slices: Iterator[ranks.Slice]) -> list[list[Part]]:
    """Return the results of slices."""
    return [ranks.merge_answers(converter(), part) for part in slices]


@pytest.mark.parametrize("mode", [ranks.run_in_step, ranks.run_apart])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 23, 101])
def test_every_row_comes_back_once_and_in_order(mode: Any, size: int, count: int) -> None:
    """For any number of rows and ranks, and any order of completion."""
    for seed in range(5):
        pool = RankPool(size, seed)

        accounted(collect(mode(map(row, range(count)), pool, size, 4)), list(range(count)))

        requests = sorted(number for calls in pool.calls for call in calls for number in call)
        assert requests == [number for number in range(count) if number % 7 != 6]


@pytest.mark.parametrize("count", [1, 5, 9, 100])
def test_ranks_in_step_are_all_called_in_every_round(count: int) -> None:
    """A rank without rows gets an empty call: others would wait for it."""
    pool = RankPool(3)

    list(ranks.run_in_step(map(row, range(count)), pool, 3, 4))  # type: ignore[arg-type]

    assert {len(calls) for calls in pool.calls} == {-(-count // 12)}


def test_a_round_without_a_good_row_calls_no_rank() -> None:
    """Not even ranks in step."""
    pool = RankPool(2)
    bad = [row(6) | {"_row": number} for number in range(8)]

    slices = ranks.run_in_step(bad, pool, 2, 4)  # type: ignore[arg-type]
    assert sum(len(part.rows) for part in slices) == 8
    assert pool.calls == [[], []]


def test_the_next_round_starts_before_the_last_is_yielded() -> None:
    """Ranks work while answers are written."""
    pool = RankPool(2)

    result = ranks.run_in_step(map(row, range(40)), pool, 2, 4)  # type: ignore[arg-type]
    next(result)

    assert [len(calls) for calls in pool.calls] == [2, 2]


def test_a_slow_rank_gets_less_work() -> None:
    """Others do the rest; only a limited number of rows waits for its slice."""
    pool = RankPool(2, slow=0)
    numbers: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        for number in range(400):
            numbers.append(number)
            yield row(number)

    first = next(ranks.run_apart(source(), pool, 2, 4))  # type: ignore[arg-type]

    assert [item["_row"] for item in first.rows] == [0, 1, 2, 3]
    assert len(numbers) == ranks.MAX_AHEAD * 2 * 4
    assert len(pool.calls[0]) <= ranks.QUEUED_SLICES < len(pool.calls[1])
    assert pool.most <= ranks.QUEUED_SLICES * 2


@pytest.mark.parametrize("mode", [ranks.run_in_step, ranks.run_apart])
@pytest.mark.parametrize(
    "spoil",
    [lambda answers: answers[1:], lambda answers: answers * 2, lambda answers: answers[::-1]],
)
def test_mismatched_answers_fail_the_job(mode: Any, spoil: Any) -> None:
    """One too few, a repeated one, or another order: none is passed on."""
    with pytest.raises(Failed, match="rank 0 was given 4 rows and answered others"):
        next(mode(map(row, range(4)), RankPool(1, spoil=spoil), 1, 4))


def test_large_rows_make_short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are stored in memory and sent."""
    monkeypatch.setattr(ranks, "SLICE_BYTES", 100)
    large = [row(number) | {"_data": b"x" * 60} for number in range(5)]

    assert [len(part.rows) for part in ranks.cut_slices(large, 4)] == [2, 2, 1]


@pytest.mark.parametrize(("rows", "expected"), [(0, 1), (1, 1), (7, 4), (6, 3), (10_000, 4)])
def test_few_rows_are_spread_over_all_ranks(rows: int, expected: int) -> None:
    """A slice is never larger than a rank's part."""
    assert ranks.slice_rows(rows, job().data_parallel) == expected


def test_ranks_go_to_nodes_in_their_order() -> None:
    """As many per node as fit completely."""
    slots = ranks.rank_slots(job(tp=2), 4)

    assert [(slot.rank, slot.ip) for slot in slots] == [
        (0, "10.0.0.2"),
        (1, "10.0.0.2"),
        (2, "10.0.0.3"),
        (3, "10.0.0.3"),
    ]


def test_a_preprocess_stage_is_rejected() -> None:
    """It would be silently ignored."""
    requests = dataclasses.replace(job(), preprocess=Preprocess(function="code:clean"))

    with pytest.raises(Refused, match="no `preprocess` stage"):
        next(ranks.run(requests, None, {}, None, CurrentMonitor()))


def test_ranks_that_do_not_fit_are_rejected() -> None:
    """With the possible number; a rank is never split across nodes."""
    with pytest.raises(
        Refused, match="2 ranks of 5 accelerators do not fit: the nodes have room for 1"
    ) as refused:
        ranks.rank_slots(job(tp=5), 2)

    assert refused.value.evidence.startswith(
        "ranks that fit: 10.0.0.1: 0 of 1 accelerators, 10.0.0.2: 1 of 5"
    )


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "llama"}, 0),
        ({"num_experts": 0, "num_local_experts": None}, 0),
        ({"num_local_experts": 8}, 8),
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"moe_num_experts": [64, 64]}, 64),
        ({"text_config": {"num_experts": 16}}, 16),
        ({"thinker_config": {"text_config": {"num_experts": 4}}}, 4),
        ({"vision_config": {"num_experts": 16}, "text_config": {}}, 0),
        (
            {
                "block_configs": [
                    {"block_type": "attention"},
                    {"block_type": "moe", "n_routed_experts": 32},
                ]
            },
            32,
        ),
    ],
)
def test_experts_are_counted_in_all_known_keys(config: dict[str, Any], count: int) -> None:
    """By vLLM's names, also in the language model of a larger one."""
    assert ranks.count_experts(config) == count


def test_the_configuration_comes_from_the_models_folder(tmp_path: Path) -> None:
    """With the job's overrides."""
    (tmp_path / "config.json").write_text('{"num_experts": 4, "a": 1}')

    assert ranks.read_configuration(job(model=str(tmp_path), args={"hf_overrides": {"a": 2}})) == {
        "num_experts": 4,
        "a": 2,
    }


def test_an_unreadable_configuration_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid, or neither local nor in the hub's cache."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match="cannot read") as refused:
        ranks.read_configuration(job(model=str(tmp_path)))
    assert refused.value.evidence.startswith("JSONDecodeError")

    hub = ModuleType("transformers")

    class Config:
        @staticmethod
        def get_config_dict(
            name: str, revision: str | None
        ) -> tuple[dict[str, Any], dict[str, Any]]:
            if name == "org/here" and revision == "v1":
                return {"num_experts": 2}, {}
            raise OSError(f"{name} is not a local folder")

    hub.PretrainedConfig = Config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", hub)
    assert ranks.read_configuration(job(model="org/here", args={"revision": "v1"})) == {
        "num_experts": 2
    }
    with pytest.raises(Refused, match="cannot read the configuration of org/gone"):
        ranks.read_configuration(job(model="org/gone"))


def test_expert_ranks_receive_their_peers_address() -> None:
    """In vLLM's variables; the local rank is 0, as it sees its own devices only. The job's values
    win.
    """
    spec = job(args={"dtype": "float32", "model": "other"})

    result = ranks.rank_settings(
        spec, RankSlot(rank=1, ip="10.0.0.2"), ("10.0.0.1", 29608), moe=True
    )

    assert result.environment == {
        "VLLM_DP_RANK": "1",
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "10.0.0.1",
        "VLLM_DP_MASTER_PORT": "29608",
    }
    assert result.arguments == {
        "dtype": "float32",
        "model": "m",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "enable_expert_parallel": True,
    }


@pytest.mark.parametrize(
    ("spec", "moe", "together", "experts", "backend"),
    [
        (job(), False, False, None, "uni"),
        (job(tp=2), False, False, None, "mp"),
        (job(pp=2), False, False, None, "mp"),
        (job(expert_parallel=False), True, True, False, "mp"),
        (job(size=1), True, False, True, "uni"),
    ],
    ids=["dense", "dense, two devices", "dense, two stages", "experts in each rank", "one rank"],
)
def test_variables_follow_from_the_model(
    spec: Any, moe: bool, together: bool, experts: Any, backend: str
) -> None:
    """vLLM rejects its data-parallel variables for dense models."""
    result = ranks.rank_settings(
        spec, RankSlot(rank=0, ip="10.0.0.1"), ("10.0.0.1", 29600), moe=moe
    )

    assert bool(result.environment) == together
    assert result.arguments.get("enable_expert_parallel") is experts
    assert result.arguments["distributed_executor_backend"] == backend


@pytest.mark.parametrize(
    ("spec", "moe", "expected"),
    [
        (job(), False, "dense model: 2 independent engines"),
        (job(), True, "mixture of experts: 2 ranks with expert parallelism over 10.0.0.1:29600"),
        (
            job(expert_parallel=False),
            True,
            "mixture of experts: 2 ranks with the experts in each of them over 10.0.0.1:29600",
        ),
        (job(size=1), True, "mixture of experts: 1 independent engine"),
    ],
)
def test_the_layout_is_described(spec: Any, moe: bool, expected: str) -> None:
    """As in the progress."""
    assert ranks.describe_ranks(spec, ("10.0.0.1", 29600), moe=moe) == expected


@pytest.mark.parametrize("moe", [False, True])
def test_a_run(moe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending rows only, over several splits; a rank's failure reaches the caller, and the ranks
    are stopped.
    """
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4 if moe else 0}))
    crews: list[Any] = []

    class Started(RankPool):
        def __init__(
            self, spec: Any, slots: list[RankSlot], progress: Any, *, together: bool
        ) -> None:
            super().__init__(len(slots))
            self.together, self.text, self.ended = together, "", False
            self.settings: list[Any] = []
            crews.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.ended = True

        def port(self, first: int) -> int:
            return first + 8

        def start(self, settings: Any, text: str) -> None:
            self.settings, self.text = settings, text

    def read_split(job: Any, manifest: Any, split: Any, pending: bytes) -> Iterator[dict[str, Any]]:
        yield from map(row, row_numbers(pending, split.first))

    monkeypatch.setattr(ranks, "RankPool", Started)
    monkeypatch.setattr(reading, "read_split", read_split)
    monkeypatch.setattr(cluster, "connect", lambda logs: None)
    warned: list[str] = []
    progress = SimpleNamespace(warn=warned.append)
    manifest = SimpleNamespace(
        splits=[SimpleNamespace(index=index, first=10 * index) for index in range(3)], types={}
    )
    first, third = [0, 1, 2, 3, 8, 9], range(20, 41)
    pending = {0: bitmap(*first, first=0), 2: bitmap(*third, first=20)}
    numbers = [*first, *third]

    accounted(
        list(
            ranks.run(
                job(model=str(tmp_path), expert_parallel=True),
                manifest,
                pending,
                progress,
                CurrentMonitor(),
            )
        ),
        numbers,
    )

    assert crews[0].ended
    assert crews[0].together is moe
    assert [setting.environment.get("VLLM_DP_RANK") for setting in crews[0].settings] == (
        ["0", "1"] if moe else [None, None]
    )
    assert crews[0].text.startswith("mixture of experts" if moe else "dense model")
    assert [bool(moe)] == [not warned]

    result = ranks.run(job(model=str(tmp_path)), manifest, pending, progress, CurrentMonitor())
    next(result)
    crews[1].spoil = lambda answers: [*answers, {**row(0), "_row": -1}]
    with pytest.raises(Failed, match="answered others"):
        list(result)
    assert crews[1].ended
