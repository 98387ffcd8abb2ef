"""`vlaunch export prometheus`: scrape targets, and alerts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import run_command
from launcher.export import prometheus
from launcher.inventory.load import loads
from tests import golden
from tests.prometheus_programs import program

GOLDEN = Path(__file__).parent / "golden"
NODES = """\
cluster: big.one-2
image: vllm/vllm-openai:v0.32.0
nodes:
  - {host: gpu01, ip: 10.0.0.11, gpus: 8}
  - {host: gpu02, ip: 10.0.0.12, gpus: 8}
"""
CASES: dict[str, tuple[str, Sequence[tuple[str, int]]]] = {
    "everywhere": (NODES, ()),
    "one-address": (NODES + "serve: {bind: 192.0.2.7}\nports: {api: 9000, metrics: 9400}\n", ()),
    "loopback": (NODES + "serve: {bind: '::1'}\n", ()),
    "without-ray": (NODES + "ray: none\n", [("gpu01", 8000), ("gpu02", 8001)]),
}


@pytest.fixture(scope="module")
def promtool() -> str:
    """Debian's promtool."""
    result = program("promtool")
    if result is None:
        pytest.skip("promtool is missing: `make machine` unpacks it")
    return result


@pytest.mark.parametrize("case", CASES)
def test_scrape_targets(case: str) -> None:
    """vLLM's endpoints, the agent on the head, Ray on every node; with the cluster's name."""
    text, apis = CASES[case]
    result = prometheus.build_files(loads(text, Path("inventory.yaml")), apis)

    golden.check(GOLDEN / f"prometheus-{case}.yml", result[prometheus.SCRAPE])
    assert yaml.safe_load(result[prometheus.SCRAPE])["rule_files"] == ["alerts.yml"]


def test_a_front_is_scraped_on_its_nodes() -> None:
    """At the port of its metrics."""
    inventory = loads(f"{NODES}front: {{node: gpu02, metrics: 9999}}\n", Path("inventory.yaml"))
    text = prometheus.build_files(inventory)["prometheus.yml"]
    jobs = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    targets = [config["targets"] for config in jobs["front"]["static_configs"]]

    assert targets == [["10.0.0.12:9999"]]
    assert jobs["vllm"]["http_sd_configs"] == [{"url": "http://10.0.0.12:9999/servers"}]
    assert "It connects to TCP 29580, 6384, 9999 of the nodes" in text


def test_other_exporters() -> None:
    """On every node, if requested."""
    inventory = loads(NODES, Path("inventory.yaml"))
    text = prometheus.build_files(inventory, node_exporter=9100, dcgm_exporter=9400)[
        prometheus.SCRAPE
    ]
    jobs = {config["job_name"]: config for config in yaml.safe_load(text)["scrape_configs"]}

    assert [*jobs] == ["vllm", "vlaunch", "ray", "node", "dcgm"]
    assert [config["targets"] for config in jobs["dcgm"]["static_configs"]] == [
        ["10.0.0.11:9400"],
        ["10.0.0.12:9400"],
    ]


def test_it_names_no_secret() -> None:
    """vLLM's metrics need no key."""
    inventory = loads(NODES + "secrets: {VLLM_API_KEY: {env: KEY}}\n", Path("inventory.yaml"))

    assert "KEY" not in "".join(prometheus.build_files(inventory).values())


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """All files, as written by the command."""
    (tmp_path / "inventory.yaml").write_text(NODES)
    folder = tmp_path / "monitoring"
    assert (
        run_command(
            ["export", "prometheus", "-i", str(tmp_path / "inventory.yaml"), "-o", str(folder)]
        )
        == 0
    )
    assert "promtool check config" in capsys.readouterr().err
    return folder


def test_a_folder_gets_all_files(written: Path) -> None:
    """Existing files are replaced."""
    names = sorted(str(path.relative_to(written)) for path in written.rglob("*.*"))

    assert names == [
        "alerts.yml",
        "alerts_test.yml",
        "dashboards/cache.json",
        "dashboards/front.json",
        "dashboards/overview.json",
        "dashboards/ranks.json",
        "prometheus.yml",
    ]
    (written / "alerts.yml").write_text("")
    run_command(
        ["export", "prometheus", "-i", str(written.parent / "inventory.yaml"), "-o", str(written)]
    )
    assert (written / "alerts.yml").read_text()


