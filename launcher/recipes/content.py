"""What a recipe of the vLLM project says of a choice, in words that any recipe could use. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.model import Inventory
from launcher.recipes import merge
from launcher.recipes.choice import Choice
from launcher.recipes.hardware import Hardware
from launcher.recipes.serving import Content, Wrong, number
from launcher.recipes.split import fewest_gpus, sizes

_TODAY = "0.32.0"


def content(
    choice: Choice,
    inventory: Inventory,
    *,
    strategy: bool,
    why: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Content:
    """Return what is served on the nodes of `inventory`; `strategy` when the recipe's own was asked
    for. `why` and `notes` are what is said before and after.
    """
    own = sizes(choice, min(node.gpus for node in inventory.nodes), len(inventory.nodes))
    return Content(
        name=choice.recipe.model.model_id,
        model=choice.model,
        args=tuple(merge.arguments(choice)),
        env=merge.environment(choice),
        split=own,
        split_name=choice.strategy.name,
        takes=f"`--strategy {choice.strategy.name}`",
        image=image(choice),
        version=least_version(choice),
        wrong=tuple(_impossible(choice, inventory, strategy)),
        why=tuple(why),
        notes=(*_of_hardware(choice, inventory), *_unmet(choice), *notes),
    )


def least_version(choice: Choice) -> str:
    """Return the oldest vLLM that a choice runs on; empty when the recipe does not say."""
    found = [choice.recipe.model.min_vllm_version or "", choice.checkpoint.min_vllm_version or ""]
    return max(found, key=number) if any(map(number, found)) else next(filter(None, found), "")


def image(choice: Choice) -> str:
    """Return the image that a recipe names for a choice; empty where it names none."""
    exact = choice.checkpoint.hardware_overrides.get(choice.hardware.id)
    brand = "tpu" if choice.hardware.generation == "tpu" else choice.hardware.profile.brand.lower()
    images = (choice.checkpoint.docker_image, choice.recipe.model.docker_image)
    own = exact.docker_image if exact else None
    return own or next((each[brand] for each in images if brand in each), "")


def usual_image(hardware: Hardware) -> str:
    """Return the image of today's vLLM for some hardware."""
    builds = {"amd": "-rocm", "cpu": "-cpu"}
    return f"vllm/vllm-openai{builds.get(hardware.accelerator, '')}:v{_TODAY}"


def _impossible(choice: Choice, inventory: Inventory, strategy: bool) -> Iterator[Wrong]:
    """Yield what vlaunch does not do, or not on these nodes."""
    spread, hardware = choice.strategy, choice.hardware
    if "omni" in choice.recipe.meta.tasks:
        yield (
            "it is a recipe for vLLM-Omni, which vlaunch does not start",
            "see which recipes are for vLLM: `vlaunch recipes list`",
        )
        return
    if hardware.accelerator != inventory.accelerator:
        yield (
            f"{hardware.id} is {hardware.profile.brand}'s, and the inventory says"
            f" `accelerator: {inventory.accelerator}`",
            "name the hardware of these nodes: `--hardware NAME`",
        )
    if spread.deploy_type == "pd_cluster":
        yield (
            "prefill and decode on servers of their own (pd_cluster) is not what vlaunch starts",
            "take another strategy: `--strategy NAME`, of `vlaunch recipes show`",
        )
    if strategy and spread.deploy_type == "multi_node" and len(inventory.nodes) == 1:
        yield (
            f"{spread.name} is for several nodes, and there is one",
            "take another strategy: `--strategy single_node_tp`",
        )


def _of_hardware(choice: Choice, inventory: Inventory) -> Iterator[str]:
    hardware = choice.hardware
    counts = {node.gpus for node in inventory.nodes}
    if counts != {hardware.profile.gpu_count} and hardware.accelerator != "cpu":
        said = ", ".join(map(str, sorted(counts)))
        yield (
            f"the recipe's {hardware.id} is a node with {hardware.profile.gpu_count} GPUs; these"
            f" have {said}"
        )
    verified = choice.recipe.meta.hardware.get(hardware.id) == "verified"
    if not verified:
        yield f"nobody has confirmed this recipe on {hardware.id}"
    least, spread = fewest_gpus(choice), choice.strategy.name
    if inventory.gpus < least:
        yield f"the recipe wants {least} GPUs for {spread}; there are {inventory.gpus}"


def _unmet(choice: Choice) -> Iterator[str]:
    """Yield what must be there besides vLLM."""
    if choice.recipe.model.nightly_required or choice.checkpoint.nightly_required:
        yield "the recipe was written for a nightly build of vLLM"
    for each in choice.recipe.dependencies:
        brands = {brand.lower() for brand in each.brand}
        if each.optional or (brands and choice.hardware.profile.brand.lower() not in brands):
            continue
        command = " ".join(each.command.split())
        if "docker" in each.install_modes:
            yield f"to be done on the nodes before: {command}"
        else:
            yield f"the image must have what the recipe installs: {command}"
