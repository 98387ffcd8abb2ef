"""Files on their way to the head: which pieces are sent, and how a script would read each."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.batch import transfer
from launcher.batch.inputs import Shipped
from launcher.core.domain import Inventory
from launcher.tools.site import Site

Load = Callable[..., Inventory]
DATA = bytes(range(250))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """A file of 250 bytes, in a folder with an awkward name; a piece has 100."""
    monkeypatch.setattr(transfer, "PIECE", 100)
    path = tmp_path / "it's a $folder" / "-rows"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return Shipped(
        to="input/0000-rows",
        label="rows",
        path=path,
        bytes=250,
        sha256=hashlib.sha256(DATA).hexdigest(),
    )


@pytest.mark.parametrize(
    ("have", "offsets"),
    [
        ({}, [0, 100, 200]),
        ({"input/0000-rows": 250}, []),
        ({"input/0000-rows": 249}, [0, 100, 200]),
        ({"input/.0000-rows.part": 130}, [130, 230]),
        # all of it, and yet not whole: it was not what was announced
        ({"input/.0000-rows.part": 250}, [0, 100, 200]),
        ({"input/.0000-rows.part": 900}, [0, 100, 200]),
    ],
)
def test_only_what_is_missing_is_sent(
    load: Load, file: Shipped, have: dict[str, int], offsets: list[int]
) -> None:
    """From where it stopped, to the end."""
    steps = transfer.steps(Site(load()), "/w", have, [file])
    sent = [step.command.stdin() if step.command.stdin else b"" for step in steps]
    words = [step.command.argv for step in steps]

    assert [int(argv[argv.index("--offset") + 1]) for argv in words] == offsets
    assert b"".join(sent) == DATA[offsets[0] if offsets else 250 :]
    assert ["--last" in argv for argv in words] == [at == offsets[-1] for at in offsets]


@pytest.mark.parametrize("have", [{}, {"input/.0000-rows.part": 130}])
def test_a_script_reads_the_same_bytes(load: Load, file: Shipped, have: dict[str, int]) -> None:
    """Also of a file that is called like an option, and where `head` ends before `tail`."""
    for step in transfer.steps(Site(load()), "/w", have, [file]):
        shown = f"set -euo pipefail; {step.command.shown_stdin} | cat"
        done = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, cwd="/")

        assert step.command.stdin is not None
        assert done.stdout == step.command.stdin()


def test_an_empty_file_is_sent(load: Load, file: Shipped, tmp_path: Path) -> None:
    """It has one piece, of nothing, which makes it whole."""
    path = tmp_path / "empty"
    path.touch()
    digest = hashlib.sha256().hexdigest()
    (step,) = transfer.steps(
        Site(load()),
        "/w",
        {},
        [Shipped(to="input/0000-e", label="e", path=path, bytes=0, sha256=digest)],
    )

    assert step.command.stdin is not None
    assert step.command.stdin() == b""
    assert step.command.argv[-2:] == ("--last", digest)


def test_nothing_is_read_before_it_is_due(load: Load, file: Shipped) -> None:
    """A plan holds no file in memory; what is gone by then is told then."""
    steps = transfer.steps(Site(load()), "/w", {}, [file])
    file.path.unlink()

    assert steps[0].command.stdin is not None
    with pytest.raises(FileNotFoundError):
        steps[0].command.stdin()
