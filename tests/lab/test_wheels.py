"""Where the wheels of the practice image come from."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.errors import VlaunchError
from launcher.lab import machine, wheels
from tests import wheel

PIN = "torch==2.13.0+cpu"
INDEX = "https://torch.example/whl/cpu"
NONE = f"ERROR: No matching distribution found for {PIN}"


class Machine:
    """Answers pip and uv; `pip` is what pip says of torch, in the order it is asked."""

    def __init__(self, *pip: str, uv: str = f"{PIN}\n    # from {INDEX}\n") -> None:
        self.pip, self.uv, self.asked = list(pip), uv, list[tuple[str, ...]]()

    def attempt(self, *argv: str, **_: object) -> subprocess.CompletedProcess[str]:
        """Stand in for `machine.attempt`."""
        self.asked.append(argv)
        if argv[1:3] == ("pip", "compile"):
            assert Path(argv[-1]).read_text() == f"{PIN}\n"
            return self.ended(argv, self.uv, "" if self.uv else "dns error")
        said = self.pip.pop(0) if "--requirement" not in argv else ""
        return self.ended(argv, "", said)

    def ended(self, argv: Sequence[str], out: str, err: str) -> subprocess.CompletedProcess[str]:
        """Return what became of a program that fails when it complains."""
        return subprocess.CompletedProcess(list(argv), 1 if err else 0, out, err)


def ensure(there: Machine, monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """Return what is said while the wheels are downloaded."""
    said: list[str] = []
    monkeypatch.setattr(machine, "attempt", there.attempt)
    found = wheels.ensure(cache, said.append)
    assert [each.name for each in found.iterdir()] == ["wheels.lock"]
    return said


def test_pips_own_configuration_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where pip finds torch for CPUs, nobody else is asked; how much comes is said before it."""
    there = Machine("")
    said = ensure(there, monkeypatch, tmp_path)

    assert len(there.asked) == 2
    assert not any("--index-url" in argv for argv in there.asked)
    assert len(said) == 1 and "0.5 GB" in said[0] and "minute" in said[0]


def test_torch_comes_from_its_own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That one wheel only."""
    there = Machine(NONE, "")
    said = ensure(there, monkeypatch, tmp_path)
    torch, rest = there.asked[2:]

    assert torch[-3:] == (PIN, "--index-url", INDEX)
    assert "--index-url" not in rest
    assert rest[-2] == "--requirement"
    assert INDEX in said[-1]


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (Machine(NONE, uv=""), "asking uv where torch==2.13.0+cpu is failed"),
        (Machine(NONE, uv=f"{PIN}\n"), "uv does not say"),
        (Machine(NONE, "no route to host"), "downloading torch==2.13.0+cpu failed"),
        (Machine("no space left", "no space left"), "downloading torch==2.13.0+cpu failed"),
    ],
    ids=["no uv", "no index", "no network", "other"],
)
def test_torch_cannot_be_had(
    there: Machine, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is said why, with what to do, and nothing is left."""
    with pytest.raises(VlaunchError) as caught:
        ensure(there, monkeypatch, tmp_path)

    assert told in caught.value.message
    assert "pip config" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one whose name and version are right; they are installed as root."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    name, data = wheel.build("torch", "1.0")
    (shelf / name).write_bytes(data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    right = hashlib.sha256(data).hexdigest()
    for digest, cache in (("0" * 64, tmp_path / "wrong"), (right, tmp_path / "right")):
        cache.mkdir()
        lock = f"torch==1.0 --hash=sha256:{digest}\n"
        monkeypatch.setattr(wheels, "lock", lambda lock=lock: lock)
        if digest == right:
            assert (wheels.ensure(cache, print) / name).read_bytes() == data
        else:
            with pytest.raises(VlaunchError) as caught:
                wheels.ensure(cache, print)
            assert right in "".join(caught.value.evidence)
            assert list(cache.iterdir()) == []
