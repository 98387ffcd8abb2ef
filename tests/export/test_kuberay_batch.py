"""`vlaunch export batch`: a job of Ray Data's with its files, in a cluster of its own."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run_command
from tests import golden
from tests.export.exports import RDMA, objects
from tests.export.kubernetes_export import PAIR, shown

JOB = """\
model: org/m
read: prompts.jsonl
write: {path: "nodes:/data/huggingface/answers", format: jsonl}
engine: {tp: 8}
"""


class Exported:
    """Output of one run."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path, *args: str) -> None:
        job = str(folder / "job.yaml")
        self.code = run_command(
            ["export", "batch", job, "-i", str(folder / "inventory.yaml"), *args]
        )
        caught = capsys.readouterr()
        self.text, self.error = caught.out, caught.err
        self.objects = objects(self.text)

    def named(self, name: str) -> dict[str, Any]:
        """Return the object with a name."""
        (results,) = [item for item in self.objects if item["metadata"]["name"] == name]
        return results

    @property
    def cluster(self) -> dict[str, Any]:
        """Return the job's cluster."""
        result: dict[str, Any] = self.objects[0]["spec"]["rayClusterSpec"]
        return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two nodes, and a job of two rows."""
    (tmp_path / "inventory.yaml").write_text(PAIR)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "eins"}\n{"prompt": "zwei"}\n')
    return tmp_path


def test_golden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that is printed but for the programs; twice the same."""
    export = Exported(capsys, folder, *RDMA)

    assert export.text == Exported(capsys, folder, *RDMA).text
    golden.check(Path(__file__).parent / "golden" / "kuberay-batch.yaml", shown(export.text))


def test_the_driver_has_the_same_files_as_on_a_node(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry point is run: it writes the job and its files, and starts the driver with the
    folder.
    """
    export = Exported(capsys, folder, *RDMA)
    mounted, work, archive = (tmp_path / name for name in ("mounted", "hf", "batch.pyz"))
    files = export.named("job-job")
    volumes = export.cluster["headGroupSpec"]["template"]["spec"]["volumes"]
    items = next(volume["configMap"]["items"] for volume in volumes if volume["name"] == "job")
    for item in items:
        path = mounted / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files["data"][item["key"]])
    data = export.named("job-programs")["binaryData"]
    archive.write_bytes(base64.b64decode(data["batch.pyz"]))
    script = (
        export.objects[0]["spec"]["entrypoint"]
        .replace("/opt/vlaunch-job", str(mounted))
        .replace("/opt/vlaunch/batch.pyz", str(archive))
        .replace("/data/huggingface", str(work))
    )
    show = "import sys, vlaunch_batch.batch.job as job; print(job.__file__, *sys.argv)"
    done = subprocess.run(
        ["sh", "-c", script.replace("-m vlaunch_batch", f"-c '{show}'")],
        capture_output=True,
        text=True,
        check=False,
    )

    folder_of_job = work / "vlaunch/pair/batch/job"
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        f"{archive}/vlaunch_batch/batch/job.py",
        "-c",
        str(folder_of_job),
    ]
    assert "python3 -m vlaunch_batch " in script
    assert json.loads((folder_of_job / "job.json").read_text())["model"] == "org/m"
    assert (folder_of_job / "input/0000-prompts.jsonl").read_text().count("prompt") == 2


def test_the_number_of_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One replica takes one node; two take both; one that spans them proves the network first."""
    export = Exported(capsys, folder, *RDMA)
    two = Exported(capsys, folder, *RDMA, "--replicas", "2")
    wide = Exported(capsys, folder, *RDMA, "--pp", "2")

    assert "workerGroupSpecs" not in export.cluster
    assert len(two.cluster["workerGroupSpecs"]) == 1
    assert "network.pyz" not in two.text
    assert "network.pyz" in str(wide.cluster)
    assert wide.objects[0]["spec"]["entrypoint"].startswith("until test -e ")
    assert export.objects[0]["spec"]["backoffLimit"] == 2


def test_binary_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They arrive unchanged."""
    (folder / "rows.parquet").write_bytes(b"PAR1\xff\xfe")
    (folder / "job.yaml").write_text(JOB.replace("prompts.jsonl", "rows.parquet"))
    export = Exported(capsys, folder, *RDMA).named("job-job")

    assert base64.b64decode(export["binaryData"]["file-1"]) == b"PAR1\xff\xfe"


def test_only_the_dashboard_is_open(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the operator; a job has no API."""
    export = Exported(capsys, folder, *RDMA)
    (policy,) = [item for item in export.objects if item["kind"] == "NetworkPolicy"]

    assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == [8265]
    assert "job-api" not in export.text


@pytest.mark.parametrize(
    ("job", "text", "expected"),
    [
        (
            JOB.replace("nodes:/data/huggingface/answers", "out"),
            RDMA,
            "reach this machine",
        ),
        (JOB + "data_parallel: {size: 2}\n", RDMA, "data-parallel ranks are placed by address"),
        (JOB, ("--pp", "2"), "--rdma-resource NAME"),
        (JOB.replace("model:", "job: 9.lives\nmodel:"), RDMA, "`9.lives` is not a valid name"),
    ],
)
def test_unsupported_settings_are_rejected(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    job: str,
    text: tuple[str, ...],
    expected: str,
) -> None:
    """With the alternative, and without standard output."""
    (folder / "job.yaml").write_text(job)
    refused = Exported(capsys, folder, *text)

    assert (refused.code, refused.text) == (2, "")
    assert expected in refused.error


def test_more_than_fits_a_config_map(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pods read large inputs from a volume."""
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n' * (1 << 17))
    refused = Exported(capsys, folder, *RDMA)

    assert (refused.code, refused.text) == (2, "")
    assert "more than a ConfigMap allows" in refused.error
    assert "nodes:/path" in refused.error
