"""Engine arguments by name: as flags for servers, and rejected ones."""

from __future__ import annotations

import pytest

from tests.inventory.conftest import Load, Mistakes


def test_servers_get_them_before_their_own_arguments(load_text: Load) -> None:
    """As from a configuration file of vLLM; later arguments win."""
    inventory = load_text(
        """
        engine_args:
          dtype: float32
          max-model-len: 512
          gpu_memory_utilization: 0.90
          enforce_eager: true
          enable_prefix_caching: false
          quantization:
          allowed_media_domains: [a.example, b.example]
          compilation_config: {mode: 2, backend: eager}
        serve: {args: [--dtype, half]}
        """
    )

    assert inventory.serve.args == (
        *("--dtype", "float32", "--max-model-len", "512", "--gpu-memory-utilization", "0.9"),
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--allowed-media-domains", "a.example", "b.example"),
        *("--compilation-config", '{"mode": 2, "backend": "eager"}'),
        *("--dtype", "half"),
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{tp: 2}", "engine_args.tp: should be left out: each server and each job sets it"),
        (
            "{data-parallel-size: 2}",
            "engine_args.data-parallel-size: should be left out: each server and each job sets it",
        ),
        (
            "{max_model_len: 1, --max-model-len: 2}",
            "engine_args.--max-model-len: is `max_model_len` in another spelling",
        ),
        (
            "{override: {key: hf_0123456789abcdefghij}}",
            "engine_args.override: a secret should not be an argument, which `ps` shows; use"
            " `secrets`",
        ),
        (
            '{"a b": 1}',
            'engine_args.a b: should be the name of an argument, such as max_model_len, not "a b"',
        ),
    ],
)
def test_forbidden_arguments(mistakes: Mistakes, written: str, expected: str) -> None:
    """Arguments of a server or job, duplicates, and secrets."""
    assert [f"3: {expected}"] == mistakes(f"engine_args: {written}")
