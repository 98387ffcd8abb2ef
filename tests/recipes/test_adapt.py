"""The parts of a command that vlaunch passes on, and the reasons for the rest."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from launcher.core import redaction
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.recipes.adapt import AdaptedCommand, adapt_command
from launcher.recipes.vllm_command import VllmCommand, parse_pasted
from launcher.tools import vllm
from tests.recipes import case

SECRETS = "secrets: {HF_TOKEN: {env: HF_TOKEN}, VLLM_API_KEY: {env: KEY}}"
KEY = "sk-abcdefghijklmnopqrstuvwx"


def adapted(
    text: str,
    inventory: Inventory | None = None,
    *args: str,
    replicas: int = 1,
    backend: str = "mp",
) -> AdaptedCommand:
    """Adapt a pasted command."""
    return adapt_command(
        parse_pasted(text),
        inventory or case.nodes(),
        args=args,
        replicas=replicas,
        backend="mp" if backend == "mp" else "ray",
    )


@pytest.mark.parametrize(
    "key", [key.rstrip("*") for key in vllm.RESERVED if key not in ("--api-key", "--hf-token")]
)
def test_every_reserved_option_is_dropped(key: str) -> None:
    """With its value; the reason names its key."""
    if key == "--model":  # it names the model
        return
    result = adapted(f"vllm serve m {key} 1 --max-model-len 8")

    assert result.args == ("--max-model-len", "8")
    ((text, reason),) = result.dropped
    assert text == f"{key} 1"
    assert reason in vllm.RESERVED


@pytest.mark.parametrize(
    "text", ["--tensor_parallel_size=16", "--tensor-par 16", "-tp=16", "-n2", "--ssl-keyfile k"]
)
def test_other_spellings_of_reserved_options(text: str) -> None:
    """All that argparse accepts."""
    result = adapted(f"vllm serve m {text}")

    assert result.args == ()
    assert [text for text, _ in result.dropped] == [text]


def test_load_balancing_needs_replicas() -> None:
    """The option stays with several."""
    text = "vllm serve m --data-parallel-hybrid-lb"

    assert adapted(text).args == ()
    assert adapted(text, replicas=2).args == ("--data-parallel-hybrid-lb",)


def test_other_arguments_win() -> None:
    """The inventory's, and those after `--`, with a note if they differ."""
    text = "vllm serve m --max-model-len 8 --seed 1 --no-enable-prefix-caching"
    result = adapted(text, None, "--max_model_len=9", "--seed", "1", "--enable-prefix-caching")

    assert result.args == ("--max_model_len=9", "--seed", "1", "--enable-prefix-caching")
    assert result.notes == [
        "`--max_model_len=9` replaces `--max-model-len 8`",
        "`--enable-prefix-caching` replaces `--no-enable-prefix-caching`",
    ]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("NCCL_SOCKET_IFNAME", "interface"),
        ("GLOO_SOCKET_IFNAME", "interface"),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "interface"),
        ("NCCL_IB_HCA", "hca"),
        ("NCCL_DEBUG", "NCCL's transport"),
        ("VLLM_HOST_IP", "`ip:`"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "`--timeout`"),
        ("HF_HOME", "`hf_home:`"),
        ("CUDA_VISIBLE_DEVICES", "`gpus:`"),
        ("TORCHINDUCTOR_CACHE_DIR", "`cache_dir:`"),
        ("RAY_ADDRESS", "Ray"),
    ],
)
def test_reserved_variables_are_dropped(name: str, source: str) -> None:
    """With their sources; others stay."""
    result = adapted(f"{name}=x VLLM_USE_V1=1 vllm serve m")

    assert result.env == {"VLLM_USE_V1": "1"}
    (note,) = result.notes
    assert note.startswith(f"dropped `{name}=x`; vlaunch sets it from ")
    assert source in note


def test_variables_of_the_inventory_win() -> None:
    """With a note where they differ; the same value needs none."""
    inventory = case.nodes('env: {A: "1", B: "2"}')
    result = adapted("A=1 B=3 C=4 vllm serve m", inventory)

    assert result.env == {"C": "4"}
    assert result.notes == ["`B=2` of the inventory replaces `B=3`"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"vllm serve m --api-key {KEY}", "VLLM_API_KEY"),
        (f"vllm serve m --api-key={KEY}", "VLLM_API_KEY"),
        (f"vllm serve m --api_key secondsecret {KEY}", "VLLM_API_KEY"),
        (f"vllm serve m --hf-token {KEY}", "HF_TOKEN"),
        (f"HF_TOKEN={KEY} vllm serve m", "HF_TOKEN"),
        (f"docker run -e HF_TOKEN={KEY} image m", "HF_TOKEN"),
        ("HF_TOKEN=$HF_TOKEN vllm serve m", "HF_TOKEN"),
    ],
)
def test_secrets_need_a_source_in_the_inventory(text: str, name: str) -> None:
    """In any case they are neither shown nor passed on."""
    with pytest.raises(RequestError) as raised:
        adapted(text)
    assert "is a secret" in raised.value.evidence
    assert raised.value.hint
    assert f"add `secrets: {{{name}: {{env: {name}}}}}` to the inventory" in raised.value.hint

    result = adapted(text, case.nodes(SECRETS))
    shown = f"{raised.value} {raised.value.evidence} {raised.value.hint} {result}"
    assert (result.args, result.env) == ((), {})
    for value in (KEY, "secondsecret"):
        assert value not in shown
        assert value not in text or redaction.redact(value) == redaction.MASK


