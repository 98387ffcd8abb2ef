"""The view from inside a container."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.hosts import container_view
from launcher.hosts.container_view import ContainerView

VIEW = {
    "memlock": None,
    "memlock_unlimited": True,
    "ipc_lock": True,
    "infiniband": ["rdma_cm", "uverbs0"],
    "imex": ["channel0"],
    "libibverbs": "/lib/x/libibverbs.so.1",
    "python": "3.12.3",
    "ray": "2.60.0",
}


def read(**changed: object) -> ContainerView:
    """Parse an answer."""
    return container_view.parse_view(
        Answer(node="a", code=0, out="warning: x\n" + json.dumps({**VIEW, **changed}) + "\n")
    )


def test_an_answer_is_parsed() -> None:
    """Lines printed by the image before it are ignored."""
    view = read()

    assert (view.ipc_lock, view.error) == (True, "")
    assert (view.memlock, view.memlock_unlimited) == (None, True)
    assert view.infiniband == ("rdma_cm", "uverbs0")


def test_a_failing_container_has_a_reason() -> None:
    """No Python in the image, or no such container."""
    answer = Answer(node="a", code=127, err='exec: "python3": executable file not found in $PATH')

    assert "python3" in container_view.parse_view(answer).error
    assert container_view.parse_view(Answer(node="a", code=1)).error == "exit status 1"


@pytest.mark.parametrize(
    "out", ["", "null", "[]", "{}", "Traceback", json.dumps({**VIEW, "ipc_lock": "x"})]
)
def test_another_answer_is_unreadable(out: str) -> None:
    """With its text as evidence."""
    with pytest.raises(UnreadableAnswer):
        container_view.parse_view(Answer(node="a", code=0, out=out))


@given(
    st.dictionaries(
        st.sampled_from(sorted(VIEW)),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.none()),
    )
)
def test_any_answer_is_parsed_or_rejected(changed: dict[str, object]) -> None:
    """The image may be hostile."""
    try:
        view = read(**changed)
    except UnreadableAnswer:
        return

    assert isinstance(view, ContainerView)


def test_the_program_runs_on_this_machine() -> None:
    """With the local Python, with a container's rights of root."""
    argv = (sys.executable, *container_view.view_argv()[1:])
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    view = container_view.parse_view(Answer(node="a", code=0, out=done.stdout))
    status = Path("/proc/self/status").read_text()
    bits = int(status.partition("CapEff:")[2].split()[0], 16)

    assert view.ipc_lock is bool(bits & 1 << 14)
    assert view.python == ".".join(map(str, sys.version_info[:3]))
