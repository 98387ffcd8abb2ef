"""The argv of the connection probe, and the parser of its results."""

from __future__ import annotations

import ast
import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer
from launcher.hosts import pairs
from launcher.hosts.pairs import Peer, PortProbe

PROBE = {
    "ports": {"6379": "timed out", "27111": "open"},
    "errors": {"6379": "x"},
    "bulk": True,
    "largest": 1399,
    "heard": True,
}


def probe(peers: int = 1) -> Argv:
    """Return the command for one node."""
    others = [
        Peer(name=f"gpu{n:03}", ip=f"10.0.{n}.1", ports=tuple(range(6379, 6391)))
        for n in range(peers)
    ]
    return pairs.probe_argv(
        node="a",
        ip="10.0.0.9",
        peers=others,
        listen=(8000, 6379, 8000),
        high=27111,
        mtu=1500,
        nonce="n",
    )


def answer(value: object, code: int = 0) -> Answer:
    """Return a node's answer."""
    return Answer(node="a", code=code, out=f"{json.dumps(value)}\n")


def test_the_program_fits_in_an_argument() -> None:
    """The kernel's limit is 128 KiB, and a shell line is one (execve(2), MAX_ARG_STRLEN)."""
    argv = probe(peers=64)

    assert argv[:2] == ("python3", "-c")
    assert len(shlex.join(argv)) < 100_000
    assert json.loads(argv[3])["listen"] == [6379, 8000]


def test_the_program_supports_old_pythons() -> None:
    """RHEL 8 has 3.6; only its grammar is checked."""
    tree = ast.parse(probe()[2], feature_version=(3, 6))
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }

    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "asyncio" not in imported


def test_an_answer_is_parsed() -> None:
    """One probe per peer, with the source added."""
    text = {"node": "a", "mtu": 1500, "peers": {"b": PROBE}}
    probe = PortProbe(
        source="a",
        target="b",
        ports={6379: "timed out", 27111: "open"},
        bulk=True,
        largest=1399,
        mtu=1500,
        errors={6379: "x"},
        heard=True,
    )

    assert pairs.parse_probes(answer(text)) == (probe,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            answer(
                {"node": "a", "error": "cannot listen at 10.0.0.9: Cannot assign requested address"}
            ),
            "Cannot assign",
        ),
        (Answer(node="a", code=127, err="sh: python3: not found"), "did not answer"),
        (answer([]), "did not answer"),
        (answer({"mtu": 1, "peers": []}), "`peers` cannot be"),
        (answer({"mtu": 1, "peers": {"b": {**PROBE, "ports": {"1": "ajar"}}}}), "ajar"),
        (answer({"mtu": "x", "peers": {"b": PROBE}}), "`mtu` cannot be"),
    ],
)
def test_other_output_is_an_unreadable_answer(value: Answer, message: str) -> None:
    """Usually because of a wrong address of the node."""
    with pytest.raises(UnreadableAnswer, match=message):
        pairs.parse_probes(value)


@given(
    st.dictionaries(
        st.sampled_from(["mtu", "peers", "error"]), st.none() | st.integers() | st.text(max_size=3)
    ),
    st.dictionaries(
        st.sampled_from(sorted(PROBE)),
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none()),
    ),
)
def test_any_answer_is_parsed_or_rejected(
    outer: dict[str, object], changes: dict[str, object]
) -> None:
    """A node may be broken or hostile."""
    try:
        probes = pairs.parse_probes(
            answer({"mtu": 1500, "peers": {"b": {**PROBE, **changes}}, **outer})
        )
    except UnreadableAnswer:
        return

    assert all(isinstance(probe, PortProbe) for probe in probes)
