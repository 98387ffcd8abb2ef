"""Parsers of Docker's output: recorded containers and images, and invalid ones."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.errors import UnreadableAnswer
from launcher.tools.docker import docker_output

FIXTURES = Path(__file__).parents[2] / "fixtures" / "docker"
RECORDED = (FIXTURES / "inspect-ray-head-20.10.json").read_text()


def test_recorded_container() -> None:
    """Docker 20.10's `inspect` of a container of `up`."""
    (container,) = docker_output.parse_containers(RECORDED)

    assert (
        container.name,
        container.role,
        container.node,
        container.status,
        container.running,
    ) == (
        "vlaunch-lab-node1",
        "head",
        "node1",
        "running",
        True,
    )
    assert (container.spec, container.restarts, container.exit_code) == ("5bff3436aec5", 0, 0)
    assert (container.image, container.argv[:3]) == (
        "vlaunch/ray:2.60.0-310f925a456a",
        ("/opt/vlaunch/entry.sh", "ray", "start"),
    )
    assert container.env["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_recorded_image() -> None:
    """An imported image has no digest; its identity is its layers and configuration."""
    image = docker_output.parse_image((FIXTURES / "image-inspect-20.10.json").read_text())

    assert image is not None
    assert (image.id[:19], image.digests, image.architecture) == (
        "sha256:ba78a082a12e",
        (),
        "amd64",
    )
    assert image.env["LANG"] == "C.UTF-8"


def test_identity_is_equal_exactly_when_layers_and_configuration_are() -> None:
    """Two nodes may have loaded the same image at different times, and labels do not matter."""
    recorded = json.loads((FIXTURES / "image-inspect-20.10.json").read_text())

    def identity(**changed: Any) -> str:
        image = docker_output.parse_image(json.dumps([{**recorded[0], **changed}]))
        assert image is not None
        return image.identity

    same = identity()
    config = recorded[0]["Config"]

    assert (
        identity(
            Created="2027",
            Id="sha256:1",
            RepoTags=[],
            GraphDriver={},
            Config={**config, "Labels": {"a": "b"}},
        )
        == same
    )
    assert identity(Config={**config, "Entrypoint": ["bash"]}) != same
    assert identity(Config={**config, "Env": ["A=1"]}) != same
    assert identity(RootFS={"Layers": []}) != same
    assert identity(Architecture="arm64") != same


@pytest.mark.parametrize(
    "text",
    [
        "Cannot connect to the Docker daemon",
        "{}",
        "[1]",
        "[null]",
        '[{"Name": "x"}]',
        '[{"Config": 1}]',
    ],
)
def test_an_unreadable_container(text: str) -> None:
    """An error with the line, not a KeyError."""
    with pytest.raises(UnreadableAnswer):
        docker_output.parse_containers(text)


@pytest.mark.parametrize(
    "text", ["nonsense", "{}", '[{"Config": {}}]', '[{"Id": "x", "Config": []}]']
)
def test_an_unreadable_image(text: str) -> None:
    """It does not count as absent."""
    with pytest.raises(UnreadableAnswer):
        docker_output.parse_image(text)


def test_empty_output() -> None:
    """Docker prints an empty list, or no text."""
    assert docker_output.parse_containers("") == docker_output.parse_containers("[]\n") == ()
    assert docker_output.parse_image("[]") is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
        max_leaves=8,
    )
)
def test_any_json(value: Any) -> None:
    """The result is containers or UnreadableAnswer."""
    with suppress(UnreadableAnswer):
        docker_output.parse_containers(
            json.dumps([{"Name": "/x", "Id": "1", "Config": value, "State": value}])
        )


@pytest.mark.parametrize(
    ("host_config", "privileged"),
    [({"Privileged": True}, True), ({"Privileged": "yes"}, False), ({}, False)],
)
def test_privileged_containers_are_recognised(
    host_config: dict[str, Any], privileged: bool
) -> None:
    """From `docker inspect`."""
    item = {**json.loads(RECORDED)[0], "HostConfig": host_config}

    assert docker_output.parse_containers(json.dumps([item]))[0].privileged is privileged