def test_without_a_folder_the_configuration_is_printed(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text, and no talk."""
    assert run_command(["export", "prometheus", "-i", str(written.parent / "inventory.yaml")]) == 0
    output = capsys.readouterr()

    assert (output.out, output.err) == ((written / "prometheus.yml").read_text(), "")


@pytest.mark.parametrize(
    ("api", "code", "expected"),
    [
        ("gpu02:8001", 0, "targets: ['10.0.0.12:8001']"),
        ("gpu02", 0, "targets: ['10.0.0.12:8000']"),
        ("gpu03:8000", 2, "no node `gpu03`"),
        ("gpu02:http", 2, "`http` is not a port"),
        ("gpu02:70000", 2, "`70000` is not a port"),
    ],
)
def test_endpoints_are_named(
    api: str, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By node, as in `status`; a mistake is reported."""
    (tmp_path / "inventory.yaml").write_text(NODES)
    assert (
        run_command(["export", "prometheus", "-i", str(tmp_path / "inventory.yaml"), "--api", api])
        == code
    )

    assert expected in "".join(capsys.readouterr())


def test_every_alert_has_a_test_and_an_explanation() -> None:
    """A firing one, one in a healthy cluster, and a section in the documentation."""
    files = prometheus.build_files(loads(NODES, Path("inventory.yaml")))
    groups = yaml.safe_load(files["alerts.yml"])["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    payload = [
        (item["alertname"], bool(item.get("exp_alerts")))
        for test in yaml.safe_load(files["alerts_test.yml"])["tests"]
        for item in test["alert_rule_test"]
    ]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()

    assert [alert for alert in alerts if (alert, True) not in payload] == []
    assert [alert for alert in alerts if (alert, False) not in payload] == []
    assert [alert for alert in alerts if f"| `{alert}` |" not in page] == []


@pytest.mark.processes
def test_promtool_accepts_all_files(written: Path, promtool: str) -> None:
    """Configuration and rules; every alert fires when it should."""
    for argv in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = subprocess.run(
            [promtool, *argv], cwd=written, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("vlaunch_rank_up == 0", "vlaunch_rank_up == 2"),
        (">= 3", ">= 2"),
        ("perc[5m]) > 0.95", "perc[5m]) > 0.5"),
        ("  and on (cluster, server) vlaunch_server_ready_timestamp_seconds > 0", "  "),
        ("and on (cluster, node, port)", "and on (cluster)"),
        ("min_over_time(vllm:num_requests_running[2m]) > 0", "vector(1)"),
    ],
)
def test_a_wrong_alert_is_detected(written: Path, promtool: str, right: str, wrong: str) -> None:
    """One that never fires, and one that fires too early."""
    text = (written / "alerts.yml").read_text()
    assert right in text
    (written / "alerts.yml").write_text(text.replace(right, wrong))
    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"],
        cwd=written,
        capture_output=True,
        check=False,
        timeout=600,
    )

    assert done.returncode == 1


def test_alerts_use_existing_metrics() -> None:
    """Recorded from vLLM and Ray, and defined by the agent."""
    text = prometheus.build_files(loads(NODES, Path("inventory.yaml")))["alerts.yml"]
    exprs = [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]

    assert [name for expr in exprs for name in metrics_of(expr) if name not in metric_names()] == []


def metrics_of(expr: str) -> list[str]:
    """Return the metrics in an expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|(?:by|on) \([^)]*\)", "", expr)
    return re.findall(r"\b(?:vllm:|vlaunch_|ray_|haproxy_|http_|process_)\w+|\bup\b", bare)


def metric_names() -> set[str]:
    """Return the names of all recorded metrics."""
    from launcher.agent.metrics import HELP

    fixtures = Path(__file__).parents[1] / "fixtures"
    recorded = [
        fixtures / "vllm" / "mp_pp2_buckets.metrics",
        fixtures / "ray" / "metrics_node.txt",
        fixtures / "haproxy" / "front.metrics",
    ]
    names = {
        match
        for path in recorded
        for match in re.findall(r"^([a-z0-9_:]+)[ {]", path.read_text(), re.MULTILINE)
    }
    return names | {f"vlaunch_{name}" for name in HELP} | {"up"}


def test_the_configuration_is_valid_yaml_for_every_name() -> None:
    """Labels are quoted."""
    inventory = loads(NODES.replace("big.one-2", "'123'"), Path("inventory.yaml"))
    (job, *_) = yaml.safe_load(prometheus.build_files(inventory)[prometheus.SCRAPE])[
        "scrape_configs"
    ]

    assert job["static_configs"][0]["labels"]["cluster"] == "123"
    assert json.dumps(job)
