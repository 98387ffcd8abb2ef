"""Node programs and secrets: written only if they differ, with private permissions; run locally."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core import shell
from launcher.core.domain import Inventory, Secret
from launcher.core.plan import Step
from launcher.tools.host import HostFacts
from launcher.tools.shipped import node_files
from launcher.tools.shipped.certificates import Renewal
from launcher.tools.site import Site
from tests.served import IMAGE

Load = Callable[..., Inventory]
SECRETS = {"RAY_AUTH_TOKEN": Secret("tok"), "HF_TOKEN": Secret("hf\n$x'")}
FRESH = HostFacts(home="/home/ops")
WRITTEN = HostFacts(home="/home/ops", files=node_files.payload_digests())


def site_with(inventory: Inventory, facts: HostFacts) -> Site:
    """Return a site whose head has these facts."""
    return Site(inventory, {inventory.head.name: facts})


def titles(steps: list[Step]) -> list[str]:
    return [step.title for step in steps]


def run_step(step: Step) -> None:
    """Run a step locally."""
    stdin = step.command.stdin() if step.command.stdin else b""
    subprocess.run(step.command.argv, input=stdin, check=True, timeout=120)


@pytest.mark.parametrize("user", ["", "0", "root", "0:0", "root:video"])
def test_an_image_of_root_needs_no_permissions(user: str, load: Load) -> None:
    """Root may read all files."""
    inventory = load()
    facts = replace(WRITTEN, images={inventory.image: replace(IMAGE, user=user)})

    assert node_files.handover_steps(site_with(inventory, facts), inventory.head) == []


def test_an_images_user_gets_permissions(load: Load) -> None:
    """Root in a container of that image sets them after the secrets are written, only if a
    container of the node is recreated or restarted, or gets new certificates.
    """
    inventory = load("docker: [sudo, -n, docker]")
    facts = replace(WRITTEN, images={inventory.image: replace(IMAGE, user="vllm")})
    site = site_with(inventory, facts)
    (step,) = node_files.handover_steps(site, inventory.head)
    command = " ".join(step.command.argv)

    assert step.title == "giving the image's user vllm read access to the secrets"
    assert "sudo -n docker run --rm" in command
    assert "--network none --user 0:0 --volume /home/ops/.vlaunch/c/secrets:/handed/0" in command
    assert command.endswith("hand-over vllm /handed/0 /handed/1 /handed/2")
    assert node_files.file_steps(site, inventory.head, SECRETS, fresh=False) == []
    renewal = Renewal(nodes={node.name: Secret("pem") for node in site.nodes}, reasons={})
    stages = node_files.certificate_stages(site, renewal)
    assert [titles(list(stage.steps)) for stage in stages] == [
        [f"writing secret {name}", step.title, f"writing secret {name}"]
        for name in ("AGENT_CERTIFICATE", "AGENT_CA")
    ]


def test_permissions_are_the_groups(tmp_path: Path) -> None:
    """Run for this test's group: secrets are readable, folders and their contents writable, and the
    owner stays; a user unknown to the image gets no access.
    """
    secrets, server = tmp_path / "secrets", tmp_path / "server"
    (server / "chat").mkdir(parents=True)
    secrets.mkdir(mode=0o700)
    for file in (secrets / "TOKEN", server / "chat" / "desired.json"):
        file.write_text("x")
        file.chmod(0o600)

    def hand_over(user: str) -> subprocess.CompletedProcess[str]:
        argv = ["sh", "-c", shell.program_text("hand_over"), "hand-over", user, secrets, server]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def modes() -> list[str]:
        files = (secrets, secrets / "TOKEN", server, server / "chat", server / "chat/desired.json")
        return [oct(path.stat().st_mode & 0o7777)[2:] for path in files]

    nobody = hand_over("no-such-user-here")
    assert (nobody.returncode, nobody.stderr) == (1, "the image has no user no-such-user-here\n")
    assert modes()[:2] == ["700", "600"]
    assert hand_over(f"{os.getuid()}:{os.getgid()}").returncode == 0
    assert modes() == ["750", "640", "2775", "2775", "660"]
    assert (secrets / "TOKEN").stat().st_uid == os.getuid()


def test_the_archive_is_reproducible(tmp_path: Path) -> None:
    """Without times and users of the control machine."""
    with tarfile.open(fileobj=io.BytesIO(node_files.payload_tar())) as archive:
        entries = archive.getmembers()

    assert {entry.name for entry in entries} == {
        path.removeprefix("payload/") for path in node_files.payload_digests()
    }
    assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in entries} == {
        (0, 0, "", 0o755)
    }


def test_programs_are_single_files() -> None:
    """As mounted into containers."""
    assert set(node_files.payload_digests()) == {
        "payload/entry.sh",
        "payload/agent.pyz",
        "payload/batch.pyz",
        "payload/network.pyz",
    }


def test_the_shipped_agent_stands_alone(load: Load, tmp_path: Path) -> None:
    """The agent and its chat client start without the launcher and its libraries."""
    inventory = load(f"state_dir: {tmp_path}")
    run_step(node_files.file_steps(site_with(inventory, FRESH), inventory.head, {}, fresh=False)[0])
    archive, python = tmp_path / "c/payload/agent.pyz", (sys.executable, "-I", "-B")
    start = "; ".join(
        (
            f"import sys; sys.path.insert(0, '{archive}')",
            "from vlaunch_agent.agent.%s import main",
            "main()",
        )
    )
    ran = [
        subprocess.run(
            (*python, *options, "-c", start % module, "--help"),
            capture_output=True,
            input="{}",
            text=True,
            timeout=120,
            check=False,
        )
        for module, options in (("__main__", ()), ("health.chat", ("-S",)))
    ]

    assert [(process.returncode, process.stderr) for process in ran] == [(0, ""), (1, "")]
    assert "--lead" in ran[0].stdout
    assert ran[1].stdout == '{"error": "\'messages\'"}\n'


def test_files_are_written_only_where_they_differ(load: Load) -> None:
    """By sha256."""
    inventory = load()
    old = HostFacts(
        home="/home/ops", files={**node_files.payload_digests(), "payload/batch.pyz": "0" * 64}
    )

    assert (
        titles(
            node_files.file_steps(
                site_with(inventory, WRITTEN), inventory.head, SECRETS, fresh=False
            )
        )
        == []
    )
    assert titles(
        node_files.file_steps(site_with(inventory, old), inventory.head, SECRETS, fresh=False)
    ) == ["writing the node programs that containers mount"]


def test_secrets_are_written_when_a_container_is_about_to_start(load: Load) -> None:
    """Ordered by name, and only then."""
    inventory = load()

    assert titles(
        node_files.file_steps(site_with(inventory, WRITTEN), inventory.head, SECRETS, fresh=True)
    ) == [
        "creating the folders that containers write to",
        "writing secret HF_TOKEN",
        "writing secret RAY_AUTH_TOKEN",
    ]


def test_no_secret_is_in_an_argv_or_a_title(load: Load) -> None:
    """Secrets are sent on standard input, which is created on demand."""
    inventory = load()
    steps = node_files.file_steps(
        site_with(inventory, FRESH), inventory.head, {"EXTRA": Secret("very-secret")}, fresh=True
    )

    assert "very-secret" not in repr(steps)
    assert steps[-1].command.stdin is not None
    assert steps[-1].command.stdin() == b"very-secret"


def test_the_steps_on_a_node(load: Load, tmp_path: Path) -> None:
    """Files match their digests, secrets are readable by their owner only, and no other file
    remains.
    """
    inventory = load(f"state_dir: {tmp_path}/a b".replace(" b", "-b"))
    for step in node_files.file_steps(Site(inventory), inventory.head, SECRETS, fresh=True):
        run_step(step)
    folder = tmp_path / "a-b" / "c"
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}

    assert set(files) == {
        *node_files.payload_digests(),
        "secrets/HF_TOKEN",
        "secrets/RAY_AUTH_TOKEN",
    }
    assert {
        name: hashlib.sha256(files[name].read_bytes()).hexdigest()
        for name in node_files.payload_digests()
    } == node_files.payload_digests()
    assert files["secrets/HF_TOKEN"].read_bytes() == b"hf\n$x'"
    assert stat.S_IMODE(files["secrets/HF_TOKEN"].stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "secrets").stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711


def run_first(load: Load, state_dir: Path, inventory: str = "") -> subprocess.CompletedProcess[str]:
    """Run the first step, with and without node programs."""
    site = site_with(load(f"state_dir: {state_dir}\n{inventory}"), WRITTEN)
    folders = node_files.file_steps(site, site.head, SECRETS, fresh=True)[0].command.argv
    unpack = node_files.file_steps(Site(site.inventory), site.head, SECRETS, fresh=True)[0].command
    assert unpack.stdin is not None
    done = subprocess.run(folders, capture_output=True, text=True, timeout=120, check=False)
    also = subprocess.run(
        unpack.argv, input=unpack.stdin(), capture_output=True, timeout=120, check=False
    )
    assert (also.returncode, also.stderr.decode()) == (done.returncode, done.stderr)
    return done


FOLDERS = ("c", "c/secrets", "c/payload", "c/server", "cache/c")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("how", ["open", "link", "dangling", "file"])
def test_a_writable_folder_of_others_is_rejected(
    load: Load, tmp_path: Path, name: str, how: str
) -> None:
    """Another user may have created it in a world-writable parent; then no file is written."""
    state = tmp_path / "state"
    path = state / name
    path.parent.mkdir(parents=True)
    if how == "open":
        path.mkdir()
        path.chmod(0o777)
    elif how == "file":
        path.touch()
    else:
        (tmp_path / "link").mkdir()
        path.symlink_to(tmp_path / ("link" if how == "link" else "nothing"))
    before = sorted(state.rglob("*"))
    done = run_first(load, state)

    assert (done.returncode, done.stdout) == (1, "")
    assert str(path) in done.stderr
    assert done.stderr.endswith(
        ": another user could change what is kept there: correct it, or set another state_dir or"
        " cache_dir\n"
    )
    assert sorted(state.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", [".", *FOLDERS])
def test_a_folder_of_another_user_is_rejected(load: Load, tmp_path: Path, name: str) -> None:
    """Even a private one."""
    state = tmp_path / "state"
    (state / name).mkdir(parents=True)
    os.chown(state / name, 65534, 65534)
    done = run_first(load, state)

    assert done.returncode == 1
    assert str(state / name) in done.stderr
    assert not [path for path in state.rglob("*") if path.is_file()]


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_healthy_folders_are_accepted(load: Load, tmp_path: Path, mask: int) -> None:
    """With any usual umask, in /tmp or behind the user's own link, on shared storage for the
    compile cache, with an image user's group; repeatedly.
    """
    shared = tmp_path / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)
    link = tmp_path / "state"
    link.symlink_to(shared)
    before = os.umask(mask)
    try:
        for _ in range(2):
            for state in (shared, link, shared / "deeper" / "still"):
                done = run_first(load, state, f"cache_dir: {shared}")
                assert (done.returncode, done.stderr) == (0, "")
                (state / "c" / "server").chmod(0o2775)
                (state / "c" / "secrets").mkdir(exist_ok=True)
                (state / "c" / "secrets").chmod(0o750)
    finally:
        os.umask(before)

    assert not list(shared.rglob(".owner*"))


def test_a_file_system_that_maps_users(load: Load, tmp_path: Path) -> None:
    """As NFS maps root to nobody: files created by the user count as its own."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "stat"
    real = shutil.which("stat")
    fake.write_text(
        f'#!/bin/sh\n[ "$*" = "${{*#*%u}}" ] || {{ echo 65534; exit; }}\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    site = site_with(load(f"state_dir: {tmp_path}/state"), WRITTEN)
    command = node_files.file_steps(site, site.head, SECRETS, fresh=True)[0].command
    for _ in range(2):
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        subprocess.run(command.argv, env={"PATH": path}, check=True, timeout=120)


def test_secrets_are_replaced_atomically(load: Load, tmp_path: Path) -> None:
    """A container that starts in between reads the old or the new one."""
    inventory = load(f"state_dir: {tmp_path}")
    for value in ("long-old-value", "new"):
        for step in node_files.file_steps(
            site_with(inventory, WRITTEN), inventory.head, {"A": Secret(value)}, fresh=True
        ):
            run_step(step)

    assert (tmp_path / "c/secrets/A").read_text() == "new"
    assert len(list((tmp_path / "c/secrets").iterdir())) == 1


def test_a_secret_removed_from_the_inventory_is_removed_from_nodes(
    load: Load, tmp_path: Path
) -> None:
    """All files in the mounted folder become variables of the container, so an old file is an old
    secret in use.
    """
    inventory = load(f"state_dir: {tmp_path}")
    for step in node_files.file_steps(
        site_with(inventory, WRITTEN),
        inventory.head,
        {"OLD": Secret("x"), "A": Secret("y")},
        fresh=True,
    ):
        run_step(step)
    facts = HostFacts(files=node_files.payload_digests(), secret_names=("A", "OLD"))
    for step in node_files.file_steps(
        site_with(inventory, facts), inventory.head, {"A": Secret("y")}, fresh=True
    ):
        run_step(step)

    assert [path.name for path in (tmp_path / "c/secrets").iterdir()] == ["A"]


@pytest.mark.parametrize("to", ["disk", "memory"])
def test_secrets_are_removed_from_other_folders(load: Load, tmp_path: Path, to: str) -> None:
    """Including outdated memory folders; folders in use and other users' files stay."""
    inventory = load(f"state_dir: {tmp_path}/disk\nsecrets_in: {to}")
    places = {name: tmp_path / name / "c" for name in ("disk", "today", "before", "foreign")}
    for place in places.values():
        (place / "secrets").mkdir(parents=True)
        (place / "secrets" / "A").write_text("old")
    (places["foreign"] / "mine").touch()
    folders = tuple(str(place) for name, place in places.items() if name != "disk")
    facts = replace(
        WRITTEN,
        secret_names=("A",),
        memory_dir=str(tmp_path / "today"),
        secrets_in_memory=("A",),
        folders=folders,
    )
    for step in node_files.file_steps(
        site_with(inventory, facts), inventory.head, {"A": Secret("new")}, fresh=True
    ):
        run_step(step)
    remaining = {
        name: (place / "secrets" / "A").read_text()
        for name, place in places.items()
        if (place / "secrets" / "A").exists()
    }

    assert remaining == {"disk" if to == "disk" else "today": "new"}
    assert (places["before"].parent.exists(), (places["foreign"] / "mine").exists()) == (
        False,
        True,
    )


def test_nodes_with_a_shared_home(load: Load, tmp_path: Path) -> None:
    """On NFS all nodes write the same file at once."""
    inventory = load(f"state_dir: {tmp_path}")
    steps = [
        step
        for _ in range(12)
        for step in node_files.file_steps(
            site_with(inventory, WRITTEN), inventory.head, {"A": Secret("value")}, fresh=True
        )
    ]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(run_step, steps))

    assert [path.name for path in (tmp_path / "c/secrets").iterdir()] == ["A"]
    assert (tmp_path / "c/secrets/A").read_text() == "value"


def test_the_logs_of_engines_are_private(tmp_path: Path, load: Load) -> None:
    """They contain prompts; a folder shared with an image's user stays shared."""
    inventory = load()
    steps = node_files.file_steps(
        site_with(inventory, WRITTEN), inventory.head, SECRETS, fresh=True
    )
    (argv,) = [step.command.argv for step in steps if "folders" in step.title]
    local_argv = [
        str(tmp_path / "c") if part.endswith("/.vlaunch/c") else part for part in argv[:5]
    ]
    subprocess.run(local_argv, check=True)
    server_dir = tmp_path / "c" / "server"
    assert server_dir.stat().st_mode & 0o7777 == 0o700
    server_dir.chmod(0o2770)
    subprocess.run(local_argv, check=True)
    assert server_dir.stat().st_mode & 0o7777 == 0o2770
