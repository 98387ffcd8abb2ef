"""The gate that proves the network where no launcher looks on: what it refuses, and that
all agree.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.payload.conftest import FOLDER


@pytest.fixture(scope="module")
def gate() -> Iterator[ModuleType]:
    """The program, as it stands in a container: its neighbours are modules beside it."""
    sys.path.insert(0, str(FOLDER))
    try:
        import network_gate

        yield network_gate
    finally:
        sys.path.remove(str(FOLDER))


RANK = {"rank": 0, "phase": "done", "ended": True, "error": ""}
PAIR = {"source": "rank1", "target": "rank0", "local_rank": 0, "correct": True}
GOOD: dict[str, Any] = {
    "error": "",
    "backend": "nccl",
    "ranks": [RANK],
    "transfers": [{**PAIR, "bandwidth": 47e9, "latency": 12e-6, "error": ""}],
    "collective": {"ranks": 16, "busbw": 300e9, "correct": True, "error": ""},
}
LINK = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via {}\n"
DIRECT, RDMA, TCP = (LINK.format(f"NET/{each}") for each in ("IB/0/GDRDMA", "IB/0", "Socket/0"))


@pytest.mark.parametrize(
    ("require", "log", "said"),
    [
        ("gdrdma", DIRECT, []),
        ("gdrdma", DIRECT + LINK.format("P2P/CUMEM"), []),
        ("gdrdma", LINK.format("P2P/MNNVL"), []),
        ("rdma", RDMA, []),
        ("any", TCP, []),
        ("any", "", []),
        ("gdrdma", DIRECT + RDMA, ["NET/IB on 1 links is worth `rdma`, and `gdrdma` is required"]),
        ("rdma", TCP * 2, ["NET/Socket on 2 links is worth `any`, and `rdma` is required"]),
        ("rdma", "", ["NCCL tells of no link between nodes, and the level must be rdma"]),
        (
            "rdma",
            "NET/OFI Selected provider is tcp (found 1 nics)\n" + LINK.format("NET/OFI/0"),
            ["NET/OFI on 1 links is worth `any`, and `rdma` is required"],
        ),
    ],
)
def test_every_link_must_reach_the_level(
    gate: ModuleType, require: str, log: str, said: list[str]
) -> None:
    """By what NCCL says that it uses, not by what is fast."""
    assert gate.judge(GOOD, require, log) == said


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"error": "the deadline of 9 s came"}, "the probe: the deadline of 9 s came"),
        ({"ranks": [{**RANK, "ended": False, "error": ""}]}, "rank 0 in phase `done`: it did not"),
        ({"transfers": [{**PAIR, "error": "no end"}]}, "rank1 → rank0, local rank 0: no end"),
        ({"transfers": [{**PAIR, "correct": False}]}, "what came is not what was sent"),
        ({"collective": None}, "no rank came to the all_reduce"),
        ({"collective": {"error": "not tried: bad"}}, "all_reduce: not tried: bad"),
        ({"collective": {"error": "", "correct": False}}, "all_reduce: its result is wrong"),
    ],
)
def test_what_was_not_seen_is_not_proven(gate: ModuleType, part: dict[str, Any], said: str) -> None:
    """Each part of the report that says less than it should."""
    (found,) = gate.judge({**GOOD, **part}, "any", DIRECT)

    assert said in found


def test_cpus_have_no_rdma(gate: ModuleType) -> None:
    """Gloo is TCP, whatever the cards can."""
    assert gate.judge({**GOOD, "backend": "gloo"}, "any", "") == []
    assert gate.judge({**GOOD, "backend": "gloo"}, "rdma", "") != []


def test_the_figures_are_told(gate: ModuleType) -> None:
    """A line for each direction, and one for all."""
    assert gate.figures(GOOD) == [
        "rank1 → rank0, local rank 0: 47.00 GB/s, 12 µs",
        "all_reduce over 16 ranks: 300.00 GB/s bus bandwidth",
    ]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def together(gate: ModuleType, wrong: list[str], *, words: list[str] | None = None) -> list[Any]:
    """Let as many nodes agree as there are judgements; return what each hears of the others."""
    port, found = free_port(), [None] * len(wrong)

    def agree(rank: int) -> None:
        word = (words or ["w"] * len(wrong))[rank]
        found[rank] = gate.agree(rank, len(wrong), "127.0.0.1", port, word, wrong[rank], 2.0)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(len(wrong))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return found


def test_all_pass_or_none(gate: ModuleType) -> None:
    """Who is well hears of who is not: its server would wait for theirs for ever."""
    assert together(gate, ["", "", ""]) == [[], [], []]
    assert together(gate, ["", "slow", ""]) == [["rank 1: slow"], [], ["rank 1: slow"]]
    assert together(gate, ["bad", ""]) == [[], ["rank 0: bad"]]
    assert gate.agree(0, 1, "127.0.0.1", 1, "w", "") == []


def test_who_is_silent_fails_all(gate: ModuleType) -> None:
    """And a node of another run is a stranger."""
    first, stranger, _ = together(gate, ["", "", ""], words=["w", "x", "w"])

    assert first == ["rank 1: it does not tell"]
    assert "does not tell how the others judged" in stranger[0]


def test_a_name_is_waited_for(gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of pods come later than the pods; one that never comes ends the gate."""
    answers = iter([socket.gaierror("not yet"), [(0, 0, 0, "", ("10.0.0.1", 0))]])

    def asked(*_: object, **__: object) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(gate.socket, "getaddrinfo", asked)
    monkeypatch.setattr(gate, "PAUSE", 0.0)
    assert gate.look_up("pair-0.pair", 5.0) == "10.0.0.1"
    answers = iter([socket.gaierror("never")])
    with pytest.raises(OSError, match="pair-0 has no address after 0 s: never"):
        gate.look_up("pair-0", 0.0)


ARGV = ["gate", "--rank", "1", "--size", "2", "--master", "pair-0", "--require", "any"]
MET = ["--met", "29501,8000", "--", "--port", "1", "--nonce", "w", "--reach", "1"]


def test_who_comes_late_passes_and_says_so(
    gate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its output, and where the kubelet looks; where there is no kubelet, no file is made."""

    def late(*_: object) -> None:
        raise gate.network_late.Late("somebody is past his")

    monkeypatch.setattr(gate, "measure", late)
    monkeypatch.setattr(gate, "MESSAGE", str(tmp_path / "message"))
    monkeypatch.setattr(gate.sys, "argv", [*ARGV, *MET])
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.2")
    assert gate.main() == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "message").touch()
    assert gate.main() == 0

    said = (tmp_path / "message").read_text()
    assert said.startswith("the others are past their gates: somebody is past his\n")
    assert "NOT proven again" in said
    assert [f"LATE {line}" in capsys.readouterr().out for line in said.splitlines()[:1]] == [True]


def test_a_first_node_that_moves_is_followed(
    gate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe begins again, at its new address."""
    places, tried = iter(["10.0.0.7", "10.0.0.8"]), []

    def probe(_args: object, _own: str, master: str, look: Any) -> str:
        tried.append(master)
        look.moved = master == "10.0.0.7"
        return '{"pair_logs": {}, "log": "told"}'

    monkeypatch.setattr(gate, "look_up", lambda *_: next(places))
    monkeypatch.setattr(gate, "probe", probe)

    assert gate.measure(gate.parsed([*ARGV, *MET][1:]), "10.0.0.2")[1] == "told"
    assert tried == ["10.0.0.7", "10.0.0.8"]
