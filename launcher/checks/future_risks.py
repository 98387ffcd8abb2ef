"""What would end a healthy cluster later: a logout that takes shared memory with it, a reboot
without the driver.
"""

from __future__ import annotations

from launcher.checks.host import not_nvidia
from launcher.checks.shape import (
    UNSURVEYED,
    Check,
    Finding,
    Host,
    each,
    passed,
    skipped,
    surveyed,
    warned,
)
from launcher.model import Node
from launcher.tools.survey import Survey

_SYSTEM_USERS = 999  # systemd leaves users up to SYSTEM_UID_MAX alone


def _remove_ipc(host: Host) -> Finding:
    node, survey, user = host.node, host.survey, host.facts.user
    if survey is None:
        return skipped(node, UNSURVEYED)
    if host.inventory.shm != "host":
        return passed(node, "the containers have shared memory of their own")
    if survey.remove_ipc is None or survey.uid is None:
        return skipped(node, "what logind does at logout is not known")
    if survey.uid <= _SYSTEM_USERS:
        return passed(node, "logs in as a system user, whom logind spares")
    if not survey.remove_ipc:
        return passed(node, "RemoveIPC=no")
    if survey.linger:
        return passed(node, f"`{user}` lingers")
    if survey.linger is None:
        return skipped(node, f"RemoveIPC=yes, and whether `{user}` lingers is not known")
    return warned(
        node,
        f"RemoveIPC=yes: when `{user}` logs out, shared memory that belongs to its user id is"
        " removed",
        fix=f"run `sudo loginctl enable-linger {user}` on {node.name}",
    )


def _next_boot(node: Node, survey: Survey) -> Finding:
    if survey.next_kernel_has_driver is None:
        return skipped(node, "which kernel boots next, and what modules it has, is not known")
    if survey.next_kernel_has_driver:
        return passed(node, "the next kernel has the nvidia module")
    return warned(
        node,
        f"the kernel of the next boot, {survey.next_kernel or 'a new one'}, has no nvidia module",
        evidence=f"running now: {survey.kernel}" if survey.kernel else "",
        fix=(
            f"run `sudo dkms autoinstall -k {survey.next_kernel or 'KERNEL'}` on {node.name}, or"
            " install its driver package"
        ),
    )


CHECKS = (
    Check(
        id="remove-ipc",
        what="a logout does not remove the containers' shared memory",
        why=(
            "containers that share the host's IPC and run under the login's user id lose semaphores"
            " and segments at its logout"
        ),
        judge=each(_remove_ipc),
        group="host",
    ),
    Check(
        id="next-boot",
        what="the kernel of the next boot has the GPU driver",
        why="an update that waits for a reboot takes the GPUs away at the worst moment",
        judge=surveyed(_next_boot),
        skip_reason=not_nvidia,
        group="host",
    ),
)
