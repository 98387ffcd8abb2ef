"""The probe: what it says on a machine, and how its answer is read, also when it is garbage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UnreadableAnswer
from launcher.model import Node
from launcher.tools import host
from launcher.tools.host import Address, Gpu, HostFacts

pytestmark = pytest.mark.processes

FIXTURES = Path(__file__).parents[1] / "fixtures" / "host"
NAMES = (
    "home",
    "user",
    "hostname",
    "addr",
    "listen",
    "disk",
    "infiniband",
    "toolkit",
    "gpus",
    "files",
    "token",
    "secrets",
    "docker",
    "info",
    "image x:1",
    "containers",
)
# What hostile, broken or merely odd machines might print in place of an answer.
GARBAGE = st.one_of(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "ifname",
                        "addr_info",
                        "local",
                        "prefixlen",
                        "flags",
                        "Version",
                        "Runtimes",
                        "Id",
                        "Config",
                        "Name",
                        "State",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ).map(json.dumps),
    st.lists(
        st.sampled_from(
            ["0", "GPU", ",", " ", "\n", "[N/A]", "*:80", "LISTEN", "x" * 64, "\x1b[31m", "%", "]"]
        )
    ).map("".join),
)


def parts(**changed: str) -> str:
    """Return an answer with the two parts that every answer has, and others as given."""
    texts = {"home": "/root", "containers": "", **changed}
    return "".join(
        f"\n@@vlaunch {name.replace('_', ' ')}\n{text}\n@@vlaunch rc 0\n"
        for name, text in texts.items()
    )


def test_the_answer_of_a_head_is_read_as_recorded() -> None:
    """Debian 12 with Docker 20.10 and a cluster that is up."""
    facts = host.parse_probe((FIXTURES / "lab-node1-up.txt").read_text())

    assert (facts.home, facts.user, facts.hostname) == ("/root", "root", "node1")
    assert facts.interface_of("10.77.0.11") == "eth0"
    assert facts.listening is not None
    assert {
        ("10.77.0.11", 6382),
        ("*", 6379),
        ("127.0.0.1", 8265),
        ("::", 22),
        ("::ffff:127.0.0.1", 10001),
    } <= facts.listening
    assert facts.disk_free == 63322164 * 1024
    assert (facts.infiniband, facts.gpus, facts.amd_renders, facts.toolkit) == (
        (),
        None,
        None,
        False,
    )
    assert set(facts.files) == {"payload/entry.sh", "payload/head.py"}
    assert (facts.token, facts.secret_names) == ("0123456789abcdef" * 4, ("RAY_AUTH_TOKEN",))
    assert facts.docker_version == "20.10.24+dfsg1"
    assert "runc" in facts.runtimes
    assert set(facts.images) == {"vllm-cpu:0.32.0", "vlaunch/ray:2.60.0-310f925a456a"}
    assert [(each.name, each.running) for each in facts.containers] == [("vlaunch-lab-node1", True)]
    assert "No such file" in facts.said["infiniband"]


def test_the_same_image_has_the_same_identity_on_two_nodes() -> None:
    """And another one has another."""
    first, second = (
        host.parse_probe((FIXTURES / f"lab-node{n}-up.txt").read_text()) for n in (1, 2)
    )
    base, derived = "vllm-cpu:0.32.0", "vlaunch/ray:2.60.0-310f925a456a"

    images = [first.images[base], second.images[base], first.images[derived]]
    identities = [image.identity for image in images if image]

    assert len(identities) == 3
    assert identities[0] == identities[1] != identities[2]


def test_the_token_is_not_shown_with_the_facts() -> None:
    """Facts end up in messages of failing tests and in debuggers."""
    assert "0123456789abcdef" not in repr(
        host.parse_probe((FIXTURES / "lab-node1-up.txt").read_text())
    )


def test_a_container_is_found_by_its_name() -> None:
    """Or it is not there."""
    facts = host.parse_probe((FIXTURES / "lab-node2-up.txt").read_text())

    assert facts.container("vlaunch-lab-node2") is facts.containers[0]
    assert facts.container("vlaunch-lab-node1") is None


def test_gpus_are_read_and_missing_memory_is_no_error() -> None:
    """GB10 shares the host's memory and says `[N/A]`."""
    facts = host.parse_probe(
        parts(
            gpus=(
                "0, NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, GPU-0\n"
                "1, NVIDIA GB10, [N/A], [N/A], 580.95.05, GPU-1"
            )
        )
    )

    assert facts.gpus == (
        Gpu(
            index=0,
            name="NVIDIA H100 80GB HBM3",
            memory_total=81559,
            memory_used=4,
            driver="580.95.05",
            uuid="GPU-0",
        ),
        Gpu(
            index=1,
            name="NVIDIA GB10",
            memory_total=0,
            memory_used=0,
            driver="580.95.05",
            uuid="GPU-1",
        ),
    )


