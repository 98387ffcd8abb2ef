"""Checks of hosts: SSH, clocks, disks, shared memory, and effects of a logout or reboot."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from statistics import median_low

from launcher.core import sizes
from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Node
from launcher.hosts.check import (
    NOT_SURVEYED,
    Check,
    Evidence,
    Host,
    collect_surveys,
    per_host,
    per_survey,
    skip_unless_nvidia,
    ssh_command,
)
from launcher.tools.host.survey import Survey
from launcher.tools.shipped import certificates
from launcher.tools.site import Site

# Seconds. The probe's round trip blurs clocks; above the second bound, logs and token expiry break.
_WARN_SKEW, _FAIL_SKEW = 2.0, 30.0
_SYSTEM_USERS = 999  # systemd exempts users up to SYSTEM_UID_MAX
_GIB = 1024**3
# Space for logs, compile caches, and Ray on top of the image.
_MIN_FREE = {"nvidia": 5 * _GIB, "amd": 5 * _GIB, "cpu": 1 * _GIB}
# Unpacked image: vllm/vllm-openai has 28.6 GB (https://github.com/vllm-project/vllm/pull/22377),
# the CPU build without CUDA a tenth.
_IMAGE_SIZE = {"nvidia": 30 * _GIB, "amd": 30 * _GIB, "cpu": 3 * _GIB}
# Programs take a MiB, secrets a few bytes; server records grow.
_MIN_STATE = 64 * 1024**2
# Free space is reported in steps, so that similar nodes fold.
_STEPS = (1, 5, 10, 20, 50, 100, 200, 500, 1024, 2048, 5120, 10_240)
# Ray's defaults: 0.3 of the free memory, at most 200 GB and 0.95 of /dev/shm, but 10 GB even with a
# smaller /dev/shm (DEFAULT_OBJECT_STORE_MEMORY_PROPORTION, DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES,
# REQUIRE_SHM_SIZE_THRESHOLD).
_STORE_SHARE, _MAX_STORE, _MIN_STORE_CAP, _SHM_SHARE = 0.3, 200 * 10**9, 10**10, 0.95


def _judge_ssh(evidence: Evidence) -> Sequence[Finding]:
    findings = []
    for node in evidence.inventory.nodes:
        if node.name in evidence.facts:
            user = evidence.facts[node.name].user
            status = "is this machine" if node.connection == "local" else "answers"
            findings.append(passed(node, f"{status}, as {user}" if user else status))
            continue
        reason = evidence.missing.get(node.name, "").strip() or "no answer"
        first, _, rest = reason.partition("\n")
        fix = (
            f"make `{ssh_command(node)} true` work without a prompt, or correct `host:` and `ssh:`"
            f" of {node.name}"
        )
        findings.append(failed(node, f"cannot be reached: {first}", evidence=rest, fix=fix))
    return findings


def _judge_skew(evidence: Evidence) -> Sequence[Finding]:
    surveys_by_node, findings = collect_surveys(evidence)
    skews = {
        name: survey.skew for name, survey in surveys_by_node.items() if survey.skew is not None
    }
    findings += [
        skipped(name, "its clock could not be read")
        for name in surveys_by_node
        if name not in skews
    ]
    if not skews:
        return findings
    # Of two clocks, trust the one nearer to this machine's.
    reference = median_low(skews.values()) if len(skews) > 2 else min(skews.values(), key=abs)
    for name, skew in skews.items():
        offset = skew - reference
        if abs(offset) <= _WARN_SKEW:
            agrees = "its clock agrees with the others"
            findings.append(passed(name, agrees if len(skews) > 1 else "its clock was read"))
            continue
        judge = warned if abs(offset) <= _FAIL_SKEW else failed
        direction = "ahead of" if offset > 0 else "behind"
        fix = f"run `sudo timedatectl set-ntp true` on {name}, or `sudo chronyc makestep` if"
        text = f"its clock is {abs(offset):.0f} s {direction} the other nodes'"
        findings.append(judge(name, text, fix=f"{fix} chrony runs"))
    if abs(reference) > _WARN_SKEW:
        direction = "behind" if reference > 0 else "ahead of"
        text = f"this machine's clock is {abs(reference):.0f} s {direction} the nodes'"
        fix = "set this machine's clock: `sudo timedatectl set-ntp true`"
        findings.append(warned("", text, fix=fix))
    return findings


def _judge_time_sync(node: Node, survey: Survey) -> Finding:
    if survey.synced is None:
        return skipped(node, "no time daemon was found")
    if survey.synced:
        return passed(node, "a time daemon synchronizes its clock")
    fix = f"run `sudo timedatectl set-ntp true` on {node.name}"
    return warned(node, "no time daemon synchronizes its clock", fix=fix)


def _judge_remove_ipc(host: Host) -> Finding:
    node, survey, user = host.node, host.survey, host.facts.user
    if survey is None:
        return skipped(node, NOT_SURVEYED)
    if host.inventory.shm != "host":
        return passed(node, "the containers have their own shared memory")
    if survey.remove_ipc is None or survey.uid is None:
        return skipped(node, "what logind does at logout is unknown")
    if survey.uid <= _SYSTEM_USERS:
        return passed(node, "the SSH user is a system user, which logind exempts")
    if not survey.remove_ipc:
        return passed(node, "RemoveIPC=no")
    if survey.linger:
        return passed(node, f"lingering is enabled for `{user}`")
    if survey.linger is None:
        return skipped(
            node, f"RemoveIPC=yes, and whether lingering is enabled for `{user}` is unknown"
        )
    return warned(
        node,
        f"RemoveIPC=yes: when `{user}` logs out, shared memory of that user id is removed",
        fix=f"run `sudo loginctl enable-linger {user}` on {node.name}",
    )


def _judge_next_boot(node: Node, survey: Survey) -> Finding:
    if survey.next_kernel_has_driver is None:
        return skipped(node, "the kernel of the next boot is unknown")
    if survey.next_kernel_has_driver:
        return passed(node, "the next kernel has the nvidia module")
    return warned(
        node,
        f"the next kernel, {survey.next_kernel or 'a new one'}, has no nvidia module",
        evidence=f"running now: {survey.kernel}" if survey.kernel else "",
        fix=(
            f"run `sudo dkms autoinstall -k {survey.next_kernel or 'KERNEL'}` on {node.name}, or"
            " install its driver package"
        ),
    )


def _judge_shm(host: Host) -> Finding:
    survey, shm, requested = host.survey, host.inventory.shm, host.inventory.ray.object_store
    memory = survey.memory if survey is not None else None
    if memory is None and requested is None:
        return skipped(
            host, "the node's memory is unknown, so the size of Ray's object store is too"
        )
    size: int | None
    if shm == "private":
        size, owner = memory and memory // 2, "the container's /dev/shm, half of the memory,"
        remedy = "set a size for `shm:`"
    elif shm == "host":
        size, owner = survey.shm if survey is not None else None, "the host's /dev/shm"
        remedy = f"`sudo mount -o remount,size={{}}G /dev/shm` on {host.name}"
    else:
        size, owner, remedy = shm, "`shm:`", "raise `shm:`"
    if size is None:
        return skipped(host, "the size of /dev/shm is unknown")
    free = size
    # A running cluster's usage is its own.
    running = any(container.running for container in host.facts.containers)
    if shm == "host" and survey is not None and survey.shm_free is not None and not running:
        free = survey.shm_free
    store = object_store_size(requested, memory or 0, size)
    if store < free:
        return passed(
            host,
            f"/dev/shm of {_gib(size)} fits Ray's object store of {_gib(store)}",
        )
    suggested = max(int(free * 0.5) // 1024**2, 75)
    return failed(
        host,
        f"Ray's object store of {_gib(store)} does not fit: {owner} has {_gib(size)}, {_gib(free)}"
        " of it free",
        fix=(
            f"set `ray: {{object_store: {suggested}MiB}}` in the inventory, or enlarge /dev/shm:"
            f" {remedy.format(store * 2 // _GIB + 1)}"
        ),
    )


def object_store_size(requested: int | None, memory: int, shm: int) -> int:
    """Return the size in bytes of Ray's object store for this memory and shared memory."""
    if requested is not None:
        return requested
    return int(min(memory * _STORE_SHARE, _MAX_STORE, max(_MIN_STORE_CAP, shm * _SHM_SHARE)))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _judge_disk(host: Host) -> Finding:
    node, facts, min_free = host.node, host.facts, _MIN_FREE[host.inventory.accelerator]
    missing, model_text = _missing_model_bytes(host)
    home = str(PurePosixPath(node.hf_home).parent)
    # Images derived from the inventory's count too.
    has_image = any(image is not None for image in facts.images.values()) or bool(facts.containers)
    docker_need = min_free if has_image else max(min_free, _IMAGE_SIZE[host.inventory.accelerator])
    free, docker_free = facts.disk_free, facts.docker_disk_free
    if free is not None and free < missing + min_free:
        purpose = " for the model" if missing else ""
        text = (
            f"{_gib(free)} free under {home}, {(missing + min_free) / _GIB:.0f} GiB needed{purpose}"
        )
        fix = "set `hf_home:` to a larger disk, or free some space there"
        return failed(node, text, fix=fix)
    if docker_free is not None and docker_free < docker_need:
        purpose = "" if has_image else " to pull the image"
        return failed(
            node,
            f"{_gib(docker_free)} free in Docker's data directory, {docker_need / _GIB:.0f} GiB"
            f" needed{purpose}",
            fix=(
                "free some space (`docker image prune -a` removes images that no container uses), "
                "or give Docker a larger disk: `data-root` in /etc/docker/daemon.json"
            ),
        )
    if free is None:
        return skipped(node, "`df` did not answer; free space is unknown")
    if not has_image and docker_free is None:
        return skipped(
            node,
            (
                "the image is not on this node yet, and the free space in Docker's data directory"
                " is unknown"
            ),
        )
    image = (
        "the image is on this node"
        if has_image
        else f"room for the image ({docker_need / _GIB:.0f} GiB)"
    )
    step = max((step for step in _STEPS if step * _GIB <= free), default=0)
    threshold = f"{step // 1024} TiB" if step >= 1024 else f"{step} GiB"
    return passed(node, f"{image}, more than {threshold} free under {home}; {model_text}")


