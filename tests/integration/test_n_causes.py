"""Five kinds of wrong engine arguments in every mode: the command names the cause, once and first,
and so does `doctor`, unless nothing was started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from launcher.lab.host_configs import MODEL
from tests.integration.batches import Batch
from tests.integration.conftest import CommandResult, LabCluster

pytestmark = [pytest.mark.lab, pytest.mark.long]

MISSING = "nobody/no-such-model"
SMALL = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
EAGER = {"compilation_config": {"mode": 2, "backend": "eager"}}
CACHE = {"kv_cache_memory_bytes": 67108864}
# Engine arguments of the inventory: without a size of the KV cache the share of memory counts, and
# without `eager` the compiler, which the lab's image lacks.
INVENTORY = {"memory": {**SMALL, **EAGER}, "compiler": {**SMALL, **CACHE}}
WRONG: dict[str, dict[str, Any]] = {
    "memory": {"gpu_memory_utilization": 0.99},
    "compiler": {},
    "argument": {"no_such_argument": 5},
    "context": {"max_model_len": 999999},
    "model": {},
}
# Parts of the message and of its first line of evidence, and the symptom of `doctor`.
EXPECTED = {
    "memory": (
        "free host memory is less",
        "ValueError: Available memory on node",
        "cpu-memory-held",
    ),
    "compiler": ("no compiler", "No working C.. compiler found", "no-compiler"),
    "argument": ("rejects the arguments; nothing was changed", "no.such.argument", ""),
    "context": ("the context is longer", "User-specified max_model_len", "context-too-long"),
    "model": ("model", MISSING, "request-refused"),
}


@pytest.fixture(scope="module", autouse=True)
def clean_up(lab_cluster: LabCluster) -> Iterator[None]:
    """Remove the cluster after the tests."""
    yield
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def start_cluster(lab_cluster: LabCluster, kind: str) -> None:
    """Start the cluster with the engine arguments of a case in its inventory."""
    args = INVENTORY.get(kind, {**SMALL, **EAGER, **CACHE})
    lab_cluster.write(lambda document: document.update(engine_args=args))
    result = lab_cluster.vlaunch("up")
    assert result.code == 0, result.output


def assert_cause(lab_cluster: LabCluster, result: CommandResult, kind: str) -> None:
    """Assert that a command, and then `doctor`, name the cause."""
    message, line, symptom = EXPECTED[kind]
    error = result.err[result.err.index("\nerror: ") + 1 :]

    assert result.code == (1 if symptom else 2), result.output
    assert message in error.splitlines()[0]
    assert re.search(line, error)
    for noise in ("See root cause", "errors.pydantic.dev", "cannot be read", "killed", "/metrics"):
        assert noise not in error, error
    if not symptom:
        return
    doctor = lab_cluster.vlaunch("doctor", "--since", "3m")
    assert doctor.code == 1
    assert f"#{symptom}" in doctor.out, doctor.out
    assert re.search(line, doctor.out) or kind != "model"


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_server(lab_cluster: LabCluster, backend: str, kind: str) -> None:
    """The command itself names the cause."""
    start_cluster(lab_cluster, kind)
    model = MISSING if kind == "model" else MODEL
    arguments = [
        argument
        for name, value in WRONG[kind].items()
        for argument in (f"--{name.replace('_', '-')}", str(value))
    ]
    begin = ("serve", "--backend", backend, "--model", model, "--timeout", "400", "--")
    try:
        assert_cause(lab_cluster, lab_cluster.vlaunch(*begin, *arguments, timeout=500), kind)
    finally:
        lab_cluster.vlaunch("stop")


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("mode", ["replicas", "ranks"])
def test_a_batch_job(lab_cluster: LabCluster, mode: str, kind: str) -> None:
    """The same for engines in replicas or ranks; `logs` has their output."""
    start_cluster(lab_cluster, kind)
    name = f"cause-{mode}-{kind}"
    ranks = mode == "ranks"
    job = Batch(lab_cluster, name).write(
        [{"text": f"row {number}"} for number in range(20)],
        model=MISSING if kind == "model" else MODEL,
        prompt="{{ text }}",
        engine={"args": WRONG[kind], **({} if ranks else {"replicas": 2})},
        **({"data_parallel": 2} if ranks else {}),
    )
    assert_cause(lab_cluster, job.run(timeout=600), kind)
    if kind not in ("model", "argument"):
        logs = lab_cluster.vlaunch("logs").out
        assert re.search(rf"^node1/batch:{name}: ", logs, re.MULTILINE)  # the driver
        assert re.search(rf"^node\d/batch:{name}:\d+: ", logs, re.MULTILINE)


def fill_shared_memory(lab_cluster: LabCluster) -> None:
    """Leave no room in /dev/shm of the second node's container."""
    fill = "dd if=/dev/zero of=/dev/shm/fill bs=1M 2>/dev/null; df /dev/shm"
    lab_cluster.docker("node2", "exec", "vlaunch-lab-node2", "sh", "-c", fill)


