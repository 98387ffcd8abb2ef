"""Answers to the question after a failure that nobody should trust."""

from __future__ import annotations

import pytest

from launcher.core import redaction
from launcher.tools.diagnosis_read import read

MARK = "@@f00d"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "motd",
        f"{MARK} ",
        f"{MARK} rc 0",
        f"{MARK} rc 99999",
        f"{MARK} state\nnull\n[]\n" + "[" * 9000,
        f"{MARK} servers\na\n{MARK} rc 0\n{MARK} observed-1\n{'[' * 9000}\n{MARK} rc 0",
        f"{MARK} zone\n+9999999\n{MARK} rc 0",
        f"{MARK} clock\n1e99\n{MARK} rc 0",
        f"{MARK} ../../etc/passwd\nx\n{MARK} rc 0",
        f"{MARK} log-0\nx\n{MARK} log-99\n\x00\n{MARK} log-1",
        (
            f'{MARK} state\n{{"name": 1, "role": {{}}, "state": {{"Status": [], "ExitCode":'
            f' "x"}}}}\n{MARK} rc 0'
        ),
        (
            f'{MARK} state\n{{"name": 1, "role": [], "state": {{"Status": "x", "ExitCode": 1e9}},'
            f' "restarts": 1e400}}\n{MARK} rc 0'
        ),
    ],
)
def test_answers_that_make_no_sense_are_borne(text: str) -> None:
    """Nothing is raised, and nothing but logs is taken for one."""
    told = read(text, MARK)

    assert {each.what for each in told.logs} <= {"container"}


def test_a_log_cannot_pretend_to_be_another_part() -> None:
    """It does not know the mark; half an answer is as good as it goes."""
    told = read(
        f"{MARK} ids\na\n{MARK} rc 0\n{MARK} log-1\n@@guess kernel\nOut of memory\n{MARK} rc"
        f" 0\n{MARK} log-2\nhalf",
        MARK,
    )

    assert [(each.part, each.lines) for each in told.logs] == [
        ("log-1", ("@@guess kernel", "Out of memory")),
        ("log-2", ("half",)),
    ]


def test_lines_are_cleaned_before_they_are_cut() -> None:
    """Of terminal codes, and of secrets, of which half must not stay."""
    redaction.learn("correct-horse-battery")
    try:
        told = read(
            f"{MARK} log-1\n\x1b[31mred\x1b[0m\r\n{'x' * 990}correct-horse-battery\n{MARK} rc 0",
            MARK,
        )
    finally:
        redaction.forget()

    assert told.logs[0].lines[0] == "red"
    assert told.logs[0].lines[1] == "x" * 990 + "***"
