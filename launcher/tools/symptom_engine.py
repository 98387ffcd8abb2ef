"""Known failures of the network, of memory and of the engine, and their known consequences."""

from launcher import upstream
from launcher.core import patterns
from launcher.tools import known_hangs
from launcher.tools.symptom import Symptom

NETWORK = (
    Symptom(
        id="gloo-interface",
        pattern=r"connectFullMesh",
        cause="Gloo uses the wrong network interface",
        fix="set `network: {interface: …}` in the inventory, then run `vlaunch up`",
        source="vllm 7074, 5094; gpustack 2125",
    ),
    Symptom(
        id="nccl-interface",
        pattern=upstream.text("nccl.no-bootstrap-interface"),
        cause="NCCL cannot find the configured network interface",
        fix="correct `network: {interface: …}` in the inventory, then run `vlaunch up`",
        source="NCCL 2.30, bootstrap.cc; sglang 3820",
    ),
    Symptom(
        id="memlock",
        pattern=upstream.text("nccl.memory-not-locked"),
        cause="NCCL is not allowed to lock the memory that RDMA needs",
        fix=(
            "set `network: {fabric: infiniband}` (adds IPC_LOCK and memlock), then run `vlaunch up`"
        ),
        source="spark-vllm-docker 389; mlperf 664",
    ),
    Symptom(
        id="nccl-system-error",
        pattern=upstream.text("nccl.system-error"),
        cause="NCCL is not allowed to lock memory, or shared memory is too small",
        fix=(
            "set `network: {fabric: infiniband}` (adds IPC_LOCK and memlock) and `shm: private`,"
            " then run `vlaunch up`"
        ),
        source="vLLM's troubleshooting page; vllm 10626",
    ),
    Symptom(
        id="shm-too-small",
        pattern=upstream.any_of("nccl.shared-memory", "ray.store-too-large"),
        cause="/dev/shm in the container is too small",
        fix="set `shm: private` or a larger size in the inventory, then run `vlaunch up`",
        source="vllm 1710, 18831; MiniMax-01 42; Ray 2.60, _private/services.py",
    ),
)

