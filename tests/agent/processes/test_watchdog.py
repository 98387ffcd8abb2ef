"""vLLM's watchdog: the option, and the files that it writes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
from pathlib import Path

import pytest

from launcher.agent.processes import watchdog
from launcher.agent.processes.process import LocalEngine
from tests.agent.waits import until

SERVE = ("vllm", "serve", "m", "--port", "8000")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed vLLM without a watchdog, like 0.32."""
    folder = tmp_path / "site" / "vllm"
    (folder / "config").mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return folder


def install_watchdog(package: Path) -> None:
    """Add the file that 0.33 has."""
    (package / "config" / "watchdog_config.py").touch()


def write_dump(folder: Path, name: str, pid: int, age: int = 0) -> Path:
    """Write a file as vLLM names it (vllm/utils/watch_dog.py), `age` seconds old."""
    folder.mkdir(exist_ok=True)
    path = folder / f"VLLM_STACK_DUMP_for_{name}_{pid}.log"
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_option(package: Path) -> None:
    """A vLLM that has the watchdog gets it, with a folder of the server."""
    install_watchdog(package)

    *command, option, settings = watchdog.add_option(SERVE, "/state/chat")

    assert (*command, option) == (*SERVE, "--watchdog-config")
    assert json.loads(settings) == {"timeout": 60, "dump_dir": "/state/chat"}


def test_older_versions(package: Path) -> None:
    """A vLLM without the watchdog would reject the option."""
    assert watchdog.add_option(SERVE, "/x") == SERVE


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of tests run where vLLM is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert watchdog.add_option(SERVE, "/x") == SERVE


@pytest.mark.parametrize(
    "option",
    [
        ("--watchdog-config", '{"timeout": 5}'),
        ('--watchdog-config={"dump_dir": "/x"}',),
        ("--watchdog_config", "{}"),
        ("--watchdog-config.timeout", "5"),
        ("--watchdog-config.dump_dir=/x",),
        ("--watch", "{}"),
    ],
)
def test_own_option_wins(package: Path, option: tuple[str, ...]) -> None:
    """In each form that vLLM's parser accepts."""
    install_watchdog(package)
    assert watchdog.add_option((*SERVE, *option), "/y") == (*SERVE, *option)


@pytest.mark.parametrize("form", ["{option} {json}", "{option}={json}", "{option}.dump_dir {dir}"])
def test_dumps_of_living_processes(tmp_path: Path, form: str) -> None:
    """Files of earlier processes belong to another engine; others are no dumps."""
    newer = write_dump(tmp_path, "worker_1", 12, age=1)
    older = write_dump(tmp_path, "engine_0", 11, age=2)
    write_dump(tmp_path, "engine_0", 7)
    (tmp_path / "notes.txt").touch()
    settings = json.dumps({"dump_dir": str(tmp_path)}, separators=(",", ":"))
    argv = form.format(option=watchdog.OPTION, json=settings, dir=tmp_path).split()

    assert watchdog.list_dumps((*SERVE, *argv), {11, 12}) == [str(older), str(newer)]


@pytest.mark.parametrize(
    "argv", [("--watchdog-config",), ("--watchdog-config", "[1]"), ("--watchdog-config", "{"), ()]
)
def test_no_folder(argv: tuple[str, ...]) -> None:
    """Without a folder vLLM writes nothing."""
    assert watchdog.list_dumps((*SERVE, *argv), {1}) == []


def test_engine_with_a_watchdog(package: Path, tmp_path: Path) -> None:
    """An engine starts with the option; the newest files of earlier engines remain."""
    install_watchdog(package)
    folder = tmp_path / "chat"
    paths = [write_dump(folder, "engine_0", pid, age=pid) for pid in range(1, 11)]
    engine = LocalEngine("chat", str(folder / "engine.log"))

    engine.start(1, ("no-such-program",), {})

    until(lambda: engine.ended, "it ends")
    assert engine.argv[-2:-1] == ("--watchdog-config",)
    assert json.loads(engine.argv[-1])["dump_dir"] == str(folder)
    assert [path.exists() for path in paths] == [True] * 8 + [False] * 2
