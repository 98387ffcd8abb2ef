"""Facts of one log and of several: without repetition, limited, and from complete lines."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.network import nccl_log
from launcher.network import nccl_log as module
from launcher.network.nccl_log import NcclLink, Reading
from tests.network.logs import BAD, FIXTURES, GOOD, LINK, LOGS, parse_text, read

SOUP = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [line for log in LOGS for line in log.read_bytes().splitlines(keepends=True)]
        ),
        st.sampled_from(
            [
                b"\n",
                b"\r\n",
                b"NCCL INFO ",
                b"NCCL WARN ",
                b" via ",
                b"NET/",
                b"Channel 00/0 : ",
                b"0[0] -> 1[1]",
                b"9" * 5000,
            ]
        ),
    ),
    max_size=12,
).map(b"".join)


def test_merged_logs_equal_one_log() -> None:
    """One log per host, or one of both."""
    both = (FIXTURES / "vllm-tp2-pp2.log").read_text().splitlines(keepends=True)
    first, two = ([line for line in both if line.startswith(host)] for host in ("gpu01", "gpu02"))

    assert first and two
    assert nccl_log.merge_readings(
        [parse_text("".join(first)), parse_text("".join(two))]
    ) == parse_text("".join(first + two))


@pytest.mark.parametrize("end", ["via NET/IB/0/GDRDMA", "via NET/IB/0/GDR", "via NET/IB/", ""])
def test_an_incomplete_last_line_is_ignored(end: str) -> None:
    """It may lack the text that proves GPUDirect."""
    line = "n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> {}[0] [send] "
    reading = parse_text(line.format(1) + "via NET/IB/0/GDRDMA\n" + line.format(2) + end)

    assert (len(reading.links), reading.truncated) == (1, True)


def test_the_worst_link_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More links than the limit are reported, and a late kind is not lost."""
    monkeypatch.setattr(module, "MAX_LINKS", 3)
    line = "n:1:2 [0] NCCL INFO Channel 00/0 : {}[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
    reading = parse_text(
        "".join(line.format(rank) for rank in range(9))
        + line.format(0).replace("IB/0/GDRDMA", "Socket/0")
    )

    assert [link.network for link in reading.links] == ["IB", "IB", "IB", "Socket"]
    assert (reading.overflow, reading.truncated) == (True, False)
    assert reading.network_links == 10


def test_libfabrics_provider() -> None:
    """In the formats of both generations of aws-ofi-nccl, per host."""
    line = "{0}:1:2 [0] NCCL INFO {1}\n"
    reading = parse_text(
        line.format("a", "NET/OFI Selected Provider is efa (found 4 nics)")
        + line.format(
            "b", "NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/24 (found 1 nics)"
        )
    )

    assert {host: list(names) for host, names in reading.providers.items()} == {
        "a": ["efa"],
        "b": ["tcp;ofi_rxm"],
    }
    assert nccl_log.merge_readings([reading]) == reading


@pytest.mark.parametrize(
    ("via", "network", "device", "gpudirect"),
    [
        ("NET/Socket/0", "Socket", 0, False),
        ("NET/IB/12", "IB", 12, False),
        ("NET/IB/0/GDRDMA", "IB", 0, True),
        ("NET/IB/3(11)/GDRDMA", "IB", 3, True),
        ("NET/IB/3(11)", "IB", 3, False),
        ("NET/IB/3/GDRDMA(PCI)", "IB", 3, True),
        ("NET/IB/3(1)/GDRDMA(PCI)/Shared", "IB", 3, True),
        ("NET/IB/0/Shared", "IB", 0, False),
        ("NET/AWS Libfabric/0/GDRDMA", "AWS Libfabric", 0, True),
        ("NET/AWS Libfabric/1(2)/GDRDMA/Shared", "AWS Libfabric", 1, True),
        ("NET/IBext_v8/2", "IBext_v8", 2, False),
        ("NET/IB-CAST/1", "IB-CAST", 1, False),
        ("NET/UCX/0/GDRDMA comm 0x22fc nRanks 02", "UCX", 0, True),
        ("NET/Socket/1 comm 0x95cdeb0 nRanks 08", "Socket", 1, False),
        ("NET/gIB/7/GDRDMA", "gIB", 7, True),
        ("NET/FasTrak/1", "FasTrak", 1, False),
        ("NET/OFI/0/GDRDMA", "OFI", 0, True),
        ("NET/IB/GDRDMA", "IB", None, True),
    ],
)
@pytest.mark.parametrize("ranks", ["0[1b000] -> 8[1c000]", "0[0] -> 8[3]", "0 -> 8"])
@pytest.mark.parametrize("label", ["Channel 02/1 :", "Channel 02 :", "Ring 02 :"])
def test_every_form_of_a_network_line(
    via: str, network: str, device: int | None, gpudirect: bool, ranks: str, label: str
) -> None:
    """Name, device and GPUDirect are parsed in any context."""
    reading = parse_text(f"n1:7:8 [0] NCCL INFO {label} {ranks} [send] via {via}\n")

    assert list(reading.links) == [
        NcclLink(0, 8, label.split()[1], "send", network, device, gpudirect, "n1")
    ]
    assert reading.network_links == 1


