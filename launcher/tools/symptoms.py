"""Log lines of containers, jobs and failed commands with known causes, up to the engine's start;
`symptom_engine` has those of network, memory and engine, docs/reference/failures.md all of them.

Order matters: causes precede their consequences, and possibly harmless lines come last. Sources:
vLLM 0.32, Ray 2.60 and NCCL 2.30 as read and run, and the threads in the entries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.core import patterns, untrusted
from launcher.core.errors import NodeError
from launcher.tools import host
from launcher.tools.symptom import Symptom
from launcher.tools.symptom_engine import ENGINE, MEMORY, NETWORK

_IMAGE = (
    Symptom(
        id="ray-missing",
        pattern=r"ray: (?:command )?not found|this image has no Ray",
        cause="the image has no Ray",
        fix="run `vlaunch up`, which adds it",
        source="vllm PR 36170; production-stack 995; gpustack 5430",
    ),
    Symptom(
        id="ray-data-missing",
        pattern=r"No module named '(?:pyarrow|pandas|fsspec)|pip install [\"']?ray\[data",
        cause="the image has no Ray Data",
        fix="run `vlaunch up`, which adds it",
        source="Ray 2.60, ray/data",
    ),
    Symptom(
        id="docker-permission",
        pattern=(
            r"permission denied while trying to connect to the [Dd]ocker|docker\.sock: connect:"
            r" permission denied"
        ),
        cause="the login may not use Docker",
        fix=(
            "add it to the group: `sudo usermod -aG docker USER` and log in again, or set `docker:"
            " [sudo, -n, docker]`"
        ),
        source="NVIDIA's multi-node playbook for DGX Spark",
    ),
    Symptom(
        id="docker-down",
        pattern=(
            r"Cannot connect to the Docker daemon|docker\.sock: connect: (?:connection refused|no"
            r" such file)"
        ),
        cause="Docker does not run on this node",
        fix=(
            "start it: `sudo systemctl start docker`, and see why it ended: `sudo journalctl -u"
            " docker -n 50`"
        ),
        source="Docker's own words",
    ),
    Symptom(
        id="nvml-lost",
        pattern=r"Failed to initialize NVML: Unknown Error",
        cause=(
            "the container has lost its GPUs: systemd reloaded, and its cgroup driver took the"
            " devices away"
        ),
        fix=(
            "run `vlaunch down` and `vlaunch up`; for good: `vlaunch check --only cgroup-driver`"
            " says what to set"
        ),
        source="nvidia-docker 1671; nvidia-container-toolkit 48",
    ),
    Symptom(
        id="gpu-runtime",
        pattern=(
            r'could not select device driver ""|nvidia-container-cli: initialization error|Failed'
            r" to initialize NVML"
        ),
        cause="Docker cannot hand out GPUs",
        fix=(
            "install nvidia-container-toolkit, then `sudo nvidia-ctk runtime configure"
            " --runtime=docker && sudo systemctl restart docker`"
        ),
        source="nvidia-docker 1637, 1671",
    ),
    Symptom(
        id="cuda-not-ready",
        pattern=r"Error 802|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        cause="CUDA is not ready: Fabric Manager does not run on this node",
        fix=(
            "start it: `sudo systemctl enable --now nvidia-fabricmanager`; its version must be the"
            " driver's"
        ),
        source="gpustack 4154; pytorch 35710",
    ),
    Symptom(
        id="memlock-refused",
        pattern=r"error setting rlimit type 8",
        cause="the node may not raise the locked-memory limit that RDMA needs",
        fix=(
            "raise it for Docker: `sudo systemctl edit docker` and add `[Service]` with"
            " `LimitMEMLOCK=infinity`"
        ),
        source="met on practice hosts",
    ),
    Symptom(
        id="rdma-devices-missing",
        pattern=(
            r"error gathering device information while adding custom device \"/dev/infiniband\""
        ),
        cause="the node has no RDMA devices",
        fix=(
            "load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric:"
            " ethernet}`"
        ),
        source="Docker's own words",
    ),
    Symptom(
        id="disk-full",
        pattern=patterns.DISK_FULL,
        cause="the disk is full",
        fix=(
            "find what fills it: `vlaunch exec --host -- df -h`; remove images that no container"
            " uses: `vlaunch exec --host -- docker image prune -a -f`"
        ),
        source="errno(3), ENOSPC",
        batch=(
            "free some space on the head, or remove jobs that are over: `vlaunch jobs --remove"
            " NAME`"
        ),
    ),
    Symptom(
        id="image-refused",
        pattern=r"toomanyrequests|pull access denied|manifest unknown|manifest for .* not found",
        cause="the registry does not give this image",
        fix=(
            "check `image:` in the inventory, log in with `docker login` on the node, or bring the"
            " image from another node with `vlaunch image copy`"
        ),
        source="Docker's own words",
    ),
    Symptom(
        id="registry-unreachable",
        pattern=(
            r"dial tcp: lookup .*|TLS handshake timeout|Client\.Timeout exceeded|network is"
            r" unreachable"
        ),
        cause="the node cannot reach the registry",
        fix=(
            "bring the image from a node that has it: `vlaunch image copy IMAGE`, or from this"
            " machine with `--here`; for all times: `image_source: nodes` in the inventory"
        ),
        source="Docker's own words",
    ),
    Symptom(
        id="image-name",
        pattern=r"repository name must be lowercase|invalid reference format",
        cause="the image's name is not one",
        fix="correct `image:` in the inventory",
        source="Docker's own words",
    ),
)

_RAY = (
    Symptom(
        id="ray-token",
        pattern=r"InvalidAuthToken|Authentication token is missing or incorrect",
        cause="this node has another Ray token than the head",
        fix="run `vlaunch down`, then `vlaunch up`",
        source="ray PR 64755; met with Ray 2.60",
    ),
    Symptom(
        id="ray-version",
        pattern=r"Version mismatch: The cluster was started with|Ray version mismatch",
        cause="Ray or Python differ between the nodes",
        fix="remove the derived image on that node (`docker rmi --force`), then run `vlaunch up`",
        source="gpustack 1640, 2691; ray 7648",
    ),
    Symptom(
        id="gcs-unreachable",
        pattern=rf"{patterns.GCS_UNREACHABLE}|Could not connect to .*:6379",
        cause="it cannot reach the head's Ray port",
        fix="allow TCP between the nodes in both directions, then run `vlaunch up`",
        source="ray 23611; vllm 15385",
        fatal=False,
    ),
    Symptom(
        id="node-lost",
        pattern=r"marked dead.*missed too many heartbeats|failed to respond to health check",
        cause="the head lost contact with it: a one-way firewall, or an overloaded node",
        fix="allow TCP from the head to this node on all ports",
        source="vllm 19960; ray 50419, 54035",
    ),
    Symptom(
        id="no-local-raylet",
        pattern=(
            r"Can't find a `node_ip_address\.json` file|none of these match this node's IP|ray"
            r" client connection timeout"
        ),
        cause="the driver runs where no Ray node is, or was given a `ray://` address",
        fix=(
            "start servers with `vlaunch serve`, which runs them in the head's container, and set"
            " no RAY_ADDRESS under `env:`"
        ),
        source="vllm 14349; gpustack/runner 178",
        fatal=False,
    ),
    Symptom(
        id="port-taken",
        pattern=r"EADDRINUSE|[Aa]ddress already in use|Port \d+ is already in use(?!, trying)",
        cause="a port is taken",
        fix="see who has it: `sudo ss -ltnp`, or choose others under `ports:` in the inventory",
        source="gpustack 6019; vllm 28498, 43206",
        fatal=False,  # The next port may work; a process without another one exits by itself.
    ),
)

_MODEL = (
    Symptom(
        id="hf-refused",
        pattern=rf"{patterns.NO_REPOSITORY}|{patterns.GATED}|401 Client Error",
        cause="Hugging Face does not give this model: it is gated, or its name is wrong",
        fix="add HF_TOKEN under `secrets:` in the inventory, and check the model's name",
        source="vllm PR 21406; ray 54812; srt-slurm 251",
        # The file may be optional; for a required one, vLLM exits by itself.
        fatal=False,
    ),
    Symptom(
        id="model-not-found",
        pattern=patterns.NO_MODEL,
        cause="the model cannot be found on this node",
        fix="check the path on every node, or copy the model there",
        source="vllm 881; aixcl 696; llm-d 485",
    ),
    Symptom(
        id="model-not-cached",
        pattern=patterns.NOT_CACHED,
        cause="the model is not in the node's cache, and downloads are off",
        fix="copy the model to `hf_home` on every node, or unset HF_HUB_OFFLINE",
        source="huggingface_hub, errors.py",
    ),
    Symptom(
        id="model-unfinished",
        pattern=host.UNFINISHED,
        cause="a copy or a download of a model is not finished",
        fix=(
            "go on with it: `vlaunch model copy MODEL`, or `vlaunch model pull MODEL`; or free its"
            " room: `vlaunch model remove MODEL`"
        ),
        source="Our own words; an interruption leaves it",
        fatal=False,  # it may be running, or be of a model that is not served
    ),
    Symptom(
        id="attention-heads",
        pattern=(
            r"Total number of attention heads \(\d+\) must be divisible by tensor parallel size"
        ),
        cause="this model's attention heads cannot be split this way",
        fix="choose a `--tp` that divides them",
        source="vLLM 0.32, config/model.py",
        batch="choose a `tp` under `engine:` that divides them",
    ),
    Symptom(
        id="dense-data-parallel",
        pattern=r"Offline data parallel mode is not supported/useful for dense models|"
        r"Non-MoE models do not support external data parallel",
        cause="vLLM spreads only mixtures of experts this way, and this model is dense",
        fix="serve it with `--data-parallel-size` of vlaunch, and set no VLLM_DP_* under `env:`",
        source="vllm PR 30739; met with vLLM 0.32",
        batch=(
            "set no VLLM_DP_* under `env:`: replicas of a dense model are independent, and need"
            " none"
        ),
    ),
    Symptom(
        id="config-mismatch",
        pattern=r"Configuration mismatch detected for engine",
        cause="the nodes of the server run with different settings or versions of vLLM",
        fix=(
            "see which: `vlaunch check --only image`; then `vlaunch stop` and `vlaunch serve` again"
        ),
        source="vLLM 0.32, v1/engine/utils.py",
    ),
)

_PLACEMENT = (
    Symptom(
        id="world-size",
        pattern=r"World size \(\d+\) is larger than the number of available GPUs",
        cause="vLLM was not told to use Ray",
        fix="use `vlaunch serve` without `--distributed-executor-backend` of your own",
        source="vllm 29447, PR 30140",
    ),
    Symptom(
        id="cpu-without-ray",
        pattern=r"current platform cpu does not support ray",
        cause="this image's CPU build has no Ray platform plugin",
        fix="set `accelerator: cpu` in the inventory, then run `vlaunch up`",
        source="met with vLLM 0.32",
    ),
    Symptom(
        id="node-resource-missing",
        pattern=r"No available node types can fulfill resource request .*'node:",
        cause=(
            "Ray knows no node with this address: VLLM_HOST_IP is not the address under which the"
            " node joined"
        ),
        fix=(
            "check `ip:` of the nodes, and set neither VLLM_HOST_IP nor"
            " VLLM_USE_RAY_V2_EXECUTOR_BACKEND under `env:`"
        ),
        source="vllm 7815, 12670; spark-vllm-docker 227",
        fatal=False,  # Ray prints this until the node joins.
    ),
    Symptom(
        id="placement-group-waits",
        pattern=r"Waiting for creating a placement group of specs for (?:[3-9]\d|\d{3,}) seconds",
        cause="too few free GPUs in Ray for what was asked",
        fix="see who holds them: `vlaunch status`, then `vlaunch stop`",
        source="vllm 13909, 13388; aibrix 927",
        fatal=False,
    ),
    Symptom(
        id="placement-group-refused",
        pattern=patterns.NO_PLACEMENT_GROUP,
        cause="Ray has not enough GPUs for this TP × PP",
        fix="see what is there: `vlaunch status`",
        source="vLLM 0.32, v1/executor/ray_utils.py",
    ),
    Symptom(
        id="host-ip-not-unique",
        pattern=r"Every node should have a unique IP address",
        cause="VLLM_HOST_IP is missing or given twice",
        fix="check `ip:` of the nodes, and do not set VLLM_HOST_IP under `env:`",
        source="vllm 7699, PR 7756, PR 43095",
    ),
)

TABLE = (*_IMAGE, *_RAY, *_MODEL, *_PLACEMENT, *NETWORK, *MEMORY, *ENGINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Symptom in a log, with its line; `batch` is the fix for a batch job."""

    line: str
    cause: str
    fix: str
    fatal: bool
    batch: str = ""
    id: str = ""


def first_match(text: str) -> Match | None:
    """Return the first entry of the table that matches any line of a log, with that line."""
    # Only the end of the log and the start of long lines are searched, which bounds the time.
    lines = [
        line
        for raw in untrusted.truncate(text, last=True).splitlines()
        if (line := untrusted.sanitize(raw))
    ]
    text = "\n".join(lines)
    for symptom in TABLE:
        if symptom.rdma:
            continue  # The inventory's requirements are unknown here.
        if not re.search(symptom.pattern, text, re.MULTILINE):
            continue  # Faster than line by line, which is only needed for a match.
        for line in lines:
            if re.search(symptom.pattern, line):
                return Match(
                    line=line.strip()[:400],
                    cause=symptom.cause,
                    fix=symptom.fix,
                    fatal=symptom.fatal,
                    batch=symptom.batch or symptom.fix,
                    id=symptom.id,
                )
    return None


def docker_error(node: str, text: str) -> NodeError | None:
    """Return the error of a node whose Docker client failed with a known cause."""
    symptom = first_match(text)
    if symptom is None or not symptom.id.startswith("docker-"):
        return None
    return NodeError(node, symptom.cause, evidence=text, hint=symptom.fix)
