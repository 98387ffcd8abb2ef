"""Splitting of logs from other tools by node and log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.diagnose import log_files


def split(text: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the lines of logs by node and log."""
    reports = log_files.split_logs(text, "FILE")
    return {name: {log.title: log.lines for log in report.logs} for name, report in reports.items()}


KUBECTL = "[pod/chat-0/vllm] INFO one\n[pod/chat-0-1/gate] two\n[pod/chat-0/vllm] \n"
JOURNAL = (
    "Nov 22 10:00:01 gpu01 vlaunch-chat.service[77]: one\n"
    "2026-11-22T10:00:02+0000 gpu02 kernel: two\n"
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (KUBECTL, {"chat-0": {"vllm": ("INFO one",)}, "chat-0-1": {"gate": ("two",)}}),
        (
            JOURNAL,
            {
                "gpu01": {"vlaunch-chat.service": ("Nov 22 10:00:01 one",)},
                "gpu02": {"kernel": ("2026-11-22T10:00:02+0000 two",)},
            },
        ),
        (
            'head-1  | one\nworker-12 | {"log": "two\\n", "stream": "stderr"}\n',
            {"head-1": {"log": ("one",)}, "worker-12": {"log": ("two",)}},
        ),
        ("INFO a: b\n a | b\nplain\n", {"FILE": {"log": ("INFO a: b", " a | b", "plain")}}),
        ("", {}),
    ],
    ids=["kubectl", "journal", "compose", "none", "empty"],
)
def test_prefixes(text: str, lines: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Every tool has its own; lines without one are the file's."""
    assert split(text) == lines


@given(st.text())
def test_any_text_is_parsed(text: str) -> None:
    """Without an exception."""
    log_files.split_logs(text, "FILE")


def test_many_names_do_not_fill_the_memory() -> None:
    """Lines of a thousand claimed pods count as the file's."""
    reports = log_files.split_logs("".join(f"[pod/p{n}/c] x\n" for n in range(1000)), "FILE")
    assert len(reports) == 401
    assert len(reports["FILE"].logs[0].lines) == 600
