"""Private parts of Ray, in one place: a new Ray may break them.

`USED` lists them, as read and run with Ray 2.60. The rest of the driver uses documented Ray, and of
vLLM only `vllm.LLM` and its sampling parameters. Imports are late: the launcher and the tests have
no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

USED = (
    # the job's id, this process's log files, and the actor table
    "ray._private.worker.global_worker",
    "ray._private.state.state.actor_table",
    # a logger's name
    "ray._private.worker",
    # a resource of every head node (ray/_common/constants.py)
    "node:__internal_head__",
    # the last operator of a dataset: its claims have no documented setter
    "Dataset._logical_plan",
)
HEAD_RESOURCES = {"node:__internal_head__": 0.001}  # pins a task or an actor to the head
WORKER_LOGGER = "ray._private.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A row of Ray's actor table.

    `node` is empty for an unplaced actor; `death` is Ray's reason for its death.
    """

    name: str
    state: str
    restarts: int
    node: str
    pid: int
    death: str = ""


def log_paths() -> tuple[str, str]:
    """Return the files of this process's stdout and stderr; Ray writes them through a pipe."""
    import ray

    worker = ray._private.worker.global_worker
    return str(worker.get_out_file_path()), str(worker.get_err_file_path())


def query_actors() -> dict[str, Actor]:
    """Return this job's actors: one request to the GCS, none to the dashboard."""
    import ray

    worker = ray._private.worker.global_worker
    table = ray._private.state.state.actor_table(None, job_id=worker.current_job_id)
    return {name: parse_actor(row) for name, row in table.items()}


def parse_actor(row: Mapping[str, Any]) -> Actor:
    """Parse a row of the table."""
    node = row["Address"]["NodeID"]
    return Actor(
        name=row["ActorClassName"],
        state=row["State"],
        restarts=int(row["NumRestarts"]),
        node=node if node.strip("f") else "",  # an id of only f means no node
        pid=int(row["Pid"]),
        death=death_reason(row.get("DeathCause")),
    )


def death_reason(cause: Any) -> str:
    """Return Ray's reason for an actor's death, as one line."""
    for name in ("actor_died_error_context", "creation_task_failure_context", "oom_context"):
        context = getattr(cause, name, None)
        if context is not None and context.ByteSize():
            message = getattr(context, "error_message", "") or getattr(
                context, "formatted_exception_string", ""
            )
            if message:
                return " ".join(message.split())
    return ""


def set_claims(dataset: Any, compute: Any, **claims: Any) -> None:
    """Set the claims of a dataset's last step, which lacks arguments for them.

    For `repartition`, which would claim a whole CPU to cut a block.
    """
    last = dataset._logical_plan.dag
    remote_args = getattr(last, "ray_remote_args", None)
    if isinstance(remote_args, dict):
        remote_args.update(claims)
        object.__setattr__(last, "compute", compute)
