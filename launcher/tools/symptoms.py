"""Log lines of containers, jobs and failed commands with known causes, up to the engine's start;
`symptom_engine` has those of network, memory and engine, docs/reference/failures.md all of them.

Order matters: causes precede their consequences, and possibly harmless lines come last. Sources:
vLLM 0.32, Ray 2.60 and NCCL 2.30 as read and run, and the threads in the entries.
"""

import re
from dataclasses import dataclass

from launcher import upstream
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
        pattern=upstream.any_of("docker.socket-permission", "docker.socket-connect"),
        cause="the SSH user has no access to Docker",
        fix=(
            "run `sudo usermod -aG docker USER` and log in again, or set `docker: [sudo, -n,"
            " docker]` in the inventory"
        ),
        source="NVIDIA's multi-node playbook for DGX Spark",
    ),
    Symptom(
        id="docker-down",
        pattern=upstream.any_of("docker.daemon-unreachable", "docker.daemon-refused"),
        cause="Docker is not running on this node",
        fix=(
            "start it: `sudo systemctl start docker`; see why it stopped: `sudo journalctl -u"
            " docker -n 50`"
        ),
        source="Docker's error message",
    ),
    Symptom(
        id="nvml-lost",
        pattern=upstream.text("nvidia-container-toolkit.devices-lost"),
        cause="the container lost its GPUs: a reload of systemd removed its access to the devices",
        fix=(
            "run `vlaunch down`, then `vlaunch up`; to prevent it, follow `vlaunch check --only"
            " cgroup-driver`"
        ),
        source="nvidia-docker 1671; nvidia-container-toolkit 48",
    ),
    Symptom(
        id="gpu-runtime",
        pattern=upstream.any_of(
            "docker.gpu-driver-missing",
            "nvidia-container-toolkit.hook-failed",
            "nvidia-container-toolkit.nvml-failed",
        ),
        cause="Docker cannot expose GPUs to containers",
        fix=(
            "install nvidia-container-toolkit, then run `sudo nvidia-ctk runtime configure"
            " --runtime=docker && sudo systemctl restart docker`"
        ),
        source="nvidia-docker 1637, 1671",
    ),
    Symptom(
        id="cuda-not-ready",
        pattern=r"Error 802|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        cause="CUDA is not ready: Fabric Manager is not running on this node",
        fix=(
            "start it: `sudo systemctl enable --now nvidia-fabricmanager`; its version must match"
            " the driver's"
        ),
        source="gpustack 4154; pytorch 35710",
    ),
    Symptom(
        id="memlock-refused",
        pattern=upstream.text("docker.limit-refused"),
        cause="Docker on this node cannot raise the locked-memory limit that RDMA needs",
        fix=(
            "run `sudo systemctl edit docker`, add `[Service]` with `LimitMEMLOCK=infinity`, and"
            " restart Docker"
        ),
        source="seen on lab hosts",
    ),
    Symptom(
        id="rdma-devices-missing",
        pattern=upstream.text("docker.device-missing"),
        cause="the node has no RDMA devices",
        fix=(
            "load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric:"
            " ethernet}`"
        ),
        source="Docker's error message",
    ),
    Symptom(
        id="disk-full",
        pattern=patterns.DISK_FULL,
        cause="the disk is full",
        fix=(
            "find the full disk: `vlaunch exec --host -- df -h`; delete all images that no"
            " container uses: `vlaunch exec --host -- docker image prune -a -f`"
        ),
        source="errno(3), ENOSPC",
        batch="free space on the head, or remove finished jobs: `vlaunch jobs remove NAME`",
    ),
    Symptom(
        id="image-refused",
        pattern=upstream.any_of(
            "docker.pull-limited", "docker.pull-denied", "docker.manifest-unknown"
        ),
        cause="the registry denied access to this image, or does not have it",
        fix=(
            "check its name and tag in the inventory, run `docker login` on the node, or"
            " copy the image from another node: `vlaunch image copy IMAGE`"
        ),
        source="Docker's error message",
    ),
    Symptom(
        id="registry-unreachable",
        pattern=upstream.any_of(
            "docker.registry-lookup",
            "docker.registry-handshake",
            "docker.registry-timeout",
            "docker.registry-network",
        ),
        cause="the node cannot reach the registry",
        fix=(
            "copy the image from a node that has it: `vlaunch image copy IMAGE`, or from this"
            " machine with `--local`; to always do so, set `image_source: nodes` in the inventory"
        ),
        source="Docker's error message",
    ),
    Symptom(
        id="image-name",
        pattern=upstream.any_of("docker.name-lower-case", "docker.name-invalid"),
        cause="the image name is invalid",
        fix="correct it in the inventory",
        source="Docker's error message",
    ),
)

