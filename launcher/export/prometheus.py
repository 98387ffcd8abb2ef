"""Files for Prometheus and Grafana, from an inventory: the scrape configuration, alerts with their
tests, and dashboards.

Only the scrape configuration depends on the inventory. Alerts and dashboards are the files in
`monitoring/`, the same for every cluster; they select it by the label `cluster`.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.core.domain import Inventory
from launcher.export import yaml_text

_DATA = Path(__file__).parent / "monitoring"
SCRAPE = "prometheus.yml"


def build_files(
    inventory: Inventory,
    apis: Sequence[tuple[str, int]] = (),
    *,
    node_exporter: int | None = None,
    dcgm_exporter: int | None = None,
) -> dict[str, str]:
    """Return the files by path.

    Args:
        inventory: of the cluster.
        apis: nodes and ports of vLLM; by default the head, at the inventory's port.
        node_exporter: port of Prometheus' node_exporter, if nodes have one.
        dcgm_exporter: port of NVIDIA's dcgm-exporter, likewise.
    """
    return {
        SCRAPE: _scrape_config(inventory, apis, {"node": node_exporter, "dcgm": dcgm_exporter}),
        **{
            str(path.relative_to(_DATA)): path.read_text(encoding="utf-8")
            for path in sorted(_DATA.rglob("*.*"))
        },
    }


def _scrape_config(
    inventory: Inventory, apis: Sequence[tuple[str, int]], exporters: Mapping[str, int | None]
) -> str:
    ports, head = inventory.ports, inventory.head

    def target(host: str, port: int, node: str = "") -> dict[str, object]:
        labels = {"cluster": inventory.cluster, **({"node": node} if node else {})}
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return {"targets": [address], "labels": labels}

    def everywhere(port: int) -> list[dict[str, object]]:
        return [target(node.ip, port, node.name) for node in inventory.nodes]

    front, endpoints = inventory.front, apis or [(head.name, ports.api)]
    jobs = {
        "vllm": [target(_listen_address(inventory, node), port, node) for node, port in endpoints],
        "vlaunch": [target(head.ip, ports.metrics)],  # its samples name their nodes
    }
    listed = f"http://{inventory.front_nodes[0].ip}:{front.metrics}/servers" if front else ""
    discovered = {} if apis or not front else {"vllm": [{"url": listed}]}
    if not inventory.ray.off:
        jobs["ray"] = everywhere(ports.metrics_export)
    if front:
        jobs["front"] = [target(n.ip, front.metrics, n.name) for n in inventory.front_nodes]
    jobs |= {name: everywhere(port) for name, port in exporters.items() if port}
    document = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": name, "http_sd_configs": discovered[name]}
            if name in discovered
            else {"job_name": name, "static_configs": targets}
            for name, targets in jobs.items()
        ],
    }
    comments = _JOB_COMMENTS | ({"vllm": _THROUGH_FRONT} if discovered else {})
    why = {f"job_name: {name}": text for name, text in comments.items()}
    return yaml_text.comment(_header_lines(inventory)) + yaml_text.dump([document], why)


_THROUGH_FRONT = "All servers, as the front lists and reaches them, also on loopback."
_JOB_COMMENTS = {
    "vllm": "Rank 0 of each endpoint. Prometheus needs no key: vLLM 0.32 requires it only for its"
    " public APIs, not for /metrics.",
    "vlaunch": "The head's agent: servers, ranks and nodes. Its samples name their nodes.",
    "ray": "Ray, on every node.",
    "front": "HAProxy, on the nodes of the front.",
    "node": "node_exporter, on every node: start it yourself.",
    "dcgm": "dcgm-exporter, on every node: start it yourself.",
}


def _header_lines(inventory: Inventory) -> Iterator[str]:
    ports = inventory.ports
    scraped = [] if inventory.front else [ports.api]
    scraped += [ports.metrics, *([] if inventory.ray.off else [ports.metrics_export])]
    scraped += [inventory.front.metrics] if inventory.front else []
    numbers = ", ".join(map(str, scraped))
    yield f"Prometheus for cluster {inventory.cluster}."
    yield "Check it: promtool check config --syntax-only prometheus.yml"
    yield "Start it: prometheus --config.file=prometheus.yml"
    yield f"It connects to TCP {numbers} of the nodes: run it on one of them, or open these ports."
    yield "Grafana imports dashboards/*.json; alerts need your own Alertmanager."
    bind = inventory.serve.bind
    if bind and ipaddress.ip_address(bind).is_loopback and not inventory.front:
        yield "The endpoint listens on loopback: only a Prometheus on its node can scrape vLLM."


def _listen_address(inventory: Inventory, node: str) -> str:
    """Return vLLM's address on a node, from its bind address."""
    bind = ipaddress.ip_address(inventory.api_bind([inventory.node(node)]))
    return inventory.node(node).ip if bind.is_unspecified else str(bind)