@pytest.mark.parametrize(
    ("via", "kind"),
    [
        ("P2P/IPC", "P2P"),
        ("P2P/IPC/read", "P2P"),
        ("P2P/CUMEM/read/CE", "P2P"),
        ("P2P/CUMEM/CE", "P2P"),
        ("P2P/direct pointer/read", "P2P"),
        ("P2P/indirect/3[3e000]", "P2P"),
        ("P2P/common device", "P2P"),
        ("SHM/direct", "SHM"),
        ("SHM/direct/direct", "SHM"),
        ("SHM/CE/direct comm 0x1 nRanks 02", "SHM"),
        ("direct shared memory", "SHM"),
    ],
)
def test_links_inside_a_node_are_counted_apart(via: str, kind: str) -> None:
    """A link inside a node is no evidence of the network."""
    reading = parse_text(f"n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {via}\n")

    assert (reading.local, reading.links, reading.network_links) == ({kind: 1}, {}, 0)


@pytest.mark.parametrize(
    "line",
    [
        "n1:7:8 [0] NCCL INFO Channel 00/02 :    0   1   2   3",
        "n1:7:8 [0] NCCL INFO Ring 00 : 1 -> 0 -> 1",
        "n1:7:8 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1",
        "n1:7:8 [0] NCCL INFO CollNet 00/0 : 1 [send] via COLLNET/SHARP/0/GDRDMA",
        "n1:7:8 [0] NCCL INFO NVLS comm 0x5 headRank 0 nHeads 8 buffSize 4194304",
        "n1:7:8 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1",
        "look for `[send] via NET/IB/0/GDRDMA` in the log",
    ],
)
def test_lines_that_resemble_links(line: str) -> None:
    """Orders of ranks, CollNet, NVLS and prose are no links."""
    assert parse_text(line + "\n").links == {}


@pytest.mark.parametrize(
    ("before", "after", "host"),
    [
        ("gpu01:5:6 [0] ", "", "gpu01"),
        ("ip-10-4-0-11.ec2.internal:5:6 [0] ", "\r", "ip-10-4-0-11.ec2.internal"),
        (
            "\x1b[36m(RayWorkerProc pid=285, ip=10.9.0.12)\x1b[0m gpu01:5:6 [0] ",
            "\x1b[32m [repeated 3x across cluster]\x1b[0m",
            "gpu01",
        ),
        (
            "(EngineCore_DP0 pid=9) (RayWorkerWrapper pid=285, ip=10.9.0.12) gpu01:5:6 [0] ",
            "",
            "gpu01",
        ),
        ("\x1b[0;36m(Worker_TP0 pid=123)\x1b[0;0m gpu01:5:6 [0] ", "", "gpu01"),
        ("[2026-03-02 08:12:01] gpu01:5:6 [0] ", "", "gpu01"),
        ("Wed Sep  6 17:26:52 2023[1,5]<stdout>:gpu01:5:6 [5] ", "", "gpu01"),
        ("0: gpu01:5:6 [0] ", "", "gpu01"),
        ("<cluster>:5:6 [0] ", "", "<cluster>"),
        (":22901:22901 [0] ", "", ""),
        ("", "", ""),
    ],
)
def test_prefixes(before: str, after: str, host: str) -> None:
    """Prefixes of Ray, vLLM, mpirun, Slurm and clocks are ignored; NCCL names the host."""
    reading = parse_text(
        f"{before}NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/1{after}\n"
    )

    assert [(link.host, link.network, link.device) for link in reading.links] == [(host, "IB", 1)]


