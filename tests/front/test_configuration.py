"""Groups of servers in HAProxy's configuration."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from launcher.core.domain import FrontSettings
from launcher.front.configuration import (
    FrontServer,
    Replica,
    front_servers,
    render,
    render_table,
    served_models,
)
from launcher.tools.site.servers import Server
from tests.agent.specs import hybrid, mp, process
from tests.served import INVENTORY


def test_a_group_has_its_servers_as_replicas() -> None:
    """In order of their numbers; a server with several APIs has one for each."""
    specs = {
        "chat": mp("n1", host="0.0.0.0"),
        "chat.10": mp("n2", host="10.1.1.1"),
        "chat.2": hybrid("n1", "n2"),
        "away": mp("n9"),
        "embed": mp("n1", port=8001),
    }
    servers = [Server(name=name, desired=spec) for name, spec in specs.items()]
    first, second = (node.ip for node in INVENTORY.nodes)

    assert front_servers(INVENTORY, [*servers, Server(name="stopped")]) == (
        FrontServer(
            name="chat",
            replicas=(
                Replica(name="chat", address=f"{first}:8000", node="n1"),
                Replica(name="chat.2:n1", address=f"{first}:8000", node="n1"),
                Replica(name="chat.2:n2", address=f"{second}:8000", node="n2"),
                Replica(name="chat.10", address="10.1.1.1:8000", node="n2"),
            ),
            models=("m",),
        ),
        FrontServer(
            name="embed",
            replicas=(Replica(name="embed", address="127.0.0.1:8001", node="n1"),),
            models=("m",),
        ),
    )


@pytest.mark.parametrize(
    ("options", "models"),
    [
        ((), ("/models/m",)),
        (("--served-model-name", "a", "b", "--seed", "1"), ("a", "b")),
        (("--served-model-name=a", "--served_model_name", "b"), ("b",)),
        (
            ("--lora-modules", "sql=/l/sql", '{"name": "x y", "path": "/l"}', "{", "{}"),
            ("/models/m", "sql", "x y"),
        ),
    ],
)
def test_a_server_has_the_models_of_its_command(options: tuple[str, ...], models: Any) -> None:
    """Their names are vLLM's: `--served-model-name`, else its argument; and adapters."""
    argv = ("vllm", "serve", "/models/m", *options)

    assert served_models(mp("n1", processes=(process("n1", *argv),))) == models


def test_a_model_of_two_servers_is_left_to_the_router() -> None:
    """As is one whose name needs quotes in HAProxy's rules."""
    servers = [
        FrontServer(name=name, replicas=(Replica(name=name, address="127.0.0.1:1"),), models=models)
        for name, models in (("a", ("both", "org/a")), ("b", ("both", 'b "x"\n')))
    ]
    text = render(FrontSettings(), servers, metrics_address="127.0.0.1")

    assert re.findall(r"str\((\w+)\) if !selected { var\(txn.model\) -m str (.*) }", text) == [
        ("a", "org/a")
    ]
    assert json.loads(render_table(FrontSettings(), servers))["models"] == {
        "both": ["a", "b"],
        "org/a": ["a"],
        'b "x"\n': ["b"],
    }
