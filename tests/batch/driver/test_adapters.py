"""LoRA adapters of a job, as arguments of vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.batch.driver import adapters, engine
from launcher.batch.driver.job_file import Refused
from tests.batch.driver.jobs import job


def adapter(folder: Path, config: Any) -> str:
    """Return the path of an adapter with this configuration."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"r": 4}, 8),
        ({"r": 8}, 8),
        ({"r": 12}, 16),
        ({"r": 64}, 64),
        ({"r": 8, "rank_pattern": {"q_proj": 24}}, 32),
        ({"r": 16, "rank_pattern": None}, 16),
    ],
)
def test_the_rank_is_the_next_that_vllm_knows(tmp_path: Path, config: Any, rank: int) -> None:
    """Of the largest layer."""
    spec = job(tmp_path, lora={"sql": adapter(tmp_path / "sql", config)})

    arguments = engine.engine_arguments(spec)
    assert (arguments["enable_lora"], arguments["max_loras"]) == (True, 1)
    assert arguments["max_lora_rank"] == rank
    assert "lora_modules" not in arguments


def test_requests_select_adapters_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `model`; one may come from the hub."""
    path, cached = adapter(tmp_path / "sql", {"r": 8}), adapter(tmp_path / "hub", {"r": 32})
    hub = ModuleType("transformers.utils")
    hub.cached_file = lambda name, file: f"{cached}/{file}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.utils", hub)
    spec = job(tmp_path, lora={"sql": path, "b": "org/b"}, write={"format": "openai"})

    assert adapters.adapter_arguments(spec) == {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
        "lora_modules": [f"sql={path}", "b=org/b"],
    }
    assert adapters.adapter_arguments(job(tmp_path)) == {}


@pytest.mark.parametrize("config", [None, {}, {"r": "x"}, []])
def test_an_unreadable_adapter_is_refused(tmp_path: Path, config: Any) -> None:
    """Before a replica starts."""
    path = str(tmp_path / "none") if config is None else adapter(tmp_path / "bad", config)

    with pytest.raises(Refused, match="LoRA adapter sql cannot be read from") as raised:
        engine.engine_arguments(job(tmp_path, lora={"sql": path}))
    assert raised.value.evidence
    assert path in raised.value.hint
