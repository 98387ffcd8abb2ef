"""The program as a whole: commands, exit codes, start-up, and small commands."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from launcher import __version__
from launcher.cli import main
from launcher.cli.main import COMMANDS, run_command
from launcher.core.errors import RequestError, VlaunchError
from tests.command_line import VLAUNCH

pytestmark = pytest.mark.processes

Ending = Callable[..., None]
SHOWN = [name for name, (_, _, help_) in COMMANDS.items() if help_]


def command(function: Callable[[bool], object]) -> click.Command:
    """Register a function as the command `x`."""
    return click.command()(click.option("--verbose", is_flag=True)(function))


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    """Let `vlaunch x` raise or return a value."""

    def make(error: BaseException | None = None, result: object = None) -> None:
        def body(verbose: bool) -> object:
            if error is not None:
                raise error
            return result

        monkeypatch.setitem(COMMANDS, "x", ("types", "x", "for tests"))
        monkeypatch.setattr("types.x", command(body), raising=False)

    return make


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_names_functions_of_commands(name: str) -> None:
    """By module and name, so that an editor finds them; each is named after its command."""
    module, function, _ = COMMANDS[name]
    found = getattr(importlib.import_module(module), function)

    assert isinstance(found, click.Command)
    assert (found.name, function) == (name, name.replace("-", "_"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VlaunchError("failed"), 1),
        (RequestError("wrong"), 2),
        (click.UsageError("wrong"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.exceptions.Exit(7), 7),
        (BrokenPipeError(), 141),
        (OSError(28, "No space left on device", "/home/x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_of_errors(
    error: BaseException, code: int, ending: Ending, capfd: pytest.CaptureFixture[str]
) -> None:
    """1: failure, 2: invalid request, 130: interrupted; never a traceback."""
    ending(error)
    keep = os.dup(1)
    try:
        assert run_command(["x"]) == code
    finally:
        os.dup2(keep, 1)
        os.close(keep)

    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_is_reported_with_a_fix(
    ending: Ending, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the file, and the variables that move it elsewhere."""
    ending(OSError(28, "No space left on device", "/home/x"))
    run_command(["x"])
    err = capsys.readouterr().err

    assert err.startswith("error: [Errno 28] No space left on device: '/home/x'\n")
    assert "XDG_CACHE_HOME" in err


@pytest.mark.parametrize(("result", "code"), [(None, 0), (3, 3), ("text", 0)])
def test_a_commands_result_is_its_exit_code(result: object, code: int, ending: Ending) -> None:
    """For numbers only."""
    ending(result=result)

    assert run_command(["x"]) == code


def test_verbose_shows_where_an_error_came_from(
    ending: Ending, capsys: pytest.CaptureFixture[str]
) -> None:
    """For developers."""
    ending(VlaunchError("failed"))

    assert run_command(["x", "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("upp", "up"), ("exce", "exec"), ("xyzzy", None)]
)
def test_a_mistyped_command_gets_a_suggestion(
    typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    assert run_command([typed]) == 2

    err = capsys.readouterr().err
    assert f"no command `{typed}`" in err
    assert ("did you mean" in err) is (meant is not None)
    assert meant is None or f"did you mean `{meant}`?" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--lock-wait", "abc"), "invalid value for '--lock-wait': `abc` is not a duration"),
        (("--lock-wiat", "1"), "no such option '--lock-wiat'"),
        (("a", "b"), "got unexpected extra argument (b)"),
    ],
)
def test_a_usage_error_is_shown_like_any_other(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lower case, without a full stop, with the command's help as its hint."""
    assert run_command(["down", *argv]) == 2
    error, hint = capsys.readouterr().err.rstrip().split("\n\n")
    assert error.startswith(f"error: {message}")
    assert hint == "hint: see `vlaunch down --help`"


def test_help_lists_every_command_in_the_order_of_need(capsys: pytest.CaptureFixture[str]) -> None:
    """Without hidden ones."""
    assert run_command(["--help"]) == 0
    out = capsys.readouterr().out
    listed = [
        line.split()[0]
        for line in out.split("First cluster, in this order:")[1].split("Options:")[0].splitlines()
        if line.startswith("  ")
    ]

    assert listed == SHOWN
    assert "payload" not in out


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of an error."""
    run_command([])
    out, err = capsys.readouterr()

    assert "First cluster" in out + err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The installed one."""
    assert run_command(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_help_loads_no_slow_module() -> None:
    """For all commands."""
    slow = {"paramiko", "docker", "rich", "pydantic", "yaml", "fabric", "cryptography", "jinja2"}
    code = f"""
import sys
from launcher.cli.main import COMMANDS, run_command
for args in ([], *([name] for name in COMMANDS)):
    run_command([*args, "--help"])
print(sorted({slow} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr == "[]\n"


def test_serve_does_without_optional_packages() -> None:
    """It has none of their options, and runs."""
    code = f"""
from launcher import recipes
recipes.EXTENSIONS = {{}}
from launcher.cli.main import run_command
site = ["-i", {str(Path(__file__).parents[2] / "inventory" / "example.yaml")!r}]
assert run_command(["serve", *site, "--model", "org/m", "--dry-run", "--offline"]) == 0
assert run_command(["serve", *site, "--recipe", "org/m", "--dry-run", "--offline"]) == 2
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)

    assert "no such option '--recipe'" in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    """`vlaunch schema` piped into `head -1`."""
    done = subprocess.run(
        ["sh", "-c", '"$@" schema | head -n 1', "sh", *VLAUNCH],
        capture_output=True,
        text=True,
        check=True,
    )

    assert (done.stdout, done.stderr) == ("{\n", "")


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For editors, equal to the packaged one."""
    assert run_command(["schema"]) == 0
    shipped = json.loads((Path(main.__file__).parents[1] / "inventory" / "schema.json").read_text())

    assert json.loads(capsys.readouterr().out) == shipped


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("- a\n", "mapping"), ("cluster: [", ""), ("a: &a [x]\nb: [*a, *a]\n", "")],
)
def test_an_invalid_inventory_is_an_invalid_request(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one clear error, no traceback, for all commands."""
    path = tmp_path / "inventory.yaml"
    path.write_text(text)

    assert run_command(["up", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_directory_as_inventory_is_an_invalid_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a missing file."""
    assert (
        run_command(["status", "-i", str(tmp_path)])
        == run_command(["down", "-i", str(tmp_path / "no.yaml")])
        == 2
    )
    assert capsys.readouterr().err.count("error: ") == 2


def test_an_inventory_as_an_argument_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Only `up` takes one, and people try it elsewhere."""
    assert run_command(["check", "inventory.yaml"]) == run_command(["config", "a.yml"]) == 2
    assert capsys.readouterr().err.count("hint: pass the inventory with `-i`") == 2
    assert run_command(["config", "word"]) == 2
    assert "hint: see `vlaunch config --help`" in capsys.readouterr().err


def test_the_program_exits_directly(tmp_path: Path) -> None:
    """The interpreter's shutdown may hang; all output is flushed before."""
    hangs = (
        "import atexit, time; atexit.register(time.sleep, 60); from launcher.cli.main import main;"
        " main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs, "--version"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


def test_output_that_cannot_be_written_is_an_error() -> None:
    """A full disk behind `>`, noticed at the last write."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*VLAUNCH, "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
            check=False,
        )

    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
