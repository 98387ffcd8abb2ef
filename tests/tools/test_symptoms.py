"""Known log lines: every recorded failure gives its cause, and no healthy start gives one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.tools import symptoms

LOGS = Path(__file__).parent.parent / "fixtures" / "vllm"


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(LOGS.glob("*_ok.log")), ids=lambda path: path.stem)
def test_healthy_starts_have_no_fatal_line(path: Path) -> None:
    """Warnings of a start that went well do not end the watching of one; neither does any single line of them."""
    text = path.read_text(encoding="utf-8")

    assert [each for line in text.splitlines() if (each := symptoms.first(line)) and each.fatal] == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fail_cpu_platform_refuses_ray", "this image's CPU build has no Ray platform plugin"),
        ("fail_cpu_shm_across_hosts", "the engine failed"),
        ("fail_gloo_loopback", "Gloo took the wrong network interface"),
        ("fail_enforce_eager", "a rank died"),
        ("fail_rank_killed", "a rank died"),
        ("fail_netcut", "the head lost contact with it: a one-way firewall, or an overloaded node"),
        ("fail_mp_headless_killed", "a rank died"),
    ],
)
def test_failures_give_their_cause(name: str, cause: str) -> None:
    """The cause stands before its consequences, is fatal, and shows its line without colour codes."""
    found = symptoms.first(log(name))

    assert found is not None
    assert (cause, True) == (found.cause, found.fatal)
    assert "\x1b" not in found.line
    assert found.fix


def test_a_placement_group_that_waits_is_told_and_not_fatal() -> None:
    """A node may still come: thirty seconds of waiting are worth a word, less is not."""
    found = symptoms.first(log("pending_placement_group_ok"))

    assert found is not None
    assert not found.fatal
    assert "too few free GPUs" in found.cause
    assert symptoms.first("Waiting for creating a placement group of specs for 10 seconds. specs=[]") is None


@pytest.mark.parametrize(
    "line", ["requests.exceptions.HTTPError: 401 Client Error: Unauthorized", "OSError: [Errno 98] Address already in use"]
)
def test_what_may_be_tried_again_or_done_without_is_not_fatal(line: str) -> None:
    """An optional file may be missing, the next port may be free: a server that needs them ends by itself."""
    found = symptoms.first(line)

    assert found is not None
    assert not found.fatal


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("vllm serve: error: unrecognized arguments: --nope 3", "vLLM does not know one of the arguments after `--`"),
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
        ("Port 8000 is already in use, trying port 8001", None),
        ("bash: ray: command not found", "the image has no Ray"),
        ('docker: could not select device driver "" with capabilities: [[gpu]].', "Docker cannot hand out GPUs"),
        ("Failed core proc(s): {'EngineCore': -9}", "the engine was killed, most likely for lack of host memory"),
        ("INFO: everything is fine", None),
    ],
)
def test_lines(line: str, cause: str | None) -> None:
    """Single lines as they are met."""
    found = symptoms.first(line)

    assert cause == (found.cause if found else None)


def test_patterns_are_sound() -> None:
    """Every entry compiles, says what it means and what to do."""
    for each in symptoms.TABLE:
        re.compile(each.pattern)
        assert each.cause and each.fix
        assert not each.cause.endswith(".")


def test_plain() -> None:
    """Nothing of a log line can draw on a terminal; tabs stay."""
    assert symptoms.plain("\x1b[36m(pid=1)\x1b[0m a\tb\x07\r\x1b]0;title\x07") == "(pid=1) a\tb"
