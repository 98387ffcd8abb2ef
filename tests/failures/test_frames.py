"""Frames of log lines."""

from __future__ import annotations

import json

import pytest

from launcher.failures.frames import split_lines, strip_frame
from launcher.failures.match import first_failure

TEXT = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "(EngineCore pid=284) ",
        "(RayWorkerProc pid=284, ip=192.168.0.2) (Worker_PP1 pid=284) ERROR 11-24 11:16:45"
        " [core.py:15] ",
        "(raylet) ",
        "(autoscaler +41s) ",
        "[rank0]: ",
        "[rank3]:[E1128 10:00:00.123456789 ProcessGroupNCCL.cpp:629] ",
        "ERROR 02-20 02:31:47 engine.py:389] ",
        "vllm-1  | ",
        "head-1  | (APIServer pid=1) ERROR 11-24 11:16:45 [core.py:15] ",
        "2026-11-20T20:14:02.123456789Z ",
        "2026-11-20T20:14:02.123456789Z stderr F ",
        "2026-11-20 20:14:02,123\tERROR services.py:2159 -- ",
        "2026-11-20 20:14:02,123 ERROR node.py:1296 -- ",
        "[2026-11-20 20:14:02 TP3] ",
        "[2026-11-20 20:14:02,123 E 17 17] (raylet) file.cc:151: ",
        "Nov 22 10:00:00 gpu01 dockerd[12]: ",
        "2026-11-22T10:00:00+0000 gpu01 vllm.service[12]: ",
        "[pod/head-0/vllm] ",
        "[ 8211.412345] ",
        "\x1b[1;36m(EngineCore pid=7)\x1b[0;0m ",
    ],
)
def test_a_frame_is_no_part_of_the_text(frame: str) -> None:
    """Alone and in a usual order."""
    assert strip_frame(frame + TEXT) == TEXT


@pytest.mark.parametrize("text", ["| 0  NVIDIA H100 |", "(x) y", "[Errno 28] full", "a | b"])
def test_a_text_stays(text: str) -> None:
    """It looks like a frame and is none."""
    assert strip_frame(text) == text


@pytest.mark.parametrize("field", ["log", "message", "msg", "MESSAGE", "textPayload"])
def test_lines_in_json(field: str) -> None:
    """Of Docker's driver, of loggers, journalctl and clouds; one message may have several lines."""
    line = json.dumps({field: f'File "x"\n{TEXT}\n', "time": "2026-11-20T20:14:02Z"})

    assert split_lines(f"before\n{line}") == ["before", 'File "x"', TEXT]


def test_other_json_stays() -> None:
    """Broken, without a message, or with a message that is no text."""
    lines = ['{"a": 1}', '{"log": 7}', '{"log": "x"', 'specs=[{"GPU": 1.0}]']

    assert split_lines("\n".join(lines)) == lines


def test_lines_that_a_terminal_broke() -> None:
    """Several lines of its width and none longer are parts of longer lines."""
    width = 80
    text = f"{'x' * 70} {TEXT} {'y' * 200}"
    broken = [text[start : start + width] for start in range(0, len(text), width)]

    lines = "\n".join(["first", *broken, "[rank0]: last"])
    assert split_lines(lines, copied=True) == ["first", text, "[rank0]: last"]
    assert split_lines(lines) == lines.split("\n")
    found = first_failure(split_lines(lines, copied=True))
    assert found is not None
    assert found.failure.id == "disk-full"
