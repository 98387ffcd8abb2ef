"""`vlaunch check` on simulated nodes: queries, no changes, and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import ConnectError
from launcher.hosts.checks.catalogue import CATALOGUE
from tests.command_line import INVENTORY, SECRET, Cluster, Ran

MODEL = "org/m"


def results(ran: Ran) -> dict[str, dict[str, Any]]:
    """Return the checks' results by ID."""
    return {check["id"]: check for check in json.loads(ran.out)["checks"]}


def finding_texts(check: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return status and text of a check's findings, by nodes."""
    return {finding["node"]: (finding["status"], finding["text"]) for finding in check["findings"]}


def test_healthy_nodes_pass_unchanged(cluster: Cluster) -> None:
    """Exit code 0 without a failure; unknown values are SKIP with a reason."""
    ran = cluster.run("check")

    assert (ran.code, cluster.world.changes) == (0, [])
    assert "FAIL" not in ran.out
    assert f"{len(CATALOGUE)} checks: " in ran.out
    assert "SKIP" in ran.out
    assert "network: fabric is ethernet, which promises no RDMA" in ran.out


def test_a_running_cluster_is_checked_in_its_containers(cluster: Cluster) -> None:
    """Without a temporary one or any change."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    cluster.commands.clear()
    ran = cluster.run("check", "--json")

    assert (ran.code, cluster.world.changes) == (0, [])
    assert not [command.argv for command in cluster.commands if command.argv[1:2] == ("run",)]
    assert results(ran)["ray-version"]["status"] == "pass"


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--strict",), 3)])
def test_a_warning_counts_only_when_strict(
    cluster: Cluster, flags: tuple[str, ...], code: int
) -> None:
    """For an unsynchronized clock."""
    cluster.world.machines["gpu02"].survey["synced"] = "NTPSynchronized=no"
    ran = cluster.run("check", *flags)

    assert ran.code == code
    assert "  WARN  time-sync" in ran.out


@pytest.mark.parametrize("flags", [(), ("--strict",)])
def test_a_failure_is_exit_code_1_with_its_fix(cluster: Cluster, flags: tuple[str, ...]) -> None:
    """The node is named, and the summary names the check."""
    cluster.world.machines["gpu02"].gpus = 7
    ran = cluster.run("check", *flags)

    assert ran.code == 1
    assert "gpu02: 7 GPUs visible, 8 declared" in ran.out
    assert "fix: set `gpus: 7` for gpu02" in ran.out
    assert "FAIL: accelerator" in ran.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--only", "time-skwe"], "there is no check `time-skwe`; did you mean `time-skew`?"),
        (["--skip", "ssh,zzz"], "there is no check `zzz`"),
        (["--group", "netwrk"], "there is no group `netwrk`; did you mean `network`?"),
        (["--only", ","], "--only needs a value"),
        (["--only", "ssh", "--skip", "ssh"], "no checks are selected"),
        (["--expect", "missing.yaml"], "missing.yaml"),
    ],
)
def test_an_invalid_request_contacts_no_node(cluster: Cluster, args: list[str], text: str) -> None:
    """Exit code 2, with the near miss; an empty selection must not pass."""
    ran = cluster.run("check", *args)

    assert (ran.code, ran.out, cluster.commands) == (2, "", [])
    assert text in ran.err


@pytest.mark.parametrize(
    ("args", "ids"),
    [
        (["--only", "ssh,time-skew"], ["ssh", "time-skew"]),
        (["--only", "time-skew", "--only", " ssh "], ["ssh", "time-skew"]),
        (["--group", "reach"], ["ssh", "sudo"]),
        (["--group", "reach", "--skip", "sudo"], ["ssh"]),
        (["--group", "reach", "--only", "disk"], ["ssh", "sudo", "disk"]),
    ],
)
def test_checks_can_be_selected(cluster: Cluster, args: list[str], ids: list[str]) -> None:
    """Comma-separated and repeated, always in the catalogue's order."""
    assert list(results(cluster.run("check", "--json", *args))) == ids


def test_only_required_commands_run(cluster: Cluster) -> None:
    """One round trip is enough for a login."""
    assert cluster.run("check", "--only", "ssh").code == 0
    assert [command.argv[3] for command in cluster.commands] == ["probe", "probe"]


def test_the_list_needs_neither_node_nor_inventory(cluster: Cluster) -> None:
    """All checks with their titles; as JSON, one list."""
    cluster.path.unlink()
    ran, as_json = (
        cluster.run("check", "--list"),
        cluster.run("check", "--list", "--json", "--group", "model"),
    )

    assert (ran.code, as_json.code, cluster.commands) == (0, 0, [])
    assert all(check.id in ran.out and check.what in ran.out for check in CATALOGUE)
    assert {row["group"] for row in json.loads(as_json.out)} == {"model"}
    assert set(json.loads(as_json.out)[0]) == {"id", "group", "what", "why"}


def test_json_is_a_single_document(cluster: Cluster) -> None:
    """Checks with findings, reasons and documentation; the counts add up."""
    ran = cluster.run("check", "--json")
    data = json.loads(ran.out)

    assert (ran.err, data["passed"], ran.out.count("\n")) == ("", True, 1)
    assert sum(data["counts"].values()) == len(data["checks"]) == len(CATALOGUE)
    for check in data["checks"]:
        assert set(check) == {"id", "group", "status", "what", "why", "docs", "findings"}
        assert check["docs"] == f"docs/reference/checks.md#{check['id']}"
        assert check["findings"]
        assert all(
            set(finding) == {"node", "status", "text", "evidence", "fix"}
            for finding in check["findings"]
        )


def test_an_unreachable_node_fails_ssh_and_is_skipped_otherwise(
    cluster: Cluster,
) -> None:
    """One cause is reported once; the other node is still checked."""
    cluster.missing["gpu02"] = ConnectError("gpu02", "no answer from gpu02:22 within 10s")
    ran = cluster.run("check", "--json")
    checks = results(ran)

    assert ran.code == 1
    assert finding_texts(checks["ssh"])["gpu02"] == (
        "fail",
        "cannot be reached: no answer from gpu02:22 within 10s",
    )
    assert [id_ for id_, result in checks.items() if result["status"] == "fail"] == ["ssh"]
    assert finding_texts(checks["docker"]) == {
        "gpu01": ("pass", "Docker answers"),
        "gpu02": ("skip", "unreachable: see `ssh`"),
    }


def test_no_reachable_node_is_not_an_error(cluster: Cluster) -> None:
    """Everything else is SKIP."""
    for name in ("gpu01", "gpu02"):
        cluster.missing[name] = ConnectError(name, "cannot be reached: timed out")
    ran = cluster.run("check")

    assert (ran.code, ran.out.count("FAIL  ssh")) == (1, 1)
    assert "PASS" not in ran.out


def test_a_node_with_an_unreadable_answer_is_unreachable(cluster: Cluster) -> None:
    """The login check fails."""
    answer = cluster.world.answer

    def garbled(command: Any) -> Any:
        original = answer(command)
        return (
            original
            if command.node != "gpu02" or original is None
            else type(original)(node="gpu02", code=0, out="motd of the day")
        )

    cluster.world.answer = garbled  # type: ignore[method-assign]
    checks = results(cluster.run("check", "--json"))

    assert finding_texts(checks["ssh"])["gpu02"][0] == "fail"
    assert "motd" in json.dumps(checks["ssh"])


def skip_inside(cluster: Cluster) -> None:
    """Let a container answer differently."""
    cluster.world.machines["gpu02"].inside = "Segmentation fault"


def skip_image(cluster: Cluster) -> None:
    """Remove the image."""
    cluster.world.machines["gpu02"].images.clear()


def skip_port_probe(cluster: Cluster) -> None:
    """Let the port probe fail."""
    cluster.world.port_probes["gpu02", "gpu01"] = "python3: error while loading shared libraries"


def skip_files(cluster: Cluster) -> None:
    """Let `find` fail on one node."""
    cluster.world.machines["gpu01"].model = {"config.json": 7}
    cluster.world.machines["gpu02"].unreadable = "find: unknown predicate -printf"


@pytest.mark.parametrize(
    ("spoil", "id_", "reason"),
    [
        (skip_inside, "ray-version", "Segmentation fault"),
        (skip_image, "ray-version", "not on this node yet: run `vlaunch up`"),
        (skip_image, "image", "is not on this node yet"),
        (skip_port_probe, "ports-reachable", "python3: error while loading shared libraries"),
        (skip_files, "model", "could not be checked for the model"),
    ],
)
def test_missing_evidence_is_skipped_with_the_reason(
    cluster: Cluster, spoil: Any, id_: str, reason: str
) -> None:
    """Never a pass, never an error of the program, and the other node is checked."""
    spoil(cluster)
    ran = cluster.run("check", "--json", "--no-hub", "--model", MODEL)
    texts = finding_texts(results(ran)[id_])

    assert ran.err == ""
    assert any(status == "skip" and reason in text for status, text in texts.values()), texts
    assert cluster.world.changes == []


def test_a_closed_port_between_two_nodes_is_named(cluster: Cluster) -> None:
    """One direction is blocked."""
    cluster.world.port_probes["gpu02", "gpu01"] = {
        "ports": {"6379": "timed out", "43210": "open"},
        "errors": {"6379": "Connection timed out"},
    }
    ran = cluster.run("check", "--only", "ports-reachable")

    assert ran.code == 1
    assert "gpu02 → gpu01: TCP 6379 timed out" in ran.out


def test_the_model_is_compared_file_by_file(cluster: Cluster) -> None:
    """The inventory's own by default."""
    cluster.write(f"serve: {{model: {MODEL}}}\n{INVENTORY}")
    cluster.world.machines["gpu01"].model = {"config.json": 7, "model.safetensors": 10**9}
    cluster.world.machines["gpu02"].model = {"config.json": 7, "model.safetensors": 10**6}
    ran = cluster.run("check", "--only", "model", "--no-hub")

    assert ran.code == 1
    assert "model.safetensors has 1000000 bytes" in ran.out


def test_a_missing_token_does_not_hide_other_findings(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the secret reports it in its check."""
    monkeypatch.delenv("HF_TOKEN")
    ran = cluster.run("check", "--group", "model", "--json", "--model", MODEL)
    checks = results(ran)

    assert (ran.code, ran.err) == (0, "")
    assert "HF_TOKEN" in json.dumps(checks["hf-token"])
    assert checks["hf-token"]["status"] == "skip"


@pytest.mark.parametrize(
    ("flags", "env", "reason"),
    [
        (["--no-hub"], "", "offline, as requested"),
        ([], "env: {HF_HUB_OFFLINE: '1'}\n", "HF_HUB_OFFLINE is set"),
    ],
)
def test_hugging_face_is_not_queried_needlessly(
    cluster: Cluster, flags: list[str], env: str, reason: str
) -> None:
    """With the reason; the token appears nowhere."""
    cluster.write(env + INVENTORY)
    ran = cluster.run("check", "--only", "hf-token", "--json", "--model", MODEL, *flags)

    assert results(ran)["hf-token"]["status"] == "skip"
    assert reason in ran.out
    assert SECRET not in ran.out


def test_expectations_are_validated_first(cluster: Cluster, tmp_path: Path) -> None:
    """A mistake in the file is an invalid request."""
    path = tmp_path / "mine.yaml"
    path.write_text("gpus: 7\n")
    ran = cluster.run("check", "--expect", str(path))

    assert (ran.code, ran.out) == (2, "")
    assert "gpus" in ran.err


def test_a_pipe_gets_neither_colour_nor_folded_rows(cluster: Cluster) -> None:
    """For `grep`, with any width in the environment."""
    ran = cluster.run("check")

    assert "\x1b" not in ran.out + ran.err
    assert max(map(len, ran.out.splitlines())) > 100


@pytest.mark.parametrize("named", [True, False])
def test_unreadable_expectations_stop_before_any_contact(
    cluster: Cluster, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a named file, and for the user's default one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(cluster.path.parent))
    own = cluster.path.parent / ("mine.yaml" if named else "vlaunch/expectations.yaml")
    own.parent.mkdir(exist_ok=True)
    own.write_text("gpus: 7\n")
    ran = cluster.run("check", *(["--expect", str(own)] if named else []))

    assert ran.code == 2
    assert own.name in ran.err
    assert cluster.fleet_options == []  # no fleet, so no connection
