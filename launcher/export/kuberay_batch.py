"""A batch job as a RayJob: its driver, its helper programs, and the files of this machine that it
reads, in a cluster of Ray's that ends with it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.errors import RequestError
from launcher.export import kuberay, kubernetes, programs
from launcher.export import kubernetes_head as head
from launcher.export import kubernetes_shape as shape
from launcher.export.kubernetes import Manifests
from launcher.export.kubernetes_shape import Group, Object, Target
from launcher.model import Argv, Inventory, Node
from launcher.payload.agent.desired import Policy
from launcher.placement import Placement
from launcher.plan import batch
from launcher.plan.request import Request

_JOB = "/opt/vlaunch-job"  # where the head has the job's files
_RETRIES = 2  # each goes on where the one before has ended


def group(inventory: Inventory, asked: batch.Request, target: Target) -> Group:
    """Return the pods of a job: as many nodes as it can use.

    Raises RequestError for what pods cannot do.
    """
    _refuse(asked)
    nodes = _nodes(inventory, asked)
    request = Request(
        name=asked.job.name,
        model=asked.job.model,
        placement=Placement(
            tp=1, pp=1, why="", nodes=tuple((node.name, node.gpus) for node in nodes)
        ),
        backend="ray",
        host="",
        port=inventory.ports.api,
    )
    engine = asked.job.engine
    spans = asked.job.mode == "engine" and engine.tp * engine.pp > min(n.gpus for n in nodes)
    # A job has no endpoint, of which nothing need be said.
    alone = replace(inventory, serve=replace(inventory.serve, bind="::"))
    made = shape.group(alone, request, Policy(), replace(target, gate=spans))
    return replace(made, programs=programs.batch())


def manifests(group: Group, asked: batch.Request) -> Manifests:
    """Return the export of a job."""
    made = kuberay.job(group, _argv(asked), {}, retries=_RETRIES)
    files = _files(group, asked)
    _mount(made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"], files)
    found = [kuberay.found(group)] if group.gated else []
    around = [kubernetes.programs(group), files["map"]]
    if not group.target.host_network:
        around.append(kubernetes.policy(group, [kuberay.by_operator(group)]))
    objects = kubernetes.made(group, (made, *found, *around))
    return Manifests(
        header=tuple(_header(group, asked, objects)),
        objects=objects,
        why={**kubernetes.why(group), **kuberay.why(group)},
    )


def _refuse(asked: batch.Request) -> None:
    job, wrong, hints = asked.job, [], []
    if job.mode == "data-parallel":
        wrong.append("data-parallel ranks are placed by addresses, which pods do not have yet")
        hints.append("use replicas: leave out `data_parallel`")
    if job.to.where == "control":
        wrong.append(f"answers to {job.to.shown}: nobody gathers them from pods")
        hints.append(
            "name a folder that the pods mount (`nodes:/path`), or an object store (s3://…)"
        )
    if wrong:
        raise RequestError(
            f"`{job.name}` cannot be written for Kubernetes", evidence=wrong, hint="\n".join(hints)
        )


def _nodes(inventory: Inventory, asked: batch.Request) -> list[Node]:
    """Return the nodes that a job can use: all, where it says nothing of GPUs."""
    most = asked.job.gpus[1] or float("inf")
    found: list[Node] = []
    for node in (inventory.head, *inventory.workers):
        if sum(each.gpus for each in found) < most:
            found.append(node)
    return found


def _argv(asked: batch.Request) -> Argv:
    run = (*batch.PACKAGE, asked.work)
    # The job's folder is where it always is, so that a retry finds what was done.
    script = f"mkdir -p {asked.work} && cp -RL {_JOB}/* {asked.work}/ && exec {' '.join(run)}"
    return ("sh", "-c", script)


def _files(group: Group, asked: batch.Request) -> Mapping[str, Object]:
    """Return the ConfigMap with the job's files, and how a pod mounts it.

    Raises RequestError: they are more than it takes.
    """
    spec = json.dumps({**asked.spec, "retry_errors": False, "restart": False}, indent=1)
    found = {"job.json": spec.encode()}
    found |= {each.to: each.path.read_bytes() for each in asked.files}
    size = sum(map(len, found.values()))
    if size > kubernetes.MOST:
        raise RequestError(
            f"the files of `{asked.job.name}` have {size:,} bytes, more than a ConfigMap takes"
            f" ({kubernetes.MOST:,})",
            hint="put the input where the pods see it: `nodes:/path`, or an object store (s3://…)",
        )
    name = f"{group.target.name}-job"
    keys = {path: f"file-{at}" for at, path in enumerate(found)}
    texts, others = dict[str, str](), dict[str, str]()
    for path, data in found.items():
        try:
            texts[keys[path]] = data.decode()
        except UnicodeDecodeError:
            others[keys[path]] = base64.b64encode(data).decode()
    items = [{"key": key, "path": path} for path, key in keys.items()]
    return {
        "map": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": kubernetes.metadata(group, "-job"),
            "data": texts,
            **({"binaryData": others} if others else {}),
        },
        "volume": {"name": "job", "configMap": {"name": name, "items": items}},
        "mount": {"name": "job", "mountPath": _JOB, "readOnly": True},
    }


def _mount(spec: Object, files: Mapping[str, Object]) -> None:
    """Mount the job's files in the head's pod."""
    spec["volumes"].append(files["volume"])
    spec["containers"][0]["volumeMounts"].append(files["mount"])


def _header(group: Group, asked: batch.Request, objects: Sequence[Object]) -> list[str]:
    job, target = asked.job, group.target
    chosen = ",".join(f"{key}={each}" for key, each in kuberay.selector(group).items())
    pod = f'"$({target.kubectl} get pods -l {chosen} -o name)"'
    needs = (
        *kuberay.needs(),
        *head.needs(group, objects),
        f"{asked.work} at one place, whichever node the head runs on (a claim that is"
        " ReadWriteMany, or a mount that all share), for what is done is written down there; else a"
        " retry begins anew",
    )
    return [
        f"The batch job {job.name} on {head.nodes(group)} of the cluster"
        f" `{group.original.cluster}`, answers to {job.to.shown}, as a {kuberay.KIND}.",
        "Made by `vlaunch batch --export kuberay`; the same job and inventory give the same text.",
        "",
        *kubernetes.listed("The cluster must have:", needs),
        *head.secret(group),
        "",
        *head.apply(group, kuberay.applied(group)),
        "See how far it is, and wait until each row has its answer:",
        f"  {target.kubectl} exec {pod} -- cat {asked.work}/progress.json",
        f"  {target.kubectl} wait --for=jsonpath='{{.status.jobStatus}}'=SUCCEEDED --timeout=24h"
        f" rayjob/{target.name}",
        *head.why_not(group),
        "",
        *kubernetes.listed("Not carried over:", group.left_out),
        "- `vlaunch jobs`, `stop` and gathering: the job is Kubernetes' own",
        "",
    ]
