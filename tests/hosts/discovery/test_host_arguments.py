"""Host arguments: hosts, ranges, SSH users, and mistakes in them."""

from __future__ import annotations

import pytest

from launcher.core.domain import Ssh
from launcher.core.errors import RequestError
from launcher.hosts.discovery.host_arguments import parse_hosts, ssh_overrides
from launcher.hosts.discovery.shape import DOCKER, InitOptions


def test_ranges_and_ssh_users_are_parsed() -> None:
    """In order: the first is the head."""
    meant = parse_hosts(
        ["gpu[09-10]", "root@10.0.0.5:2222", "ops@[fe80::1]:22"],
        InitOptions(ssh=Ssh(user="me")),
        DOCKER,
    )

    assert [(node.host, node.ssh.user, node.ssh.port) for node in meant.nodes] == [
        ("gpu09", "me", None),
        ("gpu10", "me", None),
        ("10.0.0.5", "root", 2222),
        ("fe80::1", "ops", 22),
    ]
    assert meant.head.name == "gpu09"


def test_hosts_may_be_one_list() -> None:
    """As other tools take them, also with ranges."""
    meant = parse_hosts(["gpu01,root@gpu02:2222", "gpu[03-04,07],x"], InitOptions(), DOCKER)

    names = ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07", "x"]
    assert [node.host for node in meant.nodes] == names
    assert (meant.nodes[1].ssh.user, meant.nodes[1].ssh.port) == ("root", 2222)


def test_an_address_with_two_ports_is_two_machines() -> None:
    """As behind a forwarder."""
    meant = parse_hosts(["10.0.0.5:2201", "10.0.0.5:2202"], InitOptions(), DOCKER)

    assert [node.name for node in meant.nodes] == ["10.0.0.5-2201", "10.0.0.5-2202"]


@pytest.mark.parametrize(
    ("args", "wishes", "message"),
    [
        (["gpu01", "gpu01"], InitOptions(), "gpu01"),
        (["-oProxyCommand=x"], InitOptions(), "should be a host name"),
        (["gpu[1-"], InitOptions(), "gpu[1-"),
        (["a@b@c"], InitOptions(), "is not a host"),
        (["gpu[1-2000]"], InitOptions(), "at most 1024"),
        (["gpu[1-600]", "cpu[1-600]"], InitOptions(), "1200 hosts"),
        (["gpu01:99999"], InitOptions(), "port"),
        (["gpu01"], InitOptions(cluster="Not A Name"), "cluster: should be a name"),
        (["gpu01"], InitOptions(image="Bad Image"), "image: should be an image reference"),
        (["gpu01"], InitOptions(hf_home="relative"), "hf_home: should be an absolute path"),
        (["gpu01"], InitOptions(ssh=Ssh(user="a b")), "ssh.user: should be a user name"),
    ],
)
def test_invalid_arguments_fail_before_any_connection(
    args: list[str], wishes: InitOptions, message: str
) -> None:
    """By the rules of inventories."""
    with pytest.raises(RequestError) as raised:
        parse_hosts(args, wishes, DOCKER)

    assert message in f"{raised.value.message}\n{raised.value.evidence}"


def test_sudo_with_a_password_is_rejected() -> None:
    """As in an inventory."""
    with pytest.raises(RequestError) as raised:
        parse_hosts(["gpu01"], InitOptions(), ("sudo", "docker"))

    assert "sudo -n" in raised.value.evidence


def test_only_differing_ssh_settings_are_written_per_host() -> None:
    """Common settings are written once."""
    assert ssh_overrides(Ssh(user="root", port=22), Ssh(user="root")) == Ssh(port=22)
