"""Rules between the keys of the cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.app import audit, lock
from launcher.core.domain import Backend, Inventory
from launcher.core.errors import InventoryError, PlacementError
from launcher.inventory.load import load as load_file
from launcher.inventory.load import loads
from launcher.tools.site import placement
from tests.inventory.conftest import GOOD

Load = Callable[..., Inventory]
Mistakes = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ("{api: 6379}", "ports.api: should differ from `gcs`; both are 6379"),
        (
            "{api: 7000, mp_master: 7000}",
            "ports.mp_master: should differ from `api`; both are 7000",
        ),
        (
            "{gcs: 10002}",
            (
                "ports.gcs: `gcs` (10002) should be outside the ports of Ray's workers, 10002 to"
                " 19999"
            ),
        ),
        (
            "{gcs: 19999}",
            (
                "ports.gcs: `gcs` (19999) should be outside the ports of Ray's workers, 10002 to"
                " 19999"
            ),
        ),
        (
            "{worker_min: 10000}",
            (
                "ports.worker_min: `client` (10001) should be outside the ports of Ray's workers,"
                " 10000 to 19999"
            ),
        ),
        (
            "{worker_min: 20000}",
            "ports.worker_min: should leave a range of ports for workers, not 20000 to 19999",
        ),
        (
            "{worker_max: 10002}",
            "ports.worker_max: should leave a range of ports for workers, not 10002 to 10002",
        ),
    ],
)
def test_ports_do_not_collide(mistakes: Mistakes, ports: str, expected: str) -> None:
    """With one another, or with the range of Ray's workers."""
    assert [f"3: {expected}"] == mistakes(f"ports: {ports}")


def test_ports_beside_the_workers_range_are_fine(load_text: Load) -> None:
    """The bounds are exact."""
    assert load_text("ports: {client: 10001, gcs: 20000}").ports.client == 10001


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (
            "{tp: 8, pp: 3}",
            "serve.pp: should fit the cluster: tp 8 x pp 3 needs 24 GPUs, but the nodes have 16",
        ),
        (
            "{tp: 17}",
            "serve.tp: should fit the cluster: tp 17 needs 17 GPUs, but the nodes have 16",
        ),
        (
            "{tp: 32, pp: 2}",
            "serve.tp: should fit the cluster: tp 32 x pp 2 needs 64 GPUs, but the nodes have 16",
        ),
        (
            "{pp: 20}",
            "serve.pp: should fit the cluster: pp 20 needs 20 GPUs, but the nodes have 16",
        ),
        (
            "{tp: 8, pp: 1, dp: 4}",
            (
                "serve.dp: should fit the cluster: tp 8 x pp 1 x dp 4 needs 32 GPUs, but the nodes"
                " have 16"
            ),
        ),
        (
            "{tp: 8, dp: 3}",
            "serve.dp: should fit the cluster: tp 8 x dp 3 needs 24 GPUs, but the nodes have 16",
        ),
        (
            "{pp: 2, dp: 9}",
            "serve.dp: should fit the cluster: pp 2 x dp 9 needs 18 GPUs, but the nodes have 16",
        ),
        (
            "{dp: 17}",
            "serve.dp: should fit the cluster: dp 17 needs 17 GPUs, but the nodes have 16",
        ),
        (
            "{tp: 17, dp: 2}",
            "serve.tp: should fit the cluster: tp 17 needs 17 GPUs, but the nodes have 16",
        ),
    ],
)
def test_a_placement_larger_than_the_cluster(mistakes: Mistakes, serve: str, expected: str) -> None:
    """The message has the sum."""
    assert [f"3: {expected}"] == mistakes(f"serve: {serve}")


