"""From a path to an inventory, or to every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.domain import Inventory
from launcher.core.errors import InventoryError
from launcher.inventory.load import load
from tests.inventory.conftest import GOOD, mistake_of, mistakes_of

BAD = """\
cluster: "pair; reboot"
image: vllm/vllm-openai:v0.32.0
netwrok: {interface: eth0}
env:
  HF_TOKEN: hf_0123456789abcdef0123
secrets:
  HF_TOKEN: {env: HF_TOKEN, file: token}
serve:
  backend: rai
nodes:
  - host: gpu01
    ip: 10.0.0.11
    gpus: eight
    gpu: 8
  - {host: gpu02, ip: 10.0.0.11, gpus: 8}
  - 5
  - {ip: 10.0.0.13, gpus: 8, gpus: 9}
"""


def test_a_valid_file(tmp_path: Path) -> None:
    """With an unchanged path."""
    path = tmp_path / "inventory.yaml"
    path.write_text(GOOD)

    inventory = load(path)

    assert isinstance(inventory, Inventory)
    assert (path, "pair", ["gpu01", "gpu02"]) == (
        inventory.path,
        inventory.cluster,
        [n.name for n in inventory.nodes],
    )


def test_every_mistake_is_reported_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    """Syntax of values, unknown keys, rules between keys, and duplicates."""
    path = tmp_path / "inventory.yaml"
    path.write_text(BAD)

    assert [line.removeprefix(f"{path}:") for line in mistakes_of(path)] == [
        (
            "1: cluster: should be a name of at most 40 lower-case letters, digits, `-`, `_` and"
            ' `.`, not "pair; reboot"'
        ),
        "3: unknown key `netwrok`; did you mean `network`?",
        "5: env.HF_TOKEN: should be removed; it is a secret (line 7)",
        "7: secrets.HF_TOKEN: should have exactly one of `env`, `file`, `command` and `prompt`",
        '9: serve.backend: should be ray or mp, not "rai"; did you mean `ray`?',
        '13: nodes[0].gpus: should be a whole number, not "eight"',
        "14: nodes[0]: unknown key `gpu`; did you mean `gpus`?",
        "15: nodes[1].ip: should be unique, but `10.0.0.11` is also on line 12",
        "16: nodes[2]: should be a mapping of keys to values, not 5",
        "17: nodes[3].gpus: written twice; the first is on line 17",
        (
            "17: nodes[3]: `host` is missing: Host name or address for SSH, or a range such as"
            " gpu[01-16]"
        ),
    ]


def test_the_error_has_a_count_and_exit_code_2(tmp_path: Path) -> None:
    """No node was contacted."""
    path = tmp_path / "inventory.yaml"
    path.write_text(BAD)

    with pytest.raises(InventoryError) as caught:
        load(path)

    assert (f"11 mistakes in `{path}`", 2) == (caught.value.message, caught.value.exit_code)


def test_no_secret_is_repeated(tmp_path: Path) -> None:
    """An error must not copy a misplaced token into a log."""
    path = tmp_path / "inventory.yaml"
    path.write_text(
        "cluster: [hf_0123456789abcdefghij]\nenv: {A_TOKEN: abcdefghij0, B:"
        " hf_0123456789abcdefghij}\nsecrets: {C: literal-secret, D: {env: literal-secret}}\nserve:"
        " {args: [--api-key=literal-secret, --api-key literal-secret, hf_0123456789abcdefghij]}\n"
    )

    message = "\n".join(mistakes_of(path))
    assert not [text for text in ("hf_0123", "abcdefghij0", "literal-secret") if text in message]


def test_an_empty_file(tmp_path: Path) -> None:
    """It differs from an invalid one."""
    path = tmp_path / "inventory.yaml"
    path.touch()

    assert mistake_of(path).startswith(f"{path}:1: the file is empty")


def test_a_thousand_nodes_load(tmp_path: Path) -> None:
    """The limit on nodes is reachable."""
    path = tmp_path / "inventory.yaml"
    nodes = [
        f'  - {{host: "r{rack}-gpu[001-100]", ip: "10.0.{rack}.[1-100]", gpus: 8}}\n'
        for rack in range(10)
    ]
    path.write_text("cluster: big\nimage: vllm/vllm-openai\nnodes:\n" + "".join(nodes))

    inventory = load(path)

    assert (len(inventory.nodes), inventory.gpus, inventory.head.name) == (1000, 8000, "r0-gpu001")
