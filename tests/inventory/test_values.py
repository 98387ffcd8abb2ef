"""Validation of single values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.core.domain import Inventory

Load = Callable[..., Inventory]
Mistakes = Callable[..., list[str]]

_METACHARACTERS = [
    " ",
    ";",
    "$",
    "`",
    "|",
    "&",
    "<",
    ">",
    "*",
    "?",
    "(",
    "'",
    "\\",
    "\n",
    "#",
    "!",
    "~x",
]
_NODE = "{{host: {}, ip: 10.0.0.1, gpus: 1}}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace("\n", "\\n") + '"'


@pytest.mark.parametrize("character", _METACHARACTERS)
@pytest.mark.parametrize(
    "extra",
    [
        "state_dir: {}",
        "hf_home: {}",
        "mounts: [{{source: {}, target: /t}}]",
        "mounts: [{{source: /s, target: {}}}]",
    ],
)
def test_paths_on_nodes_have_no_shell_characters(
    mistakes: Mistakes, extra: str, character: str
) -> None:
    """They end up in scripts that people paste."""
    assert mistakes(extra.format(_quoted(f"/a{character}b"))) != []


@pytest.mark.parametrize("character", _METACHARACTERS)
@pytest.mark.parametrize(
    "extra",
    [
        "ssh: {{user: {}}}",
        "ssh: {{jump: {}}}",
        "network: {{interface: {}}}",
        "network: {{fabric: roce, hca: [{}]}}",
        "docker: [{}]",
        "ray: {}",
        "serve: {{model: {}}}",
        "secrets: {{{}: {{env: A}}}}",
        "env: {{{}: x}}",
    ],
)
def test_names_have_no_shell_characters(mistakes: Mistakes, extra: str, character: str) -> None:
    """Strict on purpose."""
    assert mistakes(extra.format(_quoted(f"eth{character}0"))) != []


@pytest.mark.parametrize("character", [*_METACHARACTERS, "/", ","])
@pytest.mark.parametrize("entry", [_NODE, "{{host: a, name: {}, ip: 10.0.0.1, gpus: 1}}"])
def test_hosts_and_node_names_have_no_shell_characters(
    mistakes: Mistakes, entry: str, character: str
) -> None:
    """Ranges are checked after expansion."""
    assert mistakes(nodes=f"\nnodes: [{entry.format(_quoted(f'gpu{character}[1-1]'))}]") != []


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "-x", "--"])
@pytest.mark.parametrize(
    "extra",
    ["ssh: {{user: {}}}", "ssh: {{jump: {}}}", "ssh: {{identity: {}}}", "serve: {{model: {}}}"],
)
def test_no_value_looks_like_an_option(mistakes: Mistakes, extra: str, text: str) -> None:
    """A leading dash would make it a flag."""
    assert mistakes(extra.format(_quoted(text))) != []
    assert mistakes(nodes=f"\nnodes: [{_NODE.format(_quoted(text))}]") != []


@pytest.mark.parametrize(
    "image",
    [
        "vllm",
        "vllm/vllm-openai",
        "vllm/vllm-openai:v0.32.0",
        "localhost/x:1",
        "registry.example:5000/team/vllm_x--y:A.b-c",
        "[fd00::1]:5000/x",
        "vllm/vllm-openai@sha256:" + "0a" * 32,
        "vllm/vllm-openai:v1@sha256:" + "0a" * 32,
    ],
)
def test_image_references(load_text: Load, image: str) -> None:
    """All of Docker's forms."""
    text = load_text(nodes=f"\nnodes: [{_NODE.format('a')}]").image

    assert text == "vllm/vllm-openai:v0.32.0"
    assert image == _load_image(image)


def _load_image(image: str) -> str:
    from pathlib import Path

    from launcher.inventory.load import loads

    return loads(f'cluster: a\nimage: "{image}"\nnodes: [{_NODE.format("a")}]', Path("x")).image