def test_bare_lines() -> None:
    """Lines copied from a log without a prefix are parsed too."""
    reading = parse_text(
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/0/GDRDMA\nNET/IB : No device found.\n"
    )

    assert [link.network for link in reading.links] == ["IBext_v8"]
    assert nccl_log.merge_readings([reading]).warnings == {"NET/IB : No device found.": {}}


def test_multi_node_nvlink() -> None:
    """P2P/MNNVL is a link between nodes, and no line of a network."""
    reading = read("2.30-mnnvl")

    assert (reading.mnnvl, reading.network_links, len(reading.links)) == (True, 0, 2)


def test_devices_have_names() -> None:
    """The indices of the devices are named per host, and [RO] is none of them."""
    assert read("2.14-pxn-roce").devices == {
        "worker-0": {0: "mlx5_2:1/RoCE", 1: "mlx5_bond_0:1/RoCE"}
    }


def test_logs_forwarded_by_ray() -> None:
    """Two hosts, colours, CRLF; a repeated line counts as one."""
    reading = read("2.27-ray-gb10")

    assert (reading.network_links, {link.host for link in reading.links}) == (
        2,
        {"spark1", "spark2"},
    )
    assert (list(reading.using), list(reading.versions)) == (["IB"], ["2.27.7"])
    failed = "Call to ibv_reg_mr failed with error Cannot allocate memory"
    assert list(reading.warnings[failed]) == ["spark2"]


@pytest.mark.parametrize(
    "text",
    [
        "NET/IB : No device found.",
        "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        "Failed to open libibverbs.so[.1]",
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
        "NCCL_IB_DISABLE set by environment to 1.",
        "NCCL_IB_HCA set to mlx5_9",
        "NCCL_SOCKET_IFNAME set by environment to eth9",
        (
            "ncclOsSocketPollConnect: connect to 10.0.0.12<50001> returned No route to host,"
            " retrying (1/34)"
        ),
        "Call to connect returned Connection refused, retrying",
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, retrying 1/8",
        (
            "HINT: In many cases this error occurs when the incorrect GID index is forced by"
            " NCCL_IB_GID_INDEX"
        ),
    ],
)
def test_relevant_lines(text: str) -> None:
    """A line that explains a slow network is stored once, with its hosts, even as INFO."""
    line = f"(Worker pid=3) \x1b[36mn1:7:8 [0] NCCL INFO {text}\x1b[0m\n"
    reading = parse_text(line + line + line.replace("n1", "n2"))

    assert reading.warnings == {text: {"n1": None, "n2": None}}


@pytest.mark.parametrize(
    "text",
    ["NET/IB : Unable to open device mlx5_0", "Bootstrap : no socket interface found", "anything"],
)
def test_warnings(text: str) -> None:
    """NCCL's own warnings count, whatever their text."""
    reading = parse_text(f"n1:7:8 [0] net_ib/init.cc:334 (ncclIbInit) NCCL WARN {text}\n")

    assert (list(reading.warnings), list(reading.alarms)) == ([text], [text])


@pytest.mark.parametrize(
    "text", ["DMA-BUF is available on GPU device 0", "Using non-device net plugin version 0"]
)
def test_irrelevant_lines(text: str) -> None:
    """Messages of a healthy job are no warnings."""
    assert parse_text(f"n1:7:8 [0] NCCL INFO {text}\n").warnings == {}


def test_long_lines_are_cut() -> None:
    """Only the beginning of a very long line is parsed, for any size of blocks."""
    late = (
        b"x" * nccl_log.MAX_LINE
        + b" n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"
    )

    assert (
        nccl_log.parse_log([late])
        == nccl_log.parse_log([late[:70_000], late[70_000:]])
        == Reading(lines=1)
    )


