"""Rules between the nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.core.domain import Inventory

Load = Callable[..., Inventory]
Mistakes = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            ["{host: a, ip: 10.0.0.1, gpus: 1}", "{host: a, ip: 10.0.0.2, gpus: 1}"],
            "5: nodes[1].host: should be unique, but `a` is also on line 4",
        ),
        (
            ["{host: a, ip: 10.0.0.1, gpus: 1}", "{host: A, ip: 10.0.0.2, gpus: 1}"],
            "5: nodes[1].host: should be unique, but `a` is also on line 4",
        ),
        (
            ["{host: a, ip: 10.0.0.1, gpus: 1}", "{host: b, ip: 10.0.0.1, gpus: 1}"],
            "5: nodes[1].ip: should be unique, but `10.0.0.1` is also on line 4",
        ),
        (
            ["{host: 10.0.0.1, gpus: 1}", "{host: b, ip: 10.0.0.1, gpus: 1}"],
            "5: nodes[1].ip: should be unique, but `10.0.0.1` is also on line 4",
        ),
        (
            [
                "{host: a, name: x, ip: 10.0.0.1, gpus: 1}",
                "{host: b, name: x, ip: 10.0.0.2, gpus: 1}",
            ],
            "5: nodes[1].name: should be unique, but `x` is also on line 4",
        ),
        (
            ["{host: a, ip: 10.0.0.1, gpus: 1}", "{host: b, name: a, ip: 10.0.0.2, gpus: 1}"],
            "5: nodes[1].name: should be unique, but `a` is also on line 4",
        ),
        (
            ["{host: 'a[1-3]', ip: '10.0.0.[1-3]', gpus: 1}", "{host: a2, ip: 10.0.0.4, gpus: 1}"],
            "5: nodes[1].host: should be unique, but `a2` is also on line 4",
        ),
        (
            ["{host: 'a[1,1]', ip: '10.0.0.[1-2]', gpus: 1}"],
            "4: nodes[0].host: should be unique, but `a1` is also in this range",
        ),
    ],
)
def test_two_nodes_are_two_machines(mistakes: Mistakes, nodes: list[str], expected: str) -> None:
    """A duplicate names the other line."""
    assert [expected] == mistakes(nodes="\nnodes:\n" + "".join(f"  - {node}\n" for node in nodes))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            ["host: bastion, ssh: {port: 2201}", "host: bastion, ssh: {port: 2202}"],
            ["5: nodes[1].host: `bastion` {also}"],
        ),
        (
            ["host: bastion", "host: bastion, ssh: {port: 22}"],
            ["5: nodes[1].host: `bastion` {also}"],
        ),
        (["host: bastion, name: b", "host: b"], ["5: nodes[1].host: `b` {also}"]),
        (["host: bastion, name: a", "host: bastion, ssh: {port: 22}"], []),
        # The third equals the second and is reported as such.
        (
            ["host: b, ssh: {port: 1}", "host: b, ssh: {port: 2}", "host: b, ssh: {port: 2}"],
            [
                "5: nodes[1].host: `b` {also}",
                "6: nodes[2].host: should be unique, but `b:2` is also on line 5",
            ],
        ),
    ],
)
def test_two_nodes_do_not_share_a_host_name(
    mistakes: Mistakes, nodes: list[str], expected: list[str]
) -> None:
    """Commands for one node would reach the other."""
    also = "is also the name of the node on line 4: give each a `name` of its own"
    text = "".join(
        f"  - {{{node}, ip: 10.0.0.{at}, gpus: 8}}\n" for at, node in enumerate(nodes, 1)
    )

    assert [line.replace("{also}", also) for line in expected] == mistakes(
        nodes=f"\nnodes:\n{text}"
    )


def test_an_invalid_name_is_not_replaced_by_the_host(mistakes: Mistakes) -> None:
    """One mistake is reported once."""
    nodes = [
        "{host: b, name: a b, ip: 10.0.0.1, gpus: 1, ssh: {port: 1}}",
        "{host: b, ip: 10.0.0.2, gpus: 1, ssh: {port: 2}}",
    ]
    (mistake,) = mistakes(nodes=f"\nnodes: [{', '.join(nodes)}]")

    assert "should be a name of at most" in mistake


def test_an_address_with_two_ssh_ports_is_two_machines(load_text: Load) -> None:
    """As behind a forwarder."""
    nodes = """
    nodes:
      - {host: gateway, name: a, ip: 10.0.0.1, gpus: 1, ssh: {port: 2201}}
      - {host: gateway, name: b, ip: 10.0.0.2, gpus: 1, ssh: {port: 2202}}
    """

    assert [node.name for node in load_text(nodes=nodes).nodes] == ["a", "b"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            "host: 'a[1-3]', ip: '10.0.0.[1-2]'",
            "nodes[0].ip: should have one address per host: it has 2, and `host` stands for 3",
        ),
        (
            "host: 'a[1-3]', ip: 10.0.0.1",
            "nodes[0].ip: should have one address per host: it has 1, and `host` stands for 3",
        ),
        (
            "host: a, ip: '10.0.0.[1-2]'",
            "nodes[0].ip: should have one address per host: it has 2, and `host` stands for 1",
        ),
        (
            "host: '10.0.0.[1-2]', name: a",
            "nodes[0].name: should have one name per host: it has 1, and `host` stands for 2",
        ),
    ],
)
def test_ranges_of_an_entry_have_equal_lengths(
    mistakes: Mistakes, entry: str, expected: str
) -> None:
    """Otherwise the addresses of hosts are ambiguous."""
    assert [f"3: {expected}"] == mistakes(nodes=f"\nnodes: [{{{entry}, gpus: 1}}]")


def test_a_host_name_needs_an_address(mistakes: Mistakes, load_text: Load) -> None:
    """It may resolve differently on this machine and on the nodes."""
    assert mistakes(nodes="\nnodes: [{host: 'a[1-2]', gpus: 1}]") == [
        "3: nodes[0].host: `a1` is a name, so set `ip` to the address at which other nodes reach it"
    ]
    assert load_text(nodes="\nnodes: [{host: 10.0.0.1, gpus: 1}]").head.ip == "10.0.0.1"


def test_addresses_are_of_version_4(mistakes: Mistakes) -> None:
    """IPv6 is untested: rejected early, not during a start."""
    nodes = """
    nodes:
      - {host: a, ip: 10.0.0.1, gpus: 1}
      - {host: b, ip: "fd00::1", gpus: 1}
      - {host: "fd00::2", name: c, gpus: 1}
    """
    text = "should be an IPv4 address: Ray and vLLM over IPv6 have not been tested with vlaunch"

    assert mistakes(nodes=nodes) == [f"5: nodes[1].ip: {text}", f"6: nodes[2].host: {text}"]


def test_a_host_of_version_6_needs_a_name(mistakes: Mistakes) -> None:
    """Container names cannot contain such an address; SSH may use it."""
    assert mistakes(nodes="\nnodes: [{host: 'fd00::1', ip: 10.0.0.1, gpus: 1}]") == [
        "3: nodes[0].host: an IPv6 address cannot name a container: give the node a `name`"
    ]


def test_a_name_fits_a_certificate(mistakes: Mistakes, load_text: Load) -> None:
    """Host names may be longer."""
    host = f"{'a' * 40}.{'b' * 40}.example"
    nodes = f"\nnodes: [{{host: {host}, ip: 10.0.0.1, gpus: 1%s}}]"

    assert mistakes(nodes=nodes % "") == [
        "3: nodes[0].host: should be a name of at most 64 characters: give the node a `name`"
    ]
    assert load_text(nodes=nodes % f", name: {'n' * 40}").head.name == "n" * 40


def test_the_number_of_nodes_is_limited(mistakes: Mistakes) -> None:
    """Over all entries together."""
    entries = [f"{{host: 'a{at}-[1-200]', ip: '10.0.{at}.[1-200]', gpus: 1}}" for at in range(6)]
    nodes = f"nodes: [{', '.join(entries)}]"

    assert mistakes(nodes=nodes) == ["3: nodes: should be at most 1024 nodes in all, not 1200"]


def test_the_first_node_is_the_head_by_default(load_text: Load) -> None:
    """Else `head: true` on a node, or its name."""
    nodes = "\nnodes: [{host: a, ip: 10.0.0.1, gpus: 1}, {host: b, ip: 10.0.0.2, gpus: 1%s}]"

    assert _head(load_text(nodes=nodes % "")) == ("a", ["b"])
    assert _head(load_text(nodes=nodes % ", head: true")) == ("b", ["a"])
    assert _head(load_text("head: b", nodes % "")) == ("b", ["a"])
    assert _head(load_text("head: b", nodes % ", head: true")) == ("b", ["a"])


def _head(inventory: Inventory) -> tuple[str, list[str]]:
    return inventory.head.name, [node.name for node in inventory.workers]


@pytest.mark.parametrize(
    ("extra", "first", "second", "expected"),
    [
        (
            "",
            "head: true",
            "head: true",
            "5: nodes[1].head: should be on one node, and it is already on line 4",
        ),
        (
            "head: b",
            "head: true",
            "head: false",
            "3: head: should agree with `head: true` on line 5; remove one of the two",
        ),
        (
            "head: c1",
            "head: false",
            "head: false",
            "3: head: should be the name of one of the nodes, not `c1`",
        ),
        (
            "head: gpu-aa",
            "name: gpu-a",
            "head: false",
            "3: head: should be the name of one of the nodes, not `gpu-aa`; did you mean `gpu-a`?",
        ),
    ],
)
def test_the_head_is_a_single_node(
    mistakes: Mistakes, extra: str, first: str, second: str, expected: str
) -> None:
    """Two claims, or an unknown name."""
    nodes = f"""

    nodes:
      - {{host: a, ip: 10.0.0.1, gpus: 1, {first}}}
      - {{host: b, ip: 10.0.0.2, gpus: 1, {second}}}
    """

    assert [expected] == mistakes(extra, nodes)


def test_a_range_cannot_be_the_head(mistakes: Mistakes) -> None:
    """The entry stands for several nodes."""
    assert mistakes(nodes="\nnodes: [{host: '10.0.0.[1-2]', gpus: 1, head: true}]") == [
        "3: nodes[0].head: should be on one node, and this entry is 2; write `head: NAME` at the"
        " top level instead"
    ]


def test_at_most_a_single_node_is_local(mistakes: Mistakes, load_text: Load) -> None:
    """For the cluster, and for nodes with the setting."""
    text = "can be local for one node only, and it is for `gpu01` and `gpu02`"
    nodes = "\nnodes: [{host: 10.0.0.1, gpus: 1, connection: local}, {host: 10.0.0.2, gpus: 1%s}]"

    assert [f"3: connection: {text}"] == mistakes("connection: local")
    assert len(mistakes(nodes=nodes % ", connection: local")) == 1
    assert [node.connection for node in load_text(nodes=nodes % "").nodes] == ["local", "ssh"]


def test_the_loopback_interface_reaches_no_peer(mistakes: Mistakes, load_text: Load) -> None:
    """But it is enough for one node."""
    text = (
        "should reach the other nodes, and NCCL takes 127.0.0.1 of `lo`; move a routed"
        " host's address to a dummy interface: `ip link add dummy0 type dummy`"
    )
    nodes = (
        "\nnodes: [{host: 10.0.0.1, gpus: 1}, {host: 10.0.0.2, gpus: 1, network: {interface: lo}}]"
    )

    assert [f"3: network.interface: {text}"] == mistakes("network: {interface: lo}")
    assert [f"3: nodes[1].network.interface: {text}"] == mistakes(nodes=nodes)
    assert (
        load_text("network: {interface: lo}", "\nnodes: [{host: 10.0.0.1, gpus: 1}]").head.interface
        == "lo"
    )


def test_nodes_may_differ_in_gpus(load_text: Load) -> None:
    """Placement checks the consequences."""
    assert (
        load_text(nodes="\nnodes: [{host: 10.0.0.1, gpus: 8}, {host: 10.0.0.2, gpus: 4}]").gpus
        == 12
    )


UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
WHICH = "should list indexes or UUIDs of GPUs (see `nvidia-smi -L`)"


@pytest.mark.parametrize(
    ("gpus", "ids"), [("8", ()), ("[4, 5]", ("4", "5")), (f"['7', {UUID}]", ("7", UUID))]
)
def test_gpus_may_be_chosen(load_text: Load, gpus: str, ids: tuple[str, ...]) -> None:
    """By number, index or UUID."""
    node = load_text(nodes=f"\nnodes: [{{host: a, ip: 10.0.0.1, gpus: {gpus}}}]").head

    assert (node.gpu_ids, node.gpus) == (ids, len(ids) or 8)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("[]", "should name at least one GPU"),
        ("[1, 1]", "should name each GPU once"),
        ("[0, -1]", f"{WHICH}, not -1"),
        ("[128]", f"{WHICH}, not 128"),
        ("[true]", f"{WHICH}, not True"),
        ("[GPU-1]", f"{WHICH}, not 'GPU-1'"),
        (
            "[MIG-01234567-89ab-cdef-0123-456789abcdef]",
            "cannot be instances of a GPU (MIG): CUDA shows a process only one of them, and ranks"
            " in two of them cannot share memory; name whole GPUs",
        ),
        ("0", "should be at least 1, not 0"),
    ],
)
def test_invalid_choices_of_gpus(mistakes: Mistakes, gpus: str, expected: str) -> None:
    """Reported before any contact with a node."""
    nodes = f"\nnodes:\n  - {{host: a, ip: 10.0.0.1, gpus: {gpus}}}\n"

    assert mistakes(nodes=nodes) == [f"4: nodes[0].gpus: {expected}"]


@pytest.mark.parametrize(
    ("accelerator", "entry", "expected"),
    [
        (
            "cpu",
            "host: a, ip: 10.0.0.1, gpus: [0]",
            "should be a number with `accelerator: cpu`, whose slots are identical",
        ),
        (
            "amd",
            f"host: a, ip: 10.0.0.1, gpus: [{UUID}]",
            "should be indexes with `accelerator: amd`, such as [0, 1]",
        ),
        (
            "nvidia",
            f"host: 'a[1-2]', ip: '10.0.0.[1-2]', gpus: [{UUID}]",
            "should be indexes: `host` stands for 2, and a UUID belongs to one host",
        ),
        (
            "nvidia\nprivileged: true",
            "host: a, ip: 10.0.0.1, gpus: [0, 1]",
            "should be a number with `privileged: true`: its container sees every GPU",
        ),
        (
            "amd\nprivileged: true",
            "host: a, ip: 10.0.0.1, gpus: [0, 1]",
            "should be a number with `privileged: true`: its container sees every GPU",
        ),
    ],
)
def test_choices_of_gpus_depend_on_the_accelerator(
    mistakes: Mistakes, accelerator: str, entry: str, expected: str
) -> None:
    """CPU slots have no names, AMD devices have indexes only, and a UUID belongs to one host."""
    nodes = f"\naccelerator: {accelerator}\nnodes:\n  - {{{entry}}}\n"

    line = 5 + accelerator.count("\n")
    assert mistakes(nodes=nodes) == [f"{line}: nodes[0].gpus: {expected}"]
