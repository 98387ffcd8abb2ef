"""Shell programs for nodes, and their assembly from files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from launcher.core import shell
from launcher.lab import image
from launcher.tools import docker

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "launcher" / "core" / "shell"
NAMES = sorted(path.stem for path in FOLDER.glob("*.sh"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder in place of the package's."""
    monkeypatch.setattr(shell, "_FOLDER", tmp_path)
    monkeypatch.setattr(shell, "program_text", shell.program_text.__wrapped__)
    return tmp_path


def test_the_leading_comment_is_not_sent(files: Path) -> None:
    """Later comments are sent."""
    (files / "a.sh").write_text(
        "#!/bin/sh\n# What for.\n#\n# shellcheck …\n\necho 1 # one\n# two\n"
    )

    assert shell.program_text("a") == "echo 1 # one\n# two\n"


def test_included_files(files: Path) -> None:
    """In place, or as one quoted argument."""
    (files / "begin.sh").write_text("#!/bin/sh\n# Begins.\n\nx=1\n")
    (files / "word.sh").write_text('# A word.\necho "it\'s $1"\n')
    (files / "a.sh").write_text('#!/bin/sh\n. ./begin.sh\n\nsh -c "$(cat ./word.sh)" sh "$x"\n')
    sent = shell.program_text("a")
    expected = subprocess.run(["sh", "a.sh"], cwd=files, capture_output=True, check=True).stdout

    assert sent.startswith("x=1\n\nsh -c 'echo ")
    assert subprocess.run(["sh", "-c", sent], capture_output=True, check=True).stdout == expected
    assert expected == b"it's 1\n"


def test_sent_programs_need_no_other_file() -> None:
    """Nodes have none of them."""
    for name in NAMES:
        assert "./" not in re.sub(r'"\./secrets/|"\./server/', "", shell.program_text(name)), name


def test_every_program_is_valid_shell(tmp_path: Path) -> None:
    """After assembly, too."""
    for name in NAMES:
        (tmp_path / name).write_text(shell.program_text(name))
    check = 'for each; do sh -n "$each" || echo "$each"; done'
    args = [str(tmp_path / name) for name in NAMES]
    done = subprocess.run(["sh", "-c", check, "sh", *args], capture_output=True, check=True)

    assert (done.stdout, done.stderr) == (b"", b"")


def test_every_file_of_shell_is_used_and_packed() -> None:
    """Unused files are leftovers; files missing from the wheel fail on a user's machine."""
    python = "".join(path.read_text() for path in (ROOT / "launcher").rglob("*.py"))
    named = re.findall(r'shell\.program_text\("(\w+)"\)', python)
    for name in named:  # grows: an included program may include another one
        text = (FOLDER / f"{name}.sh").read_text()
        named += re.findall(r"(?:^\. |cat )\./(\w+)\.sh", text, re.MULTILINE)
    packed = {file.relative_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}

    assert sorted(set(named)) == NAMES
    for path in (ROOT / "launcher").rglob("*.sh"):
        assert str(path.relative_to(ROOT)) in packed
        assert path.parent == FOLDER or f'"{path.name}"' in python, path


def test_names_shared_with_python() -> None:
    """They are equal on both sides."""
    assert f"label={docker.CLUSTER}=" in shell.program_text("probe")
    assert f"label={docker.CLUSTER}=" in shell.program_text("diagnosis")
    assert f'"{docker.ROLE}"' in shell.program_text("diagnosis")
    assert f"cd /{image.SITE}\n" in shell.program_text("lab_image")