@pytest.mark.parametrize(
    "log",
    [
        f"{GOOD}\r{BAD}\r",
        f"{GOOD}\r\n{BAD}\r\n",
        f'{{"message": "{GOOD}\\n{BAD}\\n", "stream": "stderr"}}\n',
        f'{{"message":"{GOOD}\\r\\n{BAD}"}}',
        f'{{"message":"{GOOD}"}}\n{{"message":"{BAD}"}}\n'.replace(">", "\\u003e"),
        f'{{\n  "log": "{GOOD}\\n",\n  "more": "{BAD}\\n"\n}}\n'.replace("NET/", "NET\\/"),
        f"b'{GOOD}\\n{BAD}\\n'\n",
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_records_that_share_a_line(log: str, step: int) -> None:
    """Carriage returns and JSON hide no link, however the log is cut into blocks."""
    raw = log.encode()
    reading = nccl_log.parse_log(raw[at : at + step] for at in range(0, len(raw), step))

    assert {(link.host, link.network, link.device, link.gpudirect) for link in reading.links} == {
        ("gpu01", "IB", 0, True),
        ("gpu02", "Socket", 0, False),
    }


@settings(max_examples=150, deadline=None)
@given(SOUP, st.lists(st.integers(0, 2000), max_size=6))
def test_any_bytes_in_any_blocks(log: bytes, cuts: list[int]) -> None:
    """They are parsed, and the size of blocks changes nothing."""
    at = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]

    assert nccl_log.parse_log(log[a:b] for a, b in pairwise(at)) == nccl_log.parse_log([log])


def announced(host: str) -> bytes:
    """Return the line in which a host announces rank 0."""
    return (
        f"{host}:5:6 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1"
        " commId 0x1 - Init\n".encode()
    )


@settings(max_examples=30, deadline=None)
@given(SOUP, st.integers(1, 7))
# Two hosts announce the same rank, the first one twice: the first announcement counts.
@example(announced("a") + announced("b") + announced("a"), 1)
def test_any_portions_of_lines(log: bytes, soon: int) -> None:
    """The number of lines that are counted before parsing changes nothing."""
    before = nccl_log._BATCH
    whole = nccl_log.parse_log([log])
    try:
        nccl_log._BATCH = soon

        assert nccl_log.parse_log([log]) == whole
    finally:
        nccl_log._BATCH = before


@pytest.mark.parametrize(
    "bad", [b"", b"\n", b"\x00" * 4096, bytes(range(256)) * 64, b"\x1f\x8b\x08" + b"\xff" * 999]
)
@pytest.mark.parametrize(
    "reader",
    [
        lambda b: nccl_log.parse_log([b]),
        lambda b: nccl_log.parse_log(b[i : i + 1] for i in range(len(b))),
    ],
)
def test_empty_and_binary(bad: bytes, reader: Callable[[bytes], Reading]) -> None:
    """An empty or a binary file has no links, and is no error."""
    assert reader(bad).links == {}


def test_an_endless_line_does_not_fill_the_memory() -> None:
    """Of 64 MB without a line break, only the beginning is stored."""
    tracemalloc.start()
    nccl_log.parse_log(b"NET/" * (1 << 18) for _ in range(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("name", "observed"),
    [("vllm-tp2-pp2", (0, 0)), ("2.18-efa-torchrun", (2, 16)), ("2.28-h100-socket", (1, 2))],
)
def test_missing_ranks(name: str, observed: tuple[int, int]) -> None:
    """A communicator has a number of ranks, and links between them must be in the log."""
    assert nccl_log.count_unlinked_ranks(read(name)) == observed


NEAR = "".join(LINK.format(1, side, "Socket/0") + "\n" for side in ("send", "receive"))


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (NEAR, 2),
        (NEAR.splitlines()[0] + "\n", 0),  # the other end is not known
        (NEAR + BAD + "\n", 0),  # two hosts received
        (NEAR.replace("gpu01", "<node>"), 0),
        (
            NEAR
            + "gpu01:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0"
            " MNNVL 0\n",
            0,
        ),
        (
            NEAR
            + "gpu01:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0"
            " MNNVL 0\n",
            2,
        ),
    ],
)
def test_links_of_a_network_inside_a_host(log: str, count: int) -> None:
    """Both ends must be in one host, without doubt."""
    assert len(nccl_log.local_links(parse_text(log))) == count


def test_recorded_log() -> None:
    """NCCL 2.28.9 with two ranks, on one GPU that it takes for two hosts'."""
    reading = read("2.28-h100-socket")

    assert (*reading.versions, *reading.using, reading.nodes) == ("2.28.9+cuda13.0", "Socket", 2)
    assert reading.devices == {"gpu01": {0: "lo:127.0.0.1<0>"}}
    assert {(link.network, link.device) for link in reading.links} == {("Socket", 0)}
    assert reading.network_links == 8
    assert not reading.alarms


def test_recorded_warning() -> None:
    """Its WARN lines begin with the time."""
    argv = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    assert list(read("2.28-h100-duplicate").alarms) == [argv]
