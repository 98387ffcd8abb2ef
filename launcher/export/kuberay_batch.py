"""A batch job as a RayJob: its driver, its files of this machine, and a RayCluster that ends with
it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace

from launcher.agent.desired import Policy
from launcher.batch import batch_plan
from launcher.core.domain import Inventory, Node
from launcher.core.errors import RequestError
from launcher.export import group as groups
from launcher.export import kuberay, kubernetes, pods
from launcher.export.group import Group, Object
from launcher.export.kubernetes import Manifests
from launcher.export.target import Target
from launcher.serving.serve_request import Request
from launcher.tools import containers, zipapps
from launcher.tools.placement import Placement

_FILES = "/opt/vlaunch-job"  # the job's files in the head's pod
_RETRIES = 2  # each continues where the one before has ended
_MOST = 1 << 20  # bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap)


def group(inventory: Inventory, job_request: batch_plan.Request, target: Target) -> Group:
    """Return the pods of a job: as many nodes as it can use.

    Raises RequestError for what pods cannot do.
    """
    _refuse(job_request)
    nodes = _nodes(inventory, job_request)
    request = Request(
        name=job_request.job.name,
        model=job_request.job.model,
        placement=Placement(
            tp=1, pp=1, why="", nodes=tuple((node.name, node.gpus) for node in nodes)
        ),
        backend="ray",
        host="",
        port=inventory.ports.api,
    )
    engine = job_request.job.engine
    networked = job_request.job.mode == "engine" and engine.tp * engine.pp > min(
        n.gpus for n in nodes
    )
    # A job has no endpoint.
    local = replace(inventory, serve=replace(inventory.serve, bind="::"))
    built = groups.group(local, request, Policy(), replace(target, gate=networked))
    return replace(built, batch=True)


def manifests(group: Group, job_request: batch_plan.Request) -> Manifests:
    """Return the export of a job; raises RequestError where its files are too large."""
    job = kuberay.job(group, _command(job_request), {}, retries=_RETRIES)
    files, volume = _files(group, job_request)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["volumes"].append(volume)
    mount = {"name": "job", "mountPath": _FILES, "readOnly": True}
    head["containers"][0]["volumeMounts"].append(mount)
    program = zipapps.pack(zipapps.batch(), compress=True)
    policies = kubernetes.policies(group, [kuberay.dashboard_policy(group)])
    return Manifests(
        header=tuple(_header(group, job_request)),
        objects=(job, files, *policies),
        programs={**kubernetes.network_program(group), zipapps.BATCH: program},
        group=group,
    )


def _refuse(job_request: batch_plan.Request) -> None:
    job, problems, hints = job_request.job, [], []
    if job.mode == "data-parallel":
        problems.append("data-parallel ranks are placed by addresses, which pods do not have yet")
        hints.append("use replicas: leave out `data_parallel`")
    if job.to.where == "control":
        problems.append(f"answers to {job.to.shown}: pods cannot reach this machine")
        hints.append(
            "name a folder that the pods mount (`nodes:/path`), or an object store (s3://…)"
        )
    if problems:
        raise RequestError(
            f"`{job.name}` cannot be written for Kubernetes",
            evidence=problems,
            hint="\n".join(hints),
        )


def _nodes(inventory: Inventory, job_request: batch_plan.Request) -> list[Node]:
    """Return the nodes that a job can use: all, where it says nothing of GPUs."""
    most = job_request.job.gpus[1] or float("inf")
    usable: list[Node] = []
    for node in (inventory.head, *inventory.workers):
        if sum(node.gpus for node in usable) < most:
            usable.append(node)
    return usable


def _command(job_request: batch_plan.Request) -> str:
    """Return the entrypoint: it copies the job's files to its folder, where retries find what was
    done, and starts the driver.
    """
    run = f"PYTHONPATH={containers.PAYLOAD}/{zipapps.BATCH} python3 -m vlaunch_batch {job_request.work}"
    return f"mkdir -p {job_request.work} && cp -RL {_FILES}/* {job_request.work}/ && exec env {run}"


def _files(group: Group, job_request: batch_plan.Request) -> tuple[Object, Object]:
    """Return the ConfigMap with the job's files, and its volume.

    Raises RequestError: they are larger than it takes.
    """
    spec = json.dumps({**job_request.spec, "retry_errors": False, "restart": False})
    files = {"job.json": spec.encode()}
    files |= {file.to: file.path.read_bytes() for file in job_request.files}
    size = sum(map(len, files.values()))
    if size > _MOST:
        raise RequestError(
            f"the files of `{job_request.job.name}` have {size:,} bytes, more than a ConfigMap takes"
            f" ({_MOST:,})",
            hint="put the input where the pods see it: `nodes:/path`, or an object store (s3://…)",
        )
    keys = {path: f"file-{number}" for number, path in enumerate(files)}
    texts, binaries = dict[str, str](), dict[str, str]()
    for path, data in files.items():
        try:
            texts[keys[path]] = data.decode()
        except UnicodeDecodeError:
            binaries[keys[path]] = base64.b64encode(data).decode()
    metadata = pods.metadata(group, "-job")
    config: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": texts}
    items = [{"key": key, "path": path} for path, key in keys.items()]
    volume = {"name": "job", "configMap": {"name": metadata["name"], "items": items}}
    return {**config, **({"binaryData": binaries} if binaries else {})}, volume


def _header(group: Group, job_request: batch_plan.Request) -> list[str]:
    job, target = job_request.job, group.target
    labels = ",".join(f"{key}={value}" for key, value in kuberay.selector(group).items())
    pod = f'"$({target.kubectl} get pods -l {labels} -o name)"'
    shared = f"{job_request.work} on a volume that all nodes share, or a retry starts from zero"
    return [
        f"The batch job {job.name} on {kubernetes.nodes(group)} of the cluster"
        f" `{group.original.cluster}`, answers to {job.to.shown}, as a {kuberay.KIND}. Made by"
        " `vlaunch batch --export kuberay`.",
        "",
        *kubernetes.needs(group, shared),
        "",
        *kubernetes.apply(group),
        "Show its progress, and wait until each row has its answer:",
        f"  {target.kubectl} exec {pod} -- cat {job_request.work}/progress.json",
        f"  {target.kubectl} wait --for=jsonpath='{{.status.jobStatus}}'=SUCCEEDED --timeout=24h"
        f" rayjob/{target.name}",
        *kubernetes.logs(group),
        "",
        *kubernetes.listed("Not carried over:", groups.left_out(group)),
        "- `vlaunch jobs`, `stop` and gathering: the job is Kubernetes' own",
    ]
