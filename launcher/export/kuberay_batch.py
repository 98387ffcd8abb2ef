"""A batch job as a RayJob: its driver, its local files, and a RayCluster that ends with it."""

import base64
import json
from dataclasses import replace

from launcher.agent.desired import Policy
from launcher.batch import archive, batch_plan
from launcher.core.domain import Inventory, Node
from launcher.core.errors import RequestError
from launcher.export import group as groups
from launcher.export import kuberay, kubernetes, pods
from launcher.export.group import Object, PodGroup
from launcher.export.kubernetes import Manifests
from launcher.export.target import ExportTarget
from launcher.serving.serve_request import ServeRequest
from launcher.tools import containers
from launcher.tools.shipped import zipapps
from launcher.tools.site.placement import Placement

_FILES = "/opt/vlaunch-job"  # the job's files in the head's pod
_RETRIES = 2  # each continues where the one before has ended
_MOST = 1 << 20  # bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap)


def build_job_group(
    inventory: Inventory, batch: batch_plan.BatchRequest, target: ExportTarget
) -> PodGroup:
    """Return the pods of a job: as many nodes as it can use.

    Raises RequestError for features that pods do not support.
    """
    _refuse(batch)
    nodes = _usable_nodes(inventory, batch)
    request = ServeRequest(
        name=batch.job.name,
        model=batch.job.model,
        placement=Placement(
            tp=1, pp=1, why="", nodes=tuple((node.name, node.gpus) for node in nodes)
        ),
        backend="ray",
        host="",
        port=inventory.ports.api,
    )
    engine = batch.job.engine
    networked = batch.job.mode == "engine" and engine.tp * engine.pp > min(n.gpus for n in nodes)
    # A job has no endpoint.
    local = replace(inventory, serve=replace(inventory.serve, bind="::"))
    built = groups.build_group(local, request, Policy(), replace(target, gate=networked))
    return replace(built, batch=True)


def job_manifests(group: PodGroup, batch: batch_plan.BatchRequest) -> Manifests:
    """Return the export of a job; raise RequestError if its files are too large."""
    job = kuberay.job(group, _entrypoint(batch), {}, retries=_RETRIES)
    files, volume = _file_objects(group, batch)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["volumes"].append(volume)
    mount = {"name": "job", "mountPath": _FILES, "readOnly": True}
    head["containers"][0]["volumeMounts"].append(mount)
    program = zipapps.pack(archive.files(), compress=True)
    policies = kubernetes.policies(group, [kuberay.dashboard_policy(group)])
    return Manifests(
        header=tuple(_header(group, batch)),
        objects=(job, files, *policies),
        programs={**kubernetes.network_program(group), archive.NAME: program},
        group=group,
    )


def _refuse(batch: batch_plan.BatchRequest) -> None:
    job, problems, hints = batch.job, [], []
    if job.mode == "data-parallel":
        problems.append("data-parallel ranks are placed by address, which pods do not have yet")
        hints.append("use replicas: omit `data_parallel`")
    if job.to.where == "control":
        problems.append(f"output in {job.to.shown}: pods cannot reach this machine")
        hints.append(
            "use a folder that the pods mount (`nodes:/path`), or an object store (s3://…)"
        )
    if problems:
        raise RequestError(
            f"`{job.name}` cannot be exported for Kubernetes",
            evidence=problems,
            hint="\n".join(hints),
        )


def _usable_nodes(inventory: Inventory, batch: batch_plan.BatchRequest) -> list[Node]:
    """Return the nodes that a job can use: all, unless it limits its GPUs."""
    most = batch.job.gpus[1] or float("inf")
    usable: list[Node] = []
    for node in (inventory.head, *inventory.workers):
        if sum(node.gpus for node in usable) < most:
            usable.append(node)
    return usable


def _entrypoint(batch: batch_plan.BatchRequest) -> str:
    """Return the entrypoint: it copies the job's files to its folder, where retries find earlier
    results, and starts the driver.
    """
    run = f"PYTHONPATH={containers.PAYLOAD}/{archive.NAME} python3 -m vlaunch_batch {batch.work}"
    return f"mkdir -p {batch.work} && cp -RL {_FILES}/* {batch.work}/ && exec env {run}"


def _file_objects(group: PodGroup, batch: batch_plan.BatchRequest) -> tuple[Object, Object]:
    """Return the ConfigMap with the job's files, and its volume.

    Raises RequestError if they are too large.
    """
    spec = json.dumps({**batch.spec, "retry_errors": False, "restart": False})
    files = {"job.json": spec.encode()}
    files |= {file.to: file.path.read_bytes() for file in batch.files}
    size = sum(map(len, files.values()))
    if size > _MOST:
        raise RequestError(
            f"the files of `{batch.job.name}` have {size:,} bytes, more than a ConfigMap allows"
            f" ({_MOST:,})",
            hint="store the input where pods can read it: `nodes:/path`, or an object store (s3://…)",
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


def _header(group: PodGroup, batch: batch_plan.BatchRequest) -> list[str]:
    job, target = batch.job, group.target
    labels = ",".join(f"{key}={value}" for key, value in kuberay.selector(group).items())
    pod = f'"$({target.kubectl} get pods -l {labels} -o name)"'
    shared = f"{batch.work} on a volume shared by all nodes; otherwise a retry starts from zero"
    return [
        f"The batch job {job.name} on {kubernetes.format_node_count(group)} of the cluster"
        f" `{group.original.cluster}`, output in {job.to.shown}, as a {kuberay.KIND}. Generated by"
        " `vlaunch export batch`.",
        "",
        *kubernetes.list_requirements(group, shared),
        "",
        *kubernetes.apply_lines(group),
        "Show the progress; wait until all rows are answered:",
        f"  {target.kubectl} exec {pod} -- cat {batch.work}/progress.json",
        f"  {target.kubectl} wait --for=jsonpath='{{.status.jobStatus}}'=SUCCEEDED --timeout=24h"
        f" rayjob/{target.name}",
        *kubernetes.log_lines(group),
        "",
        *kubernetes.format_list("Not exported:", groups.list_omissions(group)),
        "- `vlaunch jobs`, `vlaunch stop` and copies of the answers: Kubernetes runs the job",
    ]
