"""Case folders: an inventory, the state of its nodes, and the expected script.

`observed.json` describes the nodes before the command:

* `verb`: `up` (the default) or `down`
* `offline`: true when no node is queried
* `before`: the inventory of an earlier `up`, a file of the folder
* `stopped`: nodes with an exited container
* `without_image`: nodes without the inventory's image
* `unreachable`: nodes that `down` cannot reach
* `derived`: true when an image with Ray is derived
* `nothing`: true when the plan is empty
* `home`: the SSH user's home on every node

`expected.sh` is the script; a new rule gets a new folder. The inventories of `sample-…` are links
into `inventory/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.app.apply import apply
from launcher.app.secrets import resolve
from launcher.cluster import up_inputs
from launcher.cluster.down_plan import plan_down
from launcher.cluster.up_plan import RayImage, plan_image, plan_up
from launcher.core.check import Finding
from launcher.core.domain import Answer, Inventory, Secret
from launcher.core.plan import Plan
from launcher.inventory.load import load
from launcher.network import network_plan
from launcher.network.network_shape import CheckOptions, CheckResult
from launcher.tools import ray
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import parse_answers, probe_commands, probe_nodes
from launcher.tools.shipped import derived
from launcher.tools.site import Site
from tests.fakes import FakeTransport
from tests.simulated import World

CASES = Path(__file__).parent / "plan_cases"
ASK = CheckOptions(nonce="f00d")
# Values of the cases' secrets; no script may contain them.
VALUES = {
    "HF_TOKEN": "hf_thisMustStayHidden",
    "VLLM_API_KEY": "sk-this-must-stay-hidden",
    "EXTRA": "it's $HIDDEN too",
}
TOKEN = "7ay70ken7hatmus7s7ayh1dden"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One folder, copied for changes; `world` has its nodes in their initial state."""

    name: str
    folder: Path
    inventory: Inventory
    observed: dict[str, Any]
    world: World
    secrets: dict[str, Secret]

    @property
    def context(self) -> Path | None:
        """Return the build context of the derived image, if any."""
        return self.folder / "context.tar" if self.observed.get("derived") else None

    def plans(self) -> list[Plan]:
        """Return the command's plans, as in `--dry-run`."""
        inventory, image = self.inventory, ray_image(self.inventory, self.context)
        if self.observed.get("verb") == "down":
            nodes = [
                node
                for node in inventory.nodes
                if node.name not in self.observed.get("unreachable", ())
            ]
            facts, _ = parse_answers(
                FakeTransport(self.world.answer).run(probe_commands(inventory, (), nodes))
            )
            return [plan_down(Site(inventory, facts))]
        facts = (
            {}
            if self.observed.get("offline")
            else probe_nodes(inventory, FakeTransport(self.world.answer), [inventory.image])
        )
        renewal = up_inputs.renew_certificates(inventory, facts, make=False)
        return [
            plan_image(Site(inventory, facts)),
            plan_up(Site(inventory, facts), self.secrets, image, renewal),
        ]

    def run(self) -> FakeTransport:
        """Run the command like `vlaunch`; the world's `changes` have the sent commands."""
        transport = FakeTransport(self.world.answer)
        first, *rest = self.plans()
        drain(first, transport)
        for _ in rest:
            # Probed again, as in `up` once the image exists.
            drain(self.plans()[1], transport)
        return transport


def names() -> list[str]:
    """Return the names of all case folders."""
    return sorted(path.name for path in CASES.iterdir())


def open_case(name: str, folder: Path) -> Case:
    """Copy a case folder to `folder` and put its nodes into the state in `observed.json`."""
    shutil.copytree(CASES / name, folder, dirs_exist_ok=True)
    observed = json.loads((folder / "observed.json").read_text())
    for secret, value in VALUES.items():
        # Without the final newline of editors.
        (folder / f"{secret}.key").write_text(value + "\n")
        (folder / f"{secret}.key").chmod(0o600)
    inventory = load(folder / "inventory.yaml")
    secrets = {**resolve(inventory.secrets, folder), ray.TOKEN: Secret(TOKEN)}
    world = World(inventory)
    if observed.get("before"):
        bring_up(
            load(folder / observed["before"]),
            world,
            secrets,
            folder / "context.tar" if observed.get("derived") else None,
        )
    for node in observed.get("stopped", ()):
        world.stop(node)
    for node in observed.get("without_image", ()):
        world.machines[node].images.clear()
    for machine in world.machines.values():
        machine.home = observed.get("home", "/root")
    world.changes.clear()
    return Case(
        name=name,
        folder=folder,
        inventory=inventory,
        observed=observed,
        world=world,
        secrets=secrets,
    )


def ray_image(inventory: Inventory, context: Path | None = None) -> RayImage:
    """Return the inventory's image with Ray; with a build context, a recipe that adds it."""
    if context is None:
        return RayImage(tag=inventory.image, ray_version="2.60.0", python_version="3.12.3")
    tag = f"{derived.REPOSITORY}:2.60.0-0123456789ab"
    recipe = derived.ImageRecipe(
        tag=tag, dockerfile=f"FROM {inventory.image}\n", files={"wheels/ray.whl": b"wheel"}
    )
    context.write_bytes(derived.build_context(recipe))
    return RayImage(
        tag=tag,
        ray_version="2.60.0",
        python_version="3.12.3",
        recipe=recipe,
        context_command=f"cat {context}",
    )


def bring_up(
    inventory: Inventory, world: World, secrets: Mapping[str, Secret], context: Path | None = None
) -> Plan:
    """Probe, plan and apply on a world, and return the plan."""
    transport = FakeTransport(world.answer)
    facts = probe_nodes(inventory, transport, [inventory.image])
    renewal = up_inputs.renew_certificates(inventory, facts)
    plan = plan_up(Site(inventory, facts), secrets, ray_image(inventory, context), renewal)
    drain(plan, transport)
    return plan


def drain(plan: Plan, transport: FakeTransport) -> None:
    """Apply a plan completely; its waits cost no time."""
    now = iter(range(1_000_000))
    list(apply(plan, transport, clock=lambda: float(next(now)), sleep=lambda _: None))


def up(inventory: Inventory) -> tuple[World, dict[str, HostFacts]]:
    """Bring a world up and return it with its facts."""
    world = World(inventory)
    bring_up(inventory, world, {})
    return world, probe_nodes(inventory, FakeTransport(world.answer), [inventory.image])


def judged(
    world: World, facts: dict[str, HostFacts], ask: CheckOptions, proof: CheckResult
) -> Sequence[Finding]:
    """Run the gate once."""
    gate = network_plan.network_gate(Site(world.inventory, facts), ask, proof)
    answers: dict[str, list[Answer]] = {}
    for answer in FakeTransport(world.answer).run(gate.queries):
        answers.setdefault(answer.node, []).append(answer)
    return gate.judge(answers)