MEMORY = (
    Symptom(
        id="gpu-memory-held",
        **patterns.GPU_MEMORY_IN_USE._asdict(),
        fix=(
            "lower the share: `-- --gpu-memory-utilization 0.8`, or find what uses the memory:"
            " `vlaunch exec --host -- nvidia-smi`; if another program needs that GPU, remove it"
            " from the node's `gpus: [...]`, then run `vlaunch up`"
        ),
        source="vLLM 0.32, v1/worker/utils.py; vllm 20305, 42017, 20860",
    ),
    Symptom(
        id="cpu-memory-held",
        **patterns.CPU_MEMORY_IN_USE._asdict(),
        fix=(
            "lower the share: `-- --gpu-memory-utilization 0.5`, or set the size of the KV cache:"
            " `-- --kv-cache-memory-bytes 1073741824`"
        ),
        source="vLLM 0.32, v1/worker/cpu_worker.py",
    ),
    Symptom(
        id="gpu-memory-short",
        pattern=rf"{patterns.KV_CACHE_SHORT}|{patterns.GPU_MEMORY_SHORT}",
        cause="the model and its KV cache do not fit",
        fix="lower `--max-model-len`, raise `--gpu-memory-utilization`, or use more GPUs",
        source="vLLM 0.32, v1/core/kv_cache_utils.py",
        batch=(
            "under `engine:` lower `max_model_len` or raise `gpu_memory_utilization` in `args`, or"
            " use a larger `tp`"
        ),
    ),
    Symptom(
        id="driver-too-old",
        pattern=r"Error 80[34]|unsupported display driver / cuda driver combination",
        cause="the driver is too old for the image's CUDA",
        fix="update the driver (CUDA 13 images need 580 or newer), or use the image's `-cu129` tag",
        source="gpustack 4678; llm-d 706; vllm 4940",
    ),
    Symptom(
        id="gpu-fault",
        # Those four are caused by an application.
        pattern=r"NVRM: Xid \([^)\n]*\): (?!(?:13|31|43|45)\b)\d+",
        cause="a GPU or its link is faulty",
        fix=(
            "see `vlaunch check --only gpu-errors`; remove the node from the inventory and reboot"
            " it"
        ),
        source="NVIDIA's Xid catalog",
    ),
    Symptom(
        id="cuda-no-gpu",
        pattern=r"No (?:CUDA|HIP) GPUs are available",
        cause="the process finds no GPU in its container",
        fix=(
            "remove CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES from `env:`; list the"
            " containers' GPUs: `vlaunch exec -- nvidia-smi -L`"
        ),
        source="vllm 6896, 14413; ray 51193",
    ),
    Symptom(
        id="cuda-no-kernel",
        pattern=r"no kernel image is available for execution on the device",
        cause="the image has no kernels for this generation of GPUs",
        fix=(
            "use an image that supports the GPU: a newer vLLM for a new one; CUDA 13 images need"
            " Turing (T4) or newer"
        ),
        source="vllm 16307, 19906, PR 39878; gpustack 2097",
    ),
    Symptom(
        id="cuda-kernel",
        # Out of memory has its own entry.
        pattern=(
            r"(?:CUDA|HIP) error: (?:an illegal memory access|device-side assert|unspecified launch"
            r" failure|misaligned address|an illegal instruction)"
        ),
        cause="a kernel crashed on the GPU: a bug in vLLM or torch, perhaps triggered by a request",
        fix=(
            "try without compiled graphs: `-- --enforce-eager`, or another version of vLLM; to"
            ' find the kernel, set CUDA_LAUNCH_BLOCKING: "1" under `env:` and run `vlaunch up`'
        ),
        source="vllm 28028, 19483, 11958, 21731",
        batch=(
            "try without compiled graphs: `enforce_eager: true` under `engine: {args: …}`, or"
            " another version of vLLM"
        ),
    ),
    Symptom(
        id="cpu-head-size",
        pattern=upstream.text("vllm.cpu-head-size"),
        cause="vLLM's CPU attention does not support this model's head size",
        fix="choose a model with a head size of 32, 64, 80, 96, 112, 128, 192 or 256",
        source="seen with vLLM 0.32",
    ),
    Symptom(
        id="host-memory",
        pattern=upstream.any_of("ray.memory-pressure", "ray.memory-workers"),
        cause="a node ran out of host memory",
        fix="use a node with more memory than one rank's share of the checkpoint",
        source="vllm 2669, 1160; MiaAI-Lab/GLM-5.3-Flash-NVFP4-Dual-DGX-Spark 2",
        batch=(
            "under `predict:` or `preprocess:` raise `num_cpus`, so that fewer run on a node, or"
            " lower `batch_size`"
        ),
    ),
    Symptom(
        id="kernel-oom",
        pattern=(
            r"[Oo]ut of memory: Killed process|oom-kill:constraint|^container \S+ was killed for"
            r" lack of memory"
        ),
        cause="the kernel killed a process for lack of host memory",
        fix=(
            "use a node with more memory than one rank's share of the checkpoint, or stop other"
            " programs there"
        ),
        source="Linux, mm/oom_kill.c; Docker's OOMKilled",
    ),
)