@pytest.mark.parametrize(
    "image",
    [
        "",
        "VLLM",
        "vllm/",
        "/vllm",
        "a//b",
        "vllm:",
        "vllm:a b",
        "vllm@sha256:12",
        "-vllm",
        "a" * 5000,
        "a:b:c",
        "x;y",
    ],
)
def test_invalid_image_references(image: str) -> None:
    """Rejected before any node does."""
    from launcher.core.errors import InventoryError

    with pytest.raises(InventoryError, match="1 mistake"):
        _load_image(image)


@pytest.mark.parametrize(
    "name", ["eth0", "enp1s0f0np0", "enP2p1s0f1np1", "bond0.100", "br-lan", "ib0", "a" * 15]
)
def test_interfaces(load_text: Load, name: str) -> None:
    """Names as `ip -br link` shows them."""
    assert name == load_text(f"network: {{interface: {name}}}").head.interface


@pytest.mark.parametrize(
    "name", ["a" * 16, ".", "..", "a/b", "a b", "^docker", "=eth0", "eth0,eth1", "eth0:1", ""]
)
def test_invalid_interfaces(mistakes: Mistakes, name: str) -> None:
    """IFNAMSIZ, the kernel's forbidden characters, and NCCL's prefix forms."""
    (mistake,) = mistakes(f'network: {{interface: "{name}"}}')

    assert mistake.startswith(
        "3: network.interface: should be the exact name of one network interface"
    )


@pytest.mark.parametrize(
    "name",
    ["mlx5_0", "mlx5_0:1", "rocep1s0f0", "roceP2p1s0f1", "mlx5_bond_0", "bnxt_re0", "ibp12s0"],
)
def test_rdma_devices(load_text: Load, name: str) -> None:
    """With or without a port."""
    assert (name,) == load_text(f"network: {{fabric: roce, hca: [{name!r}]}}").head.hca


@pytest.mark.parametrize(
    "name", ["mlx5_0:", "mlx5_0:0", "mlx5_0:a", "=mlx5", "^mlx5_1", "mlx5_0,mlx5_1", ""]
)
def test_invalid_rdma_devices(mistakes: Mistakes, name: str) -> None:
    """A list has one device per item."""
    (mistake,) = mistakes(f'network: {{fabric: roce, hca: ["{name}"]}}')

    assert mistake.startswith("3: network.hca[0]: should be the exact name of one RDMA device")


@pytest.mark.parametrize(
    ("ip", "reason"),
    [
        ("127.0.0.1", "is a loopback address"),
        ("::1", "is a loopback address"),
        ("0.0.0.0", "is the unspecified address"),
        ("0.1.2.3", "is the unspecified address"),
        ("::", "is the unspecified address"),
        ("255.255.255.255", "is a broadcast address"),
        ("224.0.0.1", "is a multicast address"),
        ("fe80::1", "is a link-local IPv6 address"),
        ("fe80::1%eth0", "is a link-local IPv6 address"),
        ("10.0.0", "should be an IP address"),
        ("10.0.0.256", "should be an IP address"),
        ("10.0.0.01", "should be an IP address"),
        ("gpu01", "should be an IP address"),
        ("10.0.0.1/24", "should be an IP address"),
    ],
)
def test_addresses_that_other_nodes_cannot_use(mistakes: Mistakes, ip: str, reason: str) -> None:
    """Even those from `host`, for version 4."""
    (mistake,) = mistakes(nodes=f'\nnodes: [{{host: a, ip: "{ip}", gpus: 1}}]')

    assert mistake.startswith("3: nodes[0].ip: should be an ")
    assert reason in mistake


def test_link_local_addresses_of_version_4_are_usable(load_text: Load) -> None:
    """For example on a cable between two machines without DHCP."""
    assert (
        load_text(nodes="\nnodes: [{host: a, ip: 169.254.1.1, gpus: 1}]").head.ip == "169.254.1.1"
    )


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.256", "10.0.0", "a..b/", "gpu[1-2", "[fd00::1]"]
)
def test_invalid_hosts(mistakes: Mistakes, host: str) -> None:
    """A host that resembles an address is checked as one."""
    (mistake,) = mistakes(nodes=f'\nnodes: [{{host: "{host}", ip: 10.0.0.1, gpus: 1}}]')

    assert mistake.startswith("3: nodes[0].host: should ")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("200MB", 200_000_000),
        ("10.24g", int(10.24 * 2**30)),
        ("1 TiB", 2**40),
        ("209715200", 209715200),
    ],
)
def test_sizes(load_text: Load, written: str, expected: int) -> None:
    """Decimal and binary units; a bare letter means the same as in Docker."""
    assert expected == load_text(f"shm: {written}").shm


