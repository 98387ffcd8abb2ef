"""Renewals of the agents' certificates that are cut short at any step: the agents go on."""

from __future__ import annotations

import itertools
import ssl
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher import shell
from launcher.cli.prepare import renewal
from launcher.model import Inventory
from launcher.payload.agent.certificates import Certificates, name_in
from launcher.plan.files import certificate_stages
from launcher.plan.shape import Step
from launcher.site import Site
from launcher.tools import certificates
from launcher.tools.host import HostFacts
from tests.containers import container

NODES = ("node1", "node2")
STEPS = len(NODES) * 3


@pytest.fixture
def inventory(load: Callable[..., Inventory], tmp_path: Path) -> Inventory:
    """Two nodes, whose files are in folders here."""
    nodes = ", ".join(
        f"{{host: {name}, ip: 10.0.0.{number}, gpus: 8, state_dir: {tmp_path}/{name}}}"
        for number, name in enumerate(NODES, 1)
    )
    return load(nodes=f"nodes: [{nodes}]")


def observe(inventory: Inventory) -> Site:
    """Return the nodes as `up` sees them while their containers run."""
    facts = {}
    for node in inventory.nodes:
        base = Path(node.state_dir or "") / inventory.cluster
        names = [each.name for each in (base / "secrets").glob("AGENT_*")]
        argv = ("sh", "-c", shell.program("certificates"), "certificates", str(base))
        shown = subprocess.run(argv, capture_output=True, check=True, text=True).stdout
        own = container(name=f"vlaunch-{inventory.cluster}-{node.name}", node=node.name)
        facts[node.name] = HostFacts(
            home="/home/ops", secret_names=tuple(names), certificates=shown, containers=(own,)
        )
    return Site(inventory, facts)


def steps(inventory: Inventory) -> list[Step]:
    """Return what `up` would do about certificates now."""
    site = observe(inventory)
    stages = certificate_stages(site, renewal(inventory, site.facts))
    return [step for stage in stages for step in stage.steps]


def send(sent: list[Step]) -> None:
    for step in sent:
        given = step.command.stdin() if step.command.stdin else b""
        subprocess.run(step.command.argv, input=given, check=True, timeout=10)


def accept(inventory: Inventory) -> bool:
    """True when any agent connects to any other, both knowing whom they talk to."""
    contexts = {
        node.name: [
            Certificates(
                server=server, folder=f"{node.state_dir}/{inventory.cluster}/secrets"
            ).context()
            for server in (True, False)
        ]
        for node in inventory.nodes
    }
    for head, worker in itertools.permutations(inventory.nodes, 2):
        server, client = contexts[head.name][0], contexts[worker.name][1]
        assert server is not None
        assert client is not None
        to_head, to_worker = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_worker, to_head, server_hostname=head.ip),
            server.wrap_bio(to_head, to_worker, server_side=True),
        ]
        for end in [*ends, *ends]:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
        assert [name_in(end.getpeercert()) for end in ends] == [head.name, worker.name]
    return True


def renewed(inventory: Inventory) -> bool:
    """True when nothing is left to do, and each node trusts one authority."""
    facts = observe(inventory).facts
    counts = {each.certificates.count("BEGIN") for each in facts.values()}
    reasons = certificates.reasons(inventory, facts, datetime.now(timezone.utc))
    return not reasons and counts == {2}


@pytest.mark.parametrize("count", range(1, STEPS + 1))
def test_a_renewal_that_is_cut_short_keeps_the_agents_together(
    inventory: Inventory, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of its steps, twice; the next `up` finishes it, and trusts no other."""
    send(steps(inventory))
    assert (renewed(inventory), accept(inventory)) == (True, True)
    before = {each.certificates for each in observe(inventory).facts.values()}
    with monkeypatch.context() as patch:
        patch.setattr("launcher.tools.certificates._RENEWED", certificates._RENEWED * 99)
        for _ in range(2):
            begun = steps(inventory)
            assert len(begun) == STEPS
            send(begun[:count])
            assert accept(inventory)

    send(steps(inventory))
    assert (renewed(inventory), accept(inventory)) == (True, True)
    after = {each.certificates for each in observe(inventory).facts.values()}
    assert not before & after


def test_the_old_order_would_have_separated_them(inventory: Inventory) -> None:
    """The test above can fail: an authority that replaces the old one first is not enough."""
    send(steps(inventory))
    site = observe(inventory)
    _, _, last = certificate_stages(site, renewal(inventory, site.facts, force=True))
    send(list(last.steps)[:1])

    assert not accept(inventory)
