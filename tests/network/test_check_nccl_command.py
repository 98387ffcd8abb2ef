"""`vlaunch check-nccl` on simulated nodes, and on logs: verdicts, exit codes, records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import INVENTORY, Cluster
from tests.simulated import World

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nccl"
RDMA, GDR, TCP = "NET/IB/0", "NET/IB/0/GDRDMA", "NET/Socket/0"
IB = "network: {fabric: infiniband}\n"


@pytest.fixture
def up(cluster: Cluster) -> Cluster:
    """A running cluster."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    return cluster


def linked(cluster: Cluster, via: str) -> None:
    """Give the two nodes this link."""
    cluster.world.links["gpu01", "gpu02"] = via


def saved_record(cluster: Cluster) -> dict[str, Any]:
    """Return the head's record of the last verdict."""
    payload: dict[str, Any] = json.loads(
        cluster.world.machines["gpu01"].files.get("network.json", b"{}")
    )
    return payload


def finite(text: str) -> Any:
    """Parse one JSON document without NaN and infinity."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_a_healthy_network_is_a_matrix_and_exit_code_0(up: Cluster) -> None:
    """Every direction with its figures; only the record on the head is written."""
    ran = up.run("check-nccl")

    assert ran.code == 0, ran.err
    assert "PASS" in ran.out
    assert ran.out.count("2.0 GB/s") >= 2
    assert up.world.verbs() == ["gpu01: keep"]
    assert (
        saved_record(up)["passed"],
        saved_record(up)["asked"],
        saved_record(up)["collective"],
    ) == (True, "auto", True)


def test_status_shows_the_verdict_until_a_container_restarts(up: Cluster) -> None:
    """The verdict is about these containers."""
    assert up.run("check-nccl").code == 0
    proven = json.loads(up.run("status", "--json").out)["network"]
    up.world.container("gpu02")["State"]["StartedAt"] = "2026-11-21T01:00:00Z"
    later = json.loads(up.run("status", "--json").out)["network"]

    assert proven == f"verified {saved_record(up)['taken']}: {saved_record(up)['summary']}"
    assert later.startswith("not checked for these containers")


@pytest.mark.parametrize(
    ("via", "flags", "extra", "code"),
    [
        (TCP, [], "", 0),  # Ethernet promises nothing else
        (TCP, ["--require", "rdma"], "", 1),
        (TCP, [], "network: {fabric: infiniband, require: rdma}\n", 1),
        (TCP, ["--require", "any"], "network: {fabric: infiniband, require: rdma}\n", 0),
        (TCP, [], IB, 1),
        (RDMA, [], IB, 1),  # these GPUs can GPUDirect
        (RDMA, ["--require", "rdma"], IB, 0),
        (GDR, [], IB, 0),
        (GDR, ["--require", "gdrdma"], "", 0),
        ("P2P/MNNVL", ["--require", "gdrdma"], IB, 0),
    ],
)
def test_the_level_is_the_command_lines_then_the_inventorys_then_the_hardwares(
    cluster: Cluster, via: str, flags: list[str], extra: str, code: int
) -> None:
    """Below it: exit code 1."""
    cluster.write(extra + INVENTORY)
    linked(cluster, via)

    assert cluster.run("check-nccl", *flags).code == code


def test_a_pair_below_the_level_is_named_with_its_fix(up: Cluster) -> None:
    """The record has the failed verdict."""
    ran = up.run("check-nccl", "--require", "rdma")

    assert ran.code == 1
    assert "gpu01 ↔ gpu02" in ran.out
    assert "NET/Socket is below the required level: RDMA" in ran.out
    assert "fix: " in ran.out
    assert (saved_record(up)["passed"], saved_record(up)["asked"]) == (False, "rdma")


def test_json_is_one_document_of_finite_numbers(up: Cluster) -> None:
    """For any output of a probe: infinity is no figure."""
    up.world.rates["gpu01", "gpu02"] = float("inf")
    ran = up.run("check-nccl", "--json")
    payload = finite(ran.out)

    assert ran.err == ""
    assert ran.out.count("\n") == 1
    assert {
        "backend",
        "nodes",
        "required",
        "why",
        "cells",
        "findings",
        "collective",
        "passed",
        "summary",
    } <= set(payload)
    assert [cell["bandwidth"] for cell in payload["cells"] if cell["target"] == "gpu01"] == [2e9]
    finite(up.world.machines["gpu01"].files["network.json"].decode())


def test_without_ray_temporary_containers_are_used(cluster: Cluster) -> None:
    """They are removed, and no verdict is recorded."""
    ran = cluster.run("check-nccl")
    probes = [
        command.argv for command in cluster.commands if "/opt/vlaunch/network.pyz" in command.argv
    ]

    assert ran.code == 0, ran.err
    assert [argv[3] for argv in probes] == ["once"] * 2
    assert saved_record(cluster) == {}


def test_without_an_image_nothing_is_measured(cluster: Cluster) -> None:
    """The error has the remedy."""
    cluster.world.machines["gpu02"].images.clear()
    ran = cluster.run("check-nccl")

    assert ran.code == 1
    assert "gpu02: has neither a running Ray container nor the image" in ran.err
    assert "vlaunch up" in ran.err


def test_a_slow_direction_is_measured_twice(up: Cluster) -> None:
    """Other traffic only makes transfers slower: the better figure is shown and recorded."""
    up.world = World(up.write(INVENTORY + "  - {host: gpu03, ip: 10.0.0.13, gpus: 8}\n"))
    up.world.rates["gpu01", "gpu02"] = [1e8, 1.9e9]
    ran = up.run("check-nccl", "--json")
    cell = next(
        item
        for item in json.loads(ran.out)["cells"]
        if (item["source"], item["target"]) == ("gpu01", "gpu02")
    )

    assert (ran.code, cell["bandwidth"], cell["status"]) == (0, 1.9e9, "pass")
    assert up.world.rates["gpu01", "gpu02"] == []


def test_a_failed_probe_is_named_with_its_error(up: Cluster) -> None:
    """Its last line is the reason."""
    up.world.reports["gpu02"] = "python3: can't open file '/opt/vlaunch/network.pyz'"
    ran = up.run("check-nccl")

    assert ran.code == 1
    assert "gpu02: its probe sent no report" in ran.out
    assert "can't open file" in ran.out


def test_one_node_has_no_network(cluster: Cluster) -> None:
    """An invalid request."""
    cluster.write(
        "cluster: c\nimage: vllm/vllm-openai:v0.32.0\nnodes: [{host: gpu01, ip: 10.0.0.11, gpus:"
        " 8}]\n"
    )
    ran = cluster.run("check-nccl")

    assert (ran.code, cluster.commands) == (2, [])
    assert "no network between nodes" in ran.err


def test_the_page_is_written(up: Cluster, tmp_path: Path) -> None:
    """Beside the matrix; an existing file is replaced."""
    page = tmp_path / "page.html"
    for _ in range(2):
        ran = up.run("check-nccl", "--html", str(page))

        assert (ran.code, f"wrote {page}" in ran.err) == (0, True)
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "PASS" in ran.out


@pytest.mark.parametrize("where", ["missing/page.html", "file/page.html"])
def test_an_unwritable_page_is_reported_before_measuring(
    up: Cluster, tmp_path: Path, where: str
) -> None:
    """Not after a minute of measurements."""
    (tmp_path / "file").write_text("")
    up.commands.clear()
    ran = up.run("check-nccl", "--html", str(tmp_path / where))

    assert (ran.code, ran.out, up.commands) == (2, "", [])
    assert "page.html: No" in ran.err


def test_a_failed_check_leaves_no_empty_page(cluster: Cluster, tmp_path: Path) -> None:
    """The writability test leaves no file."""
    cluster.world.machines["gpu02"].images.clear()
    ran = cluster.run("check-nccl", "--html", str(tmp_path / "page.html"))

    assert ran.code == 1
    assert not (tmp_path / "page.html").exists()


# Logs alone


def log(path: Path, *via: str, extra: str = "") -> str:
    """Write a log with one link per path."""
    line = "gpu01:1:2 [0] NCCL INFO Channel 0{0}/0 : 0[0] -> 1[0] [send] via {1}\n"
    path.write_text("".join(line.format(at, item) for at, item in enumerate(via)) + extra)
    return str(path)


@pytest.mark.parametrize(
    ("via", "flags", "code", "label"),
    [
        (GDR, [], 0, "PASS"),
        (TCP, [], 1, "FAIL"),
        (TCP, ["--require", "any"], 0, "PASS"),
        (RDMA, [], 0, "WARN"),
        (RDMA, ["--strict"], 3, "WARN"),
        (RDMA, ["--require", "rdma", "--strict"], 0, "PASS"),
        (RDMA, ["--require", "gdrdma"], 1, "FAIL"),
    ],
)
def test_a_log_is_judged_by_its_worst_link(
    cluster: Cluster, tmp_path: Path, via: str, flags: list[str], code: int, label: str
) -> None:
    """Without a node, and without an inventory."""
    cluster.path.unlink()
    ran = cluster.run("check-nccl", "--log", log(tmp_path / "a.log", GDR, via), *flags)

    assert (ran.code, ran.out.split()[0], cluster.commands) == (code, label, [])


def test_several_logs_are_one_job(cluster: Cluster, tmp_path: Path) -> None:
    """Named after --log or each with its own; the worst of all files counts."""
    good, bad = log(tmp_path / "good.log", GDR), log(tmp_path / "bad.log", TCP)

    assert cluster.run("check-nccl", "--log", good, bad).code == 1
    assert cluster.run("check-nccl", "--log", bad, "--log", good).code == 1
    assert cluster.run("check-nccl", "--log", good, good).code == 0


def test_a_worthless_log_among_good_ones(cluster: Cluster, tmp_path: Path) -> None:
    """It is named, and the verdict fails."""
    good = log(tmp_path / "good.log", GDR)
    (tmp_path / "empty.log").write_bytes(b"")
    ran = cluster.run("check-nccl", "--log", good, str(tmp_path / "empty.log"))

    assert ran.code == 1
    assert f"{tmp_path / 'empty.log'}: the log does not show the network" in ran.out


def test_the_inventorys_level_applies_to_logs(cluster: Cluster, tmp_path: Path) -> None:
    """Unless the command line has one."""
    cluster.write("network: {fabric: roce, require: gdrdma}\n" + INVENTORY)
    path = log(tmp_path / "a.log", RDMA)
    requests = ["check-nccl", "-i", str(cluster.path), "--log", path]

    assert cluster.run(*requests).code == 1
    assert cluster.run(*requests, "--require", "rdma").code == 0
    assert cluster.run(*requests, "--require", "auto").code == 0
    assert cluster.run("check-nccl", "--log", path).code == 0


@pytest.mark.parametrize(
    ("name", "code", "network", "direct"),
    [
        ("2.27-ray-gb10", 0, "IB", False),
        ("2.21-ib-none-tcp", 1, "Socket", False),
        ("2.18-efa-torchrun", 0, "AWS Libfabric", True),
        ("2.30-mnnvl", 0, "MNNVL", None),
        ("using-only", 1, None, None),
    ],
)
def test_json_of_a_log(
    cluster: Cluster, name: str, code: int, network: str | None, direct: bool | None
) -> None:
    """One document with links, required level and findings; `Using network IB` alone proves
    nothing.
    """
    ran = cluster.run("check-nccl", "--json", "--log", str(FIXTURES / f"{name}.log"))
    payload = finite(ran.out)

    assert (ran.code, payload["network"], payload["passed"]) == (code, network, code == 0)
    assert direct is None or payload["gpudirect"] is direct
    assert {"network_links", "mnnvl", "links", "required", "findings"} <= set(payload)
    assert all(
        set(finding) == {"status", "node", "text", "evidence", "fix"}
        for finding in payload["findings"]
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it is empty"),
        (bytes(range(256)) * 40, "does not show the network"),
        (b"hello\n", "is from NCCL"),
    ],
)
def test_a_log_without_links_fails(
    cluster: Cluster, tmp_path: Path, content: bytes, expected: str
) -> None:
    """Empty, binary, or of another program: exit code 1, and instructions for a log."""
    (tmp_path / "a.log").write_bytes(content)
    ran = cluster.run("check-nccl", "--require", "any", "--log", str(tmp_path / "a.log"))

    assert (ran.code, ran.err) == (1, "")
    assert expected in ran.out
    assert "NCCL_DEBUG=INFO" in ran.out


def test_a_log_on_standard_input(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` is standard input."""
    with Path(log(tmp_path / "a.log", TCP)).open() as file:
        monkeypatch.setattr(sys, "stdin", file)

        assert cluster.run("check-nccl", "--log", "-").code == 1


