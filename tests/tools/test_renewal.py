"""Interrupted renewals of the agents' certificates: agents stay connected after any step."""

from __future__ import annotations

import itertools
import ssl
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher.agent.link.certificates import Certificates, common_name
from launcher.cluster.up_inputs import renew_certificates
from launcher.core import shell
from launcher.core.domain import Inventory
from launcher.core.plan import Step
from launcher.tools.host import HostFacts
from launcher.tools.shipped import certificates
from launcher.tools.shipped.node_files import certificate_stages
from launcher.tools.site import Site
from tests.containers import container

NODES = ("node1", "node2")
STEPS = len(NODES) * 3


@pytest.fixture
def inventory(load: Callable[..., Inventory], tmp_path: Path) -> Inventory:
    """Two nodes whose state directories are local folders."""
    nodes = ", ".join(
        f"{{host: {name}, ip: 10.0.0.{number}, gpus: 8, state_dir: {tmp_path}/{name}}}"
        for number, name in enumerate(NODES, 1)
    )
    return load(nodes=f"nodes: [{nodes}]")


def observe(inventory: Inventory) -> Site:
    """Return the facts that `up` observes while the containers run."""
    facts = {}
    for node in inventory.nodes:
        base = Path(node.state_dir or "") / inventory.cluster
        names = [file.name for file in (base / "secrets").glob("AGENT_*")]
        argv = ("sh", "-c", shell.program_text("certificates"), "certificates", str(base))
        public = subprocess.run(argv, capture_output=True, check=True, text=True).stdout
        running = container(name=f"vlaunch-{inventory.cluster}-{node.name}", node=node.name)
        facts[node.name] = HostFacts(
            home="/home/ops", secret_names=tuple(names), certificates=public, containers=(running,)
        )
    return Site(inventory, facts)


def plan_steps(inventory: Inventory) -> list[Step]:
    """Return the steps of `up` that would renew certificates now."""
    site = observe(inventory)
    stages = certificate_stages(site, renew_certificates(inventory, site.facts))
    return [step for stage in stages for step in stage.steps]


def run_steps(steps: list[Step]) -> None:
    for step in steps:
        stdin = step.command.stdin() if step.command.stdin else b""
        subprocess.run(step.command.argv, input=stdin, check=True, timeout=10)


def can_connect(inventory: Inventory) -> bool:
    """Return whether all agents can connect to all others, with verified names."""
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
        sides = [
            client.wrap_bio(to_worker, to_head, server_hostname=head.ip),
            server.wrap_bio(to_head, to_worker, server_side=True),
        ]
        for side in [*sides, *sides]:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
        assert [common_name(side.getpeercert()) for side in sides] == [head.name, worker.name]
    return True


def is_renewed(inventory: Inventory) -> bool:
    """Return whether the renewal is complete, and nodes trust a single authority."""
    facts = observe(inventory).facts
    counts = {host.certificates.count("BEGIN") for host in facts.values()}
    reasons = certificates.renewal_reasons(inventory, facts, datetime.now(timezone.utc))
    return not reasons and counts == {2}


@pytest.mark.parametrize("count", range(1, STEPS + 1))
def test_an_interrupted_renewal_keeps_agents_connected(
    inventory: Inventory, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops twice after `count` steps; another `up` completes it and trusts no old authority."""
    run_steps(plan_steps(inventory))
    assert (is_renewed(inventory), can_connect(inventory)) == (True, True)
    before = {host.certificates for host in observe(inventory).facts.values()}
    with monkeypatch.context() as patch:
        patch.setattr(
            "launcher.tools.shipped.certificates._RENEW_BEFORE", certificates._RENEW_BEFORE * 99
        )
        for _ in range(2):
            steps = plan_steps(inventory)
            assert len(steps) == STEPS
            run_steps(steps[:count])
            assert can_connect(inventory)

    run_steps(plan_steps(inventory))
    assert (is_renewed(inventory), can_connect(inventory)) == (True, True)
    after = {host.certificates for host in observe(inventory).facts.values()}
    assert not before & after


def test_replacing_the_authority_first_separates_agents(inventory: Inventory) -> None:
    """This proves that the test above can fail."""
    run_steps(plan_steps(inventory))
    site = observe(inventory)
    _, _, last = certificate_stages(site, renew_certificates(inventory, site.facts, force=True))
    run_steps(list(last.steps)[:1])

    assert not can_connect(inventory)