@pytest.mark.parametrize(
    "serve",
    ["{tp: 8, pp: 2}", "{tp: 16}", "{pp: 16, tp: 1}", "{tp: 4}", "{tp: 8, dp: 2}", "{dp: 16}"],
)
def test_a_placement_that_fits(load_text: Load, serve: str) -> None:
    """All GPUs or fewer."""
    assert load_text(f"serve: {serve}").gpus == 16


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_rejected_sizes_cannot_be_placed(
    load_text: Load, mistakes: Mistakes, backend: Backend
) -> None:
    """The inventory rejects the same sizes as placement."""
    inventory = load_text()
    for tp, pp, dp in itertools.product(
        (None, 1, 3, 8, 17), (None, 1, 2, 5, 16), (1, 2, 3, 16, 17)
    ):
        sizes = ", ".join(
            f"{key}: {size}" for key, size in (("tp", tp), ("pp", pp), ("dp", dp)) if size
        )
        refused = bool(mistakes(f"serve: {{{sizes}}}"))
        try:
            placement.choose_placement(inventory, tp, pp, dp=dp, backend=backend)
        except PlacementError as error:
            assert refused or "GPUs, the cluster has" not in str(error), sizes
        else:
            assert not refused, sizes


def test_a_placement_is_not_judged_with_invalid_gpus(mistakes: Mistakes) -> None:
    """One mistake is reported once."""
    (mistake,) = mistakes("serve: {tp: 16}", "\nnodes: [{host: a, ip: 10.0.0.1, gpus: sixteen}]")

    assert "whole number" in mistake


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("ray: {object_store: 10MB}", "should be at least 75MiB, the minimum for Ray"),
        (
            "ray: {object_store: 2GiB}\nshm: 1GiB",
            "should fit into `shm` (line 4), which contains it",
        ),
    ],
)
def test_rays_object_store(mistakes: Mistakes, extra: str, expected: str) -> None:
    """It is in shared memory and has a minimum size."""
    assert [f"3: ray.object_store: {expected}"] == mistakes(extra)


@pytest.mark.parametrize("ray", ["none", "{version: none}"])
def test_a_cluster_without_ray(load_text: Load, mistakes: Mistakes, ray: str) -> None:
    """Its servers use the `mp` backend, and Ray settings are rejected."""
    bare = load_text(f"ray: {ray}")

    assert (bare.ray.off, bare.serve.backend, load_text().ray.off) == (True, "mp", False)
    assert load_text(f"ray: {ray}\nserve: {{backend: mp}}").serve.backend == "mp"
    assert mistakes(f"ray: {ray}\nserve: {{backend: ray}}") == [
        "4: serve.backend: cannot be ray with `ray: none` (line 3), which implies mp"
    ]
    assert mistakes("ray: {version: none, object_store: 1GiB}") == [
        "3: ray.object_store: should be left out with `version: none`"
    ]


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [("stuck", 59, 86401), ("restarts", -1, 101), ("canary", 0, 301), ("timeout", 0, 86401)],
)
def test_supervision_settings_have_bounds(
    load_text: Load, mistakes: Mistakes, key: str, low: int, high: int
) -> None:
    """Both ends are inclusive; without a limit, restarts are unlimited."""
    for value in (low, high):
        (mistake,) = mistakes(f"serve: {{{key}: {value}}}")
        assert mistake.startswith(f"3: serve.{key}: ")
    for value in (low + 1, high - 1):
        assert getattr(load_text(f"serve: {{{key}: {value}}}").serve, key) == value
    assert load_text("serve: {restarts: null}").serve.restarts is None


def test_an_object_store_that_fits(load_text: Load) -> None:
    """Up to all of it, or any size with the host's own."""
    assert load_text("ray: {object_store: 1GiB}\nshm: 1GiB").ray.object_store == 2**30
    assert load_text("ray: {object_store: 1TiB}").ray.object_store == 2**40


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "network: {hca: [mlx5_0]}",
            "network.hca: should come with `fabric: infiniband` or `fabric: roce`",
        ),
        (
            "accelerator: cpu\nnetwork: {fabric: roce, hca: [mlx5_0]}",
            "network.hca: should be left out with `accelerator: cpu`",
        ),
        (
            "accelerator: cpu\nnetwork: {fabric: roce, require: rdma}",
            "network.require: cannot be rdma with `accelerator: cpu`",
        ),
        ("network: {require: gdrdma}", "network.require: cannot be gdrdma with `fabric: ethernet`"),
        (
            "network: {fabric: roce, hca: [mlx5_0, mlx5_0]}",
            "network.hca: should name each device once",
        ),
    ],
)
def test_impossible_rdma(mistakes: Mistakes, extra: str, expected: str) -> None:
    """The required level must be possible on the fabric."""
    (mistake,) = mistakes(extra)

    assert expected in mistake


