"""`vlaunch doctor` on simulated nodes: queries, output, exit codes."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tracemalloc
from pathlib import Path

import platformdirs
import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.diagnose import log_files
from tests import supervision
from tests.command_line import SECRET, Cluster
from tests.diagnose.node_answers import NodeAnswers, set_answers, state

GLOO = "2026-11-21T20:14:00.1Z RuntimeError: Gloo connectFullMesh failed with no error"
DEAD = "2026-11-21T20:14:05.1Z ERROR EngineCore encountered a fatal error."


def test_the_cause_comes_first_with_its_fix(cluster: Cluster) -> None:
    """With its evidence and documentation."""
    set_answers(
        cluster,
        gpu01=NodeAnswers(parts={"log-1": f"fine\n{DEAD}"}),
        gpu02=NodeAnswers(parts={"log-1": GLOO, "driver-1": "x"}),
    )
    ran = cluster.run("doctor")
    lines = ran.out.splitlines()

    assert ran.code == 1
    assert lines[0] == "most likely first"
    assert lines[1] == "  CAUSE     gpu02: Gloo uses the wrong network interface"
    assert "gpu02, container, 2026-11-21" in lines[2]
    assert lines[2].endswith("RuntimeError: Gloo connectFullMesh failed with no error")
    assert lines[3:5] == [
        "            fix: set `network: {interface: …}` in the inventory, then run `vlaunch up`",
        "            see: docs/reference/failures.md#gloo-interface",
    ]
    assert "  EFFECT    gpu01: a rank died" in lines
    assert "read 4 lines of 3 logs on gpu[01-02]" in lines
    assert cluster.world.changes == []


def test_every_node_is_queried_once(cluster: Cluster) -> None:
    """With the user's options."""
    set_answers(cluster)
    cluster.run("doctor", "--since", "1h30m")

    assert [(command.node, command.argv[3], command.argv[10]) for command in cluster.commands] == [
        ("gpu01", "doctor", "5400s"),
        ("gpu02", "doctor", "5400s"),
    ]
    assert cluster.commands[0].argv[4] == cluster.commands[1].argv[4]
    cluster.commands.clear()
    cluster.run("doctor", "gpu02")
    assert [command.node for command in cluster.commands] == ["gpu02"]


def test_without_findings_the_scope_and_next_steps_are_shown(cluster: Cluster) -> None:
    """Exit code 0."""
    set_answers(cluster, gpu01=NodeAnswers(parts={"log-1": "fine\nfine"}))
    ran = cluster.run("doctor")

    assert ran.code == 0
    assert ran.out.splitlines()[:2] == [
        "no known failure was found",
        "read 2 lines of 1 log on gpu[01-02]",
    ]
    assert "`vlaunch check`" in ran.out
    assert "`vlaunch logs --tail 1000`" in ran.out


def test_possible_causes_do_not_fail(cluster: Cluster) -> None:
    """They are shown, though."""
    set_answers(
        cluster, gpu01=NodeAnswers(parts={"driver-1": "OSError: [Errno 98] Address already in use"})
    )
    ran = cluster.run("doctor")

    assert ran.code == 0
    assert "  POSSIBLE  gpu01: a port is already in use" in ran.out


def test_an_unreachable_node_is_a_finding(cluster: Cluster) -> None:
    """The first one, beside others."""
    cluster.missing["gpu01"] = ConnectError("gpu01", "no answer from gpu01:22 within 10s")
    set_answers(cluster, gpu02=NodeAnswers(parts={"log-1": GLOO}))
    ran = cluster.run("doctor")

    assert ran.code == 1
    assert (
        ran.out.splitlines()[1]
        == "  CAUSE     gpu01: SSH to this node fails: it is off, or unreachable from this machine"
    )
    assert "no answer from gpu01:22 within 10s" in ran.out
    assert "gpu02: Gloo uses" in ran.out


