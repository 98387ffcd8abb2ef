"""Manifests for Kubernetes of a server or a batch job: its workload (`lws.py`, `kuberay.py`), the
objects around it, and a header with instructions.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from launcher.agent.health.task import CHAT
from launcher.core.sizes import format_count
from launcher.export import group as groups
from launcher.export import kuberay, lws, pods, yaml_text
from launcher.export.group import Object, PodGroup
from launcher.network import archive
from launcher.serving import endpoints
from launcher.tools import vllm
from launcher.tools.shipped import node_files, zipapps

KINDS: Mapping[str, ModuleType] = {"lws": lws, "kuberay": kuberay}
# Comments above lines whose reason is not obvious.
_REASONS: Mapping[str, str] = {
    "enableServiceLinks: false": (
        "a Service called `vllm` would set VLLM_PORT, which makes vLLM exit"
    ),
    "kind: NetworkPolicy": "all traffic between the pods: ranks use ports that the kernel chooses",
    **lws.WHY,
    **kuberay.WHY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """An export: comments before it, its objects, and the pods' programs by name."""

    header: tuple[str, ...]
    objects: tuple[Object, ...]
    programs: Mapping[str, bytes]
    group: PodGroup

    @property
    def text(self) -> str:
        """One file, for `kubectl apply -f`."""
        data = {name: base64.b64encode(program).decode() for name, program in self.programs.items()}
        metadata = pods.metadata(self.group, "-programs")
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}
        return self._yaml(*self.objects, *([config] if data else []))

    def folder(self) -> Mapping[str, bytes]:
        """Return files by name, for `kubectl apply -k`: programs stay files."""
        name, space = f"{self.group.target.name}-programs", self.group.target.namespace
        options = {"disableNameSuffixHash": True}  # kustomize does not know where the name is used
        generator = {"name": name, "files": sorted(self.programs), "options": options}
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            **({"namespace": space} if space else {}),
            "resources": ["server.yaml"],
            **({"configMapGenerator": [generator]} if self.programs else {}),
        }
        text = self._yaml(*self.objects).replace("-f FILE", "-k DIR")
        return {
            "server.yaml": text.encode(),
            "kustomization.yaml": yaml_text.dump([kustomization], {}).encode(),
            **self.programs,
        }

    def _yaml(self, *objects: Object) -> str:
        return yaml_text.comment(self.header) + yaml_text.dump(objects, _REASONS)


def server_manifests(group: PodGroup) -> Manifests:
    """Return the export of a server; raise RequestError if one template cannot express it."""
    kind = KINDS[group.target.kind]
    objects = [kind.workload(group), _service(group)]
    api = {"from": [{"namespaceSelector": {}}], "ports": [{"port": group.request.port}]}
    ray = [kuberay.dashboard_policy(group)] if kind is kuberay else []
    objects += policies(group, [api, *ray])
    return Manifests(
        header=tuple(_header(group)),
        objects=tuple(objects),
        programs=network_program(group),
        group=group,
    )


def network_program(group: PodGroup) -> Mapping[str, bytes]:
    """Return the program of the network check, if the pods run it."""
    if not group.gated:
        return {}
    return {archive.NAME: zipapps.pack(archive.files(), compress=True)}


def policies(group: PodGroup, opened: Sequence[Object]) -> list[Object]:
    """Return the NetworkPolicy; `opened` are rules for other clients. The host network has none."""
    if group.target.host_network:
        return []
    own = {"podSelector": {"matchLabels": pods.labels(group)}}
    rules = {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}, *opened]}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": pods.metadata(group),
            "spec": {**own, **rules},
        }
    ]


def _service(group: PodGroup) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(group, "-api"),
        "spec": {
            "selector": KINDS[group.target.kind].selector(group),
            "ports": [{"name": "http", "port": group.request.port, "targetPort": "http"}],
        },
    }


def _header(group: PodGroup) -> list[str]:
    request, target, kind = group.request, group.target, KINDS[group.target.kind]
    start = group.desired.policy.start_timeout
    seconds = start + (pods.gate_deadline(group) if group.gated else start)
    return [
        f"{request.model} on {format_node_count(group)} of the cluster `{group.original.cluster}`:"
        f" {request.placement.label}, as a {kind.KIND}. Generated by `vlaunch export kubernetes`.",
        "",
        *list_requirements(group),
        "",
        *apply_lines(group),
        f"Wait until {'vLLM answers' if kind is lws else 'Ray runs vLLM'}, then chat:",
        f"  {target.kubectl} wait --for={kind.CONDITION} --timeout={seconds:.0f}s"
        f" {kind.KIND.lower()}/{target.name}",
        f"  {target.kubectl} port-forward service/{target.name}-api"
        f" {request.port}:{request.port} &",
        *_chat_lines(group),
        *log_lines(group),
        "",
        *format_list("Not exported:", (*groups.list_omissions(group), kind.OMISSIONS)),
    ]


