"""`vlaunch secrets`: the list of secrets, and their rotation."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import click
import pytest

from launcher.agent.desired import Policy
from launcher.app.secrets import from_terminal
from launcher.core import redaction
from launcher.tools.shipped import certificates
from launcher.tools.shipped.certificates import SECRET_NAMES
from tests import supervision
from tests.command_line import INVENTORY, SECRET, Cluster

KEY = "key-thatMustStayHidden"


@pytest.fixture
def keyed(cluster: Cluster, tmp_path: Path) -> Cluster:
    """A running cluster with a key from a file."""
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    cluster.write(
        INVENTORY.replace(
            "{HF_TOKEN: {env: HF_TOKEN}}", "{HF_TOKEN: {env: HF_TOKEN}, VLLM_API_KEY: {file: key}}"
        )
    )
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    return cluster


def _certificates(cluster: Cluster) -> dict[str, tuple[bytes, ...]]:
    """Return the authority's certificate and the node's own (PEM), by node."""
    return {
        node: tuple(machine.files[f"secrets/{name}"] for name in SECRET_NAMES)
        for node, machine in cluster.world.machines.items()
    }


def _certificates_end(cluster: Cluster) -> datetime:
    end = certificates.earliest_expiry(
        b"".join(pair).decode().partition("-----BEGIN PRIVATE")[0]
        for pair in _certificates(cluster).values()
    )
    assert end is not None
    return end


def _token(cluster: Cluster) -> set[bytes]:
    return {machine.files["secrets/RAY_AUTH_TOKEN"] for machine in cluster.world.machines.values()}


def test_the_list_shows_everything_but_values(keyed: Cluster) -> None:
    """Names, sources, uses, files with their modes and ages."""
    ran = keyed.run("secrets", "list", "--json")
    data = json.loads(ran.out)

    assert (ran.code, ran.err) == (0, "")
    assert {row["name"]: row["source"] for row in data["secrets"]} == {
        "HF_TOKEN": "environment variable HF_TOKEN",
        "VLLM_API_KEY": "file key",
        "RAY_AUTH_TOKEN": "created by `vlaunch up`",
        "AGENT_CA": "issued by `vlaunch up`",
        "AGENT_CERTIFICATE": "issued by `vlaunch up`",
    }
    files = {
        node: {file["name"]: file for file in listed} for node, listed in data["nodes"].items()
    }
    assert files["gpu02"]["HF_TOKEN"] == {
        "name": "HF_TOKEN",
        "path": "/root/.vlaunch/c/secrets/HF_TOKEN",
        "place": "disk",
        "mode": "600",
        "own": True,
        "age": 60.0,
        "handed": False,
    }
    assert set(files["gpu01"]) == {"", "HF_TOKEN", "VLLM_API_KEY", "RAY_AUTH_TOKEN", *SECRET_NAMES}
    for text in (ran.out, keyed.run("secrets", "list").out):
        assert not any(
            value in text for value in (SECRET, KEY, *(file.decode() for file in _token(keyed)))
        )


def test_the_list_for_people(keyed: Cluster) -> None:
    """One row per secret."""
    ran = keyed.run("secrets", "list")

    rows = {line.split()[0]: line for line in ran.out.splitlines()}
    assert "all (gpu[01-02])" in rows["HF_TOKEN"]
    assert (
        rows["RAY_AUTH_TOKEN"].split()[-2:] == ["600", "1m 00s"]
        or "1m 00s" in rows["RAY_AUTH_TOKEN"]
    )
    assert "/root/.vlaunch/c/secrets on gpu[01-02]: mode 700" in ran.out
    assert f"{_certificates_end(keyed):%Y-%m-%d}" in rows["AGENT_CERTIFICATE"]
    assert "BEGIN" not in ran.out


def test_the_list_warns_before_certificates_expire(
    keyed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts read the warning from the exit code."""
    monkeypatch.setattr("launcher.tools.shipped.certificates._WARN_BEFORE", timedelta(days=5 * 365))
    ran = keyed.run("secrets", "list")

    assert ran.code == 1
    assert "the agents' certificates expire on 20" in ran.out
    assert "run `vlaunch up` to renew them" in " ".join(ran.out.split())


def test_a_secret_in_two_places_of_a_node_is_shown_with_both(keyed: Cluster) -> None:
    """As after a change of `secrets_in`, until the next `up`."""
    for machine in keyed.world.machines.values():
        machine.memory, machine.memory_files = "/run/vlaunch-root", {"HF_TOKEN": b"x"}
    ran = keyed.run("secrets", "list")

    (row,) = (line for line in ran.out.splitlines() if line.startswith("HF_TOKEN"))
    assert "disk, memory" in row
    assert "all (gpu[01-02])" in row