@pytest.mark.parametrize(
    "written", ["2 Gigs", "-1", "0", "0GiB", "GiB", "true", "[1]", "1e9", "9999999999TiB", "lots"]
)
def test_invalid_sizes(mistakes: Mistakes, written: str) -> None:
    """Without guesses."""
    (mistake,) = mistakes(f"shm: {written}")

    assert mistake.startswith('3: shm: should be "private", "host" or a size such as 10GiB, not ')


def test_private_shared_memory_is_the_default(load_text: Load) -> None:
    """It can be explicit, as can the host's."""
    assert load_text().shm == load_text("shm: private").shm == "private"
    assert load_text("shm: host").shm == "host"


@pytest.mark.parametrize(
    "version", ["2.60", '"2.60"', '"2"', '">=2.60.0"', '"2.60.0; x"', "latest"]
)
def test_ray_versions_are_exact(mistakes: Mistakes, version: str) -> None:
    """Every node gets the same one."""
    (mistake,) = mistakes(f"ray: {version}")

    assert mistake.startswith("3: ray: should be ")


def test_a_number_where_text_belongs_should_be_quoted(mistakes: Mistakes) -> None:
    """`2.60` is the number 2.6 to YAML."""
    assert mistakes("ray: 2.60") == ["3: ray: should be text, not 2.60; put it in quotes"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("3", "3"),
        ("1.50", "1.50"),
        ("-1", "-1"),
        ("on", "on"),
        ('""', ""),
        ('"true"', "true"),
        ("0010", "0010"),
    ],
)
def test_environment_values_reach_the_node_as_written(
    load_text: Load, written: str, expected: str
) -> None:
    """As text, whatever their YAML type."""
    assert expected == load_text(f"env: {{A: {written}}}").head.env["A"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("true", 'should be in quotes: "true" or "1", whichever the program that reads it expects'),
        (
            "False",
            'should be in quotes: "false" or "0", whichever the program that reads it expects',
        ),
        ("", 'should have a value; write "" for an empty one'),
        ("[a]", "should be text or a number, not a list"),
        ('"a\\nb"', "should be one line without control characters"),
    ],
)
def test_ambiguous_environment_values(mistakes: Mistakes, written: str, expected: str) -> None:
    """`true` may mean true, True or 1 to the program."""
    assert [f"3: env.A: {expected}"] == mistakes(f"env: {{A: {written}}}")


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "Ä", "A=B"])
def test_names_of_environment_variables(mistakes: Mistakes, name: str) -> None:
    """Below `env` and `secrets`, for the cluster and for a node."""
    for extra in ('env: {{"{}": x}}', 'secrets: {{"{}": {{env: A}}}}'):
        (mistake,) = mistakes(extra.format(name))
        assert "should be the name of an environment variable" in mistake