def a_directory(path: Path) -> None:
    """Create a folder of that name."""
    path.mkdir()


def nothing(path: Path) -> None:
    """Create no file."""
    assert not path.exists()


@pytest.mark.parametrize(
    ("make", "expected"), [(a_directory, "Is a directory"), (nothing, "No such file or directory")]
)
def test_an_unreadable_log_is_an_invalid_request(
    cluster: Cluster, tmp_path: Path, make: Callable[[Path], None], expected: str
) -> None:
    """Exit code 2, no traceback."""
    make(tmp_path / "a.log")
    ran = cluster.run("check-nccl", "--log", str(tmp_path / "a.log"))

    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["a.yaml"], "the inventory with -i"),
        (["--log", "a.log", "--html", "b.html"], "a log has none"),
        (["inv.yaml", "--log", "a.log"], "pass it with `-i inv.yaml`"),
        (["--log", "inv.yml"], "pass it with `-i inv.yml`"),
        (["--require", "fast"], "fast"),
        (["--ranks-per-node", "0"], "--ranks-per-node"),
    ],
)
def test_wrong_usage(cluster: Cluster, parts: list[str], expected: str) -> None:
    """Exit code 2."""
    ran = cluster.run("check-nccl", *parts)

    assert (ran.code, ran.out) == (2, "")
    assert expected in ran.err


def test_evidence_from_a_log_is_sanitized(cluster: Cluster, tmp_path: Path) -> None:
    """It is shown without terminal codes."""
    extra = (
        "gpu01:1:2 [0] misc/x.cc:1 NCCL WARN Call to ibv_reg_mr failed \x1b[2Jwith error Cannot"
        " allocate memory\n"
    )
    ran = cluster.run("check-nccl", "--log", log(tmp_path / "a.log", TCP, extra=extra))

    assert ran.code == 1
    assert "\x1b" not in ran.out
