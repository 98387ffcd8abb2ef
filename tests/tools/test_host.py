"""The probe, run locally with a fake `docker`, and the methods of its facts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.app.certificates import make_certificate
from launcher.core import shell
from launcher.core.domain import Node
from launcher.tools import host
from launcher.tools.host import Gpu, HostFacts, host_output


def unfinished_models(home: Path) -> dict[str, str]:
    argv = ["sh", "-c", shell.program_text("models_unfinished"), "models", str(home)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return {model.model: model.kind for model in host.parse_unfinished(ran.stdout)}


def test_unfinished_copies_and_downloads_are_named(tmp_path: Path) -> None:
    """By names or folders; complete ones are not listed."""
    cached, mine, whole = (
        tmp_path / name for name in ("hub/models--org--m", "my model", "hub/models--org--whole")
    )
    for folder in (cached / "blobs", mine / ".vlaunch/parts", whole / ".vlaunch/records"):
        folder.mkdir(parents=True)
    (whole / "blobs").mkdir()
    (whole / "blobs" / "a").write_bytes(b"x")
    assert unfinished_models(tmp_path) == {}
    (cached / "blobs" / "a.incomplete").write_bytes(b"x" * 9000)
    (mine / ".vlaunch/parts/0").write_bytes(b"x" * 9000)

    assert unfinished_models(tmp_path) == {"org/m": "download", str(mine): "copy"}


def test_no_home_is_no_error(tmp_path: Path) -> None:
    """As before the first model."""
    assert unfinished_models(tmp_path / "none") == {}


def test_summaries_name_the_command_that_continues() -> None:
    """And the progress."""
    (unfinished,) = host.parse_unfinished(
        "noise\nunfinished copy: 2048 KiB of /hf/hub/models--org--m\n"
    )

    assert unfinished.summary == (
        "a copy of org/m is incomplete, 2 MiB so far: `vlaunch model copy org/m` continues it"
    )
    assert host.parse_unfinished(None) == ()


@pytest.mark.processes
def test_the_probe_runs_on_this_machine_without_docker(tmp_path: Path) -> None:
    """The real script, in an empty home, with a missing `docker`."""
    argv = host.probe(
        ("no-such-docker",),
        cluster="c",
        state_dir="",
        hf_home=str(tmp_path / "a/b"),
        accelerator="cpu",
        images=("x:1", "y:2"),
    )
    home = tmp_path / "home"
    (home / ".vlaunch/c/payload").mkdir(parents=True)
    (home / ".vlaunch/c/payload/head.py").write_text("")
    (home / ".vlaunch/c/secrets").mkdir()
    (home / ".vlaunch/c/secrets/RAY_AUTH_TOKEN").write_text("abc")
    (home / ".vlaunch/c/front").mkdir()
    first, second = make_certificate("front"), make_certificate("authority")
    (home / ".vlaunch/c/front/tls.pem").write_text(first + second)
    done = subprocess.run(
        argv, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=True
    )
    facts = host_output.parse_probe(done.stdout)

    assert facts.front_certificate.strip() == first.partition("\n-----BEGIN PRIVATE")[0]
    assert facts.home == str(home)
    assert facts.disk_free is not None
    assert facts.docker_version is None
    assert facts.part_errors["docker"]
    assert facts.images == {}
    assert {name: digest for name, digest in facts.files.items() if "front" not in name} == {
        "payload/head.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    }
    assert (facts.token, facts.secret_names) == ("abc", ("RAY_AUTH_TOKEN",))


@pytest.mark.processes
def test_the_probe_uses_the_nodes_docker_command(tmp_path: Path) -> None:
    """A fake docker with arguments before it, and names with spaces."""
    fake = tmp_path / "docker"
    fake.write_text(
        f"#!{sys.executable}\nimport json, sys\na = sys.argv[1:]\nif a[0] == 'version':"
        " print(json.dumps({'Version': '28'}))\nelif a[0] == 'info':"
        " print(json.dumps({'Runtimes': {'nvidia': {}}}))\nelif a[:2] == ['image',"
        " 'inspect']: print(json.dumps([{'Id': a[2], 'RootFS': {}, 'Config': {}}]))\nelif"
        " a[0] == 'images': print('vlaunch/ray:made')\nelif a[0] == 'ps': assert a[-1] =="
        " 'label=vlaunch.cluster=c'; print('id1')\nelif a[0] == 'inspect':"
        " print(json.dumps([{'Id': a[1], 'Name': '/n', 'Config': {}, 'State': {}}]))\n"
    )
    fake.chmod(0o755)
    argv = host.probe(
        ("env", "A=1", str(fake)),
        cluster="c",
        state_dir=str(tmp_path),
        hf_home="/",
        accelerator="cpu",
        images=("x:1",),
    )
    facts = host_output.parse_probe(
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    )

    assert (facts.docker_version, facts.runtimes) == ("28", ("nvidia",))
    assert set(facts.images) == {"x:1", "vlaunch/ray:made"}
    assert [container.id for container in facts.containers] == ["id1"]


@pytest.mark.processes
def test_the_token_is_read_from_its_previous_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a memory folder that would not be chosen now; the disk takes precedence."""
    me = f"test-{os.getpid()}"
    memory, disk = Path(f"/dev/shm/vlaunch-{me}/c/secrets"), tmp_path / "c" / "secrets"
    for name, script in (("id", f"[ $1 = -u ] && echo 0 || echo {me}"), ("stat", "echo other")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    argv = host.probe(
        ("false",), cluster="c", state_dir=str(tmp_path), hf_home="/", accelerator="cpu", images=()
    )
    tokens = []
    try:
        for folder in (memory, disk):
            folder.mkdir(parents=True)
            (folder / "RAY_AUTH_TOKEN").write_text(f"of {folder}".replace(" ", "-"))
            facts = host_output.parse_probe(
                subprocess.run(argv, capture_output=True, text=True, check=False).stdout
            )
            tokens.append((facts.memory_dir, facts.token))
    finally:
        shutil.rmtree(memory.parents[1])

    assert tokens == [("", f"of-{memory}"), ("", f"of-{disk}")]


@pytest.mark.processes
def test_a_silent_docker_is_queried_once(tmp_path: Path) -> None:
    """Queries of a hanging daemon take until their deadline: five would exceed the probe's."""
    calls = tmp_path / "asked"
    argv = host.probe(
        ("sh", "-c", f'echo "$1" >> {calls}; exit 1', "docker"),
        cluster="c",
        state_dir=str(tmp_path),
        hf_home="/",
        accelerator="cpu",
        images=("x:1",),
    )
    subprocess.run(argv, capture_output=True, check=True)

    assert calls.read_text() == "version\n"


@pytest.mark.processes
def test_a_hanging_part_does_not_affect_others() -> None:
    """Parts have their own deadline with `timeout`, which the script must use."""
    script = host.probe(
        ("docker",), cluster="c", state_dir="", hf_home="/", accelerator="cpu", images=()
    )[2]
    queries = [
        line
        for line in script.splitlines()
        if '"$@" images' in line or '"$@" ps' in line or '"$@" inspect' in line
    ]

    assert len(queries) == 5
    assert all("timeout -k 2 15" in line or "part " in line for line in queries)
    assert shutil.which("timeout")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["there", "later/on"])
