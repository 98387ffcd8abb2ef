"""Rules about paths in the containers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.core.domain import Inventory, Secret
from launcher.tools import containers, docker
from launcher.tools.site import Site

Load = Callable[..., Inventory]
Mistakes = Callable[..., list[str]]

_OWN = {
    containers.PAYLOAD: "vlaunch mounts its node programs",
    containers.SECRETS: "vlaunch mounts the secrets",
    containers.SERVERS: "vlaunch mounts the state of servers",
    containers.COMPILED: "vlaunch mounts the compile cache",
}


@pytest.mark.parametrize(
    "folder", ["/data/huggingface", "/data/huggingface/x", "/data//huggingface/"]
)
def test_the_compile_cache_is_outside_the_model_cache(mistakes: Mistakes, folder: str) -> None:
    """Nodes may share the latter; reported once, at the responsible key."""
    (message,) = mistakes(f"cache_dir: {folder}")

    assert message.startswith("3: cache_dir: should be outside `hf_home` (/data/huggingface)")


def test_nodes_are_judged_by_their_own_homes(mistakes: Mistakes, load_text: Load) -> None:
    """Homes may differ."""
    nodes = "\nnodes: [{{host: a, ip: 10.0.0.1, gpus: 1, {}}}]"

    assert load_text("cache_dir: /data/cache").head.cache_dir == "/data/cache"
    assert mistakes("cache_dir: /a/b", nodes.format("hf_home: /a")) != []
    assert mistakes("hf_home: /a", nodes.format("cache_dir: /a/b"))[0].startswith(
        "4: nodes[0].cache_dir: should be outside `hf_home` (/a)"
    )
    assert mistakes("hf_home: /a", nodes.format("hf_home: /b, cache_dir: /a/b")) == []


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("[/a:/m, /b:/m/]", "mounts[1]: should have a target of its own; `/m` is used on line 3"),
        ("[/a:/m, /b:/m/./]", "mounts[1]: should have a target of its own; `/m` is used on line 3"),
        ("[/a:/m, /b://m]", "mounts[1]: should have a target of its own; `/m` is used on line 3"),
        ("[/a:/x, /b:/x]", "mounts[1]: should have a target of its own; `/x` is used on line 3"),
        ("[/a:/.]", "mounts[0]: should not cover the container's root directory"),
    ],
)
def test_mounts_do_not_overlap(mistakes: Mistakes, mounts: str, expected: str) -> None:
    """Docker rejects two mounts on one path."""
    assert [f"3: {expected}"] == mistakes(f"mounts: {mounts}")


def test_invalid_mounts_do_not_affect_others(
    mistakes: Mistakes,
) -> None:
    """Their placeholders are no targets."""
    messages = mistakes("mounts:\n- /a\n- b:/m\n- c:/m\n- /d:/n\n- /e:/n")

    assert [message.partition(": should")[0] for message in messages] == [
        "4: mounts[0]",
        "5: mounts[1]",
        "6: mounts[2]",
        "8: mounts[4]",
    ]
    assert messages[-1].endswith("`/n` is used on line 7")


@pytest.mark.parametrize(("place", "what"), _OWN.items())
def test_vlaunchs_own_mounts_are_reserved(
    mistakes: Mistakes, load_text: Load, place: str, what: str
) -> None:
    """On them, inside them, and around them without write access: Docker would fail once the old
    container is removed.
    """
    around = place.rpartition("/")[0]
    sealed = (
        f"should be writable, or have another target: Docker must make `{place}` in it, where"
        f" {what}"
    )

    assert mistakes(f"mounts: [/a:{place}/]") == [
        f"3: mounts[0]: should have another target: {what} at `{place}`"
    ]
    assert mistakes(f"mounts: [/a:{place}/b]") == [
        f"3: mounts[0]: should have a target outside `{place}`, where {what}"
    ]
    assert mistakes(f"mounts: [/a:{around}:ro]") == [f"3: mounts[0]: {sealed}"]
    assert load_text(f"mounts: ['/a:{around}', '/a:{place}-2', '/a:{around}/other:ro']").mounts


def test_every_mount_of_a_container_is_reserved(load_text: Load, mistakes: Mistakes) -> None:
    """New mounts of vlaunch are reserved automatically."""
    inventory = load_text()
    spec = containers.node_spec(Site(inventory), inventory.head, "image", {"A": Secret("a")})
    argv = docker.run((), spec)
    own = [mount.target for mount in spec.mounts] + [
        argv[at + 1].partition(":")[0] for at, argument in enumerate(argv) if argument == "--tmpfs"
    ]

    assert len(own) == 6
    for place in own:
        assert len(mistakes(f"mounts: [/a:{place}]")) == 1, place


@pytest.mark.parametrize("shm", ["private", "host", "16GiB"])
def test_shared_memory_has_its_own_key(mistakes: Mistakes, load_text: Load, shm: str) -> None:
    """A mount would collide with it, or silently win over it; folders inside it are allowed."""
    text = (
        "should be removed: `shm` sets the containers' /dev/shm; `shm: host` gives them the node's"
    )

    assert mistakes(f"shm: {shm}\nmounts: [/dev/shm:/dev/shm]") == [f"4: mounts[0]: {text}"]
    assert load_text(f"shm: {shm}\nmounts: [/dev/shm/models:/dev/shm/models]").mounts


def test_the_caches_path_is_reserved(mistakes: Mistakes) -> None:
    """The cluster's, the default, and a node's own."""
    text = "should have another target, or be left out: `hf_home`{} is mounted at `{}`"
    nodes = (
        "\nnodes: [{host: a, ip: 10.0.0.1, gpus: 1}, {host: b, ip: 10.0.0.2, gpus: 1, hf_home:"
        " /scratch/hf/}]"
    )
    mounts = "mounts: [/a:%s/]"

    assert mistakes(mounts % "/data/huggingface") == [
        f"3: mounts[0]: {text.format('', '/data/huggingface')}"
    ]
    assert mistakes(f"hf_home: /hf\n{mounts % '/hf'}") == [
        f"4: mounts[0]: {text.format(' (line 3)', '/hf')}"
    ]
    assert mistakes(mounts % "/scratch/hf", nodes) == [
        f"3: mounts[0]: {text.format(' (line 4)', '/scratch/hf')}"
    ]


def test_unused_and_invalid_caches_do_not_conflict(mistakes: Mistakes, load_text: Load) -> None:
    """The cluster's, if all nodes have their own; the default, if another one was configured
    incorrectly.
    """
    nodes = "\nnodes: [{host: a, ip: 10.0.0.1, gpus: 1, hf_home: %s}]"
    mounts = "mounts: [/a:/data/huggingface]"

    assert load_text(mounts, nodes % "/scratch/hf").mounts
    assert [mistake.partition(": should")[0] for mistake in mistakes(mounts, nodes % "hf")] == [
        "4: nodes[0].hf_home"
    ]
    assert [mistake.partition(": should")[0] for mistake in mistakes(f"hf_home: hf\n{mounts}")] == [
        "3: hf_home"
    ]


@pytest.mark.parametrize(
    "mount", ["/a:/data", "/data:/data:ro", "/a:/data/huggingface/hub", "/a:/data/other:ro"]
)
def test_mounts_around_and_inside_the_cache(load_text: Load, mount: str) -> None:
    """Another disk for a part of it, or its parent directory."""
    assert load_text(f"mounts: ['{mount}']").mounts


def test_a_read_only_mount_around_the_cache(mistakes: Mistakes) -> None:
    """Docker cannot create the mount point."""
    text = (
        "should be writable, or have another target: Docker must make `/data/huggingface` in it,"
        " where `hf_home` is mounted"
    )

    assert mistakes("mounts: [/srv/data:/data:ro]") == [f"3: mounts[0]: {text}"]


def test_the_usual_cache_path_is_configured_by_hf_home(mistakes: Mistakes, load_text: Load) -> None:
    """A mount on it would be unused, unless HF_HOME is set."""
    mounts = "mounts: [/a:/root/.cache/huggingface]"

    assert mistakes(mounts) == [
        "3: mounts[0]: should be written as `hf_home`: the containers look for models there, not"
        " here"
    ]
    assert load_text(f"{mounts}\nenv: {{HF_HOME: /root/.cache/huggingface}}").mounts


@pytest.mark.parametrize(
    ("home", "used"),
    [
        ("/opt/vlaunch", "/opt/vlaunch"),
        ("/opt/vlaunch/hf", "/opt/vlaunch"),
        ("/run/vlaunch/secrets/", "/run/vlaunch/secrets"),
        ("/var/lib/vlaunch", "/var/lib/vlaunch"),
        ("/dev/shm", "/dev/shm"),
    ],
)
def test_the_cache_must_not_hide_other_paths(mistakes: Mistakes, home: str, used: str) -> None:
    """It is mounted at its path on the node; for all nodes, and for one."""
    text = (
        f"should be another directory: the containers get it at the same path, and there `{used}`"
        " is taken"
    )
    nodes = f"\nnodes: [{{host: a, ip: 10.0.0.1, gpus: 1, hf_home: {home}}}]"

    assert mistakes(f"hf_home: {home}") == [f"3: hf_home: {text}"]
    assert mistakes(nodes=nodes) == [f"3: nodes[0].hf_home: {text}"]


@pytest.mark.parametrize("home", ["/var/lib/vlaunch/hf", "/dev/shm/hf", "/opt/hf", "/opt"])
def test_the_cache_may_be_in_writable_paths(load_text: Load, home: str) -> None:
    """Docker creates its mount point."""
    assert load_text(f"hf_home: {home}").head.hf_home == home