def _missing_model_bytes(host: Host) -> tuple[int, str]:
    """Return the missing bytes of the model (0 if unknown) and a description."""
    evidence = host.evidence
    if not evidence.model:
        return 0, "no model is set, so its size is unknown"
    full_size = max((sum(files.values()) for files in evidence.files.values() if files), default=0)
    missing = full_size - sum((evidence.files.get(host.name) or {}).values())
    if full_size and not missing:
        return 0, "the model is on this node"
    # Users fill paths themselves, maybe on another disk than the Hugging Face home.
    if not full_size or evidence.model.startswith("/"):
        return 0, "the model's size is unknown"
    return missing, f"the model needs {missing / _GIB:.0f} GiB more"


def _judge_certificates(evidence: Evidence) -> list[Finding]:
    warning = certificates.front_warning(evidence.inventory, evidence.facts, evidence.now)
    text, _, fix = warning.partition("; ")
    judge = failed if " expired " in text else warned
    return [*_judge_agents(evidence), *([judge("", text, fix=fix)] if text else ())]


def _judge_agents(evidence: Evidence) -> list[Finding]:
    texts = [host.facts.certificates for host in evidence.reached]
    expiry = certificates.earliest_expiry(texts)
    if expiry is None:
        return [skipped("", "no certificates: the cluster is not up")]
    if certificates.expiry_warning(texts, evidence.now):
        text = f"the first one expires on {expiry:%Y-%m-%d}"
        return [warned("", text, fix="run `vlaunch up`, which renews them and restarts nothing")]
    return [passed("", f"valid until {expiry:%Y-%m-%d}")]