@pytest.mark.parametrize(
    "instead",
    [
        Answer(node="gpu02", code=255, err="the connection was lost"),
        Answer(node="gpu02", code=124, timed_out=True, seconds=240),
        Answer(node="gpu02", code=0, out="motd of the day"),
    ],
)
def test_a_node_with_another_answer_is_a_finding(cluster: Cluster, instead: Answer) -> None:
    """For any other answer."""
    set_answers(cluster, gpu02=NodeAnswers(instead=instead))
    ran = cluster.run("doctor", "--json")

    assert [(finding["id"], finding["nodes"]) for finding in json.loads(ran.out)["findings"]] == [
        ("node-unreachable", ["gpu02"])
    ]


def test_the_supervisors_last_fault_is_the_first_evidence(cluster: Cluster) -> None:
    """With the server's name, rank and node, and the engine's first error."""
    record = json.dumps(
        supervision.make_record(
            "chat", "pausing", faults=[supervision.make_fault(at=1795299000.0)]
        ).as_json()
    )
    set_answers(
        cluster, gpu01=NodeAnswers(parts={"servers": "chat\n", "observed-1": record, "log-1": GLOO})
    )
    lines = cluster.run("doctor").out.splitlines()

    assert lines[1] == "  CAUSE     gpu01: a server crashed or failed to start"
    assert "gpu01, server chat, 2026-11-21" in lines[2]
    assert lines[2].endswith(
        "server chat: a rank is dead (rank PP1 on gpu02): RuntimeError: CUDA error"
    )


def test_an_engine_s_log_has_its_server_s_name(cluster: Cluster) -> None:
    """On every node."""
    set_answers(cluster, gpu02=NodeAnswers(parts={"servers": "chat\nembed\n", "engine-2": GLOO}))
    lines = cluster.run("doctor").out.splitlines()

    assert lines[1] == "  CAUSE     gpu02: Gloo uses the wrong network interface"
    assert "gpu02, server embed, 2026-11-21" in lines[2]


def test_json_is_one_document(cluster: Cluster) -> None:
    """With everything in the table."""
    set_answers(
        cluster,
        gpu01=NodeAnswers(
            parts={
                "state": state("c", "worker", "exited", ExitCode=137, OOMKilled=True),
                "log-1": DEAD,
            }
        ),
    )
    ran = cluster.run("doctor", "--json")
    payload = json.loads(ran.out)

    assert (ran.code, ran.err, payload["found"]) == (1, "", True)
    assert [(finding["id"], finding["kind"]) for finding in payload["findings"]] == [
        ("kernel-oom", "now"),
        ("rank-died", "after"),
        ("container-ended", "after"),
    ]
    assert set(payload["findings"][0]) == {
        "id",
        "kind",
        "cause",
        "fix",
        "source",
        "nodes",
        "count",
        "evidence",
        "docs",
    }
    assert payload["looked"] == {"nodes": ["gpu01", "gpu02"], "logs": 1, "lines": 1, "ready": None}


def test_lines_of_logs_are_sanitized(cluster: Cluster) -> None:
    """Without terminal codes, secrets and markup."""
    line = f"\x1b]0;t\x07\x1b[2J[bold]connectFullMesh {SECRET}\r"
    set_answers(
        cluster,
        gpu01=NodeAnswers(
            parts={
                "log-1": line,
                "state": state(
                    "c\x1b[2J", "worker", "exited", Error="\x1b[31m no space left on device"
                ),
            }
        ),
    )
    ran = cluster.run("doctor")

    assert "\x1b" not in ran.out
    assert SECRET not in ran.out
    assert "[bold]connectFullMesh ***" in ran.out

    set_answers(
        cluster, gpu01=NodeAnswers(instead=Answer(node="gpu01", code=1, err=f"\x1b[2Jno {SECRET}"))
    )
    ran = cluster.run("doctor")
    assert "unexpected output: no ***" in ran.out
    assert "\x1b" not in ran.out


def test_equal_gaps_of_nodes_are_shown_once(cluster: Cluster) -> None:
    """A kernel log often requires root."""
    answer = (
        "\n{mark} clock\n1795300000\n{mark} rc 0\n{mark} kernel\n\n{mark} rc 9\n{mark}"
        " ids\n\n{mark} rc 0\n"
    )
    set_answers(cluster)
    inner = cluster.world.answer

    def simulated(command: object) -> Answer | None:
        original = inner(command)  # type: ignore[arg-type]
        mark = command.argv[4]  # type: ignore[attr-defined]
        return original and Answer(node=original.node, code=0, out=answer.format(mark=mark))

    cluster.world.answer = simulated  # type: ignore[method-assign, assignment]

    assert (
        "not checked: gpu[01-02]: kernel log: only root can read it on this node"
        in cluster.run("doctor").out
    )


