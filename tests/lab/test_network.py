"""Parser of `iptables -S`."""

from __future__ import annotations

from launcher.lab import network

# Recorded with `iptables -S`, iptables 1.8.9 (nf_tables).
LISTING = """\
-P FORWARD DROP
-A FORWARD -i vlb1c2d3e4f -o vlb1c2d3e4f -m comment --comment vlaunch-lab -j ACCEPT
-A FORWARD -m comment --comment "a rule of someone else" -j ACCEPT
-A FORWARD -j DOCKER-USER
-A FORWARD -i vlb99999999 -o vlb99999999 -m comment --comment vlaunch-lab-2 -j ACCEPT
"""


def test_only_rules_with_exactly_this_comment_are_ours() -> None:
    """A lab called `vlaunch-lab` does not match the rules of `vlaunch-lab-2`."""
    rules = list(network.tagged_rules(LISTING, "vlaunch-lab"))

    assert [rule[:4] for rule in rules] == [["-A", "FORWARD", "-i", "vlb1c2d3e4f"]]


def test_no_rules_in_an_empty_answer() -> None:
    """A machine without iptables has none."""
    assert not list(network.tagged_rules("", "vlaunch-lab"))
