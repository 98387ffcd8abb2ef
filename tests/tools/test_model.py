"""State and files of a model."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from launcher.core.domain import Answer, Argv
from launcher.tools import model
from launcher.tools.model import shape_of
from tests.tools.site.test_placement import LLAMA_70B, MOE


def run(argv: Argv) -> Answer:
    """Run a query locally."""
    done = subprocess.run(
        argv, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    return Answer(node="a", code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture
def hf_home(tmp_path: Path) -> Path:
    """A Hugging Face cache with one model: two files, one of them in a subfolder."""
    repo = tmp_path / "hub" / "models--org--m"
    for folder in ("refs", "blobs", "snapshots/abc/sub"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs/main").write_text("abc")
    (repo / "blobs/1").write_bytes(b"{}")
    (repo / "blobs/2").write_bytes(b"x" * 300)
    (repo / "snapshots/abc/config.json").symlink_to("../../blobs/1")
    (repo / "snapshots/abc/sub/a b.safetensors").symlink_to("../../../blobs/2")
    return tmp_path


def test_files_of_a_cached_model_have_the_size_of_their_blobs(hf_home: Path) -> None:
    """Not of the links."""
    files = model.parse_scan(run(model.scan("org/m", str(hf_home)))).files

    assert files == {"config.json": 2, "sub/a b.safetensors": 300}


def test_an_unfinished_download_is_detected(hf_home: Path) -> None:
    """A link with a missing blob has no size."""
    repo = hf_home / "hub/models--org--m"
    (repo / "blobs/3.incomplete").touch()
    (repo / "blobs/2").unlink()
    files = model.parse_scan(run(model.scan("org/m", str(hf_home)))).files

    assert files == {"config.json": 2, "sub/a b.safetensors": -1}


def test_an_incomplete_model_is_recognised(hf_home: Path) -> None:
    """A link without content, a missing shard of the index, an unfinished copy."""
    repo = hf_home / "hub/models--org--m"
    assert model.parse_scan(run(model.scan("org/m", str(hf_home)))).where == "there"
    index = repo / "snapshots/abc/model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "one.safetensors", "v": "one.safetensors"}}')
    scan = model.parse_scan(run(model.scan("org/m", str(hf_home))))
    assert (scan.where, scan.missing_file, scan.absent) == ("lacks", "one.safetensors", True)
    (repo / "snapshots/abc/one.safetensors").symlink_to("../../blobs/2")
    assert model.parse_scan(run(model.scan("org/m", str(hf_home)))).where == "there"
    (repo / "blobs/2").unlink()
    assert (
        model.parse_scan(run(model.scan("org/m", str(hf_home)))).missing_file == "one.safetensors"
    )


def test_an_unfinished_copy(hf_home: Path) -> None:
    """A folder with one is a mixture; other models in the cache are unaffected."""
    parts = hf_home / "hub/models--org--m/.vlaunch/parts"
    parts.mkdir(parents=True)
    (parts / "0").touch()
    assert model.parse_scan(run(model.scan("org/m", str(hf_home)))).where == "there"
    (hf_home / "hub/models--org--m/refs/main").unlink()
    assert model.parse_scan(run(model.scan("org/m", str(hf_home)))).where == "begun"
    assert model.parse_scan(run(model.scan("org/m", str(hf_home)))).files is None
    mine = parts.parents[1]
    assert model.parse_scan(run(model.scan(str(mine), ""))).where == "begun"


def test_a_plain_directory_and_a_single_file_are_listed(tmp_path: Path) -> None:
    """By path; a GGUF model is one file."""
    (tmp_path / "m.gguf").write_bytes(b"12345")

    assert model.parse_scan(run(model.scan(str(tmp_path), ""))).files == {"m.gguf": 5}
    assert model.parse_scan(run(model.scan(str(tmp_path / "m.gguf"), ""))).files == {"m.gguf": 5}


def test_a_missing_model_is_recognised(hf_home: Path) -> None:
    """By path and by name."""
    assert model.parse_scan(run(model.scan("org/other", str(hf_home)))).files is None
    assert model.parse_scan(run(model.scan("/no/such/path", ""))).files is None


@pytest.mark.parametrize(
    "answer",
    [
        Answer(node="a", code=0, out="?\n\n{}"),
        Answer(node="a", code=1, err="denied"),
        Answer(node="a", code=0, out="f x y\n\n{}"),
        Answer(node="a", code=0, out=f"f {'9' * 5000} y\n\n{{}}"),
    ],
)
def test_files_that_cannot_be_listed_are_unknown(answer: Answer) -> None:
    """BusyBox' find has no `-printf`."""
    scan = model.parse_scan(answer)

    assert (scan.files, scan.listed) == (None, False)
    assert (scan.config is None) is (answer.code != 0)


def test_the_configuration_is_read(hf_home: Path) -> None:
    """From the cache, unchanged."""
    config = '{"a": "b\\n\\n"}\n\n'
    (hf_home / "hub/models--org--m/blobs/1").write_text(config)
    scan = model.parse_scan(run(model.scan("org/m", str(hf_home))))
    assert (scan.config, scan.digest) == (
        {"a": "b\n\n"},
        hashlib.sha256(config.encode()).hexdigest(),
    )
    assert model.parse_scan(run(model.scan("org/x", str(hf_home)))).where == "not cached"


@pytest.mark.parametrize(
    ("config", "heads", "layers"),
    [
        (LLAMA_70B, 64, 80),
        ({"n_head": 12, "n_layer": 6}, 12, 6),
        (
            {
                "num_attention_heads": 16,
                "text_config": {"num_attention_heads": 32, "num_hidden_layers": 40},
            },
            32,
            40,
        ),
        ({"num_attention_heads": "many", "text_config": None}, None, None),
        ({"num_attention_heads": True}, None, None),
        (None, None, None),
    ],
)
def test_shape_of(config: dict[str, object] | None, heads: int | None, layers: int | None) -> None:
    """Heads and layers under their usual keys; invalid values are ignored."""
    shape = shape_of(config)

    assert (heads, layers) == (shape.heads, shape.layers)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (LLAMA_70B, 0),
        (MOE, 128),
        ({**LLAMA_70B, "n_routed_experts": 256}, 256),
        ({**LLAMA_70B, "num_local_experts": 8}, 8),
        ({**LLAMA_70B, "moe_num_experts": [64, 64]}, 64),
        ({"text_config": MOE}, 128),
        ({**LLAMA_70B, "thinker_config": {"text_config": MOE}}, 128),
        (
            {
                **LLAMA_70B,
                "block_configs": [
                    {"block_type": "mamba"},
                    {"block_type": "moe", "n_routed_experts": 32},
                ],
            },
            32,
        ),
        ({"architectures": ["x"]}, None),
        (None, None),
    ],
)
def test_experts(config: dict[str, object] | None, experts: int | None) -> None:
    """Under any of their keys; a config without attention heads is not a dense model's."""
    assert experts == shape_of(config).experts
