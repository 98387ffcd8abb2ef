"""The `lab` commands without a lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.core.errors import RequestError, VlaunchError
from launcher.lab import layout, prerequisites
from launcher.lab.lab_command import lab as command


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands assume root; they create nothing."""
    monkeypatch.setattr(prerequisites, "require_linux_root", lambda: None)


@pytest.mark.usefixtures("as_root")
def test_status_without_a_lab_gives_a_hint(tmp_path: Path) -> None:
    """Not an empty table."""
    result = CliRunner().invoke(command, ["status", "--dir", str(tmp_path)])

    assert isinstance(result.exception, RequestError)
    assert "vlaunch lab up" in result.exception.hint


@pytest.mark.usefixtures("as_root")
def test_status_of_a_lab_after_a_reboot_is_down(tmp_path: Path) -> None:
    """Only the record exists: data on stdout, and an error with the command for the repair."""
    layout.save_lab(
        layout.make_lab(name="gone", directory=tmp_path, subnet="127.77.0.0/24", nodes=1, gpus=1)
    )

    result = CliRunner().invoke(
        command, ["status", "--name", "gone", "--dir", str(tmp_path), "--json"]
    )

    assert json.loads(result.stdout)["up"] is False
    assert isinstance(result.exception, VlaunchError)
    assert result.exception.hint == f"run `vlaunch lab up --name gone --dir {tmp_path}`"


def test_up_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same object as of `status`, alone on standard output."""
    monkeypatch.setattr(prerequisites, "ensure_installed", lambda **_: None)
    monkeypatch.setattr("launcher.lab.startup.start_lab", lambda *_, **__: None)
    monkeypatch.setattr("launcher.lab.status.observe", lambda _: [])
    result = CliRunner().invoke(command, ["up", "--dir", str(tmp_path), "--json"])

    assert json.loads(result.stdout)["inventory"] == str(tmp_path / "inventory.yaml")
    assert "the lab is up: 2 hosts" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["up", "--subnet", "here"], ["up", "--name", "../x"], ["up", "--nodes", "0"]]
)
def test_a_wrong_request_is_refused_first(arguments: list[str]) -> None:
    """Also without root."""
    assert isinstance(CliRunner().invoke(command, arguments).exception, RequestError)
