"""The inventory's defaults in a job."""

from __future__ import annotations

from dataclasses import replace

from launcher.batch.build import with_defaults
from launcher.core.domain import Inventory
from tests.batch.conftest import Load

DEFAULTS = {"max-model-len": 512, "dtype": "float32", "enforce_eager": True}


def test_a_jobs_engine_arguments_override_the_inventorys(
    load_text: Load, inventory: Inventory
) -> None:
    """In any spelling; one without a value is left to vLLM."""
    cpu = replace(inventory, engine_args=DEFAULTS)
    job = load_text("engine: {args: {max_model_len: 2048, enforce-eager: null, seed: 3}}")

    assert with_defaults(job, cpu).engine.args == {
        "max_model_len": 2048,
        "dtype": "float32",
        "seed": 3,
    }
    assert with_defaults(job, inventory).engine.args == {"max_model_len": 2048, "seed": 3}


def test_a_class_gets_no_engine_arguments(load_text: Load, inventory: Inventory) -> None:
    """It selects its own model, and its answers do not depend on them."""
    job = load_text("predict: {class: 'a:B'}", model=None)

    assert with_defaults(job, replace(inventory, engine_args=DEFAULTS)) == job