def test_rdma_devices_of_a_node_follow_the_same_rules(mistakes: Mistakes) -> None:
    """All nodes have the cluster's fabric."""
    nodes = "\nnodes: [{host: a, ip: 10.0.0.1, gpus: 1, network: {hca: [mlx5_0]}}]"

    assert mistakes(nodes=nodes) == [
        "3: nodes[0].network.hca: should come with `fabric: infiniband` or `fabric: roce` under"
        " `network`"
    ]


def test_a_fabric_without_devices_leaves_the_choice_to_nccl(load_text: Load) -> None:
    """`hca` is never required."""
    assert load_text("network: {fabric: infiniband}").head.hca == ()


def test_an_invalid_fabric_is_not_judged(mistakes: Mistakes) -> None:
    """One mistake is reported once."""
    (mistake,) = mistakes("network: {fabric: rocky, hca: [mlx5_0], require: rdma}")

    assert "did you mean `roce`?" in mistake


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "MY_API_KEY",
        "DB_PASSWORD",
        "aws_secret_access_key",
        "WANDB_APIKEY",
        "RAY_AUTH_TOKEN",
    ],
)
def test_a_secret_in_plain_env_is_rejected(mistakes: Mistakes, name: str) -> None:
    """Inventories are shared files."""
    assert [
        f"3: env.{name}: a secret should not be written here; use `secrets: {{{name}: {{env:"
        f" {name}}}}}`"
    ] == mistakes(f"env: {{{name}: 0123456789}}")


def test_a_token_like_value_is_a_secret_whatever_its_name(mistakes: Mistakes) -> None:
    """Well-known prefixes, in a node's environment as well."""
    nodes = "\nnodes: [{host: a, ip: 10.0.0.1, gpus: 1, env: {X: hf_0123456789abcdefghij}}]"
    (mistake,) = mistakes(nodes=nodes)

    assert mistake.startswith("3: nodes[0].env.X: a secret should not be written here")


@pytest.mark.parametrize(
    "env",
    [
        "TOKENIZERS_PARALLELISM: disabled",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN: 1",
        "MAX_TOKENS: 4000000",
        "HF_TOKEN_PATH: /run/token",
        'API_KEY: ""',
    ],
)
def test_settings_about_tokens_are_no_secrets(load_text: Load, env: str) -> None:
    """Switches, counts and paths."""
    assert load_text(f"env: {{{env}}}").head.env


def test_a_secret_is_not_also_a_plain_variable(mistakes: Mistakes) -> None:
    """The precedence would be ambiguous."""
    assert mistakes("secrets: {A: {env: A}}\nenv: {A: x}") == [
        "4: env.A: should be removed; it is a secret (line 3)"
    ]


@pytest.mark.parametrize("name", ["VLLM_HOST_IP", "RAY_ADDRESS", "RAY_AUTH_MODE"])
def test_reserved_variables(mistakes: Mistakes, name: str) -> None:
    """They differ per node or follow from other keys."""
    for extra in (f"env: {{{name}: x}}", f"secrets: {{{name}: {{env: A}}}}"):
        (mistake,) = mistakes(extra)
        assert "should be removed; " in mistake