def test_files_that_others_can_read_are_reported(keyed: Cluster) -> None:
    """With the fix; and files that no inventory names. Scripts use the exit code."""
    keyed.world.machines["gpu02"].modes["HF_TOKEN"] = "644 0"
    keyed.world.machines["gpu02"].files["secrets/OLD"] = b"x"
    ran = keyed.run("secrets", "list", "--json")

    assert ran.code == 1
    assert json.loads(ran.out)["remarks"] == [
        (
            "gpu02: /root/.vlaunch/c/secrets/HF_TOKEN has mode 644; run there: `chmod 600"
            " /root/.vlaunch/c/secrets/HF_TOKEN`"
        ),
        (
            "gpu02: /root/.vlaunch/c/secrets/OLD is not a secret of this inventory; `vlaunch down`"
            " removes it"
        ),
    ]


def test_rotate_gives_every_node_a_new_token(keyed: Cluster) -> None:
    """The same one, and new containers."""
    (before,) = _token(keyed)
    ran = keyed.run("secrets", "rotate", "--yes")

    assert ran.code == 0, ran.err
    (after,) = _token(keyed)
    assert len(after) == 64
    assert after != before
    assert [verb for verb in keyed.world.verbs() if verb.endswith(": run")] == [
        "gpu01: run",
        "gpu02: run",
    ]
    assert "all containers of c will be recreated" in ran.err
    assert before.decode() not in ran.err
    assert after.decode() not in ran.err
    assert keyed.run("up").code == 0
    assert _token(keyed) == {after}


def test_rotate_renews_certificates_and_restarts_nothing(keyed: Cluster, tmp_path: Path) -> None:
    """Without a prompt; a changed value of another secret is not written."""
    before, token = _certificates(keyed), _token(keyed)
    (tmp_path / "key").write_text("another-key")
    ran = keyed.run("secrets", "rotate", "AGENT_CERTIFICATE")
    after = _certificates(keyed)

    assert ran.code == 0, ran.err
    assert "no container was restarted" in ran.err
    assert len(keyed.world.changes) == 2 * (len(SECRET_NAMES) + 1)
    assert len({authority for authority, _ in after.values()}) == 1
    old, new = ({text for pair in nodes.values() for text in pair} for nodes in (before, after))
    assert not old & new
    assert _token(keyed) == token
    assert "PRIVATE" not in ran.err
    (tmp_path / "key").write_text(KEY)
    keyed.world.changes.clear()
    assert keyed.run("up").code == 0
    assert keyed.world.changes == []


def test_rotate_without_a_name_renews_certificates_too(keyed: Cluster) -> None:
    """With the name of another secret, they stay."""
    before = _certificates(keyed)
    assert keyed.run("secrets", "rotate", "RAY_AUTH_TOKEN", "--yes").code == 0
    assert _certificates(keyed) == before
    assert keyed.run("secrets", "rotate", "--yes").code == 0
    assert _certificates(keyed) != before


@pytest.mark.parametrize("settings", ["ray: {token_auth: false}", "ray: none"])
def test_rotate_restarts_nothing_without_rays_token(settings: str, cluster: Cluster) -> None:
    """The token stays the same, because only labels depend on it."""
    cluster.write(f"{INVENTORY}{settings}\n")
    assert cluster.run("up").code == 0
    before, token = _certificates(cluster), _token(cluster)
    cluster.world.changes.clear()
    ran = cluster.run("secrets", "rotate")

    assert ran.code == 0, ran.err
    assert set(cluster.world.verbs()) == {
        f"{node}: {verb}" for node in ("gpu01", "gpu02") for verb in ("extend", "store")
    }
    assert _certificates(cluster) != before
    assert _token(cluster) == token


@pytest.mark.parametrize("inventory", ["ray: {token_auth: false}", "ray: none"])
def test_the_token_exists_without_rays_authentication(inventory: str, cluster: Cluster) -> None:
    """The nodes' agents use it."""
    cluster.write(f"{INVENTORY}{inventory}\n")

    assert "RAY_AUTH_TOKEN" in cluster.run("secrets", "list").out