def _judge_state_dir(host: Host) -> Finding:
    node, state = host.node, host.facts.state
    path = Site(host.inventory, host.evidence.facts).state_dir(node)
    if state is None:
        return skipped(node, f"{path} could not be checked")
    alternative = "or set `state_dir:` in the inventory to a directory that the SSH user may write"
    if state.read_only:
        fix = f"remount it (`sudo mount -o remount,rw …`), {alternative}"
        return failed(node, f"{path} is on a read-only file system", fix=fix)
    if not state.writable:
        user = host.facts.user or node.ssh.user or "the SSH user"
        fix = f"check it and its parent directories with `ls -ld` on {node.name}, {alternative}"
        return failed(node, f"`{user}` cannot write to {path}", fix=fix)
    if state.free < _MIN_STATE:
        fix = f"free some space there: `df -h` and `du -sh ~` on {node.name}, {alternative}"
        text = f"{state.free / 2**20:.0f} MiB free for {path}, {_MIN_STATE / 2**20:.0f} MiB needed"
        return failed(node, text, fix=fix)
    return passed(node, "the state directory is writable")


def _judge_cache_dir(host: Host) -> Finding:
    """Judge the file system of the compile cache; a missing folder is fine."""
    cache = host.facts.compile_cache
    if cache is None:
        return skipped(host, "the file system of `cache_dir` is unknown")
    if cache.remote:
        return warned(
            host,
            f"the compile cache would be on {cache.kind}, a network file system",
            fix=(
                f"set `cache_dir:` of {host.name}, or `state_dir:` for all of its files, to a"
                " directory on a local disk"
            ),
        )
    if cache.size is None or cache.size < sizes.MIB:
        return passed(host, f"{cache.kind}, nothing compiled yet")
    return passed(host, f"{cache.kind}, {sizes.format_size(cache.size)} compiled")


