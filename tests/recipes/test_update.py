"""Import of recipes from vLLM's repository, and the judgement which of them can run."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.cli.main import run_command
from launcher.core.errors import RequestError, VlaunchError
from launcher.recipes import library, source, update
from launcher.recipes.library import Hardware
from launcher.recipes.source import RecipeSource
from tests.recipes import case

H100 = Hardware(name="h100", accelerator="nvidia", generation="hopper", gpu_count=8, vram_gb=640)
MI300X = Hardware(name="mi300x", accelerator="amd", gpu_count=8, vram_gb=1536)
GOOD = "model: {model_id: acme/Good}\n"
OMNI = "meta: {tasks: [omni]}\nmodel: {model_id: acme/Omni}\n"


def write_checkout(folder: Path, version: str = "0.40.0", **recipes: str) -> Path:
    """Write vLLM's sources with some recipes of `acme`."""
    models = folder / "recipes" / "models" / "acme"
    models.mkdir(parents=True)
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
    (folder / "recipes" / "README.md").write_text("# Recipes\n")
    for name, text in recipes.items():
        (models / f"{name}.yaml").write_text(text)
    return folder


def as_tar(folder: Path) -> Path:
    """Pack a folder like a source distribution."""
    path = folder.parent / "vllm-0.40.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "vllm-0.40.0")
    return path


def as_zip(folder: Path) -> Path:
    """Pack a folder like GitHub."""
    path = folder.parent / "main.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, f"vllm-main/{file.relative_to(folder)}")
    return path


def judge(text: str, *hardware: Hardware) -> list[str]:
    """Return the reasons for the rejection of a recipe."""
    content = RecipeSource(origin="x", version="", texts={"acme/M": text})
    result = update.judge_recipes(content, hardware or (H100, MI300X))
    assert list(result.recipes) == ([] if result.rejected else ["acme/M"])
    return list(result.rejected.get("acme/M", ()))