def test_the_probe_checks_write_access_without_writing(tmp_path: Path, name: str) -> None:
    """On the folder itself, or its nearest existing parent."""
    (tmp_path / "there").mkdir()
    argv = host.probe(
        ("no-docker",),
        cluster="c",
        state_dir=str(tmp_path / name),
        hf_home="/",
        accelerator="cpu",
        images=(),
    )
    done = subprocess.run(
        argv, check=True, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    facts = host_output.parse_probe(done.stdout)

    assert facts.state is not None
    assert facts.state.writable
    assert facts.state.free > 0
    assert not (tmp_path / "later").exists()


@pytest.mark.processes
def test_the_used_gpus_of_a_node() -> None:
    """Those named by index or UUID, else its first ones."""
    gpus = (
        Gpu(
            index=at, name="H100", memory_total=81559, memory_used=4, driver="580", uuid=f"GPU-{at}"
        )
        for at in range(8)
    )
    facts = HostFacts(gpus=tuple(gpus))
    node = Node(name="n", host="n", ip="10.0.0.1", gpus=2)

    assert [gpu.index for gpu in facts.used_gpus(node)] == [0, 1]
    assert [gpu.index for gpu in facts.used_gpus(replace(node, gpu_ids=("GPU-6", "4")))] == [4, 6]
    assert facts.used_gpus(replace(node, gpu_ids=("9",))) == ()
