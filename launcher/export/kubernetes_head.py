"""What is said before manifests for whoever applies them: what the cluster must have, and the lines
that apply them, prove them and tell why not.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.export import pod_security, pod_volumes, pods, proof
from launcher.export.kubernetes_shape import Group, Object
from launcher.plan import files

FILE, FOLDER = "--server-side -f FILE", "--server-side -k DIR"  # what is applied


def for_folder(header: Sequence[str]) -> list[str]:
    """Return a header for manifests that lie in a folder, beside a kustomization."""
    return [line.replace(FILE, FOLDER) for line in header]


def nodes(group: Group) -> str:
    """Return how many nodes are needed."""
    return "1 node" if group.size == 1 else f"{group.size} nodes"


def needs(group: Group, objects: Sequence[Object]) -> list[str]:
    """Name what the cluster must have, whatever runs in the pods."""
    target = group.target
    found = [*_hardware(group)]
    if target.namespace:
        found.append(f"the namespace {target.namespace}")
    if target.host_network:
        names = ", ".join(node.name for node in group.nodes)
        found.append(
            f"nodes that are called {names} (`kubernetes.io/hostname`), for their network"
            " is used; NetworkPolicy does not hold there: `vlaunch export firewall`"
        )
    found.append(f"the image {group.inventory.image}, which the nodes can pull{_with_ray(group)}")
    found.append(_model(group))
    found += pod_security.needs(objects, target.namespace)
    if target.memory is None:
        found.append(
            "memory to spare: none is requested, so these pods are evicted first; `--memory SIZE`"
            " requests it, weights while they load and /dev/shm included"
        )
    return found


def _hardware(group: Group) -> list[str]:
    rdma, gpus = group.target.rdma, pods.gpu_resource(group)
    if not gpus and rdma is None:
        return [nodes(group)]
    each = " or ".join(map(str, sorted(set(group.shares.values()))))
    found = [f"{nodes(group)} with {each} free `{gpus}`" if gpus else nodes(group)]
    names = {"GPUS": gpus} if gpus else {}
    if rdma is not None:
        found.append(f"`{rdma[0]}` on each of them, {rdma[1]} a pod")
        names["RDMA"] = rdma[0]
    columns = ["NODE:.metadata.name"]
    for title, name in names.items():
        escaped = name.replace(".", r"\.")
        columns.append(f"{title}:.status.allocatable.{escaped}")
    return [*found, f"  kubectl get nodes -o custom-columns='{','.join(columns)}'"]


def _with_ray(group: Group) -> str:
    if group.request.backend != "ray":
        return ""
    return (
        ", with Ray in it: stock images of vLLM carry none; `vlaunch up` builds one that does"
        " (`vlaunch image list` names it), `--image IMAGE` takes it"
    )


def _model(group: Group) -> str:
    at, volume, model = pod_volumes.model_at(group), group.target.volume, group.request.model
    if model.startswith("/"):
        inside = f"with {model.removeprefix(at).lstrip('/')} in it"
    else:
        inside = f"a Hugging Face cache (`hub/models--{model.replace('/', '--')}` in it)"
    if volume is None or not volume.claim:
        folder = volume.path if volume is not None else at
        fetched = "" if model.startswith("/") else "; what is not there is fetched, by each pod"
        return f"{folder} on every node, {inside}{fetched}"
    below = f", below {volume.path}," if volume.path else ""
    return f"the claim {volume.claim}{below} mounted at {at}: {inside}; {_mode(group)}"


def _mode(group: Group) -> str:
    """Return how a claim must be mountable, by as many pods."""
    if group.size == 1:
        return "of any access mode"
    if pod_volumes.reads_only(group):
        return "ReadOnlyMany or ReadWriteMany"
    return "ReadWriteMany, for it is written"


def secret(group: Group) -> list[str]:
    """Return the line that makes the secret, where there is one; no value becomes an argument."""
    names, target = group.secrets, group.target
    if not names:
        return []
    written = [f'{files.shown(group.original, name)} >"$d/{name}"' for name in names]
    words = [
        "d=$(mktemp -d)",
        "trap 'rm -rf \"$d\"' EXIT",
        *written,
        '! find "$d" -type f -empty | grep .',
        f'{target.kubectl} create secret generic {target.name}-secrets --from-file="$d"',
    ]
    return ["- the secret, once:", f"    (umask 077; {' && '.join(words)})"]


def apply(group: Group, note: str = "") -> list[str]:
    """Return the lines that apply the manifests; `note` is of the kind."""
    target = group.target
    found = [
        "Apply it (--server-side, for an annotation of other applies would be too large):",
        f"  {target.kubectl} apply {FILE}",
    ]
    if target.disruption_budget:
        found += [
            "Its PodDisruptionBudget blocks drains of nodes; before one:",
            f"  {target.kubectl} delete poddisruptionbudget {target.name}",
        ]
    return [*found, *([note] if note else [])]


def asked(group: Group) -> list[str]:
    """Return the lines that chat with the server."""
    target, port = group.target, group.request.port
    key = []
    if "VLLM_API_KEY" in group.original.secrets:
        path = "jsonpath='{.data.VLLM_API_KEY}'"
        read = f"{target.kubectl} get secret {target.name}-secrets -o {path} | base64 -d"
        key = [f'  VLLM_API_KEY="$({read})"']
    chat = proof.chat(f"http://localhost:{port}/v1", group.request, group.original)
    return [
        f"  {target.kubectl} port-forward service/{target.name}-api {port}:{port} &",
        *key,
        f"  {chat.replace('curl', 'curl --retry 10 --retry-connrefused', 1)}",
    ]


def why_not(group: Group) -> list[str]:
    """Return the lines that tell why it does not come up."""
    target = group.target
    own = f"{pods.INSTANCE}={target.name}"
    logs = f"{target.kubectl} logs -l {own} --all-containers --prefix --tail=-1"
    return [
        "If it does not come up (pods that are never made are named by events alone):",
        f"  {logs} | vlaunch doctor --from -",
        f"  {target.kubectl} get events --sort-by=.lastTimestamp | grep {target.name}",
    ]
