"""The contract with other programs, on the source of a small program."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.core.errors import VlaunchError
from launcher.upstream.entries import Entry, Program, VersionRange
from scripts.contract import __main__ as command
from scripts.contract import download
from scripts.contract.judge import Finding, judge_entry, judge_program
from scripts.contract.source import Source

ENGINE = '''
"""Engine is dead: a docstring is no text of a log."""

logger.info("Initializing engine (v%s) with config: %s", version, config)
raise ValueError(f"World size ({size}) is larger than " f"the {kind} GPUs")
text = "Failed core " + "proc(s): {}".format(procs)


class Core:
    dead = False

    def step(self, mode: str) -> None:
        self.resources = Resources()
'''
ARGUMENTS = """
parser.add_argument("--data-rank", "-dr", type=int)
group.add_argument("--enable-x/--no-enable-x", action=Both)


class FrontendArgs:
    host: str | None = None
    ssl_keyfile: str = ""


class EngineArgs:
    model: str = ""


@router.get("/v1/jobs/{name}/stop")
def stop(): ...


Gauge(name="app:requests_running", labelnames=())
name = "app:info"
environment = {"APP_FOLDER": lambda: os.getenv("APP_FOLDER")}
"""
FILES = {
    "app/engine.py": ENGINE,
    "app/arguments.py": ARGUMENTS,
    "rust/src/lib.rs": 'info!("the server is ready on {address}"); gauge("app:requests_running");',
}


def entry(kind: str, text: str, file: str, **fields: str) -> Entry:
    """Return an entry that two files of vlaunch use."""
    return Entry(
        id="x",
        kind=kind,  # type: ignore[arg-type] - of a parameter
        text=text,
        file=file,
        used_by=("launcher/tools/vllm.py", "launcher/agent/health/api.py"),
        **fields,
    )


ENTRIES = [
    entry("log_line", "Initializing engine", "app/engine.py"),
    entry("exit_text", r"World size \(\d+\) is larger than the \w+ GPUs", "app/engine.py"),
    entry("exit_text", r"core proc\(s\): .*-9", "app/engine.py", source="core proc(s): {}"),
    entry("log_line", "the server is ready on", "rust/src/lib.rs"),
    entry("flag", "--data-rank", "app/arguments.py"),
    entry("flag", "-dr", "app/arguments.py"),
    entry("flag", "--no-enable-x", "app/arguments.py"),
    entry("flag", "--ssl-keyfile", "app/arguments.py"),
    entry("route", "/v1/jobs/{}/stop", "app/arguments.py"),
    entry("metric", "app:requests_running", "app/arguments.py"),
    entry("metric", "app:info", "app/arguments.py"),
    entry("env", "APP_FOLDER", "app/arguments.py"),
    entry("class", "Core.dead", "app/engine.py"),
    entry("class", "Core.resources", "app/engine.py"),
    entry("function", "Core.step", "app/engine.py"),
    entry("function", "Core.step.mode", "app/*.py"),
    entry("file", "app/engine.py", "app/engine.py"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write the source of the program."""
    for name, text in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "source"


def judge(root: Path, item: Entry, version: str = "1.0") -> Finding:
    """Return the outcome of an entry in the source."""
    return judge_entry("app", item, version, Source(root))


@pytest.mark.parametrize("item", ENTRIES, ids=lambda item: f"{item.kind} {item.text}")
def test_entry_is_in_the_source(root: Path, item: Entry) -> None:
    """Each kind of entry is read from the syntax tree, or from strings."""
    assert judge(root, item).outcome == "ok"


@pytest.mark.parametrize(
    "item",
    [
        entry("log_line", "Engine is dead", "app/engine.py"),
        entry("flag", "--model", "app/arguments.py"),
        entry("metric", "app:requests_waiting", "app/arguments.py"),
        entry("class", "dead", "app/engine.py"),
        entry("function", "step", "app/engine.py"),
        entry("file", "app/other.py", "app/other.py"),
    ],
    ids=lambda item: f"{item.kind} {item.text}",
)
def test_entry_is_not_in_the_source(root: Path, item: Entry) -> None:
    """Neither docstrings nor names of another class count, nor fields that become no option."""
    assert judge(root, item).outcome == "broken"