@pytest.mark.parametrize(
    "arguments", [["--since", "10x"], ["--since", "x"], ["--since", ""], ["gpu09"]]
)
def test_an_invalid_request_contacts_no_node(cluster: Cluster, arguments: list[str]) -> None:
    """Exit code 2."""
    ran = cluster.run("doctor", *arguments)

    assert (ran.code, ran.out, cluster.commands) == (2, "", [])


def test_a_text_is_diagnosed_without_a_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file or a pipe, with the pod of every line; no inventory is needed."""
    text = f"[pod/chat-0/vllm] {DEAD}\n[pod/chat-0-1/vllm] {GLOO}\n"
    (tmp_path / "pods.log").write_text(text)
    cluster.path.unlink()
    ran = cluster.run("doctor", "--log", str(tmp_path / "pods.log"))

    assert ran.code == 1
    assert "  CAUSE     chat-0-1: Gloo uses the wrong network interface" in ran.out
    assert "  EFFECT    chat-0: a rank died" in ran.out
    assert "read 2 lines of 2 logs on chat-0,chat-0-1" in ran.out
    assert cluster.fleet_options == []

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    piped = cluster.run("doctor", "--log", "-", "--json")
    assert piped.code == 1
    assert json.loads(piped.out)["looked"]["nodes"] == ["chat-0", "chat-0-1"]


def test_a_bundle_is_diagnosed(cluster: Cluster, tmp_path: Path) -> None:
    """An archive of `vlaunch collect` has a folder per node."""
    bundle = tmp_path / "b.tar.gz"
    with tarfile.open(bundle, "w:gz") as archive:
        for name, data in (("b/gpu02/container.log", GLOO), ("b/gpu01/x.json", GLOO)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data.encode()))
    ran = cluster.run("doctor", "--log", str(bundle))

    assert ran.code == 1
    assert "  CAUSE     gpu02: Gloo uses the wrong network interface" in ran.out
    assert "of 1 log on gpu02" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--log", "nowhere.log"), "nowhere.log cannot be read"),
        (("--log", "."), ". cannot be read"),
        (("--log", "-", "gpu01"), "--log contacts no node"),
    ],
)
def test_an_invalid_text(cluster: Cluster, arguments: tuple[str, ...], message: str) -> None:
    """An invalid request, with a hint."""
    ran = cluster.run("doctor", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def packed(path: Path, *members: tuple[str, int, bytes], mode: str = "w:xz") -> Path:
    """Write an archive of members: name, number of zero bytes, and further data."""
    with tarfile.open(path, mode) as archive:
        for name, zeros, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = zeros + len(data)
            archive.addfile(entry, io.BytesIO(bytes(zeros) + data))
    return path


def test_only_the_end_of_a_large_log_is_read(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first complete line, with a note: a file, a pipe, an archive's member."""
    monkeypatch.setattr(log_files, "_MOST", 1000)
    data = b"x" * 5000 + b"\npassword: " + b"y" * 950 + b"\n" + GLOO.encode() + b"\n"
    (tmp_path / "a.log").write_bytes(data)
    packed(tmp_path / "b.tar.xz", ("b/gpu02/a.log", 0, data))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for name, message in (
        ("a.log", "a.log"),
        ("b.tar.xz", "b.tar.xz: b/gpu02/a.log"),
        ("-", "standard input"),
    ):
        ran = cluster.run("doctor", "--log", name)
        skipped = len(data) - len(GLOO) - 1
        assert ran.code == 1
        assert f"{message}: read only its end; skipped its first {skipped:,} bytes" in ran.err, name
        assert "Gloo uses the wrong network interface" in ran.out