def test_rotate_a_single_secret_keeps_the_token(keyed: Cluster, tmp_path: Path) -> None:
    """The source has a new value, and the nodes' files get it."""
    before = _token(keyed)
    (tmp_path / "key").write_text("another-key")
    ran = keyed.run("secrets", "rotate", "VLLM_API_KEY", "--yes")

    assert ran.code == 0, ran.err
    assert _token(keyed) == before
    assert {machine.files["secrets/VLLM_API_KEY"] for machine in keyed.world.machines.values()} == {
        b"another-key"
    }


def test_rotate_with_the_same_value_changes_nothing(keyed: Cluster) -> None:
    """The message suggests changing the source; no prompt appears."""
    ran = keyed.run("secrets", "rotate", "VLLM_API_KEY")

    assert (ran.code, keyed.world.changes) == (0, [])
    assert "every source returned the value in use" in ran.err


def test_rotate_lists_stopped_work_and_prompts(keyed: Cluster) -> None:
    """Without a terminal it fails before any change."""
    supervision.store_server(keyed.world, supervision.make_spec("chat"))
    supervision.store_server(keyed.world, supervision.make_spec("once", policy=Policy(restarts=0)))
    keyed.world.jobs.append(
        {
            "submission_id": "b-1",
            "status": "RUNNING",
            "metadata": {"vlaunch.batch": "rows", "vlaunch.gpus": "1"},
            "message": "",
        }
    )
    ran = keyed.run("secrets", "rotate")

    assert (ran.code, keyed.world.changes) == (2, [])
    assert "stop server `chat`, server `once`, batch job rows?" in ran.err
    assert "hint: add `--yes`" in ran.err
    ran = keyed.run("secrets", "rotate", "--yes")
    assert ran.code == 0
    assert "server `chat` restarts by itself" in ran.err
    assert "server `once` is stopped: run `vlaunch serve` again" in ran.err
    assert "batch job rows resumes when you run" in ran.err


def test_rotate_rejects_unknown_names(keyed: Cluster) -> None:
    """Before any change."""
    ran = keyed.run("secrets", "rotate", "HF_TOKN", "--yes")

    assert (ran.code, keyed.fleet_options[1:], keyed.world.changes) == (2, [], [])
    assert "no secret `HF_TOKN` in this cluster" in ran.err
    assert "HF_TOKEN, VLLM_API_KEY, RAY_AUTH_TOKEN" in ran.err


def test_rotate_starts_no_cluster(cluster: Cluster) -> None:
    """Only `up` starts containers."""
    ran = cluster.run("secrets", "rotate", "--yes")

    assert (ran.code, cluster.world.changes) == (2, [])
    assert "run `vlaunch up`, which fetches every secret" in ran.err


def test_a_prompt_appears_once_and_only_if_the_value_is_needed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` prompts without echo; `status`, `check` and a dry run without nodes do not."""
    prompts: list[str] = []

    def answer(text: str, **how: object) -> str:
        assert how == {"hide_input": True, "err": True}
        prompts.append(text)
        return SECRET

    from_terminal.cache_clear()
    monkeypatch.setattr(click, "prompt", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    cluster.write(INVENTORY.replace("{env: HF_TOKEN}", "{prompt: Token of the hub}"))
    for args in (
        ["status"],
        ["check", "--model", "org/m"],
        ["up", "--dry-run", "--offline"],
        ["secrets", "list"],
    ):
        cluster.run(*args)
    assert prompts == []
    ran = cluster.run("up")
    assert (ran.code, prompts) == (0, ["Token of the hub (HF_TOKEN)"])
    assert cluster.world.machines["gpu02"].files["secrets/HF_TOKEN"] == SECRET.encode()
    from_terminal.cache_clear()


def test_a_prompt_without_a_terminal_is_reported_with_other_mistakes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any node is contacted."""
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    cluster.write(
        INVENTORY.replace(
            "{HF_TOKEN: {env: HF_TOKEN}}", "{A_KEY: {prompt: true}, HF_TOKEN: {env: HF_TOKEN}}"
        )
    )
    ran = cluster.run("up")

    assert (ran.code, cluster.fleet_options) == (2, [])
    assert "cannot fetch 2 secrets" in ran.err
    assert "A_KEY: needs a terminal for its prompt, and there is none" in ran.err
    assert "HF_TOKEN: the environment variable" in ran.err


def test_values_are_hidden_in_commands_that_do_not_need_them(cluster: Cluster) -> None:
    """They are removed from log lines."""
    cluster.run("up")
    redaction.clear_secrets()  # as another process
    cluster.logs = {"gpu01": {"head": f"debug: Authorization {SECRET}\n".encode()}, "gpu02": {}}
    ran = cluster.run("logs")

    assert SECRET not in ran.out
    assert "Authorization ***" in ran.out