CHECKS = (
    Check(
        id="ssh",
        what="SSH login works on every node",
        why="an unreachable node cannot be checked, and the cluster is incomplete without it",
        judge=_judge_ssh,
        group="reach",
    ),
    Check(
        id="time-skew",
        what="the clocks agree within two seconds",
        why=(
            "otherwise logs of several nodes cannot be ordered, and tokens and certificates expire"
            " at the wrong time"
        ),
        judge=_judge_skew,
        group="host",
    ),
    Check(
        id="time-sync",
        what="a time daemon synchronizes the clock",
        why="unsynchronized clocks drift apart",
        judge=per_survey(_judge_time_sync),
        group="host",
    ),
    Check(
        id="remove-ipc",
        what="a logout does not remove the containers' shared memory",
        why=(
            "containers with the host's IPC and the SSH user's id lose semaphores and segments when"
            " that user logs out"
        ),
        judge=per_host(_judge_remove_ipc),
        group="host",
    ),
    Check(
        id="next-boot",
        what="the next kernel has the GPU driver",
        why="after a kernel update without it, the next reboot leaves the node without GPUs",
        judge=per_survey(_judge_next_boot),
        skip_reason=skip_unless_nvidia,
        group="host",
    ),
    Check(
        id="certificates",
        what="the certificates of agents and front are valid for a month",
        why="agents without a valid one cannot connect, and servers on several nodes stop",
        judge=_judge_certificates,
        group="host",
    ),
    Check(
        id="shm",
        what="shared memory fits Ray's object store",
        why="otherwise Ray falls back to files in /tmp or does not start",
        judge=per_host(_judge_shm),
        group="memory",
    ),
    Check(
        id="disk",
        what="the disks have room for the image and the model",
        why="a full disk aborts the pull, the build or the download",
        judge=per_host(_judge_disk),
        group="storage",
    ),
    Check(
        id="state-dir",
        what="the state directory is writable",
        why="it stores the programs and secrets that containers mount, and the servers' records",
        judge=per_host(_judge_state_dir),
        group="storage",
    ),
    Check(
        id="cache-dir",
        what="the compile cache is on a local disk",
        why=(
            "it has thousands of small files for this node's GPUs: a network file system is slow,"
            " and nodes that share them break each other's"
        ),
        judge=per_host(_judge_cache_dir),
        group="storage",
    ),
)
