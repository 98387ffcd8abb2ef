"""Survey of a node's hardware."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core import shell
from launcher.core.errors import UnreadableAnswer
from launcher.tools import host
from launcher.tools.host import host_output
from launcher.tools.host.survey import LOOKUP_DEADLINE, Gid, GpuState, Lookup, NvlinkFabric, Survey

pytestmark = pytest.mark.processes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "host"
PARTS = [
    line.split()[1]
    for line in shell.program_text("survey").partition("@@vlaunch clock")[2].splitlines()
    if line.lstrip().startswith(("part ", "sh_c "))
]


def survey(name: str) -> Survey:
    """Parse a recorded or written output."""
    result = host_output.parse_probe((FIXTURES / f"survey-{name}.txt").read_text()).survey
    assert result is not None
    return result


def parts(**texts: str) -> str:
    """Return an answer with a survey."""
    texts = {"clock": "1 2", "home": "/root", "containers": "", **texts, "survey": ""}
    return "".join(f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc 0\n" for name, text in texts.items())


def test_recorded_lab_host() -> None:
    """Debian 12 without GPU, ethtool or nvidia-smi."""
    result = survey("lab")

    assert (result.system, result.uid, result.python) == (
        "Debian GNU/Linux 12 (bookworm)",
        0,
        "3.11.2",
    )
    assert result.own_names == ("10.91.0.11",)
    assert result.default_nic == "eth0"
    assert result.nics is not None
    assert [(nic.name, nic.mtu, nic.up, nic.physical) for nic in result.nics] == [
        ("lo", 65536, True, False),
        ("eth0", 1500, True, False),
    ]
    assert result.nics[1].addresses[0] == "10.91.0.11/24"
    assert result.skew is not None
    assert 0 <= result.skew < 1
    assert (result.docker_storage, result.docker_cgroup, result.docker_root) == (
        "overlay2",
        "cgroupfs v1",
        "/var/lib/docker",
    )
    assert (result.rdma, result.gpus) == ((), ())
    assert (result.next_kernel, result.next_kernel_has_driver) == ("", None)


def test_ports_of_an_infiniband_node_and_their_nearest_gpus() -> None:
    """Eight H100 with one port per GPU."""
    result = survey("h100-infiniband")
    ports = {device.name: device.ports[0] for device in result.rdma}

    assert list(ports) == [f"mlx5_{n}" for n in (0, 1, 2, 3, 4, 5, 6, 9, 10, 11)]
    assert [
        name
        for name, port in ports.items()
        if (port.link_layer, port.state, port.rate) == ("InfiniBand", "ACTIVE", 400.0)
    ] == [f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert (ports["mlx5_2"].state, ports["mlx5_2"].physical) == ("DOWN", "Disabled")
    assert [
        name for gpu in result.gpus for name, near in gpu.affinity.items() if near == "PIX"
    ] == [f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert {result.gpus[0].peers[f"GPU{n}"] for n in range(1, 8)} == {"NV18"}
    assert [gpu.ecc_errors for gpu in result.gpus] == [0, 0, 0, 0, 0, 0, 3, 0]
    assert result.rdma[1].netdevs == ("ens6f0np0",)
    assert "nvidia_peermem" in result.modules


def test_recorded_h100() -> None:
    """One GPU without NVSwitches and RDMA devices, driver 580; no `ip` and no Docker."""
    text = (FIXTURES.parent / "gpu-h100" / "survey.txt").read_text()
    facts = host_output.parse_probe(text)

    assert facts.survey is not None
    assert facts.survey.gpus == (GpuState(index=0, ecc_errors=0, peers={"GPU0": "X"}),)
    assert facts.survey.nvlink == NvlinkFabric()
    assert (facts.survey.xid, facts.survey.imex, facts.lost_gpus) == ((), (), ())
    assert facts.survey.modules == ("nvidia", "nvidia_uvm")
    assert facts.gpu_processes == ()
    assert facts.gpus == (
        host.Gpu(
            index=0,
            name="NVIDIA H100 80GB HBM3",
            memory_total=81559,
            memory_used=0,
            driver="580.159.04",
            uuid="GPU-00000000-1111-2222-3333-444455556600",
        ),
    )


def test_faults_of_a_node_are_parsed() -> None:
    """Foreign processes on GPUs with user and container, Xids, a name on loopback, a kernel without
    a driver.
    """
    facts = host_output.parse_probe((FIXTURES / "survey-h100-infiniband.txt").read_text())
    result = facts.survey
    assert result is not None
    assert facts.gpu_processes is not None
    assert result.xid is not None
    worker, stranger = facts.gpu_processes

    assert (worker.user, worker.container, worker.memory) == ("ray", "4f1c" * 16, 71232)
    assert (stranger.user, stranger.container, stranger.name) == ("alice", "", "python, train.py")
    assert "Xid (PCI:0000:5d:00): 79" in result.xid[0]
    assert result.own_names == ("127.0.1.1",)
    assert (result.next_kernel, result.next_kernel_has_driver) == ("5.15.0-130-generic", False)
    assert (result.remove_ipc, result.linger, result.synced) == (True, False, True)
    assert result.skew == pytest.approx(0.0625)


def test_a_roce_node_shows_its_gid_table() -> None:
    """NCCL_IB_GID_INDEX is the index of the routable RoCE v2 entry."""
    result = survey("h200-roce")

    assert result.rdma[0].ports[0].gids[3] == Gid(
        index=3, value="0000:0000:0000:0000:0000:ffff:c0a8:1015", kind="RoCE v2", netdev="eth2"
    )
    assert (result.skew, result.synced, result.xid, result.linger) == (
        pytest.approx(-2.5),
        False,
        None,
        True,
    )
    assert (result.default_nic, result.next_kernel_has_driver) == ("bond0", True)
    assert result.nics is not None
    assert [nic.name for nic in result.nics if nic.physical] == [
        "eth0",
        "eth2",
        "eth3",
        "eth4",
        "eth5",
    ]


def test_a_gb10_has_no_ecc_and_no_numa() -> None:
    """Neither a count nor a node."""
    result = survey("gb10")

    assert [gpu.ecc_errors for gpu in result.gpus] == [None]
    assert [device.name for device in result.rdma if device.ports[0].state == "ACTIVE"] == [
        "roceP2p1s0f0",
        "rocep1s0f0",
    ]
    assert {device.numa for device in result.rdma} == {None}
    assert (result.remove_ipc, result.linger, result.own_names) == (None, None, ())


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("synced", "NTPSynchronized=no", "synced", False),
        ("synced", "Leap status     : Normal", "synced", True),
        ("synced", "?", "synced", None),
        ("clock", " 12.5", "skew", None),
        ("clock", "100 97.25N", "skew", -2.75),
        ("logind", "", "remove_ipc", True),
        ("logind", "RemoveIPC=yes\nRemoveIPC=no", "remove_ipc", False),
        ("modules", "ib_core\nib_core", "modules", ("ib_core",)),
        ("route", "not json", "default_nic", ""),
        ("boot", "next=6.8\n", "next_kernel_has_driver", None),
        (
            "names",
            "own n1 7.5 12.625 124 \nreverse 10.0.0.2 7.%N 8.%N 0 10.0.0.2 n2\nreverse x y\n",
            "lookups",
            (
                Lookup(kind="reverse", subject="10.0.0.2", seconds=1.0),
                Lookup(kind="own", subject="n1", seconds=5.125, answered=False),
            ),
        ),
        ("system", "port_range=1024-65535\n", "port_range", (1024, 65535)),
        ("system", "port_range=60999-32768\n", "port_range", None),
        ("system", "port_range=-\n", "port_range", None),
        ("names", "own n1 7.5 8.5 0 127.0.1.1 ::1 \n", "own_names", ("127.0.1.1", "::1")),
        ("names", "own n1 7.5 8.5 2 \n", "own_names", ()),
        ("names", "own n1 7.5 12.5 124 \n", "own_names", None),
        (
            "names",
            "nameserver\t192.0.2.53\nhosts:  files dns\nsearch a",
            "resolver_lines",
            ("nameserver 192.0.2.53", "hosts: files dns"),
        ),
    ],
)
def test_tools_have_different_formats(name: str, text: str, field: str, value: object) -> None:
    """Another daemon, an older version, a file without the value."""
    result = host_output.parse_probe(parts(**{name: text})).survey

    assert getattr(result, field) == value


def test_a_plain_probe_has_no_survey() -> None:
    """It stays as fast as before."""
    plain = host.probe(
        ("docker",), cluster="c", state_dir="", hf_home="/", accelerator="cpu", images=()
    )

    assert not any(text in plain[2] for text in ("@@vlaunch clock", "topo -m", "sys/class/net"))
    assert host_output.parse_probe((FIXTURES / "lab-node1-up.txt").read_text()).survey is None


def test_a_truncated_survey_is_unreadable() -> None:
    """Missing parts at the end would look like missing hardware."""
    text = (FIXTURES / "survey-lab.txt").read_text()
    with pytest.raises(UnreadableAnswer):
        host_output.parse_probe(text.partition("@@vlaunch boot")[0])


@pytest.mark.parametrize("bare", [False, True])
def test_the_survey_runs_on_this_machine(tmp_path: Path, bare: bool) -> None:
    """The real script, which also completes with hardly any tools."""
    path = os.environ["PATH"]
    if bare:
        for tool in ("sh", "timeout", "head", "date", "uname", "cat", "id", "dirname"):
            (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
        path = str(tmp_path)
    argv = host.probe(
        ("no-docker",),
        cluster="c",
        state_dir="",
        hf_home=str(tmp_path),
        accelerator="cpu",
        images=(),
        survey=True,
    )
    stdin = f"{time.time():.6f}\nnever read\n"
    done = subprocess.run(
        argv,
        check=True,
        input=stdin,
        env={"HOME": str(tmp_path), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    result = host_output.parse_probe(done.stdout).survey

    assert result is not None
    assert result.skew is not None
    assert abs(result.skew) < 60
    assert result.kernel == os.uname().release
    if not bare:
        assert result.memory and result.driver_memory
        assert result.driver_memory < result.memory / 4
        assert result.port_range
        assert result.nics


def test_names_are_resolved_concurrently_with_a_deadline(tmp_path: Path) -> None:
    """In both directions, with the node's own; silent servers take the deadline once."""
    getent = tmp_path / "getent"
    getent.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        # The silent ones wait for each other.
        "case $2 in 10.0.0.[34]) echo $$ >$2; other=10.0.0.$((7 - ${2##*.}))\n"
        'until kill -0 "$(cat $other)" 2>/dev/null; do sleep 0.05; done\n'
        "touch met; exec sleep 60;; esac\n"
        '[ "$1" = hosts ] && echo "$2      node${2##*.} alias" || echo "10.0.0.9 STREAM $2"\n'
    )
    getent.chmod(0o755)
    done = subprocess.run(
        [
            "sh",
            "-c",
            shell.program_text("survey_names"),
            "probe",
            "10.0.0.2",
            "10.0.0.3",
            "10.0.0.4",
        ],
        check=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    result = host_output.parse_probe(parts(names=done.stdout)).survey

    assert result is not None
    assert result.lookups is not None
    assert [(lookup.kind, lookup.subject, lookup.answered) for lookup in result.lookups] == [
        ("reverse", "10.0.0.2", True),
        ("reverse", "10.0.0.3", False),
        ("reverse", "10.0.0.4", False),
        ("forward", "node2", True),
        ("own", os.uname().nodename, True),
    ]
    assert result.own_names == ("10.0.0.9",)
    assert (tmp_path / "met").exists()
    silent = [lookup.seconds for lookup in result.lookups if not lookup.answered]
    assert all(LOOKUP_DEADLINE <= seconds < 60 for seconds in silent)


def test_a_lookup_that_was_slow_once_is_not_slow(tmp_path: Path) -> None:
    """The node was busy, not its resolver."""
    getent = tmp_path / "getent"
    slow = f"mkdir {tmp_path}/$2 2>/dev/null && sleep 1.5"
    getent.write_text(f'#!/bin/sh\n{slow}\necho "10.0.0.9 STREAM $2"\n')
    getent.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", shell.program_text("survey_names"), "probe"],
        check=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    result = host_output.parse_probe(parts(names=done.stdout)).survey

    assert result is not None
    assert result.lookups is not None
    assert (tmp_path / os.uname().nodename).exists()
    assert [lookup.seconds < 1.5 for lookup in result.lookups] == [True]


def test_docker_gets_none_of_the_standard_input(tmp_path: Path) -> None:
    """It would consume the launcher's clock, or wait for more input."""
    fake = tmp_path / "docker"
    fake.write_text('#!/bin/sh\n[ "$1" = version ] && printf \'{"Version":"%s"}\' "$(cat)"\n')
    fake.chmod(0o755)
    argv = host.probe(
        (str(fake),),
        cluster="c",
        state_dir="",
        hf_home="/",
        accelerator="cpu",
        images=(),
        survey=True,
    )
    done = subprocess.run(
        argv,
        check=True,
        input="1.5\n" + "second line\n" * 9000,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert host_output.parse_probe(done.stdout).docker_version == ""


GARBAGE = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                "a/b:",
                "GPU0",
                "\t",
                "\n",
                "-1",
                ":",
                "/",
                "9" * 30,
                "²",
                "GPU-1, 2, x, 3",
                "@1 ",
                "=",
            ]
        )
    ).map("".join),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["ifname", "mtu", "flags", "dev", "metric", "addr_info", "local", "Driver"]
                ),
                inner,
            )
        ),
        max_leaves=8,
    ).map(json.dumps),
)


@given(st.dictionaries(st.sampled_from([*PARTS, "clock", "info"]), GARBAGE, max_size=6))
def test_any_output_is_parsed_or_rejected(changed: dict[str, str]) -> None:
    """A node may be broken or hostile."""
    with suppress(UnreadableAnswer):
        assert isinstance(host_output.parse_probe(parts(**changed)).survey, Survey | None)