@pytest.mark.parametrize("pack", [Path, as_tar, as_zip])
def test_sources(tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    """A folder and archives have the same recipes and version."""
    path = pack(write_checkout(tmp_path / "vllm", A=GOOD, B=OMNI))

    content = source.read_source(path)

    assert content.texts == {"acme/A": GOOD, "acme/B": OMNI}
    assert (content.origin, content.version) == ("vLLM 0.40.0", "0.40.0")


def test_folder_of_recipes(tmp_path: Path) -> None:
    """Without the rest of vLLM, the version is unknown."""
    folder = write_checkout(tmp_path / "vllm", A=GOOD) / "recipes"

    content = source.read_source(folder)

    assert (list(content.texts), content.origin, content.version) == (["acme/A"], str(folder), "")


def test_unusable_sources(tmp_path: Path) -> None:
    """Each has its own message."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("x")
    large = write_checkout(tmp_path / "large", A="#" * (1 << 20) + GOOD)
    binary = write_checkout(tmp_path / "binary")
    (binary / "recipes" / "models" / "acme" / "A.yaml").write_bytes(b"\xff\xfe")
    for path, message in (
        (tmp_path / "empty", "has no recipes"),
        (tmp_path / "text", "cannot read"),
        (tmp_path / "none", "does not exist"),
        (large, "cannot read"),
        (binary, "cannot read"),
    ):
        with pytest.raises(RequestError, match=message) as raised:
            source.read_source(path)
        assert "--source" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        (OMNI, "vLLM-Omni"),
        ("compatible_strategies: [pd_cluster]\n" + GOOD, "prefill and decode"),
        ("compatible_strategies: [pd_cluster, single_node_tp]\n" + GOOD, None),
        ("dependencies: [{command: uv pip install vllm==0.11.2}]\n" + GOOD, "needs vLLM 0.11.2"),
        ("dependencies: [{command: 'pip install vllm[audio]==0.30.0'}]\n" + GOOD, None),
        (
            "dependencies: [{command: uv pip install vllm==0.11.2, optional: true}]\n" + GOOD,
            None,
        ),
        ("meta: {hardware: {h100: unsupported, mi300x: unsupported}}\n" + GOOD, "not run on h100"),
        ("meta: {hardware: {h100: unsupported}}\n" + GOOD, None),
        ("variants: {a: {supported_hardware: [trillium]}}\n" + GOOD, "no variant of acme/M runs"),
        ("model: {model_id: acme/M, base_env: {A: $HOME/x}}\n", "shell's `$HOME`"),
        ("model: {model_id: acme/M, base_args: [--api-key, $KEY]}\n", None),
        ("model: {model_id: acme/M, base_args: 5}\n", "line 1: model.base_args: should be a list"),
        ("model: [\n", "not valid YAML"),
    ],
)
def test_rejections(text: str, reason: str | None) -> None:
    """A recipe is rejected if no hardware can run it."""
    reasons = judge(text)

    assert bool(reasons) == (reason is not None)
    assert reason is None or reason in " ".join(reasons)


def test_unknown_keys() -> None:
    """Keys that vlaunch neither reads nor ignores on purpose are listed, with their recipes."""
    text = (
        "meta: {title: T, mood: good}\nguide: text\nmodel: {model_id: acme/M, architecture: moe}\n"
        "variants: {a: {label: A, shape: round}, b: {shape: square}}\n"
        "features: {f: {modes: {m: {colour: red}}}}\n"
    )
    texts = dict.fromkeys(("a/1", "a/2", "a/3", "a/4", "a/5"), text)
    content = RecipeSource(origin="x", version="", texts=texts)

    unknown = update.judge_recipes(content, [H100]).unknown_keys

    assert set(unknown) == {"meta.mood", "variants.*.shape", "features.*.modes.*.colour"}
    line = update.describe_unknown_key("meta.mood", unknown["meta.mood"])
    assert line == "`meta.mood` is unknown: a/1, a/2, a/3 and 2 more"


def test_check_of_fields(tmp_path: Path) -> None:
    """The contract learns of invalid fields and of unknown keys."""
    bad = "model: {model_id: acme/B, base_args: 5}\nnew: 1\n"
    path = as_tar(write_checkout(tmp_path / "vllm", A=GOOD, B=bad, C=OMNI))

    assert update.check_fields(path) == [
        "acme/B:1: model.base_args: should be a list, such as [a, b], not 5",
        "`new` is unknown: acme/B",
    ]


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's imported recipes."""
    path = tmp_path / "data" / "recipes.json"
    monkeypatch.setattr(library, "user_file", lambda: path)
    return path


def test_command(tmp_path: Path, user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported recipes replace the packaged ones; rejected ones are named."""
    dense = case.FILE.read_text() + "mood: good\n"
    path = write_checkout(tmp_path / "vllm", Dense=dense, Omni=OMNI, Odd="model: 5\n")

    assert run_command(["recipes", "update", "--source", str(path)]) == 0

    error = capsys.readouterr().err.replace("\n", " ")
    assert "rejected acme/Omni: it is for vLLM-Omni, which vlaunch does not start" in error
    assert "rejected acme/Odd: line 1: model: should be a mapping" in error
    assert "ignored: `mood` is unknown: acme/Dense" in error
    assert "imported 1 of 3 recipes from vLLM 0.40.0, rejected 2: " in error
    loaded = library.load_library()
    assert (loaded.source, list(loaded.recipes)) == ("vLLM 0.40.0", ["acme/Dense"])
    assert loaded.load_recipe("acme/Dense").variants == case.recipe().variants
    assert loaded.hardware == library.load_packaged().hardware
    assert run_command(["recipes", "list"]) == 0
    assert "1 of 1 recipes from vLLM 0.40.0" in capsys.readouterr().err


def test_json(tmp_path: Path, user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts get the names and the reasons."""
    path = write_checkout(tmp_path / "vllm", Good=GOOD, Omni=OMNI)

    assert run_command(["recipes", "update", "--json", "--source", str(path)]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "source": "vLLM 0.40.0",
        "imported": ["acme/Good"],
        "rejected": {"acme/Omni": ["it is for vLLM-Omni, which vlaunch does not start"]},
        "unknown_keys": {},
        "file": str(user_file),
    }


def test_newer_packaged_recipes_win(tmp_path: Path, user_file: Path) -> None:
    """After an upgrade of vlaunch, imported recipes may be of an older vLLM."""
    for version, expected in (("0.2.0", False), ("99.0.0", True)):
        path = write_checkout(tmp_path / version, version, Good=GOOD)
        assert run_command(["recipes", "update", "--source", str(path)]) == 0
        assert ("acme/Good" in library.load_library().recipes) is expected


def test_damaged_file(user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has a repair, which works."""
    user_file.parent.mkdir()
    user_file.write_text("{half")

    assert run_command(["recipes", "list"]) == 2
    assert "vlaunch recipes update" in capsys.readouterr().err


# ---- the package index ---------------------------------------------------------------------------


class Index(ThreadingHTTPServer):
    """A package index with one page, whose files have their content as links."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.wrong_hash = False
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """The address for pip."""
        return f"http://127.0.0.1:{self.server_port}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        """Return the page or a file."""
        name = self.path.rpartition("/")[2]
        if name in self.server.files:
            body = self.server.files[name]
        elif self.path == "/simple/vllm/":
            body = json.dumps(
                {"files": [self._describe(name) for name in self.server.files]}
            ).encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _describe(self, name: str) -> dict[str, object]:
        data = b"other" if self.server.wrong_hash else self.server.files[name]
        digest = hashlib.sha256(data).hexdigest()
        yanked = "yanked" in self.server.files[name].decode(errors="replace")
        return {
            "filename": name,
            "url": f"../../files/{name}",
            "hashes": {"sha256": digest},
            "yanked": yanked,
        }

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A package index that pip is configured for."""
    with Index() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_newest_release(tmp_path: Path, index: Index) -> None:
    """Without a source it is downloaded; wheels, pre-releases and yanked files do not count."""
    archive = as_tar(write_checkout(tmp_path / "vllm", Good=GOOD)).read_bytes()
    index.files = {
        "vllm-0.9.2.tar.gz": b"older",
        "vllm-0.40.0.tar.gz": archive,
        "vllm-0.41.0rc1.tar.gz": b"early",
        "vllm-0.42.0.tar.gz": b"yanked",
        "vllm-0.43.0-cp38-abi3-manylinux1_x86_64.whl": b"wheel",
    }

    with source.newest_release() as path:
        assert list(source.read_source(path).texts) == ["acme/Good"]
    assert not path.exists()


def test_unusable_index(index: Index) -> None:
    """Each problem has a hint to download the file by hand."""
    with pytest.raises(VlaunchError, match="cannot download") as raised, source.newest_release():
        pass
    assert "no source distribution" in raised.value.evidence
    assert "by hand" in (raised.value.hint or "")

    index.files, index.wrong_hash = {"vllm-0.40.0.tar.gz": b"x"}, True
    with pytest.raises(VlaunchError, match="cannot download") as raised, source.newest_release():
        pass
    assert "another hash" in raised.value.evidence


def test_hostile_archive(tmp_path: Path) -> None:
    """Links and paths that lead elsewhere are not followed."""
    path = tmp_path / "vllm-1.0.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("v/recipes/models/acme/Link.yaml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name in ("v/../recipes/models/acme/Up.yaml", "v/recipes/models/acme/Good.yaml"):
            entry = tarfile.TarInfo(name)
            entry.size = len(GOOD)
            archive.addfile(entry, io.BytesIO(GOOD.encode()))

    assert list(source.read_source(path).texts) == ["acme/Good"]
