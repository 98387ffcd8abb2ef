"""What a container sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UnreadableAnswer
from launcher.model import Answer
from launcher.tools import inside
from launcher.tools.inside import Inside

SAID = {
    "memlock": None,
    "capeff": "00000000a80465fb",
    "infiniband": ["rdma_cm", "uverbs0"],
    "imex": ["channel0"],
    "libibverbs": "/lib/x/libibverbs.so.1",
    "shm": 67108864,
    "python": "3.12.3",
    "ray": "2.60.0",
    "torch": "2.9.0+cu129",
    "nccl": "2.27.5",
    "cuda": "12.9.1",
    "env": {"NCCL_SOCKET_IFNAME": "=eth0"},
}


def read(**changed: object) -> Inside:
    """Return what an answer says."""
    return inside.parse_look(
        Answer(node="a", code=0, out="warning: x\n" + json.dumps({**SAID, **changed}) + "\n")
    )


def test_an_answer_is_read() -> None:
    """Docker's usual capabilities and IPC_LOCK; lines that the image prints first are passed
    over.
    """
    found = read()

    assert (found.running, found.error) == (True, "")
    assert found.capabilities == (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "NET_BIND_SERVICE",
        "NET_RAW",
        "IPC_LOCK",
        "SYS_CHROOT",
        "MKNOD",
        "AUDIT_WRITE",
        "SETFCAP",
    )
    assert (found.memlock, found.memlock_unlimited) == (None, True)
    assert found.infiniband == ("rdma_cm", "uverbs0")
    assert found.env == {"NCCL_SOCKET_IFNAME": "=eth0"}


@pytest.mark.parametrize(
    ("bits", "there"),
    [("4000", True), ("0", False), ("1ffffffffff", True), ("ffffffffffffbfff", False)],
)
def test_ipc_lock_is_the_fifteenth_capability(bits: str, there: bool) -> None:
    """Without it RDMA cannot pin memory."""
    assert ("IPC_LOCK" in read(capeff=bits).capabilities) is there


def test_a_limit_on_locked_memory_is_in_bytes() -> None:
    """Docker's default is 64 KiB or 8 MiB."""
    assert (read(memlock=65536).memlock, read(memlock=65536).memlock_unlimited) == (65536, False)


def test_a_container_that_cannot_be_asked_says_why() -> None:
    """No Python in the image, or no such container."""
    answer = Answer(node="a", code=127, err='exec: "python3": executable file not found in $PATH')

    assert "python3" in inside.parse_look(answer, running=False).error
    assert inside.parse_look(Answer(node="a", code=1), running=False).error == "exit status 1"


@pytest.mark.parametrize(
    "out", ["", "null", "[]", "{}", "Traceback", json.dumps({**SAID, "capeff": "x"})]
)
def test_another_answer_is_unreadable(out: str) -> None:
    """With what it was as evidence."""
    with pytest.raises(UnreadableAnswer):
        inside.parse_look(Answer(node="a", code=0, out=out))


@given(
    st.dictionaries(
        st.sampled_from(sorted(SAID)),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.none()),
    )
)
def test_whatever_comes_back_only_the_tools_own_error_is_raised(changed: dict[str, object]) -> None:
    """The image may be anybody's."""
    try:
        found = read(**changed)
    except UnreadableAnswer:
        return

    assert isinstance(found, Inside)


def test_the_program_runs_here() -> None:
    """With this machine's own Python, and only network variables leave it."""
    argv = (sys.executable, *inside.look()[1:])
    env = {**os.environ, "NCCL_DEBUG": "INFO", "VLLM_HOST_IP": "10.0.0.1", "HF_TOKEN": "secret"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    found = inside.parse_look(Answer(node="a", code=0, out=done.stdout))

    assert found.env["NCCL_DEBUG"] == "INFO"
    assert found.env["VLLM_HOST_IP"] == "10.0.0.1"
    assert "HF_TOKEN" not in found.env
    assert found.python == ".".join(map(str, sys.version_info[:3]))