def hide_module(lab_cluster: LabCluster) -> None:
    """Remove a module that vLLM imports from the second node's container."""
    hide = "mv $(python3 -c 'import msgspec; print(msgspec.__path__[0])') /root/away"
    lab_cluster.docker("node2", "exec", "vlaunch-lab-node2", "sh", "-c", hide)


def truncate_weights(lab_cluster: LabCluster) -> None:
    """Keep the first kilobyte of the weights on both nodes, which differ from no other then."""
    for host in lab_cluster.lab.hosts[:2]:
        weights = f"{MODEL}/model.safetensors"
        lab_cluster.on(host.name, "sh", "-c", f"cp {weights} /root/w; truncate -s 1000 {weights}")


def restore_weights(lab_cluster: LabCluster) -> None:
    """Put the weights back."""
    for host in lab_cluster.lab.hosts[:2]:
        lab_cluster.on(host.name, "mv", "/root/w", f"{MODEL}/model.safetensors")


WRONG_INTERFACE = {"env": {"GLOO_SOCKET_IFNAME": "nosuch0"}}


@pytest.mark.parametrize(
    ("change", "inject", "undo", "failure"),
    [
        ({}, fill_shared_memory, None, "shm-full"),
        (WRONG_INTERFACE, None, None, "request-refused"),
        ({}, truncate_weights, restore_weights, "weights-file-broken"),
        ({}, hide_module, None, "module-missing"),
    ],
    ids=["shared-memory", "interface", "weights", "module"],
)
def test_a_fault_of_a_node(
    lab_cluster: LabCluster,
    change: dict[str, Any],
    inject: Callable[[LabCluster], None] | None,
    undo: Callable[[LabCluster], None] | None,
    failure: str,
) -> None:
    """Public reports have it; `doctor` names it."""
    settings = {"engine_args": {**SMALL, **EAGER, **CACHE}, **change}
    lab_cluster.recreate(lambda document: document.update(settings))
    if inject:
        inject(lab_cluster)
    try:
        served = lab_cluster.vlaunch("serve", "--backend", "mp", "--timeout", "200", timeout=400)
        doctor = lab_cluster.vlaunch("doctor", "--since", "5m")
    finally:
        lab_cluster.vlaunch("stop")
        if undo:
            undo(lab_cluster)

    assert served.code == 1, served.output
    assert doctor.code == 1
    assert f"#{failure}" in doctor.out, served.output + doctor.out


def test_a_port_of_another_ray(lab_cluster: LabCluster) -> None:
    """`up` refuses to start, and `doctor` repeats the reason."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    image = yaml.safe_load(lab_cluster.inventory.read_text())["image"]
    argv = ("run", "-d", "--name", "other-ray", "--network", "host", "--entrypoint", "python3")
    listen = "import socket, time; s = socket.create_server(('', 6379)); time.sleep(600)"
    lab_cluster.docker("node1", *argv, image, "-c", listen)
    try:
        result = lab_cluster.vlaunch("up")
        doctor = lab_cluster.vlaunch("doctor")
    finally:
        lab_cluster.docker("node1", "rm", "-f", "other-ray")

    assert result.code == 1, result.output
    assert "6379" in result.err
    assert doctor.code == 1
    assert "#request-refused" in doctor.out, doctor.out
    assert "6379" in doctor.out