@pytest.mark.parametrize("code", [0, 255])
def test_a_lost_gpu_does_not_hide_the_others(code: int) -> None:
    """Drivers from 545 on name it on standard error and list the others."""
    words = "Unable to determine the device handle for GPU0: 0000:1B:00.0: Unknown Error"
    text = parts(gpus=f"{words}\n1, NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, GPU-1")
    facts = host.parse_probe(f"{text[:-2]}{code}\n")

    assert [gpu.index for gpu in facts.gpus or ()] == [1]
    assert facts.lost_gpus == (words,)


def test_where_the_driver_speaks_of_nothing_but_a_lost_gpu() -> None:
    """Older drivers: what else there is, is not known."""
    words = "Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error"
    facts = host.parse_probe(parts(gpus=words))

    assert (facts.gpus, facts.lost_gpus) == (None, (words,))


def test_amd_gpus_are_found_with_their_render_nodes() -> None:
    """One topology file with SIMD units each; a kernel may not tell which device is its own."""
    path = "/sys/class/kfd/kfd/topology/nodes"
    told = f"{path}/1/properties drm_render_minor 136\n{path}/2/properties "

    assert host.parse_probe(parts(gpus=told)).amd_renders == (136, None)


def test_what_a_node_uses_of_its_gpus() -> None:
    """Those it names by index or UUID, else its first ones."""
    told = "".join(f"{at}, H100, 81559, 4, 580, GPU-{at}\n" for at in range(8))
    facts = host.parse_probe(parts(gpus=told))
    node = Node(name="n", host="n", ip="10.0.0.1", gpus=2)

    assert [gpu.index for gpu in facts.used(node)] == [0, 1]
    assert [gpu.index for gpu in facts.used(replace(node, gpu_ids=("GPU-6", "4")))] == [4, 6]
    assert facts.used(replace(node, gpu_ids=("9",))) == ()


def test_gpus_that_containers_were_given() -> None:
    """So many, or those that are named; other devices are none."""
    gpus = '"Capabilities":[["gpu"]]'
    given = (
        f'["/vlaunch-a-n", "a", [{{"Count":4,"DeviceIDs":null,{gpus},"Options":{{}}}}]]\n'
        f'["/vlaunch-b-n", "b", [{{"Driver":"","Count":0,"DeviceIDs":["4","GPU-5"],{gpus}}}]]\n'
        '["/vlaunch-c-n", "c", null]\n'
        '["/vlaunch-d-n", "d", [{"Count":1,"Capabilities":[["tpu"]]}]]\n'
    )
    found = host.parse_probe(parts(given=given)).given

    assert [(each.container, each.cluster, each.count, each.ids) for each in found] == [
        ("vlaunch-a-n", "a", 4, ()),
        ("vlaunch-b-n", "b", 0, ("4", "GPU-5")),
        ("vlaunch-c-n", "c", 0, ()),
        ("vlaunch-d-n", "d", 0, ()),
    ]
    assert [[each.has(at, f"GPU-{at}") for at in (3, 4, 5)] for each in found] == [
        [True, False, False],
        [False, True, True],
        [False, False, False],
        [False, False, False],
    ]


def test_listening_sockets_of_netstat_are_read_as_those_of_ss() -> None:
    """Both name the local address in the fourth column."""
    netstat = (
        "Proto Recv-Q Send-Q Local Address\ntcp 0 0 0.0.0.0:6379 0.0.0.0:* LISTEN\ntcp6 0 0 :::22"
        " :::* LISTEN"
    )
    ss = "LISTEN 0 128 127.0.0.53%lo:53 0.0.0.0:*\nLISTEN 0 128 [fe80::1]%eth0:546 [::]:*"

    assert host.parse_probe(parts(listen=netstat)).listening == frozenset(
        {("0.0.0.0", 6379), ("::", 22)}
    )
    assert host.parse_probe(parts(listen=ss)).listening == frozenset(
        {("127.0.0.53", 53), ("fe80::1", 546)}
    )


def test_addresses_say_whether_their_link_is_up() -> None:
    """`flags`, not `operstate`, which is UNKNOWN for many good links."""
    link = [
        {
            "ifname": "eth0",
            "flags": [],
            "mtu": 9000,
            "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}, {"broadcast": "x"}],
        }
    ]

    assert host.parse_probe(parts(addr=json.dumps(link))).addresses == (
        Address(interface="eth0", ip="10.0.0.1", prefix=24, up=False),
    )