@pytest.mark.parametrize(
    ("file", "before", "after", "broken"),
    [
        ("app/engine.py", "Initializing engine", "Setting up the engine", ENTRIES[0]),
        ("app/arguments.py", "--data-rank", "--data-first-rank", ENTRIES[4]),
        ("app/arguments.py", "app:requests_running", "app:running_requests", ENTRIES[9]),
    ],
)
def test_a_change_is_found(root: Path, file: str, before: str, after: str, broken: Entry) -> None:
    """One line of a log, one flag and one metric: the finding names vlaunch's files. A copy in
    Rust does not hide it.
    """
    path = root / file
    path.write_text(path.read_text().replace(before, after))
    program = Program(
        name="app",
        title="App",
        package="app",
        versions=VersionRange(program="app", checked=("1.0",)),
        entries={str(number): item for number, item in enumerate(ENTRIES)},
    )

    findings = judge_program(program, "1.0", Source(root))
    (missing,) = [finding for finding in findings if finding.outcome == "broken"]

    assert missing.entry == broken
    assert missing.is_failure
    assert "launcher/tools/vllm.py, launcher/agent/health/api.py" in missing.describe()
    assert f"is not in {file}: nothing replaces it" in missing.describe()


def test_a_moved_text_is_no_failure_but_a_moved_class_is(root: Path) -> None:
    """Code imports a class from its file."""
    assert judge(root, entry("log_line", "Initializing engine", "app/core.py")).outcome == "moved"
    assert judge(root, entry("class", "Core", "app/core.py")).outcome == "broken"


@pytest.mark.parametrize(
    ("limits", "version", "outcome"),
    [
        ({"first": "1.2"}, "1.1.3", "back"),
        ({"first": "1.2"}, "1.2.0", "ok"),
        ({"last": "1.2"}, "1.2.9", "ok"),
        ({"last": "1.2"}, "1.3", "back"),
    ],
)
def test_versions_of_an_entry(
    root: Path, limits: dict[str, str], version: str, outcome: str
) -> None:
    """An entry that is in a version that should lack it needs other limits."""
    item = entry("log_line", "Initializing engine", "app/engine.py", **limits)
    assert judge(root, item, version).outcome == outcome
    missing = entry("log_line", "no such line", "app/engine.py", **limits)
    assert judge(root, missing, version).outcome == ("absent" if outcome == "back" else "broken")


def test_a_stated_consequence_is_no_failure(root: Path) -> None:
    """It is reported, with the consequence."""
    finding = judge(root, entry("log_line", "gone", "app/engine.py", without="one phase less"))
    assert (finding.outcome, finding.is_failure) == ("broken", False)
    assert finding.describe().endswith("is not in app/engine.py: one phase less")


def test_a_text_of_another_package_is_not_checked(root: Path) -> None:
    """uvicorn's lines are not in vLLM's source."""
    assert judge(root, entry("log_line", "x", "on.py", package="uvicorn")).outcome == "elsewhere"


def test_texts_of_a_binary(tmp_path: Path) -> None:
    """Formats of printf have holes, and parts of a message that is put together lie apart."""
    binary = tmp_path / "lib.so"
    binary.write_bytes(
        b"\x00\x01Channel %02d/%d : %d[%d] -> %d\x00node \x02 marked dead because \x00_ZN3log\x00"
    )
    channel = entry("log_line", "x", "lib.so", source="Channel {}/{} : {}[{}]")
    assert judge(tmp_path, channel).outcome == "ok"
    apart = entry("log_line", "x", "lib.so", source="Channel {} marked dead because")
    assert judge(tmp_path, apart).outcome == "ok"
    assert judge(tmp_path, entry("log_line", "_ZN3log", "lib.so")).outcome == "broken"


def test_index_is_cached(root: Path, tmp_path: Path) -> None:
    """An index in the cache saves the reading of all files."""
    cache = tmp_path / "index.json"
    first = Source.load(root, cache)
    (root / "app/engine.py").write_text("")
    assert Source.load(root, cache).texts == first.texts
    cache.write_text(json.dumps({"scheme": 0, "parts": []}))
    assert Source.load(root, cache).texts["app/engine.py"] == []


def test_newest_releases() -> None:
    """The newest patch of each of the newest minor versions."""
    versions = ["2.60.0", "2.59.0", "2.58.1", "2.58.0", "2.57.1", "2.9.3"]
    assert download.newest_minors(versions, 3) == ["2.58.1", "2.59.0", "2.60.0"]