@pytest.mark.parametrize(
    ("text", "evidence", "hint"),
    [
        (f"vllm serve m --chat-template {KEY}", "a value of `--chat-template` looks", "secrets:"),
        (f"ACME={KEY} vllm serve m", "a value of ACME looks like a secret", "secrets:"),
        ("vllm serve m --seed $SEED", "contains the shell's `$SEED`", "with its value"),
        ("A=${B} vllm serve m", "A contains the shell's `${B}`", "with its value"),
        ("vllm serve m --seed `date`", "contains the shell's ```", "with its value"),
    ],
)
def test_unusable_arguments(text: str, evidence: str, hint: str) -> None:
    """Secrets in unexpected places, and shell expansions."""
    with pytest.raises(RequestError) as raised:
        adapted(text)

    assert evidence in raised.value.evidence
    assert hint in (raised.value.hint or "")
    assert KEY not in raised.value.evidence
    assert KEY not in text or redaction.redact(KEY) == redaction.MASK


def test_a_dropped_option_may_have_a_shell_variable() -> None:
    """It is not used."""
    assert adapted("vllm serve m -tp $TP").args == ()


def test_variables_that_ray_reads_early() -> None:
    """Rejected with Ray only, with lines for the inventory."""
    text = "LD_PRELOAD=/a.so OMP_NUM_THREADS=8 vllm serve m"

    assert adapted(text).env == {"LD_PRELOAD": "/a.so", "OMP_NUM_THREADS": "8"}
    with pytest.raises(
        RequestError, match="the pasted command cannot run on this cluster"
    ) as raised:
        adapted(text, backend="ray")
    assert "before LD_PRELOAD and OMP_NUM_THREADS" in raised.value.evidence
    assert 'env:\n  LD_PRELOAD: "/a.so"\n  OMP_NUM_THREADS: "8"' in (raised.value.hint or "")


@pytest.mark.parametrize(
    "option", ["--enable-x", "--no-enable-x", "--disable-x", "--no-disable-x", "--disable_x"]
)
def test_an_option_has_several_forms(option: str) -> None:
    """The last of them counts, as in vLLM's own parser."""
    result = adapted("vllm serve m --enable-x", None, option)
    assert result.args == (option,)


@pytest.mark.parametrize(
    ("version", "image", "notes"),
    [
        ("0.11.0", "vllm/vllm-openai:v0.32.0", []),
        ("0.32.0", "vllm/vllm-openai:v0.32.0-cu130", []),
        ("0.11.0", "vllm/vllm-openai:mine", ["needs vLLM 0.11.0; check that .*:mine has it"]),
        ("nightly", "vllm/vllm-openai:v0.32.0", ["needs vLLM nightly; check"]),
    ],
)
def test_the_version_of_an_image(version: str, image: str, notes: list[str]) -> None:
    """It is compared by its tag; where that is impossible, there is a note."""
    command = VllmCommand(origin="the recipe r", model="m", version=version)
    inventory = case.nodes(image=image)
    result = adapt_command(command, inventory, args=(), replicas=1, backend="mp")

    assert len(result.notes) == len(notes)
    assert all(map(re.search, notes, result.notes))


def test_an_old_image_and_a_named_one() -> None:
    """The hint has the recipe's image; another image alone is a note."""
    command = VllmCommand(origin="the recipe r", model="m", version="0.34", image="acme/vllm:x")
    with pytest.raises(RequestError) as raised:
        adapt_command(command, case.nodes(), args=(), replicas=1, backend="mp")
    assert "needs vLLM 0.34, but the cluster's image is vllm/vllm-openai" in raised.value.evidence
    assert raised.value.hint == "set `image:` to acme/vllm:x, then run `vlaunch up`"

    inventory = case.nodes(image="vllm/vllm-openai:v0.34.0")
    result = adapt_command(command, inventory, args=(), replicas=1, backend="mp")
    assert "names the image acme/vllm:x" in result.notes[0]
    latest = replace(command, image="vllm/vllm-openai:latest")
    assert adapt_command(latest, inventory, args=(), replicas=1, backend="mp").notes == []


def test_all_problems_are_reported_at_once() -> None:
    """With one hint for each."""
    with pytest.raises(RequestError) as raised:
        adapted(f"RAY_x=1 vllm serve m --api-key {KEY} --seed $S", backend="ray")

    assert len(raised.value.evidence.splitlines()) == 3
    for part in ("VLLM_API_KEY", "`$S`", "`--backend mp`"):
        assert part in (raised.value.hint or "")