@pytest.mark.parametrize(
    "source", ["{}", "{env: A, file: a}", "{env: A, command: a, file: b}", "{env: A, prompt: true}"]
)
def test_a_secret_has_exactly_a_single_source(mistakes: Mistakes, source: str) -> None:
    """Neither none nor two."""
    text = "should have exactly one of `env`, `file`, `command` and `prompt`"
    assert mistakes(f"secrets: {{A: {source}}}") == [f"3: secrets.A: {text}"]


@pytest.mark.parametrize("source", ["false", "3", '""', "[hf_0123456789abcdefghij]", "{a: b}"])
def test_a_prompt_is_true_or_a_question(mistakes: Mistakes, source: str) -> None:
    """The text may be the value by mistake, so it is not shown."""
    (mistake,) = mistakes(f"secrets: {{A: {{prompt: {source}}}}}")

    assert mistake.startswith(
        "3: secrets.A.prompt: should be true, or one line of text for the prompt, not "
    )
    assert "hf_" not in mistake


def test_a_prompt_is_not_the_value(mistakes: Mistakes) -> None:
    """A token in place of the text."""
    text = "should be the prompt text; the value is entered at the prompt"
    assert mistakes("secrets: {A: {prompt: hf_0123456789abcdefghij}}") == [
        f"3: secrets.A.prompt: {text}"
    ]


_API_KEY = (
    "a key should not be an argument, which `ps` shows; use `secrets: {VLLM_API_KEY: {env:"
    " VLLM_API_KEY}}`"
)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--api-key", _API_KEY),
        (
            "--api-key=abc",
            (
                "a key should not be an argument, which `ps` shows; use `secrets: {VLLM_API_KEY:"
                " {env: VLLM_API_KEY}}`"
            ),
        ),
        (
            "--x=hf_0123456789abcdefghij",
            "a secret should not be an argument, which `ps` shows; use `secrets`",
        ),
        (
            "--x=glpat-0123456789abcdefghij",
            "a secret should not be an argument, which `ps` shows; use `secrets`",
        ),
        ("--max-model-len 8192", "should be two items: `--max-model-len` and its value"),
    ],
)
def test_arguments_for_vllm(mistakes: Mistakes, argument: str, expected: str) -> None:
    """Every user of the node can read them."""
    assert [f"3: serve.args[0]: {expected}"] == mistakes(f'serve: {{args: ["{argument}"]}}')


def test_arguments_may_have_spaces_in_their_value(load_text: Load) -> None:
    """JSON in one argument is common."""
    args = ("--compilation-config", '{"level": 3}', '--x={"a": 1}', "8192", "0.90")

    assert (
        args
        == load_text(
            """serve: {args: [--compilation-config, '{"level": 3}', '--x={"a": 1}', 8192, 0.90]}"""
        ).serve.args
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            "[sudo, docker]",
            "should use `sudo -n`: without -n, sudo would wait for a password",
        ),
        (
            "[/usr/bin/sudo, docker]",
            "should use `sudo -n`: without -n, sudo would wait for a password",
        ),
        ("[-n, docker]", "should start with a command, not with the option `-n`"),
    ],
)
def test_calls_of_docker_that_would_hang(mistakes: Mistakes, argv: str, expected: str) -> None:
    """For the cluster and for one node."""
    node = f"\nnodes: [{{host: a, ip: 10.0.0.1, gpus: 1, docker: {argv}}}]"

    assert [f"3: docker: {expected}"] == mistakes(f"docker: {argv}")
    assert [f"3: nodes[0].docker: {expected}"] == mistakes(nodes=node)


def test_docker_by_sudo_without_a_password(load_text: Load) -> None:
    """The supported form."""
    assert load_text("docker: [sudo, -n, docker]").head.docker == ("sudo", "-n", "docker")


@pytest.mark.parametrize("name", [audit.FILE, lock.FILE])
def test_reserved_names_of_clusters(name: str, tmp_path: Path) -> None:
    """Folders of all locks or audit trails."""
    path = tmp_path / "inventory.yaml"
    path.write_text(f"cluster: {name}\nimage: x:1\nnodes: [{{host: a, ip: 10.0.0.1, gpus: 1}}]\n")

    with pytest.raises(InventoryError) as caught:
        load_file(path)
    assert [mistake.partition(": ")[2] for mistake in caught.value.mistakes] == [
        "cluster: should be another name: this one is reserved on the nodes"
    ]


