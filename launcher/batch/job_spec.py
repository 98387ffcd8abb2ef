"""A job on a cluster: `job.json` for the driver, with the job's identity and its digest.

Settings outside the identity may change between runs: they affect speed, not answers.
"""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from launcher.batch.checked_job import CheckedJob
from launcher.batch.identity import identity_digest, job_identity
from launcher.batch.inputs import ShippedFile
from launcher.batch.job import VERSION, Job, PlacedJob, RankHost, to_json
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError

# bytes of `job.json`; one answer returns it with the names of the received files, cut at 8 MiB
MAX_BYTES = 5 * 2**20


def work_folder(inventory: Inventory, name: str) -> str:
    """Return the folder of the job `name` on the head, at the same path in its container."""
    return f"{jobs_folder(inventory)}/{name}"


def jobs_folder(inventory: Inventory) -> str:
    """Return the folder of the cluster's batch jobs on the head."""
    return f"{inventory.head.hf_home.rstrip('/')}/vlaunch/{inventory.cluster}/batch"


def job_spec(
    job: CheckedJob, shipped: Sequence[ShippedFile], inventory: Inventory
) -> dict[str, Any]:
    """Return `job.json` of `job` on the cluster of `inventory`.

    Args:
        job: the checked job.
        shipped: from `inputs.read_shipped`.
        inventory: the cluster.

    Raises:
        RequestError: too many shipped files for its size limit.
    """
    work, identity = work_folder(inventory, job.name), identity_of(job, shipped)
    output = f"{work}/output" if job.to.where == "control" else job.to.text
    values = {attribute.name: getattr(job, attribute.name) for attribute in fields(Job)}
    values["read"] = replace(job.read, paths=_source_paths(job, shipped, work))
    values["write"] = replace(job.write, path=output)
    placed = PlacedJob(
        **values,
        cluster=inventory.cluster,
        work=work,
        identity=identity,
        digest=identity_digest(identity),
        rank_port=inventory.ports.mp_master,
        rank_hosts=rank_hosts(inventory) if job.data_parallel else (),
    )
    payload = {"version": VERSION, **to_json(placed)}
    if (length := len(json.dumps(payload))) > MAX_BYTES:
        raise RequestError(
            f"the description of `{job.name}` is too long: it lists {len(shipped):,}"
            " files on this machine",
            evidence=f"{length:,} bytes, at most {MAX_BYTES:,}",
            hint=(
                "put the rows into fewer files, or read them from storage that the head can"
                " access: `nodes:/…`, s3://, gs:// or hdfs://"
            ),
        )
    return payload


def identity_of(job: CheckedJob, shipped: Sequence[ShippedFile]) -> dict[str, Any]:
    """Return everything that determines the answers, flat, by job file keys; files by name and
    content.
    """
    elsewhere = [source.text for source in job.sources if source.where != "control"]
    # The local output folder may change: the answers are the same.
    output = "gathered" if job.to.where == "control" else job.to.shown
    files = {"read.paths": elsewhere or None, "write.path": output}
    return job_identity(job, {**files, **_identity_of_files(shipped)})


def _identity_of_files(shipped: Sequence[ShippedFile]) -> dict[str, Any]:
    rows = [file for file in shipped if file.source is not None]
    code = [file for file in shipped if file.source is None]
    return {
        **{_input_key(file.label): _file_identity(file) for file in rows},
        **{f"code {file.label}": _file_identity(file) for file in code},
        "input order": [file.label for file in rows] or None,
    }


def _input_key(label: str) -> str:
    """Return an input file's key; a file called `order` must not clash with `input order`."""
    return f"input {'./' if label == 'order' else ''}{label}"


def _file_identity(file: ShippedFile) -> str:
    return f"{file.sha256}, {file.bytes} bytes"


def _source_paths(job: CheckedJob, shipped: Sequence[ShippedFile], work: str) -> tuple[str, ...]:
    paths: list[str] = []
    for index, source in enumerate(job.sources):
        paths += (
            [f"{work}/{file.to}" for file in shipped if file.source == index]
            if source.where == "control"
            else [source.text]
        )
    return tuple(paths)


def rank_hosts(inventory: Inventory) -> tuple[RankHost, ...]:
    """Return the nodes for ranks of a cluster, the head first."""
    nodes = (inventory.head, *inventory.workers)
    return tuple(RankHost(ip=node.ip, gpus=node.gpus) for node in nodes)