def test_lines_of_a_log_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of short lines takes many times its size in memory."""
    monkeypatch.setattr(log_files, "_LINES", 10)
    (tmp_path / "a.log").write_text("".join(f"{number}\n" for number in range(100)))
    (report,) = log_files.read_logs((str(tmp_path / "a.log"),)).values()

    assert report.logs[0].lines[-1] == "99"
    assert len(report.logs[0].lines) < 11
    assert "read only its end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("one", [("b/gpu01/a.log", 40 << 20, b"")]),
        ("many", [(f"b/gpu01/{number}.log", 1 << 20, b"") for number in range(20)]),
        ("between", [("b/gpu01/a.bin", 30 << 20, b""), ("b/gpu01/a.log", 9, b"")]),
    ],
)
def test_an_endless_archive(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    members: list[tuple[str, int, bytes]],
) -> None:
    """The first part is diagnosed, the rest is reported as omitted, and memory stays small."""
    monkeypatch.setattr(log_files, "_ALL", 4 << 20)
    path = packed(
        tmp_path / f"{name}.tar.gz", ("b/gpu02/a.log", 0, GLOO.encode()), *members, mode="w:gz"
    )
    tracemalloc.start()
    ran = cluster.run("doctor", "--log", str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert ran.code == 1
    assert "gpu02: Gloo uses the wrong network interface" in ran.out
    assert (
        f"{name}.tar.gz: read only the first 4 MiB, 4,000,000 lines or 5,000 files; to" in ran.err
    )
    assert peak < 40 << 20


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("first", [True, False])
def test_endless_headers(cluster: Cluster, tmp_path: Path, kind: bytes, first: bool) -> None:
    """`tarfile` reads a header in one piece, and nested headers recursively."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = kind, 1 << 30
    small = tarfile.TarInfo("x")
    small.type, small.size = kind, 512
    for name, blocks in (
        ("large", entry.tobuf() + bytes(4096)),
        ("chained", (small.tobuf() + b"9 a=bcde\n".ljust(512, b"\0")) * 3000),
    ):
        before = b"" if first else tarfile.TarInfo("b/a.log").tobuf()
        (tmp_path / f"{name}.tar").write_bytes(before + blocks)
        ran = cluster.run("doctor", "--log", f"{name}.tar")
        assert "Traceback" not in ran.err
        assert ran.code in (0, 2)


MISSING = ("serve", "--model", "/data/huggingface/none")
REFUSED = "  CAUSE     operator: the last command failed before it started anything"


def test_a_rejected_request_is_named_with_its_hint(cluster: Cluster) -> None:
    """No node has a log of it: the operator's machine stores it until the command succeeds."""
    set_answers(cluster)
    assert cluster.run("up").code == 0
    set_answers(cluster)
    assert cluster.run(*MISSING).code == 1
    assert cluster.run(*MISSING, "--dry-run").code == 0
    ran = cluster.run("doctor")
    lines = ran.out.splitlines()
    assert ran.code == 1
    assert lines[1] == REFUSED
    assert "operator, vlaunch serve, " in lines[2]
    assert "gpu[01-02]: has no model at /data/huggingface/none" in lines[2]
    assert "vlaunch: hint: copy it from this machine: " in lines[3]

    assert cluster.run("up").code == 0
    assert REFUSED in cluster.run("doctor").out
    assert cluster.run("serve", "--skip-network-check", "--no-wait", "--model", "org/m").code == 0
    assert REFUSED not in cluster.run("doctor").out


def test_an_unreadable_record_of_it_is_no_failure(cluster: Cluster) -> None:
    """The state folder may have other content, or be full."""
    set_answers(cluster)
    folder = Path(platformdirs.user_state_dir("vlaunch"))
    folder.mkdir(parents=True)
    (folder / "refused-c.json").write_text('{"verb": "serve", "at": "?", "lines": 5}')
    assert cluster.run("doctor").code == 0

    (folder / "refused-c.json").unlink()
    folder.rmdir()
    folder.write_text("no folder")
    assert cluster.run(*MISSING).code == 1
    assert cluster.run("doctor").code == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", "90s"), ("30m", "1800s"), ("1D2h", "93600s")]
)
def test_since_takes_a_duration(cluster: Cluster, text: str, seconds: str) -> None:
    """Days, hours, minutes and seconds, also combined."""
    set_answers(cluster)
    cluster.run("doctor", "--since", text)

    assert cluster.commands[0].argv[10] == seconds
