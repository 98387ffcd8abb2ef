"""Parser for the probe's output, including garbage."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import UnreadableAnswer
from launcher.tools.host import Address, Gpu, HostFacts, StateDir, host_output

FIXTURES = Path(__file__).parents[2] / "fixtures" / "host"
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
# Output of hostile, broken or unusual machines.
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
    """Return an output with the two required parts, and others."""
    texts = {"home": "/root", "containers": "", **changed}
    return "".join(
        f"\n@@vlaunch {name.replace('_', ' ')}\n{text}\n@@vlaunch rc 0\n"
        for name, text in texts.items()
    )


def test_recorded_answer_of_a_head() -> None:
    """Debian 12 with Docker 20.10 and a running cluster."""
    facts = host_output.parse_probe((FIXTURES / "lab-node1-up.txt").read_text())

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
    assert [(container.name, container.running) for container in facts.containers] == [
        ("vlaunch-lab-node1", True)
    ]
    assert "No such file" in facts.part_errors["infiniband"]


def test_the_same_image_has_the_same_identity_on_two_nodes() -> None:
    """And another one a different identity."""
    first, second = (
        host_output.parse_probe((FIXTURES / f"lab-node{n}-up.txt").read_text()) for n in (1, 2)
    )
    base, derived = "vllm-cpu:0.32.0", "vlaunch/ray:2.60.0-310f925a456a"

    images = [first.images[base], second.images[base], first.images[derived]]
    identities = [image.identity for image in images if image]

    assert len(identities) == 3
    assert identities[0] == identities[1] != identities[2]


def test_the_token_is_not_shown_with_the_facts() -> None:
    """Facts appear in messages of failing tests and in debuggers."""
    assert "0123456789abcdef" not in repr(
        host_output.parse_probe((FIXTURES / "lab-node1-up.txt").read_text())
    )


def test_a_container_is_selected_by_its_name() -> None:
    """None if there is no such container."""
    facts = host_output.parse_probe((FIXTURES / "lab-node2-up.txt").read_text())

    assert facts.container("vlaunch-lab-node2") is facts.containers[0]
    assert facts.container("vlaunch-lab-node1") is None


def test_missing_memory_of_a_gpu_is_no_error() -> None:
    """GB10 shares the host's memory and reports `[N/A]`."""
    facts = host_output.parse_probe(
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
    message = "Unable to determine the device handle for GPU0: 0000:1B:00.0: Unknown Error"
    text = parts(gpus=f"{message}\n1, NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, GPU-1")
    facts = host_output.parse_probe(f"{text[:-2]}{code}\n")

    assert [gpu.index for gpu in facts.gpus or ()] == [1]
    assert facts.lost_gpus == (message,)


def test_output_with_a_lost_gpu_only() -> None:
    """With older drivers, the other GPUs are unknown."""
    message = "Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error"
    facts = host_output.parse_probe(parts(gpus=message))

    assert (facts.gpus, facts.lost_gpus) == (None, (message,))


def test_amd_gpus_have_render_nodes() -> None:
    """One topology file with SIMD units per GPU; a kernel may not report the render node."""
    path = "/sys/class/kfd/kfd/topology/nodes"
    output = f"{path}/1/properties drm_render_minor 136\n{path}/2/properties "

    assert host_output.parse_probe(parts(gpus=output)).amd_renders == (136, None)


def test_gpu_allocations_of_containers() -> None:
    """By number or ID; other devices do not count."""
    gpus = '"Capabilities":[["gpu"]]'
    output = (
        f'["/vlaunch-a-n", "a", [{{"Count":4,"DeviceIDs":null,{gpus},"Options":{{}}}}]]\n'
        f'["/vlaunch-b-n", "b", [{{"Driver":"","Count":0,"DeviceIDs":["4","GPU-5"],{gpus}}}]]\n'
        '["/vlaunch-c-n", "c", null]\n'
        '["/vlaunch-d-n", "d", [{"Count":1,"Capabilities":[["tpu"]]}]]\n'
    )
    allocations = host_output.parse_probe(parts(given=output)).gpu_allocations

    assert [
        (allocation.container, allocation.cluster, allocation.count, allocation.ids)
        for allocation in allocations
    ] == [
        ("vlaunch-a-n", "a", 4, ()),
        ("vlaunch-b-n", "b", 0, ("4", "GPU-5")),
        ("vlaunch-c-n", "c", 0, ()),
        ("vlaunch-d-n", "d", 0, ()),
    ]
    assert [
        [allocation.includes(at, f"GPU-{at}") for at in (3, 4, 5)] for allocation in allocations
    ] == [
        [True, False, False],
        [False, True, True],
        [False, False, False],
        [False, False, False],
    ]


def test_listening_sockets_of_netstat_and_ss() -> None:
    """Both have the local address in the fourth column."""
    netstat = (
        "Proto Recv-Q Send-Q Local Address\ntcp 0 0 0.0.0.0:6379 0.0.0.0:* LISTEN\ntcp6 0 0 :::22"
        " :::* LISTEN"
    )
    ss = "LISTEN 0 128 127.0.0.53%lo:53 0.0.0.0:*\nLISTEN 0 128 [fe80::1]%eth0:546 [::]:*"

    assert host_output.parse_probe(parts(listen=netstat)).listening == frozenset(
        {("0.0.0.0", 6379), ("::", 22)}
    )
    assert host_output.parse_probe(parts(listen=ss)).listening == frozenset(
        {("127.0.0.53", 53), ("fe80::1", 546)}
    )


def test_the_state_of_links() -> None:
    """From `flags`, not `operstate`, which is UNKNOWN for many working links."""
    link = [
        {
            "ifname": "eth0",
            "flags": [],
            "mtu": 9000,
            "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}, {"broadcast": "x"}],
        }
    ]

    assert host_output.parse_probe(parts(addr=json.dumps(link))).addresses == (
        Address(interface="eth0", ip="10.0.0.1", prefix=24, up=False),
    )


def test_failed_parts_are_none_with_their_messages() -> None:
    """A missing tool is a fact, not an error."""
    text = (
        parts()
        + "\n@@vlaunch addr\nsh: 1: ip: not found\n@@vlaunch rc 127\n\n@@vlaunch docker\npermission"
        " denied\n@@vlaunch rc 1\n"
    )
    facts = host_output.parse_probe(text)

    assert (facts.addresses, facts.listening, facts.disk_free, facts.docker_version) == (
        None,
        None,
        None,
        None,
    )
    assert facts.part_errors == {"addr": "sh: 1: ip: not found", "docker": "permission denied"}


@pytest.mark.parametrize(
    "text", ["", "Last login: today\n", "\n@@vlaunch home\n/root\n@@vlaunch rc 0\n", parts()[:-20]]
)
def test_a_truncated_answer_is_unreadable(text: str) -> None:
    """It would read as a node without containers."""
    with pytest.raises(UnreadableAnswer):
        host_output.parse_probe(text)


def test_a_banner_before_the_answer_is_ignored() -> None:
    """Start-up files of shells may print text."""
    assert (
        host_output.parse_probe("Welcome!\n\x1b[1mnews\x1b[0m\n" + parts(user="ops")).user == "ops"
    )


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
def test_an_invalid_part_is_unreadable_or_absent(name: str, text: str) -> None:
    """Never a KeyError: the output is the evidence."""
    try:
        host_output.parse_probe(parts(**{name: text}))
    except UnreadableAnswer as error:
        assert text.strip()[:10] in error.evidence


@given(
    st.dictionaries(st.sampled_from(NAMES), GARBAGE, max_size=6),
    st.sampled_from(["0", "1", "127", "", "x", "-", "²"]),
)
def test_any_output_is_parsed_or_rejected(changed: dict[str, str], code: str) -> None:
    """A node may be broken or hostile."""
    texts = {"home": "/root", "containers": "", **changed}
    text = "".join(
        f"\n@@vlaunch {name}\n{output}\n@@vlaunch rc {code}\n" for name, output in texts.items()
    )
    with suppress(UnreadableAnswer):
        assert isinstance(host_output.parse_probe(text), HostFacts)


@pytest.mark.parametrize("end", ["", "@@vlaunch rc"])
def test_the_ray_token_is_never_evidence(end: str) -> None:
    """A truncated output is quoted without the part that contains the token."""
    text = f"\n@@vlaunch home\n/root\n@@vlaunch rc 0\n\n@@vlaunch token\nthe-token\n{end}"
    with pytest.raises(UnreadableAnswer) as caught:
        host_output.parse_probe(text + ("\n\n@@vlaunch docker\nKilled\n" if end else ""))

    assert "the-token" not in caught.value.evidence
    assert ("Killed" in caught.value.evidence) is bool(end)


def test_warnings_before_dockers_answer_are_ignored() -> None:
    """Sudo and Docker's command line print them on the same stream."""
    noise = "sudo: unable to resolve host node1: Name or service not known\n"
    facts = host_output.parse_probe(
        parts(
            docker=noise + '{"Version":"28.1"}',
            info=f'{noise}{{"Runtimes":{{"runc":{{}}}},"SecurityOptions":["name=seccomp,profile=default","name=rootless"]}}',
            containers=f"{noise}[]",
        )
    )

    assert (facts.docker_version, facts.runtimes, facts.containers) == ("28.1", ("runc",), ())
    assert facts.security == ("seccomp", "rootless")


@pytest.mark.parametrize("code", [1, 124, 137])
def test_timeouts_differ_from_failures(code: int) -> None:
    """By the exit status of timeout(1); the `null` of an unreachable daemon is no message."""
    text = parts(docker="null\npermission denied")
    facts = host_output.parse_probe(
        text.replace("denied\n@@vlaunch rc 0", f"denied\n@@vlaunch rc {code}")
    )

    assert facts.part_errors["docker"] == "permission denied"
    assert ("docker" in facts.timed_out_parts) is (code != 1)


@pytest.mark.parametrize(("name", "version"), [("podman", None), ("podman-socket", "4.3.1")])
def test_podman_is_recognised(name: str, version: str | None) -> None:
    """As a `docker` program, which reports no server, and behind Docker's socket."""
    facts = host_output.parse_probe((FIXTURES / f"lab-{name}.txt").read_text())

    assert (facts.podman, facts.docker_version) == (True, version)
    assert facts.state is not None
    assert facts.state.writable
    assert not host_output.parse_probe((FIXTURES / "lab-node1-up.txt").read_text()).podman


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        ("0", None),
        ("1\nsystem_u:object_r:default_t:s0 /data/hf", {"/data/hf": "default_t"}),
        ("1\n? /root/.vlaunch", {}),
    ],
)
def test_selinux_labels(output: str, labels: dict[str, str] | None) -> None:
    """As printed by stat(1); `?` on file systems without labels."""
    assert host_output.parse_probe(parts(selinux=output)).selinux == labels


@pytest.mark.parametrize(
    ("access", "writable", "read_only"),
    [("writable", True, False), ("read-only", False, True), ("closed", False, False)],
)
def test_the_state_directory_is_reported(access: str, writable: bool, read_only: bool) -> None:
    """With the free bytes."""
    facts = host_output.parse_probe(parts(state=f"{access}\nFilesystem\n/dev/sda1 1 1 7 1% /home"))

    assert facts.state == StateDir(writable=writable, read_only=read_only, free=7 * 1024)