def test_what_could_not_be_asked_is_none_and_its_words_are_kept() -> None:
    """A missing tool is a fact, not an error."""
    text = (
        parts()
        + "\n@@vlaunch addr\nsh: 1: ip: not found\n@@vlaunch rc 127\n\n@@vlaunch docker\npermission"
        " denied\n@@vlaunch rc 1\n"
    )
    facts = host.parse_probe(text)

    assert (facts.addresses, facts.listening, facts.disk_free, facts.docker_version) == (
        None,
        None,
        None,
        None,
    )
    assert facts.said == {"addr": "sh: 1: ip: not found", "docker": "permission denied"}


@pytest.mark.parametrize(
    "text", ["", "Last login: today\n", "\n@@vlaunch home\n/root\n@@vlaunch rc 0\n", parts()[:-20]]
)
def test_an_answer_that_ends_too_early_is_unreadable(text: str) -> None:
    """Half an answer would read as a node without containers."""
    with pytest.raises(UnreadableAnswer):
        host.parse_probe(text)


def test_a_banner_before_the_answer_is_passed_over() -> None:
    """Shells print what their start-up files say."""
    assert host.parse_probe("Welcome!\n\x1b[1mnews\x1b[0m\n" + parts(user="ops")).user == "ops"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docker", '{"Version"'),
        ("info", "{]"),
        ("addr", "[{"),
        ("disk", "df: no\n"),
        ("gpus", "0, a, b"),
        ("containers", "Error: x"),
        ("image_x", "Cannot connect"),
        ("addr", "[1]"),
        ("addr", '[{"addr_info": [{"local": "x"}]}]'),
        ("info", '{"Runtimes": []}'),
        ("containers", '[{"Id": 1}]'),
        ("disk", ""),
        ("docker", "[]"),
    ],
)
def test_a_part_of_another_form_is_unreadable_or_absent(name: str, text: str) -> None:
    """Never a KeyError: the words are the evidence."""
    try:
        host.parse_probe(parts(**{name: text}))
    except UnreadableAnswer as error:
        assert text.strip()[:10] in error.evidence


@given(
    st.dictionaries(st.sampled_from(NAMES), GARBAGE, max_size=6),
    st.sampled_from(["0", "1", "127", "", "x", "-", "²"]),
)
def test_whatever_a_node_prints_only_facts_or_unreadable_comes_out(
    changed: dict[str, str], code: str
) -> None:
    """A node may be broken, or hostile."""
    texts = {"home": "/root", "containers": "", **changed}
    text = "".join(
        f"\n@@vlaunch {name}\n{said}\n@@vlaunch rc {code}\n" for name, said in texts.items()
    )
    with suppress(UnreadableAnswer):
        assert isinstance(host.parse_probe(text), HostFacts)