_RAY = (
    Symptom(
        id="ray-token",
        pattern=upstream.text("ray.token-refused"),
        cause="this node's Ray token differs from the head's",
        fix="run `vlaunch down`, then `vlaunch up`",
        source="ray PR 64755; seen with Ray 2.60",
    ),
    Symptom(
        id="ray-version",
        pattern=upstream.any_of("ray.version-mismatch", "ray.version-mismatch-start"),
        cause="the nodes have different versions of Ray or Python",
        fix="remove the derived image on that node (`docker rmi --force`), then run `vlaunch up`",
        source="gpustack 1640, 2691; ray 7648",
    ),
    Symptom(
        id="gcs-unreachable",
        pattern=rf"{patterns.GCS_UNREACHABLE}|Could not connect to .*:6379",
        cause="the node cannot reach the head's Ray port",
        fix="allow TCP between the nodes in both directions, then run `vlaunch up`",
        source="ray 23611; vllm 15385",
        fatal=False,
    ),
    Symptom(
        id="node-lost",
        pattern=upstream.any_of("ray.node-dead", "ray.node-unhealthy", "ray.node-silent"),
        cause="the head lost contact with the node: a one-way firewall, or an overloaded node",
        fix="allow TCP from the head to this node on all ports",
        source="vllm 19960; ray 50419, 54035",
    ),
    Symptom(
        id="no-local-raylet",
        pattern=upstream.any_of("ray.no-raylet-file", "ray.client-timeout"),
        cause="the driver runs on a machine without a Ray node, or uses a `ray://` address",
        fix=(
            "start servers with `vlaunch serve`, which runs them in the head's container, and"
            " remove RAY_ADDRESS from `env:`"
        ),
        source="vllm 14349; gpustack/runner 178",
        fatal=False,
    ),
    Symptom(
        id="port-taken",
        pattern=rf"EADDRINUSE|[Aa]ddress already in use|{upstream.text('ray.port-in-use')}",
        cause="a port is already in use",
        fix="find the process: `sudo ss -ltnp`, or set another port under `ports:`",
        source="gpustack 6019; vllm 28498, 43206",
        fatal=False,  # The next port may work; a process without another one exits by itself.
    ),
)

_MODEL = (
    Symptom(
        id="hf-refused",
        pattern=rf"{patterns.NO_REPOSITORY}|{patterns.GATED}|401 Client Error",
        cause="Hugging Face denied access to this model: it is gated, or its name is wrong",
        fix="add HF_TOKEN under `secrets:` in the inventory, and check the model's name",
        source="vllm PR 21406; ray 54812; srt-slurm 251",
        # The file may be optional; for a required one, vLLM exits by itself.
        fatal=False,
    ),
    Symptom(
        id="model-not-found",
        pattern=patterns.NO_MODEL,
        cause="the model was not found on this node",
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
        cause="a model's copy or download is incomplete",
        fix=(
            "continue it: `vlaunch model copy MODEL` or `vlaunch model pull MODEL`; or delete it:"
            " `vlaunch model remove MODEL`"
        ),
        source="vlaunch's message after an interruption",
        fatal=False,  # it may be running, or be of a model that is not served
    ),
    Symptom(
        id="attention-heads",
        pattern=upstream.text("vllm.attention-heads"),
        cause="the number of attention heads is not divisible by TP",
        fix="choose a `--tp` that divides it",
        source="vLLM 0.32, config/model.py",
        batch="choose a `tp` under `engine:` that divides it",
    ),
    Symptom(
        id="dense-data-parallel",
        pattern=upstream.any_of("vllm.dense-offline-replicas", "vllm.dense-external-replicas"),
        cause="vLLM supports this data parallelism for mixtures of experts only, not dense models",
        fix="use vlaunch's `--data-parallel-size`, and remove VLLM_DP_* from `env:`",
        source="vllm PR 30739; seen with vLLM 0.32",
        batch=(
            "remove VLLM_DP_* from `env:`: replicas of a dense model are independent and need none"
        ),
    ),
    Symptom(
        id="config-mismatch",
        pattern=upstream.text("vllm.config-mismatch"),
        cause="the server's nodes have different settings or versions of vLLM",
        fix="run `vlaunch check --only image`, then `vlaunch stop` and `vlaunch serve`",
        source="vLLM 0.32, v1/engine/utils.py",
    ),
)

_PLACEMENT = (
    Symptom(
        id="world-size",
        pattern=upstream.text("vllm.world-size"),
        cause="vLLM is not configured to use Ray",
        fix="run `vlaunch serve` without your own `--distributed-executor-backend`",
        source="vllm 29447, PR 30140",
    ),
    Symptom(
        id="cpu-without-ray",
        pattern=upstream.text("vllm.cpu-without-ray"),
        cause="this image's CPU build has no Ray platform plugin",
        fix="set `accelerator: cpu` in the inventory, then run `vlaunch up`",
        source="seen with vLLM 0.32",
    ),
    Symptom(
        id="node-resource-missing",
        pattern=upstream.text("ray.node-resource-missing"),
        cause=(
            "Ray has no node with this address: VLLM_HOST_IP differs from the address with which"
            " the node joined"
        ),
        fix=(
            "check `ip:` of the nodes, and remove VLLM_HOST_IP from `env:`; up to vLLM 0.32 also"
            " VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
        ),
        source="vllm 7815, 12670; spark-vllm-docker 227",
        fatal=False,  # Ray prints this until the node joins.
    ),
    Symptom(
        id="placement-group-waits",
        pattern=upstream.text("vllm.placement-group-waits-long"),
        cause="Ray has too few free GPUs for this request",
        fix="see what uses them: `vlaunch status`; free them: `vlaunch stop`",
        source="vllm 13909, 13388; aibrix 927",
        fatal=False,
    ),
    Symptom(
        id="placement-group-refused",
        pattern=patterns.NO_PLACEMENT_GROUP,
        cause="Ray has too few GPUs for this TP × PP",
        fix="see the GPUs in Ray: `vlaunch status`",
        source="vLLM 0.32, v1/executor/ray_utils.py",
    ),
    Symptom(
        id="host-ip-not-unique",
        pattern=upstream.text("vllm.host-ip-not-unique"),
        cause="VLLM_HOST_IP is missing, or the same on two nodes",
        fix="check `ip:` of the nodes, and remove VLLM_HOST_IP from `env:`",
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