@pytest.mark.parametrize(
    "path", ["huggingface", "~/hf", "/", "/a/../b", "/a b", "/a:b", "/a,b", "./a"]
)
def test_paths_on_the_nodes_are_absolute(mistakes: Mistakes, path: str) -> None:
    """Without separators of Docker, and without `..`."""
    (mistake,) = mistakes(f'hf_home: "{path}"')

    assert mistake.startswith("3: hf_home: should be an absolute path on the nodes")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("cap: 0", "cap: should be at least 1, not 0"),
        ("cap: 1000", "cap: should be at most 512, not 1000"),
        ("cap: many", 'cap: should be a whole number, not "many"'),
        ("cap: 1.5", "cap: should be a whole number, not 1.5"),
        ("lock_wait: -1", "lock_wait: should be at least 0, not -1"),
        ("lock_wait: 10m", 'lock_wait: should be a whole number, not "10m"'),
        ("cap: true", "cap: should be a whole number, not true"),
        ("ports: {gcs: 70000}", "ports.gcs: should be at most 65535, not 70000"),
        ("ssh: {port: 0}", "ssh.port: should be at least 1, not 0"),
        ("ssh: {connect_timeout: 0}", "ssh.connect_timeout: should be greater than 0, not 0"),
        ("ssh: {connect_timeout: soon}", 'ssh.connect_timeout: should be a number, not "soon"'),
        ("ssh: ops", 'ssh: should be a mapping of keys to values, not "ops"'),
        ("env: [A]", "env: should be a mapping of keys to values, not a list"),
        (
            "docker: sudo -n docker",
            'docker: should be a list, such as [a, b], not "sudo -n docker"',
        ),
        ("docker: []", "docker: should be a list that is not empty, not a list"),
        ("ray: {token_auth: yes}", 'ray.token_auth: should be true or false, not "yes"'),
        (
            "accelerator: nvida",
            'accelerator: should be nvidia, amd or cpu, not "nvida"; did you mean `nvidia`?',
        ),
        (
            "mounts: [/a]",
            'mounts[0]: should be SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths, not "/a"',
        ),
        ("mounts: [5]", "mounts[0]: should be a mapping of keys to values, not 5"),
        (
            "serve: {bind: everywhere}",
            (
                "serve.bind: should be an IP address of the head, or 0.0.0.0 for all of them, not"
                ' "everywhere"'
            ),
        ),
        ("serve: {tp: 0}", "serve.tp: should be at least 1, not 0"),
        ("serve: {args: [true]}", "serve.args[0]: should be text, not true; put it in quotes"),
        (
            "secrets: abc",
            "secrets: should be a mapping of keys to values, not a literal value",
        ),
        (
            "secrets: {A: abc}",
            (
                "secrets.A: should name the source of the value, such as {env: A}, not a literal"
                " value"
            ),
        ),
    ],
)
def test_invalid_values_have_plain_messages(mistakes: Mistakes, extra: str, expected: str) -> None:
    """The expected form, and the value."""
    assert [f"3: {expected}"] == mistakes(extra)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1048576", "1048576"),
        ("-1", "-1"),
        ('"1024:65536"', "1024:65536"),
        ('"1024:-1"', "1024:-1"),
        ("{soft: 1024, hard: 65536}", "1024:65536"),
    ],
)
def test_limits_are_written_as_in_docker_and_in_compose(
    load_text: Load, written: str, read: str
) -> None:
    """And passed to `docker run` in its own form."""
    assert load_text(f"ulimits: {{nofile: {written}}}").ulimits == {"nofile": read}


@pytest.mark.parametrize("written", ["lots", "1.5", '"2:1"', '"-1:5"', "true", "{soft: 1}", "-2"])
def test_invalid_limits(mistakes: Mistakes, written: str) -> None:
    """With the expected form."""
    (message,) = mistakes(f"ulimits: {{nofile: {written}}}")

    assert message.startswith("3: ulimits.nofile: should ")
    assert mistakes("ulimits: {files: 1}")[0].startswith(
        "3: ulimits.files: should be a limit that Docker supports"
    )


def test_logging_is_written_as_in_compose(load_text: Load, mistakes: Mistakes) -> None:
    """A driver and its options; drivers without logs are rejected."""
    logging = load_text("logging: {driver: local, options: {max-size: 10m, max-file: 3}}").logging

    assert (logging.driver, logging.options) == ("local", {"max-size": "10m", "max-file": "3"})
    assert load_text().logging.options is None
    assert load_text("logging: {options: {}}").logging.options == {}
    assert mistakes("logging: {driver: none}")[0].startswith(
        "3: logging.driver: should be a Docker log driver"
    )
    assert mistakes("logging: {options: {Max Size: 1}}")[0].startswith(
        "3: logging.options.Max Size: should be an option of the log driver"
    )
    assert mistakes("logging: {max-size: 1m}")[0].startswith("3: logging: unknown key `max-size`")


