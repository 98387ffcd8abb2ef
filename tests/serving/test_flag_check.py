"""`serve` with arguments that the image's vLLM rejects: an error, and nothing is touched."""

from __future__ import annotations

import pytest

from tests.command_line import Cluster

SERVE = ("serve", "--skip-network-check", "--no-wait", "--model", "org/m", "--tp", "4", "--pp", "2")
MISTAKES = {
    "mistakes": ["unrecognized arguments: --max-nun-seqs 16"],
    "similar": {"--max-nun-seqs": "--max-num-seqs"},
}


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_wrong_flag_leaves_the_running_server_alone(cluster: Cluster, backend: str) -> None:
    """On every backend, with `--replace`."""
    serve = (*SERVE, "--backend", backend)
    assert cluster.run("up").code == 0
    assert cluster.run(*serve).code == 0
    cluster.world.changes.clear()
    cluster.world.machines["gpu01"].flags.update(MISTAKES)
    ran = cluster.run(*serve, "--replace", "--", "--max-nun-seqs", "16")

    assert (ran.code, cluster.world.changes) == (2, [])
    assert "error: vLLM 0.32.0 rejects the arguments; nothing was changed" in ran.err
    assert "unrecognized arguments: --max-nun-seqs 16" in ran.err
    assert "hint: `--max-nun-seqs`: did you mean `--max-num-seqs`?" in ran.err
    assert cluster.run(*serve).code == 0, "the old server is still there"


def test_a_newer_vllm_is_reported_and_serves(cluster: Cluster) -> None:
    """With what may go wrong."""
    assert cluster.run("up").code == 0
    cluster.world.machines["gpu01"].flags.update({"vllm": "0.99.0"})
    ran = cluster.run(*SERVE)

    assert ran.code == 0
    assert "vLLM 0.99.0 is newer than vlaunch was checked with" in ran.err
    assert "a start may fail" in ran.err
