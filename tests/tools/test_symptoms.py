"""Known log lines: all recorded failures have a cause, and no healthy start has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.tools import symptoms

LOGS = Path(__file__).parent.parent / "fixtures" / "vllm"
# One line per entry: from the threads that the entry names, and from recorded runs.
LINES = {
    "ray-missing": "bash: line 1: ray: command not found",
    "ray-data-missing": "ModuleNotFoundError: No module named 'pyarrow'",
    "docker-permission": (
        "permission denied while trying to connect to the Docker daemon socket at"
        " unix:///var/run/docker.sock"
    ),
    "docker-down": (
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon"
        " running?"
    ),
    "nvml-lost": "Failed to initialize NVML: Unknown Error",
    "cuda-not-ready": (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions"
        " before? Error 802: system not yet initialized"
    ),
    "gpu-runtime": (
        'docker: Error response from daemon: could not select device driver "" with capabilities:'
        " [[gpu]]."
    ),
    "memlock-refused": (
        "OCI runtime create failed: error setting rlimit type 8: operation not permitted"
    ),
    "rdma-devices-missing": (
        "docker: Error response from daemon: error gathering device information while adding custom"
        ' device "/dev/infiniband": no such file or directory'
    ),
    "disk-full": "OSError: [Errno 28] No space left on device",
    "image-refused": (
        "Error response from daemon: manifest for vllm/vllm-openai:v9.9.9 not found: manifest"
        " unknown: manifest unknown"
    ),
    "registry-unreachable": (
        'Error response from daemon: Get "https://registry-1.docker.io/v2/": dial tcp: lookup '
        "registry-1.docker.io: no such host"
    ),
    "image-name": "docker: invalid reference format: repository name must be lowercase",
    "ray-token": "InvalidAuthToken: Authentication token is missing or incorrect",
    "ray-version": (
        "RuntimeError: Version mismatch: The cluster was started with: Ray: 2.60.0 Python: 3.12.3"
    ),
    "gcs-unreachable": (
        "[2026-11-20 20:14:02,123 W 17 17] gcs_rpc_client.h:151: Failed to connect to GCS at"
        " address 10.0.0.11:6379 within 5 seconds."
    ),
    "node-lost": (
        "The node with node id: 5f2 and address: 10.0.0.12 and node name: 10.0.0.12 has been marked"
        " dead because the detector has missed too many heartbeats from it."
    ),
    "no-local-raylet": (
        "2026-03-19 14:58:50,134\tINFO node.py:1084 -- Can't find a `node_ip_address.json` file"
        " from /tmp/ray/session_2026-03-19_14-26-07_915096_1. Have you started Ray instance using"
        " `ray start` or `ray.init`?"
    ),
    "port-taken": "OSError: [Errno 98] Address already in use",
    "hf-refused": (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url "
        "https://huggingface.co/org/m/resolve/main/config.json."
    ),
    "model-not-found": "OSError: /data/models/m does not appear to have a file named config.json.",
    "model-unfinished": "unfinished copy: 1024 KiB of /data/huggingface/hub/models--org--m",
    "model-not-cached": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the"
        " disk cache and outgoing traffic has been disabled."
    ),
    "attention-heads": (
        "ValueError: Total number of attention heads (40) must be divisible by tensor parallel size"
        " (16)."
    ),
    "dense-data-parallel": (
        "ValueError: Offline data parallel mode is not supported/useful for dense models."
    ),
    "config-mismatch": "RuntimeError: Configuration mismatch detected for engine 1.",
    "world-size": (
        "ValueError: World size (16) is larger than the number of available GPUs (8) in this node."
    ),
    "cpu-without-ray": "ValueError: current platform cpu does not support ray.",
    "node-resource-missing": (
        "(autoscaler +41s) Error: No available node types can fulfill resource request"
        " {'node:172.16.10.33': 0.001, 'GPU': 1.0}. Add suitable node types to this cluster to"
        " resolve this issue."
    ),
    "placement-group-waits": (
        "INFO 11-20 20:14:02 [ray_utils.py:412] Waiting for creating a placement group of specs for"
        " 40 seconds. specs=[{'GPU': 1.0}, {'GPU': 1.0}]"
    ),
    "placement-group-refused": (
        "ValueError: Cannot provide a placement group requiring {'GPU': 16.0}."
    ),
    "host-ip-not-unique": (
        "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids and 3"
        " unique IP addresses."
    ),
    "gloo-interface": (
        "RuntimeError: Gloo connectFullMesh failed with"
        " [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
    ),
    "nccl-interface": (
        "gpu02:155:155 [0] bootstrap.cc:126 NCCL WARN Bootstrap : no socket interface found"
    ),
    "memlock": (
        "gpu01:155:921 [0] ibvwrap.cc:171 NCCL WARN Call to ibv_reg_mr failed with error Cannot"
        " allocate memory"
    ),
    "nccl-system-error": (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system"
        " error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7"
    ),
    "shm-too-small": (
        "gpu01:155:921 [0] NCCL WARN Error while creating shared memory segment"
        " /dev/shm/nccl-dR2Lbi (size 9637888)"
    ),
    "gpu-memory-held": (
        "ValueError: Free memory on device cuda:0 (11.2/79.1 GiB) on startup is less than desired"
        " GPU memory utilization (0.92, 72.8 GiB)."
    ),
    "gpu-memory-short": (
        "ValueError: To serve at least one request with the model's max seq len (131072), 16.0 GiB"
        " KV cache is needed, which is larger than the available KV cache memory (9.1 GiB)."
    ),
    "driver-too-old": (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has"
        " unsupported display driver / cuda driver combination"
    ),
    "gpu-fault": (
        "[ 8211.4] NVRM: Xid (PCI:0000:17:00): 79, pid=4242, name=VLLM::Worker, GPU has fallen off"
        " the bus."
    ),
    "cuda-no-gpu": "RuntimeError: No CUDA GPUs are available",
    "cuda-no-kernel": (
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the"
        " device"
    ),
    "cuda-kernel": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "cpu-head-size": "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    "host-memory": (
        "ray.exceptions.OutOfMemoryError: 1 task(s) failed: Workers killed due to memory pressure"
        " (OOM)."
    ),
    "kernel-oom": (
        "2026-11-20T20:14:02,123456+00:00 Out of memory: Killed process 4242 (VLLM::Worker_TP) "
        "total-vm:9000000kB, anon-rss:8000000kB"
    ),
    "cpu-memory-held": (
        "ValueError: Available memory on node 0 (11.53/16.21 GiB) on startup is less than desired"
        " CPU memory utilization (0.92, 14.92 GiB)."
    ),
    "context-too-long": (
        "  Value error, User-specified max_model_len (999999) is greater than the derived"
        " max_model_len (max_position_embeddings=2048.0 or model_max_length=None)."
    ),
    "no-compiler": (
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in"
        " torch._inductor.config.cpp.cxx: (None, 'g++')"
    ),
    "batch-failed": "batch job failed: ValueError: the seventh seal",
    "unknown-argument": "vllm serve: error: unrecognized arguments: --nope 3",
    "compiled-graph-timeout": (
        "ray.exceptions.RayChannelTimeoutError: System error: Timed out waiting for object"
        " available to read."
    ),
    "node-unreachable": "node cannot be reached: no answer from gpu02:22 within 10s",
    "server-gave-up": "keeper: gave up server chat: restart limit of 3 reached in 1 h",
    "rank-hangs": "keeper: server chat hangs: no step has ended for 70 s: rank TP1 on gpu02",
    "known-to-hang": "known to hang: NCCL 2.29.2 on ARM, where it was built with gcc before 10",
    "server-quiet": "keeper: server chat is quiet: no step has ended for 45 s",
    "server-died": "keeper: fault of server chat: a rank is dead (rank PP1 on gpu02)",
    "request-refused": "vlaunch: serve was refused: node1: has no /data/huggingface/llama",
    "rank-silent": (
        "INFO 11-20 20:14:02 [shm_broadcast.py:801] No available shared memory broadcast block"
        " found in 60 seconds. This typically happens when some processes are hanging or doing some"
        " time-consuming work."
    ),
    "nccl-unreachable": (
        "gpu01:155:921 [0] NCCL INFO socketPollConnect: connect to 10.0.0.12<43007> returned No"
        " route to host, retrying (3/20)"
    ),
    "rdma-unseen": "gpu01:155:155 [0] NCCL INFO NET/IB : No device found.",
    "rdma-libraries": (
        "gpu01:155:155 [0] NCCL INFO dlvsym failed on mlx5dv_reg_dmabuf_mr -"
        " /lib/x86_64-linux-gnu/libmlx5.so: undefined symbol: mlx5dv_reg_dmabuf_mr, version"
        " MLX5_1.25"
    ),
    "object-store": (
        "2026-11-20 20:14:02,123\tWARNING services.py:2159 -- WARNING: The object store is using"
        " /tmp instead of /dev/shm because /dev/shm has only 67108864 bytes available."
    ),
    "hf-lock": (
        "Still waiting to acquire lock on /data/huggingface/hub/.locks/models--org--m/fc1c.lock"
        " (elapsed: 10.0 seconds)"
    ),
    "cache-permission": (
        "PermissionError: [Errno 13] Permission denied: '/data/huggingface/hub/models--org--m'"
    ),
    "engine-slow": "TimeoutError: Timed out waiting for engine core processes to start.",
    "cpu-experts": "NotImplementedError: device_communicator.all_gatherv(x)",
    "rank-died": (
        "ERROR 11-20 20:14:02 [ray_executor_v2.py:523] RayWorkerProc rank=1 died unexpectedly,"
        " shutting down executor."
    ),
    "engine-killed": (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
        " proc(s): {'EngineCore': -9}"
    ),
    "engine-failed": (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
        " proc(s): {}"
    ),
    "container-restarts": (
        "container vlaunch-c-gpu02 keeps ending: 12 restarts, the last exit code 1"
    ),
    "container-ended": (
        "container vlaunch-c-gpu02 ended with exit code 137 (it was killed: by hand, or for lack of"
        " memory)"
    ),
}


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(LOGS.glob("*_ok.log")), ids=lambda path: path.stem)
def test_healthy_starts_have_no_fatal_line(path: Path) -> None:
    """Warnings of a successful start, together or singly, do not stop the wait for it."""
    text = path.read_text(encoding="utf-8")

    assert [
        match for line in text.splitlines() if (match := symptoms.first_match(line)) and match.fatal
    ] == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fail_cpu_platform_refuses_ray", "this image's CPU build has no Ray platform plugin"),
        ("fail_cpu_shm_across_hosts", "the engine failed"),
        ("fail_gloo_loopback", "Gloo uses the wrong network interface"),
        ("fail_enforce_eager", "a rank died"),
        ("fail_rank_killed", "a rank died"),
        (
            "fail_netcut",
            "the head lost contact with the node: a one-way firewall, or an overloaded node",
        ),
        ("fail_mp_headless_killed", "a rank died"),
    ],
)
def test_failures_give_their_cause(name: str, cause: str) -> None:
    """It comes before its consequences, is fatal, and shows its line without colour codes."""
    match = symptoms.first_match(log(name))

    assert match is not None
    assert (cause, True) == (match.cause, match.fatal)
    assert "\x1b" not in match.line
    assert match.fix


def test_a_waiting_placement_group_is_not_fatal() -> None:
    """A node may still join: only a wait of thirty seconds is worth a message."""
    match = symptoms.first_match(log("pending_placement_group_ok"))

    assert match is not None
    assert not match.fatal
    assert "too few free GPUs" in match.cause
    assert (
        symptoms.first_match(
            "Waiting for creating a placement group of specs for 10 seconds. specs=[]"
        )
        is None
    )


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_optional_or_repeated_steps_are_not_fatal(line: str) -> None:
    """An optional file may be missing, the next port may be free: a server that needs them exits by
    itself.
    """
    match = symptoms.first_match(line)

    assert match is not None
    assert not match.fatal


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "vllm serve: error: unrecognized arguments: --nope 3",
            "vLLM rejected an engine argument",
        ),
        ("OSError: [Errno 98] Address already in use", "a port is already in use"),
        ("/bin/sh: 1: nvcc: not found", None),
        ("WARNING 11-24 11:15:42 [x.py:1] eager: RuntimeError: Could not find nvcc", None),
        (
            "(Worker pid=7) ERROR 11-24 11:15:42 [x.py:1] RuntimeError: Could not find nvcc and"
            " default cuda_home='/usr/local/cuda' doesn't exist",
            "the image has no compiler, which vLLM needs during startup",
        ),
        ("Port 8000 is already in use, trying port 8001", None),
        ("bash: ray: command not found", "the image has no Ray"),
        (
            'docker: could not select device driver "" with capabilities: [[gpu]].',
            "Docker cannot expose GPUs to containers",
        ),
        (
            "Failed core proc(s): {'EngineCore': -9}",
            "the engine was killed, most likely for lack of host memory",
        ),
        (
            "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low",
            "a node ran out of host memory",
        ),
        (
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
            "a kernel crashed on the GPU: a bug in vLLM or torch, perhaps triggered by a request",
        ),
        ("torch.AcceleratorError: CUDA error: invalid device ordinal", None),
        (  # vLLM 0.33
            "ValueError: The worker already uses 5.2 GiB (model weights and runtime), more than the"
            " 4.0 GiB of CPU memory reserved for it on node 0, leaving none for the KV cache.",
            "the model and its KV cache do not fit",
        ),
        (
            "ValueError: Available memory on node 0 (1.0/8.0 GiB) on kv cache allocation is less"
            " than requested memory for kv (4.0 GiB).",
            "the free host memory is less than the engine's share",
        ),
        (
            "Node is dead because the health check failed.",
            "the head lost contact with the node: a one-way firewall, or an overloaded node",
        ),
        (
            "NCCL WARN socketPollConnect: connect to 10.0.0.12<43007> returned Connection refused,"
            " exceeded error retry count after 34 attempts",
            "NCCL cannot reach another node: a firewall, or the wrong interface",
        ),
        ("INFO: everything is fine", None),
        ("vlaunch: an engine of batch job prompts-7990e1e1", None),
    ],
)
def test_lines(line: str, cause: str | None) -> None:
    """Single lines as logged."""
    match = symptoms.first_match(line)

    assert cause == (match.cause if match else None)


@pytest.mark.parametrize("id_", [symptom.id for symptom in symptoms.TABLE])
def test_every_entry_knows_its_line(id_: str) -> None:
    """No earlier entry matches the line; lines that matter only with RDMA are excluded."""
    symptom = next(entry for entry in symptoms.TABLE if entry.id == id_)
    match = symptoms.first_match(LINES[id_])

    assert re.search(symptom.pattern, LINES[id_])
    assert (match.id if match else "") == ("" if symptom.rdma else id_)


def test_every_entry_has_a_unique_name_and_a_source() -> None:
    """Names are headings of the documentation."""
    ids = [symptom.id for symptom in symptoms.TABLE]

    assert len(set(ids)) == len(ids) == len(LINES)
    assert [symptom for symptom in ids if not re.fullmatch(r"[a-z]+(-[a-z]+)*", symptom)] == []
    assert [symptom.id for symptom in symptoms.TABLE if not symptom.source] == []


def test_causes_precede_consequences() -> None:
    """The first matching entry is reported."""
    after = [symptom.after for symptom in symptoms.TABLE]
    last_cause = max(
        place
        for place, symptom in enumerate(symptoms.TABLE)
        if not symptom.after and symptom.id != "engine-killed"
    )

    assert True not in after[:last_cause]


def test_patterns_are_sound() -> None:
    """All entries compile and have a cause and a fix."""
    for symptom in symptoms.TABLE:
        re.compile(symptom.pattern)
        assert symptom.cause and symptom.fix
        assert not symptom.cause.endswith(".")
