"""Recipes of sparkrun."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.recipes import read, sparkrun
from launcher.recipes.read import RecipeError
from launcher.recipes.serving import Content, Wish, serving
from tests.recipes import acme


def content(text: str, nodes: int = 2) -> Content:
    """Read the text of a recipe, for so many nodes with one GPU."""
    written = read.parsed(text, "r.yaml", first="model")
    assert sparkrun.is_one(written)
    return sparkrun.content(sparkrun.recipe(written, "r.yaml"), "r.yaml", acme.nodes(nodes, 1))


def words(found: Content) -> str:
    """Its arguments as one would type them."""
    return " ".join(option.text for option, _ in found.args)


def fixture(name: str) -> str:
    return (acme.FOLDER / name).read_text(encoding="utf-8")


def test_a_command() -> None:
    """Is filled in from the defaults, and read as vLLM's words; JSON's braces stay."""
    found = content(fixture("sparkrun.yaml"))

    assert found.model == "acme/Dense-8B"
    assert words(found) == (
        "--host 0.0.0.0 --port 8000 --tensor-parallel-size 2 --gpu-memory-utilization 0.8"
        " --max-num-seqs 6 --speculative-config"
        """ '{"method":"mtp","num_speculative_tokens":2}'"""
        " --distributed-executor-backend ray --revision 0123456789abcdef"
    )
    assert found.env == {"ACME_MOE": "1", "NCCL_DEBUG": "INFO"}
    assert found.split.words == "TP 2 on 2 nodes"
    assert found.image == "acme/spark-vllm:latest"


def test_fields_without_a_counterpart() -> None:
    """Are named, and so are those that nobody knows."""
    assert content(fixture("sparkrun.yaml")).notes == (
        "the recipe is for the backend ray: `--backend ray`",
        "`pre_exec` is not used: no commands are run in the containers before: put them into the"
        " image",
        "`brand_new` is not known to vlaunch, and not used",
    )


def test_the_first_version() -> None:
    """Doubles JSON's braces, and says what to build."""
    found = content(fixture("sparkrun-v1.yaml"))

    assert words(found) == """--port 8000 -tp 2 --limit-mm-per-prompt '{"image":1}'"""
    assert found.split.tp == 2
    assert [each.split("`")[1] for each in found.notes[1:]] == ["build_args", "mods"]


def test_a_model_in_their_containers() -> None:
    """Is the one that the recipe names; where it names none, that is said."""
    path = "command: vllm serve /cache/huggingface/hub/x --seed 1"
    named, nameless = content(f"model: a/b\n{path}"), content(path)

    assert (named.model, words(named)) == ("a/b", "--seed 1")
    assert "a/b is taken" in named.notes[0]
    assert nameless.model == "/cache/huggingface/hub/x"
    assert "`--model` names yours" in nameless.notes[0]


def test_no_command() -> None:
    """Then the defaults are vLLM's options."""
    text = """
model: a/b
runtime: vllm
defaults: {tensor_parallel: 2, max_model_len: 8192, trust_remote_code: true, enforce_eager: false}
"""
    found = content(text)

    assert words(found) == "--tensor-parallel-size 2 --max-model-len 8192 --trust-remote-code"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("more", "nodes", "said"),
    [
        ("min_nodes: 3", 2, "it is for 3 nodes at least; there are 2"),
        ("cluster_only: true", 1, "it is for 2 nodes at least; there are 1"),
        ("max_nodes: 1", 2, "it is for 1 node at most; there are 2"),
        ("solo_only: true", 2, "it is for 1 node at most; there are 2"),
        ("mode: solo", 1, ""),
    ],
)
def test_how_many_nodes(more: str, nodes: int, said: str) -> None:
    """Is kept to."""
    found = content(f"model: a/b\ndefaults: {{}}\n{more}", nodes)
    if not said:
        assert found.wrong == ()
        return
    with pytest.raises(RequestError) as error:
        serving(found, acme.nodes(nodes, 1), Wish(), None)
    assert error.value.evidence == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runtime: sglang\nmodel: a/b", "runtime: is not vLLM's, which alone is started here"),
        ("container: x", "has neither `model` nor `command`"),
        ("command: 'vllm serve a/b --x {y}'", "has no value for {y} in `defaults`"),
        ('command: "vllm serve \'a"', "is no command line"),
        ("command: llama-server -m x", "should be `vllm serve MODEL …`, and nothing else"),
        ("command: vllm serve", "should be `vllm serve MODEL …`, and nothing else"),
        ("command: vllm serve a | tee x", "should be one command, without a shell's words"),
        ("command: vllm serve a $(id)", "should be one command, without a shell's words"),
        ("command: 5", "command: should be text, not 5"),
        ("defaults: [1]\nmodel: a/b", "defaults: should be a mapping"),
    ],
)
def test_what_cannot_be_served(text: str, said: str) -> None:
    """A clear error, with the place."""
    with pytest.raises(RecipeError) as error:
        content(text)

    assert said in error.value.evidence


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("model: {model_id: a/b}\nmeta: {}", False),
        ("model: a/b\ndefaults: {}", True),
        ("command: vllm serve x", True),
        ("5", False),
    ],
)
def test_the_two_formats_are_told_apart(text: str, one: bool) -> None:
    """By their keys."""
    assert sparkrun.is_one(read.parsed(text, "r.yaml", first="model")) is one