LOCK = """
[[packages]]
name = "vllm"
sdist = { url = "https://files/vllm-0.33.0.tar.gz", size = 47, hashes = { sha256 = "SOURCE" } }
wheels = [{ url = "https://files/vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", \
hashes = { sha256 = "WHEEL" } }]
""".replace("SOURCE", "a" * 64).replace("WHEEL", "b" * 64)


def test_file_of_a_release() -> None:
    """A source distribution if there is one, else the wheel."""
    source = ("https://files/vllm-0.33.0.tar.gz", "a" * 64)
    assert download._choose_file(LOCK, "vllm", "0.33.0") == source
    wheel = LOCK.replace("sdist", "# sdist").splitlines()
    url, digest = download._choose_file("\n".join(wheel[:3] + wheel[4:]), "vllm", "0.33.0")
    assert (url[-4:], digest) == (".whl", "b" * 64)
    with pytest.raises(VlaunchError, match="no file of vllm 9"):
        download._choose_file("", "vllm", "9")


def test_archives_are_unpacked_without_other_files(tmp_path: Path) -> None:
    """Only sources, and nothing outside of the folder; later runs need no archive."""
    with tarfile.open(tmp_path / "vllm-1.0.tar.gz", "w:gz") as archive:
        for name in ("vllm/a.py", "vllm/a.so", "tests/b.py", "../vllm/c.py", "vllm/../../d.py"):
            info = tarfile.TarInfo(f"vllm-1.0/{name}")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"1"))
    with zipfile.ZipFile(tmp_path / "ray-2.0-cp312-cp312-manylinux2014_x86_64.whl", "w") as wheel:
        for name in ("ray/a.py", "ray/rllib/b.py", "ray/_raylet.so", "ray-2.0.dist-info/METADATA"):
            wheel.writestr(name, "1")
    for package, version, expected in (
        ("vllm", "1.0", ["vllm/a.py"]),
        ("ray", "2.0", ["ray/_raylet.so", "ray/a.py"]),
    ):
        unpacked = download.fetch_source(package, version, tmp_path, offline=True)
        files = sorted(p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*.*"))
        assert files == expected
    assert not list(tmp_path.parent.glob("*.py"))
    assert download.downloaded_releases("ray", tmp_path) == ["2.0"]


def test_missing_download(tmp_path: Path) -> None:
    """Offline, a version that was not downloaded is an error that says what to do."""
    options = ["--folder", str(tmp_path), "--offline", "--version", "vllm=0.33.0"]
    result = CliRunner().invoke(command.main, options)
    assert result.exit_code == 1
    assert f"vllm 0.33.0 is not in {tmp_path}\nhint: run `make contract`" in result.output


def test_command_reports_what_broke(root: Path) -> None:
    """The table names each missing entry with its files, and the exit code is 1."""
    options = ["--source", f"vllm=0.33.0={root}", "--brief"]
    result = CliRunner().invoke(command.main, options)
    assert result.exit_code == 1
    assert "vllm 0.33.0: metric `vllm:num_requests_running` (requests-running, launcher/" in (
        result.output
    )
    assert "MISSING" in result.output


def test_fields_of_recipes_are_checked(root: Path) -> None:
    """A key that vlaunch does not know is reported, with its recipe."""
    recipe = root / "recipes" / "models" / "org" / "model.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("model: {model_id: org/model}\nnew_section: {a: 1}\n")
    result = CliRunner().invoke(command.main, ["--source", f"vllm=0.33.0={root}", "--brief"])
    assert "vllm 0.33.0: recipe `new_section` is unknown: org/model" in result.output


def test_hash_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with another hash than the index states is not kept."""

    class Answer(io.BytesIO):
        def raise_for_status(self) -> None:
            """Accept."""

        def iter_content(self, size: int) -> list[bytes]:
            """Return the body."""
            return [self.read(size)]

    monkeypatch.setattr(download.requests, "get", lambda *_, **__: Answer(b"other"))
    monkeypatch.setattr(download, "_run", lambda *_: LOCK)
    with pytest.raises(VlaunchError, match="another hash"):
        download.fetch_source("vllm", "0.33.0", tmp_path, offline=False)
    assert list(tmp_path.iterdir()) == []
    good = hashlib.sha256(b"other").hexdigest()
    monkeypatch.setattr(download, "_run", lambda *_: LOCK.replace("a" * 64, good))
    archive = download._download("vllm", "0.33.0", tmp_path)
    assert (archive.name, archive.read_bytes()) == ("vllm-0.33.0.tar.gz", b"other")
