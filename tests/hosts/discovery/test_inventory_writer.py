"""The written inventory represents all discoveries exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Ssh
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory, format_scalar
from launcher.hosts.discovery.shape import InitOptions
from launcher.inventory import document
from launcher.inventory.load import loads
from tests.hosts.discovery.hosts import gpus, h100_pair, host, nic


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_text_survives_a_round_trip(text: str) -> None:
    """In our parser and in others; `no`, `1e3` and `a: b` among them."""
    scalar = format_scalar(text)
    read = document.parse_document(f"key: {scalar}\nflow: {{a: {scalar}, b: [{scalar}]}}\n")

    assert read.data == {"key": text, "flow": {"a": text, "b": [text]}}


@pytest.mark.parametrize(
    "text",
    ["yes", "no", "on", "off", "null", "true", "1e3", "0x1f", "007", "12:30", "~", "-", "a #b"],
)
def test_ambiguous_scalars_are_text_for_every_yaml_parser(text: str) -> None:
    """PyYAML reads YAML 1.1."""
    assert yaml.safe_load(format_scalar(text)) == text


def test_text_of_hosts_stays_in_its_comment() -> None:
    """Without line feeds and terminal codes."""
    evil = "x\ncluster: evil\x1b[2J\u2028cluster: evil"
    pair = [
        replace(scanned, facts=replace(scanned.facts, docker_version=evil))
        for scanned in h100_pair()
    ]
    text = format_inventory(discover(pair, InitOptions()))

    assert loads(text, Path("inventory.yaml")).cluster == "vllm"
    assert "\x1b" not in text
    assert "\u2028" not in text


def test_ssh_settings_are_written_once() -> None:
    """Common ones at the top, others at the node."""
    pair = h100_pair()
    hosts = [pair[0], replace(pair[1], ssh=Ssh(user="root", port=2222))]
    wishes = InitOptions(ssh=Ssh(user="ops", identity="~/.ssh/my key", jump="ops@bastion:22"))
    read = loads(format_inventory(discover(hosts, wishes)), Path("/x/inventory.yaml"))

    assert [node.ssh.user for node in read.nodes] == ["ops", "root"]
    assert [node.ssh.port for node in read.nodes] == [None, 2222]
    assert {node.ssh.jump for node in read.nodes} == {"ops@bastion:22"}
    assert read.head.ssh.identity is not None
    assert read.head.ssh.identity.endswith("/.ssh/my key")


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([7, 8])),
        min_size=1,
        max_size=12,
        unique_by=lambda pair: pair[0],
    )
)
def test_folding_keeps_every_node_and_their_order(numbers: list[tuple[int, int]]) -> None:
    """Ranges expand to exactly the original values."""
    hosts = [
        host(f"gpu{at}", nic("eth0", f"10.0.0.{at + 5}/24"), gpus=gpus(count))
        for at, count in numbers
    ]
    read = loads(format_inventory(discover(hosts, InitOptions())), Path("inventory.yaml"))

    assert [(node.name, node.ip, node.gpus) for node in read.nodes] == [
        (f"gpu{a}", f"10.0.0.{a + 5}", n) for a, n in numbers
    ]
    assert read.head.name == f"gpu{numbers[0][0]}"


def test_two_writes_of_the_same_hosts_are_the_same() -> None:
    """Without dates and random order."""
    assert format_inventory(discover(h100_pair(), InitOptions())) == format_inventory(
        discover(h100_pair(), InitOptions())
    )