def test_a_secret_is_no_option_of_a_log_driver(mistakes: Mistakes) -> None:
    """`docker inspect` would show it."""
    assert mistakes("logging: {driver: splunk, options: {splunk-token: 0123456789abcdef}}") == [
        (
            "3: logging.options.splunk-token: a secret should not be written here; give it to"
            " Docker itself, in `log-opts` of /etc/docker/daemon.json"
        )
    ]


def test_capabilities_have_two_names(load_text: Load, mistakes: Mistakes) -> None:
    """With and without CAP_; unknown ones are mistakes."""
    assert load_text("cap_add: [CAP_SYS_PTRACE, net_admin, ALL]").cap_add == (
        "SYS_PTRACE",
        "NET_ADMIN",
        "ALL",
    )
    assert mistakes("cap_add: [SYS_TRACE]") == [
        (
            "3: cap_add[0]: should be a capability such as IPC_LOCK or SYS_PTRACE (see `man"
            ' capabilities`), not "SYS_TRACE"'
        )
    ]


@pytest.mark.parametrize(
    "device",
    [
        "/dev/gdrdrv",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/a:/dev/b",
        "/dev/a:rw",
        "/dev/a:/b:r",
        "nvidia.com/gpu=all",
    ],
)
def test_devices(load_text: Load, device: str) -> None:
    """Files below /dev, and names of CDI."""
    assert load_text(f'devices: ["{device}"]').devices == (device,)


@pytest.mark.parametrize(
    "device", ["gdrdrv", "/etc/passwd", "/dev/", "/dev/../etc", "/dev/a:x", "/dev/a b", "/dev/a:"]
)
def test_invalid_devices(mistakes: Mistakes, device: str) -> None:
    """Before a container fails for them."""
    (message,) = mistakes(f'devices: ["{device}"]')

    assert message.startswith("3: devices[0]: should be a device of the nodes such as /dev/gdrdrv")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("imagee: x", "unknown key `imagee`; did you mean `image`?"),
        ("user: ops", "unknown key `user` here; it belongs under `ssh`"),
        ("tp: 8", "unknown key `tp` here; it belongs under `serve`"),
        (
            "ssh: {docker: [docker]}",
            "ssh: unknown key `docker` here; it belongs at the top level or in a node",
        ),
        ("network: {shm: host}", "network: unknown key `shm` here; it belongs at the top level"),
        ("network: {hcas: [a]}", "network: unknown key `hcas`; did you mean `hca`?"),
        ("secrets: {A: {envv: B}}", "secrets.A: unknown key `envv`; did you mean `env`?"),
        ("ray: {zzz: 1}", "ray: unknown key `zzz`; valid keys: version, object_store, token_auth"),
        (
            '"a\\nb": 1',
            'unknown key `"a\\nb"`; valid keys: cluster, image, image_source, accelerator',
        ),
    ],
)
def test_unknown_keys_have_a_suggestion(mistakes: Mistakes, extra: str, expected: str) -> None:
    """A misplaced key is as common as a typing error."""
    assert mistakes(extra)[0].startswith(f"3: {expected}")


def test_a_key_without_a_value_counts_as_unset(load_text: Load) -> None:
    """Perhaps only comments are left below it."""
    assert load_text() == load_text("env:\nssh:\nserve:\nray:")


def test_required_keys(mistakes: Mistakes) -> None:
    """The messages have their purpose."""
    assert mistakes(nodes="\nnodes: [{host: a, ip: 10.0.0.1}]") == [
        "3: nodes[0]: `gpus` is missing: GPUs to use: how many, or which, such as [4, 5, 6, 7]"
        " (with `accelerator: cpu`: slots)"
    ]
    assert mistakes(nodes="\nnodes:") == [
        "3: `nodes` is missing: The machines; the first is the head by default"
    ]
    assert mistakes(nodes="\nnodes: []") == [
        "3: nodes: should be a list that is not empty, not a list"
    ]
