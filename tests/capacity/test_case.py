"""Cases from files: what they say, what is refused, and the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.capacity.answer import answer_case
from launcher.capacity.case import read
from launcher.errors import RequestError
from tests.capacity import models

FIXTURES = Path(__file__).parents[1] / "fixtures" / "planner"


def case(**said: Any) -> str:
    whole = {
        "id": "one",
        "config": models.LLAMA_8B,
        "weights_gib": 14.96,
        "gpu": {"name": "H100", "memory_gib": 79.18},
        **said,
    }
    return yaml.safe_dump(whole)


def test_a_case_is_answered() -> None:
    """With every field of a plan, and with tokens where its KV cache was measured."""
    (found,) = read(case(tp=2, max_model_len=8192, expect={"kv_gib": 40.0}), "case.yaml")
    said = answer_case(found)
    assert said["verdict"] == "fits"
    assert said["basis"] == "estimate"
    assert (said["split"]["tp"], said["split"]["pp"], said["split"]["dp"]) == (2, 1, 1)
    assert len(said["alternatives"]) >= 3
    assert said["tokens_from_kv_gib"] == 40 * 1024**3 // (32 * 16 * 4 * 2 * 128 * 2) * 16
    for name in ("weights_gib", "working_gib", "kv_gib", "kv_tokens", "max_concurrency"):
        assert said[name]["low"] <= said[name]["likely"] <= said[name]["high"]


def test_all_cases_are_read() -> None:
    """Those of the fixtures, and kinds of layers in words."""
    found = read((FIXTURES / "cases.yaml").read_text(), "cases.yaml")
    kinds = {each.id: {layer.kind for layer in each.model().layers} for each in found}
    assert len(found) == 12
    assert kinds["dl-gpt-oss-120b-tp4-four-nodes"] == {"sliding", "full"}
    assert kinds["talos-1995-qwen3.8-27b-fp8-tp2"] == {"recurrent", "full"}


def test_counted_kinds_are_read() -> None:
    """`21 mamba2, 17 mlp, 4 attention` says how many, which is enough without stages."""
    config = {**models.NEMOTRON_H, "layer_types": "5 mamba2, 4 mlp, 1 attention"}
    del config["hybrid_override_pattern"]
    (found,) = read(case(config=config), "case.yaml")
    kinds = [layer.kind for layer in found.model().layers]
    assert (kinds.count("recurrent"), kinds.count("none"), kinds.count("full")) == (5, 4, 1)


def test_only_weights_are_judged_of_what_is_not_modelled() -> None:
    """The answer says why, and claims nothing else."""
    new = {"architectures": ["NewForCausalLM"]}
    (found,) = read(case(config=new, weights_gib=30.0), "case.yaml")
    said = answer_case(found)
    assert said["basis"] == "weights-only"
    assert said["not_modelled"] == "the architecture NewForCausalLM is not modelled"
    assert said["verdict"] == "tight"
    assert said["kv_tokens"] is None


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["NewForCausalLM"]},
        {**models.LLAMA_8B, "quantization": "MIXED_PRECISION"},
    ],
)
def test_nothing_is_said_of_weights_that_are_not_known(config: dict[str, Any]) -> None:
    """No size, no estimate: 0.0 GiB would be taken for one."""
    (found,) = read(case(config=config, weights_gib=None), "case.yaml")
    with pytest.raises(RequestError, match="no estimate is possible") as error:
        answer_case(found)
    assert "weights_gib: N" in str(error.value.hint)


@pytest.mark.parametrize(
    ("said", "mistake"),
    [
        ({"tp": 0}, "tp: Input should be greater than or equal to 1"),
        ({"tp": "two"}, "tp: Input should be a valid integer"),
        ({"weights_gib": 0}, "weights_gib: Input should be greater than 0"),
        ({"weights_gib": float("nan")}, "weights_gib"),
        ({"gpu": {"name": "H100"}}, "gpu.memory_gib: Field required"),
        ({"config": []}, "config: Input should be a valid dictionary"),
        ({"max_model_len": -1}, "max_model_len: Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(said: dict[str, Any], mistake: str) -> None:
    """Where in the file, and what it should be."""
    with pytest.raises(RequestError) as caught:
        read(case(**said), "case.yaml")
    assert mistake in caught.value.evidence


@pytest.mark.parametrize("text", ["", "- [", "a: &a [*a, *a]", "\x00", "{" * 5000, "7"])
def test_what_is_no_case_is_refused(text: str) -> None:
    """Whatever stands in the file, it is one error."""
    with pytest.raises(RequestError, match="holds no case"):
        read(text, "case.yaml")


def test_stages_must_go_together() -> None:
    """A partition of other layers than the model has is refused."""
    (found,) = read(case(pp=2, pp_layer_partition=[10, 10]), "case.yaml")
    with pytest.raises(RequestError, match="do not go together with a model of 32 layers"):
        found.estimated()