ENGINE = (
    Symptom(
        id="unknown-argument",
        pattern=(
            rf"unrecognized arguments: .*|error: argument .*|{patterns.UNKNOWN_ARGUMENT.pattern}"
        ),
        cause=patterns.UNKNOWN_ARGUMENT.cause,
        fix="list vLLM's arguments: `vlaunch exec --head -- vllm serve --help=all`",
        source="Python's argparse; vLLM 0.32, engine/arg_utils.py",
        batch=patterns.UNKNOWN_ARGUMENT.batch,
    ),
    Symptom(
        id="context-too-long",
        **patterns.CONTEXT_TOO_LONG._asdict(),
        fix="leave `--max-model-len` out, or lower it to the model's own limit",
        source="vLLM 0.32, config/model.py",
    ),
    Symptom(
        id="no-compiler",
        **patterns.NO_COMPILER._asdict(),
        fix=(
            "use an image with g++ (and nvcc, on GPUs), or turn compilation off: `--"
            " --enforce-eager`; FlashInfer's sampler needs none with"
            ' VLLM_USE_FLASHINFER_SAMPLER: "0" under `env:`'
        ),
        source="torch 2.13, _inductor/exc.py; vllm 49497; flashinfer 1781",
    ),
    Symptom(
        id="compiled-graph-timeout",
        pattern=upstream.text("ray.channel-timeout"),
        cause=(
            "a rank timed out in Ray's compiled graph, which only the old executor of vLLM up to"
            " 0.32 uses"
        ),
        fix=(
            "remove VLLM_USE_RAY_V2_EXECUTOR_BACKEND from `env:` (0.33 ignores it: it has only the"
            " new executor); to keep it with 0.32, raise RAY_CGRAPH_get_timeout there"
        ),
        source="vllm 27116, 29373, 19703; vLLM 0.33, v1/executor/abstract.py",
    ),
    Symptom(
        # vLLM 0.32, distributed/device_communicators: the CPU communicator lacks both, which the
        # derived image adds.
        id="cpu-experts",
        pattern=upstream.any_of("vllm.communicator-gather", "vllm.communicator-scatter"),
        cause="vLLM's CPU build cannot run a mixture of experts on several ranks without Ray",
        fix="run `vlaunch serve` with `--backend ray`: its image has the missing part",
        source="seen with vLLM 0.32",
    ),
    Symptom(
        id="node-unreachable",
        pattern=r"^node cannot be reached: ",
        cause="SSH to this node fails: it is off, or unreachable from this machine",
        fix="find the reason: `vlaunch check --only ssh`",
        source="this machine's SSH connection",
    ),
    Symptom(
        id="batch-failed",
        pattern=r"^batch job failed: ",
        cause="a batch job failed",
        fix="fix the cause, then run the same command again: it continues where it stopped",
        source="the log of the job's driver",
    ),
    Symptom(
        id="server-gave-up",
        pattern=r"^keeper: gave up",
        cause="a server reached its restart limit and stays down",
        fix="fix the other findings, then run `vlaunch serve`",
        source="the supervisor's record",
    ),
    Symptom(
        id="rank-hangs",
        pattern=r"^keeper: server \S+ hangs: |^keeper: fault of server \S+: no step had ended for ",
        cause="a rank hangs: the others wait for it",
        fix=(
            "`vlaunch collect` saves the stacks of all ranks; `vlaunch serve --replace` restarts"
            " the server now, and its supervisor restarts it after vLLM's deadline"
        ),
        source="the supervisor's record",
    ),
    Symptom(
        id="known-to-hang",
        pattern=rf"^{known_hangs.PREFIX}",
        cause="this build of NCCL, or this driver, is known to hang",
        fix="use the version that the line names",
        source="issues and release notes, named in the line",
        fatal=False,
    ),
    Symptom(
        id="server-quiet",
        pattern=r"^keeper: server \S+ is quiet: ",
        cause="a server's current step takes longer than any step before",
        fix="wait: either the step is long, or `vlaunch status` soon names a rank that hangs",
        source="the supervisor's record",
        fatal=False,
    ),
    Symptom(
        id="server-died",
        pattern=r"^keeper: fault of server ",
        cause="a server crashed or failed to start",
        fix="check whether it restarted: `vlaunch status`",
        source="the supervisor's record",
    ),
    Symptom(
        id="request-refused",
        pattern=r"^vlaunch: (?!an engine of batch job )",  # the first line of a batch job's log
        cause="the last command failed before it started anything",
        fix="follow its hint, or run it again to read the complete message",
        source="the file on the operator's machine in which vlaunch saves the error",
    ),
    # From here on: possibly harmless lines, and consequences of other failures.
    Symptom(
        id="rank-silent",
        pattern=upstream.any_of("vllm.rpc-timeout", "vllm.broadcast-timeout"),
        cause="a rank does not respond: it hangs, or the network between the nodes does",
        fix="read the logs of every node: `vlaunch logs`",
        source="vllm 46611, 50835, 43420",
        fatal=False,
    ),
    Symptom(
        id="nccl-unreachable",
        pattern=upstream.any_of("nccl.connection-retried", "nccl.connection-polled"),
        cause="NCCL cannot reach another node: a firewall, or the wrong interface",
        fix=(
            "allow TCP between the nodes on all ports; find blocked ports: `vlaunch check --group"
            " ports`"
        ),
        source="NCCL 2.30, os/linux.cc; vllm 13200; LlamaFactory 8045",
        fatal=False,
    ),
    Symptom(
        id="rdma-unseen",
        pattern=upstream.text("nccl.no-ib-device"),
        cause="NCCL finds no RDMA device and uses TCP, although the inventory requires RDMA",
        fix="run `vlaunch check --group rdma`, then `vlaunch up` and `vlaunch check-nccl`",
        source="NCCL 2.30, net_ib/init.cc; vllm PR 42075, 7429; nccl 451",
        fatal=False,
        rdma=True,
    ),
    Symptom(
        id="rdma-libraries",
        pattern=r"undefined symbol: mlx5dv_",
        cause=(
            "the container mixes its own RDMA libraries with the host's, or they are too old for"
            " NCCL"
        ),
        fix=(
            "remove the host's libraries from `mounts:`; see which transport NCCL uses: `vlaunch"
            " check-nccl`"
        ),
        source="vllm 42750; HAMi-core 261",
        fatal=False,  # NCCL works without the newer functions.
        rdma=True,
    ),
    Symptom(
        id="object-store",
        pattern=upstream.text("ray.store-on-disk"),
        cause="/dev/shm is smaller than Ray's object store, which uses the slower disk",
        fix=(
            "set `shm: private`, a larger size or a smaller `ray: {object_store: …}` in the"
            " inventory, then run `vlaunch up`"
        ),
        source="gpustack 5014; Ray 2.60, _private/services.py",
        fatal=False,
    ),
    Symptom(
        id="hf-lock",
        pattern=(
            r"[Ll]ock acquisition failed|[Ss]till waiting to acquire lock on|The file lock '.*'"
            r" could not be acquired"
        ),
        cause="several processes download the same model, or a crashed one left its lock",
        fix=(
            "download it once: `vlaunch model pull MODEL`; if no download is running, delete the"
            " `.locks` folder under `hf_home`"
        ),
        source="huggingface_hub 2543; vllm PR 21406",
        fatal=False,
    ),
    Symptom(
        id="cache-permission",
        pattern=(
            r"PermissionError: .*(?:cache|huggingface|hub)\b|Permission denied:"
            r" '[^'\n]*(?:cache|huggingface|hub)\b"
        ),
        cause="the container cannot write to the model cache, which belongs to another user",
        fix="change its owner on that node: `sudo chown -R USER HF_HOME`",
        source="aixcl 696; llm-d 485",
        fatal=False,  # A process that needs the file exits by itself.
    ),
    Symptom(
        id="engine-slow",
        pattern=upstream.text("vllm.engine-slow"),
        cause="the engine was not ready within vLLM's time limit",
        fix="raise VLLM_ENGINE_READY_TIMEOUT_S under `env:`, or put the model on a faster disk",
        source="vLLM 0.32, envs.py",
        after=True,
    ),
    Symptom(
        id="rank-died",
        pattern=upstream.any_of("vllm.ray-rank-died", "vllm.engine-dead", "vllm.engine-fatal"),
        cause="a rank died",
        fix="read the logs of every node: `vlaunch logs`; then run `vlaunch serve`",
        source="vLLM 0.32, v1/executor/ray_executor_v2.py",
        after=True,
        batch="read the logs of every node: `vlaunch logs`",
    ),
    Symptom(
        id="engine-killed",
        pattern=patterns.ENGINE_KILLED.pattern,
        cause=patterns.ENGINE_KILLED.cause,
        fix=patterns.ENGINE_KILLED.batch,
        source="vLLM 0.32, v1/engine/utils.py",
    ),
    Symptom(
        id="engine-failed",
        pattern=upstream.any_of("vllm.engine-failed", "vllm.worker-exception"),
        cause="the engine failed",
        fix="read the earlier lines: `vlaunch logs`",
        source="vLLM 0.32, v1/engine/core.py",
        after=True,
    ),
    Symptom(
        id="container-restarts",
        pattern=r"^container \S+ keeps ending: ",
        cause="the container keeps restarting",
        fix="read its last lines: `vlaunch logs`",
        source="Docker's state of the container",
        after=True,
    ),
    Symptom(
        id="container-ended",
        pattern=r"^container \S+ ended",
        cause="a container of the cluster exited, with everything that ran in it",
        fix="read its last lines: `vlaunch logs`; then run `vlaunch up`",
        source="vllm 32136; Docker's state of the container",
        after=True,
    ),
)
