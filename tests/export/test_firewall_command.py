"""`vlaunch export firewall --scan`: rules with the nodes' dynamic ports."""

from __future__ import annotations

from tests.command_line import Cluster


def test_dynamic_ports_of_the_nodes_are_closed(cluster: Cluster) -> None:
    """The same text for every node; without the flag no node is contacted."""
    assert "tcp dport 32768-60999 drop" in cluster.run("export", "firewall").out
    assert cluster.commands == []
    cluster.world.machines["gpu02"].survey["system"] = "port_range=1024-65535"
    ran = cluster.run("export", "firewall", "--scan")

    assert (ran.code, ran.err) == (0, "")
    assert "tcp dport 1024-65535 drop" in ran.out
