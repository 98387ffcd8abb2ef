"""Log lines that have a known cause: what they mean and what to do. One table for containers, jobs and failed commands.

Order matters: a cause stands before the consequences that it prints. Sources: vLLM 0.32 and Ray 2.60 as read and run, and the
threads named beside each entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A pattern, its cause and the fix. `fatal` means that waiting any longer is of no use.

    `batch` is the fix where it is a batch job's, and another one.
    """

    pattern: str
    cause: str
    fix: str
    fatal: bool = True
    batch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A symptom that was seen, with its line; `batch` is the fix for a batch job."""

    line: str
    cause: str
    fix: str
    fatal: bool
    batch: str = ""


TABLE = (
    Symptom(
        pattern=r"ray: (?:command )?not found|this image has no Ray",
        cause="the image has no Ray",  # vllm PR 36170; production-stack 995; gpustack 5430
        fix="run `vlaunch up`, which adds it",
    ),
    Symptom(
        pattern=r"No module named '(?:pyarrow|pandas|fsspec)|pip install [\"']?ray\[data",
        cause="the image has no Ray Data",
        fix="run `vlaunch up`, which adds it",
    ),
    Symptom(
        pattern=r'could not select device driver ""|nvidia-container-cli: initialization error|Failed to initialize NVML',
        cause="Docker cannot hand out GPUs",  # nvidia-docker 1637, 1671
        fix="install nvidia-container-toolkit, then `sudo nvidia-ctk runtime configure --runtime=docker "
        "&& sudo systemctl restart docker`",
    ),
    Symptom(
        pattern=r"error setting rlimit type 8",
        cause="the node may not raise the locked-memory limit that RDMA needs",
        fix="raise it for Docker: `sudo systemctl edit docker` and add `[Service]` with `LimitMEMLOCK=infinity`",
    ),
    Symptom(
        pattern=r"error gathering device information while adding custom device \"/dev/infiniband\"",
        cause="the node has no RDMA devices",
        fix="load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric: ethernet}`",
    ),
    Symptom(
        pattern=r"no space left on device|No space left on device",
        cause="the disk is full",
        fix="free some space: `docker system prune`, `df -h`",
        batch="free some space on the head, or remove jobs that are over: `vlaunch jobs --remove NAME`",
    ),
    Symptom(
        pattern=r"toomanyrequests|pull access denied|manifest unknown|manifest for .* not found",
        cause="the registry does not give this image",
        fix="check `image:` in the inventory, log in with `docker login` on the node, or load the image with `docker load`",
    ),
    Symptom(
        pattern=r"dial tcp: lookup .*|TLS handshake timeout|Client\.Timeout exceeded|network is unreachable",
        cause="the node cannot reach the registry",
        fix="load the image instead: `docker save IMAGE | ssh NODE docker load`",
    ),
    Symptom(
        pattern=r"repository name must be lowercase|invalid reference format",
        cause="the image's name is not one",
        fix="correct `image:` in the inventory",
    ),
    Symptom(
        pattern=r"InvalidAuthToken|Authentication token is missing or incorrect",
        cause="this node has another Ray token than the head",  # ray PR 64755
        fix="run `vlaunch down`, then `vlaunch up`",
    ),
    Symptom(
        pattern=r"Version mismatch: The cluster was started with|Ray version mismatch",
        cause="Ray or Python differ between the nodes",  # gpustack 1640, 2691
        fix="remove the derived image on that node (`docker rmi --force`), then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"Failed to connect to GCS|Unable to connect to GCS|Could not connect to .*:6379",
        cause="it cannot reach the head's Ray port",  # ray 23611
        fix="allow TCP between the nodes in both directions, then run `vlaunch up`",
        fatal=False,
    ),
    Symptom(
        pattern=r"marked dead.*missed too many heartbeats|failed to respond to health check",
        cause="the head lost contact with it: a one-way firewall, or an overloaded node",  # ray 50419, 54035
        fix="allow TCP from the head to this node on all ports",
    ),
    Symptom(
        pattern=r"EADDRINUSE|[Aa]ddress already in use|Port \d+ is already in use(?!, trying)",
        cause="a port is taken",  # gpustack 6019, vllm 43206
        fix="see who has it: `sudo ss -ltnp`, or choose others under `ports:` in the inventory",
        fatal=False,  # The next port may do; who has no other ends by itself.
    ),
    Symptom(
        pattern=r"RepositoryNotFoundError|Repository Not Found|GatedRepoError|401 Client Error|gated repo",
        cause="Hugging Face does not give this model: it is gated, or its name is wrong",
        fix="add HF_TOKEN under `secrets:` in the inventory, and check the model's name",
        fatal=False,  # It may be a file that the model can do without; for any other, vLLM ends by itself.
    ),
    Symptom(
        pattern=r"Invalid repository ID or local directory specified|Can't load the configuration of|"
        r"does not appear to have a file named config\.json|HFValidationError|is not a local folder and is not a valid model",
        cause="the model cannot be found on this node",
        fix="check the path on every node, or copy the model there",
    ),
    Symptom(
        pattern=r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled",
        cause="the model is not in the node's cache, and downloads are off",
        fix="copy the model to `hf_home` on every node, or unset HF_HUB_OFFLINE",
    ),
    Symptom(
        pattern=r"Total number of attention heads \(\d+\) must be divisible by tensor parallel size",
        cause="this model's attention heads cannot be split this way",
        fix="choose a `--tp` that divides them",
        batch="choose a `tp` under `engine:` that divides them",
    ),
    Symptom(
        pattern=r"World size \(\d+\) is larger than the number of available GPUs",
        cause="vLLM was not told to use Ray",  # vllm 29447, PR 30140
        fix="use `vlaunch serve` without `--distributed-executor-backend` of your own",
    ),
    Symptom(
        pattern=r"current platform cpu does not support ray",
        cause="this image's CPU build has no Ray platform plugin",
        fix="set `accelerator: cpu` in the inventory, then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"Waiting for creating a placement group of specs for (?:[3-9]\d|\d{3,}) seconds",
        cause="too few free GPUs in Ray for what was asked",  # vllm 13909, aibrix 927
        fix="see who holds them: `vlaunch status`, then `vlaunch stop`",
        fatal=False,
    ),
    Symptom(
        pattern=r"Cannot provide a placement group",
        cause="Ray has not enough GPUs for this TP × PP",
        fix="see what is there: `vlaunch status`",
    ),
    Symptom(
        pattern=r"Every node should have a unique IP address",
        cause="VLLM_HOST_IP is missing or given twice",  # vllm 7699
        fix="check `ip:` of the nodes, and do not set VLLM_HOST_IP under `env:`",
    ),
    Symptom(
        pattern=r"connectFullMesh",
        cause="Gloo took the wrong network interface",  # vllm 7074
        fix="set `network: {interface: …}` in the inventory, then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"Bootstrap : no socket interface found",
        cause="NCCL found no such network interface",
        fix="correct `network: {interface: …}` in the inventory, then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"ibv_reg_mr.*Cannot allocate memory|unhandled system error",
        cause="NCCL may not lock memory, or shared memory is too small",  # spark-vllm-docker 389; vLLM troubleshooting page
        fix="set `network: {fabric: infiniband}` (adds IPC_LOCK and memlock) and `shm: host`, then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"creating shared memory segment /dev/shm/nccl-|object store is using /tmp instead of /dev/shm",
        cause="/dev/shm in the container is too small",  # vllm 1710; gpustack 5014
        fix="set `shm: host` or a larger size in the inventory, then run `vlaunch up`",
    ),
    Symptom(
        pattern=r"Free memory on device .* is less than desired GPU memory utilization",
        cause="something else holds GPU memory",  # vllm 20305
        fix="see who: `vlaunch exec --host -- nvidia-smi`, or lower it: `-- --gpu-memory-utilization 0.8`",
        batch="see who: `vlaunch exec --host -- nvidia-smi`, or lower `gpu_memory_utilization` under `engine: {args: …}`",
    ),
    Symptom(
        pattern=r"No available memory for the cache blocks|larger than the (?:maximum|available KV cache memory)|"
        r"torch\.OutOfMemoryError|CUDA out of memory",
        cause="the model and its KV cache do not fit",
        fix="lower `--max-model-len`, raise `--gpu-memory-utilization`, or use more GPUs",
        batch="under `engine:` lower `max_model_len` or raise `gpu_memory_utilization` in `args`, or use a larger `tp`",
    ),
    Symptom(
        pattern=r"Error 80[34]|unsupported display driver / cuda driver combination",
        cause="the driver is too old for the image's CUDA",  # gpustack 4678
        fix="update the driver (CUDA 13 images need 580 or newer), or use the image's `-cu129` tag",
    ),
    Symptom(
        pattern=r"Unsupported CPU attention configuration",
        cause="vLLM's CPU attention does not support this model's head size",
        fix="choose a model with a head size of 32, 64, 80, 96, 112, 128, 192 or 256",
    ),
    Symptom(
        pattern=r"killed due to memory pressure \(OOM\)|OutOfMemoryError: \d+ task",
        cause="a node ran out of host memory",  # vllm 2669
        fix="use a node with more memory than one rank's share of the checkpoint",
        batch="under `predict:` or `preprocess:` raise `num_cpus`, so that fewer run on a node, or lower `batch_size`",
    ),
    Symptom(
        pattern=r"unrecognized arguments: .*|error: argument .*",
        cause="vLLM does not know one of the arguments after `--`",
        fix="see what it takes: `vlaunch exec --head -- vllm serve --help=all`",
    ),
    Symptom(
        pattern=r"RPC call to \w+ timed out|No available shared memory broadcast block found",
        cause="a rank does not answer: it hangs, or the network between the nodes does",  # vllm 46611
        fix="look at every node: `vlaunch logs`",
        fatal=False,
    ),
    Symptom(
        # vLLM 0.32, distributed/device_communicators: the CPU communicator lacks both; ours, in the derived image, has them.
        pattern=r"device_communicator\.(?:all_gatherv|reduce_scatterv)\(.*|NotImplementedError.*(?:all_gatherv|reduce_scatterv)",
        cause="vLLM's CPU build cannot spread a mixture of experts over ranks without Ray",
        fix="serve it with `--backend ray`, whose image has what is missing",
    ),
    Symptom(
        pattern=r"RayWorkerProc rank=\d+ died unexpectedly|EngineDeadError|EngineCore encountered a fatal error",
        cause="a rank died",
        fix="look at every node: `vlaunch logs`, then start again: `vlaunch serve`",
        batch="look at every node: `vlaunch logs`",
    ),
    Symptom(
        pattern=r"Failed core proc\(s\): \{.*: -9\b",
        cause="the engine was killed, most likely for lack of host memory",
        fix="see whether the kernel did it: `vlaunch exec --host -- dmesg | tail`",
    ),
    Symptom(
        pattern=r"Engine core initialization failed|WorkerProc hit an exception",
        cause="the engine failed",
        fix="read the lines above it: `vlaunch logs`",
    ),
)


def first(text: str) -> Match | None:
    """Return the first entry of the table that matches any line of a log, with that line; causes before consequences."""
    lines = [plain(line) for line in text.splitlines()]
    for symptom in TABLE:
        for line in lines:
            if re.search(symptom.pattern, line):
                return Match(
                    line=line.strip()[:400], cause=symptom.cause, fix=symptom.fix, fatal=symptom.fatal,
                    batch=symptom.batch or symptom.fix,
                )  # fmt: skip
    return None


def plain(line: str) -> str:
    """Return a log line without terminal colours and control characters: logs are not to draw on anybody's terminal."""
    line = re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])", "", line)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", line)