def test_the_probe_runs_on_this_machine_without_docker(tmp_path: Path) -> None:
    """The script itself, in an empty home, with a `docker` that is not there."""
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
    done = subprocess.run(
        argv, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=True
    )
    facts = host.parse_probe(done.stdout)

    assert facts.home == str(home)
    assert facts.disk_free is not None
    assert facts.docker_version is None
    assert facts.said["docker"]
    assert facts.images == {}
    assert facts.files == {
        "payload/head.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    }
    assert (facts.token, facts.secret_names) == ("abc", ("RAY_AUTH_TOKEN",))


def test_the_probe_asks_docker_in_the_nodes_own_way(tmp_path: Path) -> None:
    """A stand-in for docker with words before it, and names with spaces kept whole."""
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
    facts = host.parse_probe(
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    )

    assert (facts.docker_version, facts.runtimes) == ("28", ("nvidia",))
    assert set(facts.images) == {"x:1", "vlaunch/ray:made"}
    assert [each.id for each in facts.containers] == ["id1"]


def test_the_token_is_found_where_it_lay_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a place in memory that would not be chosen any more; what is on the disk comes first."""
    me = f"test-{os.getpid()}"
    memory, disk = Path(f"/dev/shm/vlaunch-{me}/c/secrets"), tmp_path / "c" / "secrets"
    for name, script in (("id", f"[ $1 = -u ] && echo 0 || echo {me}"), ("stat", "echo other")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    argv = host.probe(
        ("false",), cluster="c", state_dir=str(tmp_path), hf_home="/", accelerator="cpu", images=()
    )
    found = []
    try:
        for folder in (memory, disk):
            folder.mkdir(parents=True)
            (folder / "RAY_AUTH_TOKEN").write_text(f"of {folder}".replace(" ", "-"))
            facts = host.parse_probe(
                subprocess.run(argv, capture_output=True, text=True, check=False).stdout
            )
            found.append((facts.memory, facts.token))
    finally:
        shutil.rmtree(memory.parents[1])

    assert found == [("", f"of-{memory}"), ("", f"of-{disk}")]


def test_a_docker_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """A wedged daemon holds each question until its deadline: five of them would outlast the
    probe's own.
    """
    asked = tmp_path / "asked"
    argv = host.probe(
        ("sh", "-c", f'echo "$1" >> {asked}; exit 1', "docker"),
        cluster="c",
        state_dir=str(tmp_path),
        hf_home="/",
        accelerator="cpu",
        images=("x:1",),
    )
    subprocess.run(argv, capture_output=True, check=True)

    assert asked.read_text() == "version\n"


@pytest.mark.parametrize("end", ["", "@@vlaunch rc"])
def test_the_ray_token_is_never_evidence(end: str) -> None:
    """An answer that broke off is quoted, without the part that holds the token."""
    text = f"\n@@vlaunch home\n/root\n@@vlaunch rc 0\n\n@@vlaunch token\nthe-token\n{end}"
    with pytest.raises(UnreadableAnswer) as caught:
        host.parse_probe(text + ("\n\n@@vlaunch docker\nKilled\n" if end else ""))

    assert "the-token" not in caught.value.evidence
    assert ("Killed" in caught.value.evidence) is bool(end)


def test_a_part_that_hangs_does_not_take_the_others_with_it() -> None:
    """Each part has its own deadline: `timeout` is what the script relies on, so it must be in the
    script.
    """
    script = host.probe(
        ("docker",), cluster="c", state_dir="", hf_home="/", accelerator="cpu", images=()
    )[2]
    asking = [
        line
        for line in script.splitlines()
        if '"$@" images' in line or '"$@" ps' in line or '"$@" inspect' in line
    ]

    assert len(asking) == 5
    assert all("timeout -k 2 15" in line or "part " in line for line in asking)
    assert shutil.which("timeout")


def test_warnings_before_dockers_answer_are_no_part_of_it() -> None:
    """Sudo and Docker's command line print them on the same stream."""
    noise = "sudo: unable to resolve host node1: Name or service not known\n"
    facts = host.parse_probe(
        parts(
            docker=noise + '{"Version":"28.1"}',
            info=f'{noise}{{"Runtimes":{{"runc":{{}}}},"SecurityOptions":["name=seccomp,profile=default","name=rootless"]}}',
            containers=f"{noise}[]",
        )
    )

    assert (facts.docker_version, facts.runtimes, facts.containers) == ("28.1", ("runc",), ())
    assert facts.security == ("seccomp", "rootless")


@pytest.mark.parametrize("code", [1, 124, 137])
def test_what_came_too_late_is_told_from_what_failed(code: int) -> None:
    """By the exit status of timeout(1); the `null` of a server that was not reached is no word."""
    text = parts(docker="null\npermission denied")
    facts = host.parse_probe(text.replace("denied\n@@vlaunch rc 0", f"denied\n@@vlaunch rc {code}"))

    assert facts.said["docker"] == "permission denied"
    assert ("docker" in facts.late) is (code != 1)


@pytest.mark.parametrize(("name", "version"), [("podman", None), ("podman-socket", "4.3.1")])
def test_podman_is_told_from_docker(name: str, version: str | None) -> None:
    """As a program in Docker's place, which tells of no server, and behind Docker's socket."""
    facts = host.parse_probe((FIXTURES / f"lab-{name}.txt").read_text())

    assert (facts.podman, facts.docker_version) == (True, version)
    assert facts.state is not None
    assert facts.state.writable
    assert not host.parse_probe((FIXTURES / "lab-node1-up.txt").read_text()).podman


@pytest.mark.parametrize(
    ("said", "labels"),
    [
        ("0", None),
        ("1\nsystem_u:object_r:default_t:s0 /data/hf", {"/data/hf": "default_t"}),
        ("1\n? /root/.vlaunch", {}),
    ],
)
def test_labels_count_where_selinux_enforces(said: str, labels: dict[str, str] | None) -> None:
    """As stat(1) prints them; `?` where a file system has none."""
    assert host.parse_probe(parts(selinux=said)).selinux == labels


@pytest.mark.parametrize(
    ("word", "writable", "read_only"),
    [("writable", True, False), ("read-only", False, True), ("closed", False, False)],
)
def test_where_the_clusters_files_lie_is_told(word: str, writable: bool, read_only: bool) -> None:
    """With the bytes that are free there."""
    facts = host.parse_probe(parts(state=f"{word}\nFilesystem\n/dev/sda1 1 1 7 1% /home"))

    assert facts.state == host.StateDir(writable=writable, read_only=read_only, free=7 * 1024)


@pytest.mark.parametrize("name", ["there", "later/on"])
def test_the_probe_looks_for_a_place_to_write_without_writing(tmp_path: Path, name: str) -> None:
    """The folder itself, or the nearest above it that is there."""
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
    facts = host.parse_probe(done.stdout)

    assert facts.state is not None
    assert facts.state.writable
    assert facts.state.free > 0
    assert not (tmp_path / "later").exists()
