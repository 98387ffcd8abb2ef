"""Lab models: built once, and equal on all hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.lab import hosts, layout, machine, models, tiny_others
from launcher.lab.layout import Host, Lab


class Docker:
    """A fake that runs scripts without a container: it writes their files into the host's
    folder.
    """

    def __init__(self) -> None:
        self.built: list[tuple[str, str]] = []

    def __call__(self, *argv: str, timeout: float, what: str) -> None:
        script, target, other = argv[-3:]
        home = next(
            Path(argument.split("=", 1)[1]) for argument in argv if argument.startswith("home=")
        )
        folder = home / Path(target).parent.name
        assert (folder / Path(script).name).exists()
        self.built.append((Path(script).name, Path(other).name))
        weights = folder / Path(target).name / "model.safetensors"
        weights.write_text(
            f"{Path(script).name} with"
            f" {sorted(path.name for path in (folder / Path(other).name).iterdir())}"
        )
        weights.chmod(0o600)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Two hosts with folders for models."""
    lab_spec = layout.make_lab(
        name="vlaunch-lab", directory=tmp_path / "lab", subnet="10.77.0.0/24", nodes=2, gpus=1
    )
    for host in lab_spec.hosts:
        hosts.hf_home(host).mkdir(parents=True)
    return lab_spec


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Docker:
    """Fake Docker."""

    def argv(host: Host, *arguments: str) -> tuple[str, ...]:
        return (f"home={hosts.hf_home(host)}", *arguments)

    fake = Docker()
    monkeypatch.setattr(machine, "run", fake)
    monkeypatch.setattr(hosts, "docker_argv", argv)
    return fake


def stored_weights(lab: Lab, name: str) -> list[str]:
    """Return the weights of a model on all hosts."""
    return [(hosts.hf_home(host) / name / "model.safetensors").read_text() for host in lab.hosts]


def test_all_models_are_built_once_and_copied_to_all_hosts(
    lab: Lab, docker: Docker, tmp_path: Path
) -> None:
    """The first one, whose tokenizer the others use, is built first. Models of another image are
    removed.
    """
    cache = tmp_path / "cache"
    messages: list[str] = []
    (cache / "model-of-before").mkdir(parents=True)

    for _ in range(2):
        models.ensure_models(lab, cache, Path("image-1.tar"), messages.append)

    assert docker.built == [
        ("tiny_llama.py", "tiny-llama"),
        *[("tiny_others.py", "tiny-llama")] * 3,
    ]
    assert messages == ["creating the tiny models"]
    assert stored_weights(lab, models.LLAMA) == ["tiny_llama.py with []"] * 2
    for name in (models.MOE, models.EMBED, models.RERANK):
        assert name in tiny_others.KINDS
        assert stored_weights(lab, name) == ["tiny_others.py with ['model.safetensors']"] * 2
    assert len(list(cache.iterdir())) == 1
    for host in lab.hosts:
        assert sorted(path.name for path in hosts.hf_home(host).iterdir()) == [
            "tiny-embed",
            "tiny-llama",
            "tiny-moe",
            "tiny-rerank",
        ]
        assert (
            hosts.hf_home(host) / models.MOE / "model.safetensors"
        ).stat().st_mode & 0o777 == 0o644


def test_another_image_rebuilds_the_models(lab: Lab, docker: Docker, tmp_path: Path) -> None:
    """Its libraries may write other bytes."""
    for archive in ("image-1.tar", "image-2.tar"):
        models.ensure_models(lab, tmp_path / "cache", Path(archive), lambda _: None)

    assert len(docker.built) == 8
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("name", [models.LLAMA, models.MOE, models.RERANK])
def test_a_differing_copy_is_replaced(lab: Lab, docker: Docker, tmp_path: Path, name: str) -> None:
    """Missing, changed or additional files; other hosts and models are not touched."""
    models.ensure_models(lab, tmp_path / "cache", Path("image-1.tar"), lambda _: None)
    before: Any = stored_weights(lab, name)
    (hosts.hf_home(lab.hosts[1]) / name / "model.safetensors").write_text("broken")

    models.ensure_models(lab, tmp_path / "cache", Path("image-1.tar"), lambda _: None)

    assert stored_weights(lab, name) == before
    assert len(docker.built) == 4
