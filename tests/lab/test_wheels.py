"""Where the wheels of the practice image come from."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.core.errors import VlaunchError
from launcher.lab import machine, wheels
from tests import wheel


def answer(code: int, asked: list[tuple[str, ...]]) -> Callable[..., object]:
    """Return a stand-in of `machine.attempt`, for a pip that ends with this exit code."""

    def attempt(*argv: str, **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, code, "", "ERROR: No matching distribution")

    return attempt


def test_torch_may_come_from_its_own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That one wheel only, beside the indexes of pip's configuration; the size is told first."""
    asked: list[tuple[str, ...]] = []
    told: list[str] = []
    monkeypatch.setattr(machine, "attempt", answer(0, asked))

    (file,) = wheels.ensure(tmp_path, told.append).iterdir()
    torch, rest = asked

    assert file.name == "wheels.lock"
    assert torch[-5:-3] == ("torch==2.13.0+cpu", "--extra-index-url")
    assert "--extra-index-url" not in rest
    assert rest[-3:-1] == ("--require-hashes", "--requirement")
    assert len(told) == 1 and "0.5 GB" in told[0]


def test_torch_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says where to get it, and nothing is left."""
    monkeypatch.setattr(machine, "attempt", answer(1, []))
    with pytest.raises(VlaunchError) as caught:
        wheels.ensure(tmp_path, print)

    assert "download.pytorch.org" in caught.value.hint
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