def test_an_image_copied_between_nodes_is_named_by_a_tag() -> None:
    """Docker knows digests only of images from a registry."""
    text = GOOD.replace("vllm-openai:v0.32.0", f"vllm-openai@sha256:{'0' * 64}")
    path = Path("test.yaml")
    loads(text, path)
    with pytest.raises(InventoryError) as caught:
        loads(f"{text}image_source: nodes\n", path)
    assert "image: should be named by a tag" in caught.value.evidence


def test_all_mistakes_about_a_front_are_reported(mistakes: Mistakes) -> None:
    """At once."""
    front = (
        "front: {node: b, nodes: [gpu01, c], port: 8000, metrics: 8000, hold: 1 year,"
        " tls: {cert: a.pem}, image: A}"
    )

    assert mistakes(front) == [
        '3: front.hold: should be a duration such as 90s, 10m or 1h, not "1 year"',
        "3: front.image: should be an image reference such as vllm/vllm-openai:v0.33.0 or"
        ' name@sha256:…, not "A"',
        "3: front.metrics: should differ from `front.port`; both are 8000",
        "3: front.node: should be left out with `nodes`",
        "3: front.node: should be the name of a node, not `b`",
        "3: front.nodes[1]: should be the name of a node, not `c`",
        "3: front.port: should differ from `ports.api`; both are 8000",
        "3: front.tls: should have both files: `cert` and `key`",
    ]


def test_a_front_needs_no_setting(load_text: Load) -> None:
    """It is on the head, with TLS."""
    inventory = load_text("front: {}")

    assert inventory.front_nodes == (inventory.head,)
    assert inventory.front_url == "https://10.0.0.11:8443"
    assert load_text("front: {tls: off, address: a.example}").front_url == "http://a.example:8443"


@pytest.mark.parametrize("path", ["env", "nodes[0].env"])
def test_instances_of_a_gpu_are_rejected_in_the_environment(mistakes: Mistakes, path: str) -> None:
    """As in `gpus:`."""
    env = "env: {NVIDIA_VISIBLE_DEVICES: MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f}"
    node = f"nodes:\n  - {{host: gpu01, ip: 10.0.0.11, gpus: 1, {env}}}\n"
    (text,) = mistakes(env) if path == "env" else mistakes(nodes=node)

    assert f" {path}.NVIDIA_VISIBLE_DEVICES: cannot be instances of a GPU (MIG)" in text


@pytest.mark.parametrize(
    "exceptions", ["X: y", "NO_PROXY: localhost", 'no_proxy: "10.0.0.11,localhost,127.0.0.1"']
)
def test_a_proxy_needs_exceptions_for_the_nodes(mistakes: Mistakes, exceptions: str) -> None:
    """The message has the line to write."""
    assert mistakes(f'env: {{HTTP_PROXY: "http://proxy:3128", {exceptions}}}') == [
        "3: env.HTTP_PROXY: would send the nodes' own requests to the proxy; add to this section"
        " `NO_PROXY: localhost,127.0.0.1,10.0.0.11,10.0.0.12`"
    ]


@pytest.mark.parametrize(
    "exceptions",
    [
        'NO_PROXY: "localhost,127.0.0.1,10.0.0.11,10.0.0.12"',
        'NO_PROXY: "localhost, 127.0.0.0/8, 10.0.0.0/24, .example"',
        'no_proxy: "*"',
    ],
)
def test_a_proxy_with_exceptions(load_text: Load, exceptions: str) -> None:
    """Addresses, networks, or everything."""
    inventory = load_text(f'env: {{HTTP_PROXY: "http://proxy:3128", {exceptions}}}')

    assert inventory.head.env["HTTP_PROXY"] == "http://proxy:3128"
