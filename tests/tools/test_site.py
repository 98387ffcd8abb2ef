"""The inventory combined with facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.domain import Node, Ssh
from launcher.tools.host import HostFacts
from launcher.tools.site import Site
from tests.served import IMAGE, INVENTORY, container

HEAD, OTHER = INVENTORY.nodes


def site_with(node: Node, **container_fields: str) -> Site:
    """Return a site with one probed node, which has a container."""
    own = container(node.name, **container_fields)
    facts = HostFacts(home="/home/me", containers=(own,), images={"base:1": IMAGE})
    return Site(INVENTORY, {node.name: facts})


def test_names_follow_from_the_inventory_alone() -> None:
    """Any machine can manage the cluster."""
    assert Site(INVENTORY).container_name(HEAD) == "vlaunch-c-n1"


@pytest.mark.parametrize(("status", "runs"), [("running", True), ("exited", False)])
def test_a_stopped_container_is_listed(status: str, runs: bool) -> None:
    """Only a running one can be queried."""
    site = site_with(HEAD, status=status)

    assert site.container(HEAD) is not None
    assert (site.running_container(HEAD) is not None, site.head_runs) == (runs, runs)
    assert not site_with(OTHER).head_runs


def test_a_node_without_a_probe_has_no_facts() -> None:
    """This is not an error: some commands probe the head only."""
    site = site_with(HEAD)

    assert (site.observed_nodes, site.facts_of(OTHER)) == ((HEAD,), None)
    assert (site.container(OTHER), site.running_container(OTHER), site.image(OTHER, "base:1")) == (
        None,
    ) * 3
    assert (site.image(HEAD, "base:1"), site.image(HEAD, "other")) == (IMAGE, None)


@pytest.mark.parametrize(
    ("node", "folder"),
    [
        (HEAD, "/home/me/.vlaunch/cache/c"),
        (replace(HEAD, state_dir="/srv/v"), "/srv/v/cache/c"),
        (replace(HEAD, cache_dir="/nvme"), "/nvme/c"),
    ],
)
def test_the_location_of_the_compile_cache(node: Node, folder: str) -> None:
    """Beside the state, or in the inventory's folder, per cluster."""
    assert site_with(HEAD).cache_dir(node) == folder


@pytest.mark.parametrize(
    ("node", "assumed", "observed"),
    [
        (HEAD, "/root/.vlaunch/c", "/home/me/.vlaunch/c"),
        (replace(HEAD, ssh=Ssh(user="ops")), "/home/ops/.vlaunch/c", "/home/me/.vlaunch/c"),
        (replace(HEAD, state_dir="/srv/v"), "/srv/v/c", "/srv/v/c"),
    ],
)
def test_the_state_directory_is_the_nodes_or_below_its_home(
    node: Node, assumed: str, observed: str
) -> None:
    """Without a probe the home is derived from the user."""
    assert (Site(INVENTORY).state_dir(node), site_with(HEAD).state_dir(node)) == (assumed, observed)


def test_commands_in_containers_get_standard_input() -> None:
    """They run in `docker exec`, with the node's docker command."""
    node = replace(HEAD, docker=("sudo", "-n", "docker"))
    plain = Site(INVENTORY).in_container(node, ("ls", "/"))
    fed = Site(INVENTORY).in_container(node, ("cat",), timeout=5, stdin=bytes, shown_stdin="true")

    assert plain.argv == ("sudo", "-n", "docker", "exec", "vlaunch-c-n1", "ls", "/")
    assert fed.argv[3:] == ("exec", "--interactive", "vlaunch-c-n1", "cat")
    assert (plain.node, plain.timeout, plain.stdin, plain.shown_stdin) == ("n1", 60, None, "")
    assert (fed.timeout, fed.stdin, fed.shown_stdin) == (5, bytes, "true")