def format_node_count(group: PodGroup) -> str:
    """Format the number of nodes."""
    return format_count(group.size, "node")


def format_list(title: str, lines: Sequence[str]) -> list[str]:
    """Format lines as a list with a title."""
    return [title, *(f"- {line}" for line in lines)]


def list_requirements(group: PodGroup, *extra: str) -> list[str]:
    """Return the requirements on the cluster."""
    target, inventory = group.target, group.inventory
    counts = " or ".join(map(str, sorted(set(group.shares.values()))))
    gpus = f" with {counts} free {pods.gpu_resource(group)}" if pods.gpu_resource(group) else ""
    name, count = target.rdma_resource or ("", 0)
    rdma = f" and {count} {name}" if name else ""
    ray = ", with Ray installed (`--image IMAGE`)" if target.kind == "kuberay" else ""
    lines = [KINDS[target.kind].NEEDS, f"{format_node_count(group)}{gpus}{rdma}"]
    if target.host_network:
        names = ", ".join(node.name for node in group.nodes)
        lines.append(f"nodes named {names} (`kubernetes.io/hostname`), for the host network")
    lines += [f"the image {inventory.image}{ray}", _model_line(group), *extra]
    secret = ["- the secret; to create it:", f"    {_secret_line(group)}"] if group.secrets else []
    return [*format_list("The cluster must have:", lines), *secret]


def _model_line(group: PodGroup) -> str:
    path, volume, model = (
        pods.model_mount_path(group),
        group.target.model_volume,
        group.request.model,
    )
    source = f"the claim {volume.claim}" if volume and volume.claim else "a directory on every node"
    contents = f"with {model}" if model.startswith("/") else f"the Hugging Face cache for {model}"
    access = "read-only" if pods.reads_only(group) else "missing files are downloaded to it"
    return f"{source}, mounted at {path}: {contents}; {access}"


def _secret_line(group: PodGroup) -> str:
    """Return the shell line that creates the secret; no value becomes an argument."""
    target = group.target
    steps = [
        "d=$(mktemp -d)",
        "trap 'rm -rf \"$d\"' EXIT",
        *(
            f'{node_files.secret_command(group.original, name)} >"$d/{name}"'
            for name in group.secrets
        ),
        '! find "$d" -type f -empty | grep .',
        f'{target.kubectl} create secret generic {target.name}-secrets --from-file="$d"',
    ]
    return f"(umask 077; {' && '.join(steps)})"


def apply_lines(group: PodGroup) -> list[str]:
    """Return the header lines that check and apply the manifests."""
    kubectl = group.target.kubectl
    return [
        "Check and apply:",
        f"  {kubectl} apply --dry-run=server -f FILE",
        f"  {kubectl} apply -f FILE",
    ]


def _chat_lines(group: PodGroup) -> list[str]:
    target, request = group.target, group.request
    with_key = "VLLM_API_KEY" in group.original.secrets
    names = vllm.option_values(request.args, "--served-model-name")
    model = names[-1] if names else request.model
    url, key = f"http://localhost:{request.port}/v1", "VLLM_API_KEY" if with_key else ""
    line = endpoints.curl_line(url, CHAT, model, key=key)
    line = line.replace("curl", "curl --retry 10 --retry-connrefused", 1)
    secret_query = (
        f"{target.kubectl} get secret {target.name}-secrets -o jsonpath='{{.data.VLLM_API_KEY}}'"
    )
    return [*([f'  VLLM_API_KEY="$({secret_query} | base64 -d)"'] if with_key else []), f"  {line}"]


def log_lines(group: PodGroup) -> list[str]:
    """Return the header lines for a failed start."""
    target = group.target
    label = f"{pods.INSTANCE}={target.name}"
    return [
        "If it does not start (only events name pods that Kubernetes rejects):",
        f"  {target.kubectl} logs -l {label} --prefix --tail=-1 | vlaunch doctor --log -",
        f"  {target.kubectl} get events --sort-by=.lastTimestamp | grep {target.name}",
    ]
