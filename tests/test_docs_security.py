"""The security model and the tables of ports and permissions, against the code."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from launcher.batch import job_spec
from launcher.batch.checked_job import CheckedJob, Source
from launcher.batch.job import DataParallel, Read, Write
from launcher.core.domain import Ports, SecretSource
from launcher.export.firewall import MP_PORTS
from launcher.hosts.checks.ports import DYNAMIC_PORTS
from launcher.inventory.load import loads
from launcher.inventory.schema import InventoryFile, fields_of
from launcher.tools import containers, docker, ray
from launcher.tools.site import Site

DOCS = Path(__file__).parent.parent / "docs"
TEXT = "\n".join(
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("reference/containers.md", "explanation/security.md")
)
INVENTORY = """\
cluster: c
image: vllm/vllm-openai:v0.32.0
nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 8}]
"""


def _table(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading."""
    lines = TEXT.partition(heading)[2].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


PORTS = {row[0].strip("`"): row for row in _table("## Ports")}


def test_every_port_is_in_the_table_with_its_default() -> None:
    """Exactly the inventory's keys, in their order."""
    assert {name: row[1] for name, row in PORTS.items()} == {
        field.name: str(field.default) for field in fields(Ports)
    }
    assert list(PORTS) == [field.name for field in fields(Ports)]


@pytest.mark.parametrize("name", PORTS)
def test_a_port_is_on_the_documented_nodes(name: str) -> None:
    """Ray's ports are in its commands; vLLM's, the agent's and the check's are not."""
    inventory = loads(INVENTORY, Path("inventory.yaml"))
    number = str(getattr(inventory.ports, name))
    head, worker = (
        ray.start_head(inventory.head, inventory),
        ray.start_worker(inventory.workers[0], inventory),
    )
    if number in head:
        assert PORTS[name][2] == ("every node" if number in worker else "head")
    else:
        assert name in ("api", "mp_master", "dp_rpc", "group", "probe", "copy", "metrics")
        assert PORTS[name][2] == ("every node" if name == "copy" else "head")


def test_the_rendezvous_port_of_batches_is_documented() -> None:
    """In the table and in the inventory's schema."""
    inventory = loads(INVENTORY, Path("inventory.yaml"))
    target = Source(where="remote", text="s3://b/o", shown="s3://b/o")
    sections = {"read": Read(paths=("s3://b/i",)), "write": Write(path="s3://b/o")}
    job = CheckedJob(**sections, sources=(), to=target, code={}, data_parallel=DataParallel(size=2))
    port = job_spec.job_spec(job, (), inventory)["rank_port"]
    name = next(item.name for item in fields(Ports) if getattr(inventory.ports, item.name) == port)

    assert f"batches with `data_parallel:`, up to {MP_PORTS} ports from this one" in PORTS[name][4]
    assert "batches" in str(fields_of(Ports)[name].description)


def test_the_dashboard_is_bound_to_loopback() -> None:
    """As documented; the firewall closes the kernel's range of dynamic ports."""
    inventory = loads(INVENTORY, Path("inventory.yaml"))
    argv = ray.start_head(inventory.head, inventory)

    assert argv[argv.index("--dashboard-host") + 1] == PORTS["dashboard"][3]
    assert f"{DYNAMIC_PORTS[0]} to {DYNAMIC_PORTS[1]}" in TEXT
    assert inventory.api_bind([inventory.head]) == "0.0.0.0"
    assert "by default all addresses" in PORTS["api"][3]


def test_ray_ports_require_the_token() -> None:
    """Every Ray container runs in token mode."""
    inventory = loads(INVENTORY, Path("inventory.yaml"))
    spec = containers.node_spec(Site(inventory), inventory.head, "x:1", {})

    assert spec.env["RAY_AUTH_MODE"] == "token"
    assert "`RAY_AUTH_MODE=token`" in TEXT
    assert all(
        "Ray token" in PORTS[name][5]
        for name in PORTS
        if name
        not in ("metrics_export", "api", "mp_master", "dp_rpc", "group", "probe", "copy", "metrics")
    )


def test_all_sources_and_locations_of_secrets_are_documented() -> None:
    """The inventory's keys, and both values of `secrets_in`."""
    section = TEXT.partition("\n## Secrets\n")[2].partition("\n## ")[0]

    assert [name for name in fields_of(SecretSource) if f"{{{name}:" not in section] == []
    assert [row[0] for row in _table("**On the nodes.**")] == ["`disk`", "`memory`"]
    assert "secrets_in" in fields_of(InventoryFile)
    assert containers.SECRETS in section


def test_containers_have_the_documented_rights() -> None:
    """Never privileged; the host's network always; IPC_LOCK only with RDMA."""
    for fabric in ("ethernet", "infiniband", "roce"):
        inventory = loads(f"{INVENTORY}network: {{fabric: {fabric}}}\n", Path("inventory.yaml"))
        spec = containers.node_spec(Site(inventory), inventory.head, "x:1", {})
        argv = docker.run(("docker",), spec)

        assert "--privileged" not in argv
        assert argv[argv.index("--network") + 1] == "host"
        assert argv[argv.index("--ipc") + 1] == "private"
        assert ("IPC_LOCK" in argv) == (fabric != "ethernet")


# Files with `sudo` in hints, or in arguments that are rejected.
HINTS = {"docker.py", "rules.py", "vllm_command.py"}


def test_sudo_runs_docker_and_nothing_else() -> None:
    """Only `docker:` of an inventory may use sudo; hints are for people."""
    code = Path(containers.__file__).parents[1]
    users = [
        str(path.relative_to(code))
        for path in sorted(code.rglob("*.py"))
        if not path.is_relative_to(code / "lab") and path.name not in HINTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "sudo"
    ]

    assert users == ["hosts/init_command.py"]  # `init` tries whether Docker needs it
