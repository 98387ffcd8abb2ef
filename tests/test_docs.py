"""Documentation against the code: commands, links, files, counts."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import click
import pytest

from benchmarks import layout
from launcher.cli.main import COMMANDS, cli, run_command
from launcher.core.check import Finding
from launcher.hosts.checks import catalogue
from launcher.network import levels, nccl_log, network_shape
from launcher.network import network_view as ui
from launcher.network.probe_command import Collective
from scripts import reference

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
NETWORK = DOCS / "how-to" / "network.md"
OUTPUT = DOCS / "reference" / "output.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Generated from help texts and schemas; their words are not counted.
LISTS = {
    DOCS / "reference" / name for name in ("commands.md", "failures.md", "inventory.md", "job.md")
}
# Beginnings of paths in other projects' repositories.
FOREIGN = (
    "/", "autoscaler/", "capacity_planner.py", "distributed/", "examples/ray_serving/",
    "flashinfer/", "fused_moe/", "models/vram.py", "out/", "platforms/", "quantization/",
    "ray_constants.py", "v1/", "vllm/",
)  # fmt: skip
SHOWN = [name for name, (_, _, help_) in COMMANDS.items() if help_]


def commands(text: str) -> list[str]:
    """Return a page's commands: lines of `sh` blocks, prompts of `console` blocks."""
    lines = []
    for kind, block in re.findall(
        r"^```(sh|console)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL
    ):
        lines += [
            line.removeprefix("$ ")
            for line in block.splitlines()
            if kind == "sh" or line.startswith("$ ")
        ]
    typed = [re.sub(r"^(sudo )?(\.venv/bin/)?(?=vlaunch )", "", line) for line in lines]
    return [line for line in typed if line.startswith("vlaunch ")]


def mentioned(text: str) -> list[str]:
    """Return the commands within sentences, without tables and placeholders."""
    prose = re.sub(r"^```.*?^```|^\|.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [
        line
        for line in (" ".join(match.split()) for match in re.findall(r"`(vlaunch [^`]+)`", prose))
        if "…" not in line
    ]


def parse(line: str) -> click.Context:
    """Parse a command line as the program does, without running it; raises click's errors."""
    # Without comments, redirections, and what follows a pipe.
    argv = shlex.split(re.sub(r" \d?>\S+| [|<] .*", "", line), comments=True)[1:]
    if argv[0].startswith("-"):
        return cli.make_context("vlaunch", argv)
    command = cli.get_command(click.Context(cli), argv[0])
    assert command is not None, f"no such command: {line}"
    return command.make_context(argv[0], argv[1:])


def documented_commands() -> list[tuple[str, str]]:
    """Return (page, command) for every command of every page."""
    lists = {str(page.relative_to(ROOT)) for page in LISTS}
    texts = zip(NAMES, [page.read_text(encoding="utf-8") for page in PAGES], strict=True)
    return [
        (name, line)
        for name, text in texts
        for line in dict.fromkeys([*commands(text), *(() if name in lists else mentioned(text))])
    ]


@pytest.mark.parametrize("name", SHOWN)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help has a sentence, not only flags."""
    assert run_command([name, "--help"]) == 0
    out = capsys.readouterr().out

    assert f"vlaunch {name}" in out
    assert len(out.split("\n\n")[1].strip()) > 20


@pytest.mark.parametrize("page", [str(path.relative_to(DOCS)) for path in reference.pages()])
def test_the_reference_is_up_to_date(page: str) -> None:
    """`make reference` writes it from the code's commands, keys, checks, failures and versions."""
    path = DOCS / page

    assert reference.pages()[path] == path.read_text(encoding="utf-8")


def test_the_site_has_every_page() -> None:
    """The navigation of its index lists all pages."""
    linked = re.findall(r"^([a-z-]+/[a-z-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)

    assert sorted(linked) == sorted(
        str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob("*/*.md")
    )


def test_the_readme_has_the_number_of_checks() -> None:
    """The catalogue's."""
    assert f" {len(catalogue.CATALOGUE)} checks " in README.read_text()


def test_the_readme_has_the_commands_in_order_of_use() -> None:
    """In its first transcript."""
    shown = [line.split()[1] for line in commands(README.read_text().partition("\n## ")[0])]

    assert shown == ["init", "check", "up", "check-nccl", "serve"]


@pytest.mark.parametrize(("page", "line"), documented_commands())
def test_every_documented_command_parses(page: str, line: str) -> None:
    """Commands, options and values parse."""
    try:
        context = parse(line)
    except click.exceptions.Exit:  # --help and its like
        return

    for option in ("only", "skip", "group") if context.info_name == "check" else ():
        names = ",".join(context.params[option]).split(",") if context.params[option] else []
        assert len(catalogue.select_checks(**{option: names})) > 0, page


def test_an_unknown_command_is_reported() -> None:
    """An unknown option, and an unknown command."""
    with pytest.raises(click.UsageError):
        parse("vlaunch check-nccl --requires rdma   # a comment")
    with pytest.raises(AssertionError):
        parse("vlaunch prove")


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_resolve(path: Path) -> None:
    """Files and headings that exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        if name.startswith(("http:", "https:")):
            continue
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not heading or heading in _anchors(linked.read_text(encoding="utf-8")), target


def test_pages_that_the_code_prints_exist() -> None:
    """`docs/PAGE.md#SECTION`, sections included unless they are placeholders."""
    links = {
        link
        for folder in ("launcher", "inventory", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".sh", ".html")
        for link in re.findall(r"\bdocs/[a-z/-]+\.md(?:#[a-z-]+)?", path.read_text("utf-8"))
        if not link.startswith(FOREIGN)
    }
    sections = {link: link.partition("#") for link in links}

    assert [link for link, (page, _, _) in sections.items() if not (ROOT / page).exists()] == []
    assert [
        link
        for link, (page, _, section) in sections.items()
        if section and section not in _anchors((ROOT / page).read_text("utf-8"))
    ] == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_files_that_a_page_names_exist(path: Path) -> None:
    """Programs and folders, by path or by name alone."""
    assert [name for name in _files(path.read_text(encoding="utf-8")) if not _exists(name)] == []


def test_files_of_the_launcher_that_the_code_names_exist() -> None:
    """In comments, docstrings and strings, by path from the root."""
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("launcher", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
        for name in re.findall(r"\blauncher/[a-z_/]+\.(?:py|sh)\b", path.read_text("utf-8"))
        if not (ROOT / name).exists()
    }

    assert missing == set()


def test_a_missing_file_is_reported() -> None:
    """By path and by name; placeholders and other projects' files are exempt."""
    text = "`tools/gone.py` `gone.sh` `core/gone/` `core/plan.py` `tools/NAME.py` `vllm/envs.py`"

    assert [name for name in _files(text) if not _exists(name)] == [
        "tools/gone.py", "gone.sh", "core/gone/",
    ]  # fmt: skip


def test_the_diagram_of_the_layout_is_up_to_date() -> None:
    """`make layout` draws it from the import contract."""
    page = layout.PAGE.read_text(encoding="utf-8")

    assert layout.update_page(page) == page
    assert [name for name in ("cli/", "batch/", "core/") if f"│ {name}" not in page] == []


def test_the_architecture_lists_every_command_with_its_folder() -> None:
    """Except for those of `cli/` itself."""
    rows = re.findall(r"^\| (`.+/`) \| (.+?) \|", layout.PAGE.read_text("utf-8"), re.MULTILINE)
    placed = {(name, f"`{module.split('.')[1]}/`") for name, (module, _, _) in COMMANDS.items()}
    listed = {
        (command, folder)
        for folders, commands in rows
        for command in commands.split(", ")
        for folder in folders.split(", ")
    }

    assert {pair for pair in placed if pair[1] != "`cli/`"} <= listed


@pytest.mark.parametrize(
    ("page", "limit"),
    [("README.md", 600), ("docs/explanation/architecture.md", 1800), ("CONTRIBUTING.md", 1000)],
)
def test_pages_that_are_read_first_are_short(page: str, limit: int) -> None:
    """Diagrams and tables included."""
    assert _count_words(ROOT / page) <= limit


def test_the_site_is_short() -> None:
    """All pages together, and each page, without the lists of options and keys."""
    counts = {page: _count_words(page) for page in DOCS.rglob("*.md") if page not in LISTS}
    generated = {page for page in reference.pages() if page in counts}

    assert sum(counts.values()) <= 26_000
    assert [page.name for page in counts.keys() - generated if counts[page] > 1_800] == []
    assert [
        page.name
        for page, count in counts.items()
        if count > 2_100 and page.name not in ("checks.md",)
    ] == []


def test_the_network_page_explains_every_mark_of_the_matrix() -> None:
    """Every mark of the matrix is explained."""
    text = NETWORK.read_text()

    assert [name for name in ui.MARKS if f"`{name}`" not in text] == []


def test_the_network_page_explains_every_field() -> None:
    """Of `--json`, with and without `--log`."""
    text = OUTPUT.read_text()
    top = {"passed", "summary", *(item.name for item in fields(network_shape.Verdict))}
    inner = {
        item.name for noun in (network_shape.Cell, Collective, Finding) for item in fields(noun)
    }
    link = nccl_log.parse_log(
        [b"gpu01:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"]
    )
    logs = levels.as_json(link)

    assert [
        name
        for name in sorted({*top, *logs, *logs["links"][0]})
        if not re.search(rf"`{name}(\[\])?`", text)
    ] == []
    assert [name for name in sorted(inner) if not re.search(rf"`\.?{name}`", text)] == []


def test_the_table_of_dependencies_is_complete() -> None:
    """Every dependency of pyproject.toml, and no other."""
    page = (DOCS / "reference" / "dependencies.md").read_text()
    rows = re.findall(r"^\| (?!library)([\w, ;-]+) \|", page, flags=re.MULTILINE)
    named = {name.lower() for row in rows for name in re.split("[,;] ", row)}
    named = {f"types{name}" if name.startswith("-") else name for name in named}
    required = re.findall(r'^  "([\w-]+)[>=<]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)

    assert named == {name.lower() for name in required}


def _count_words(page: Path) -> int:
    """Count the words of a page, without the lines of tables and diagrams."""
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _files(text: str) -> list[str]:
    """Return this repository's programs and folders that a page names."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = re.findall(r"`([\w./-]+\.(?:py|sh))`", prose)
    names += [
        name
        for name in re.findall(r"`((?:[\w-]+/)+)`", prose)
        if any((base / name.split("/")[0]).is_dir() for base in (ROOT, ROOT / "launcher"))
    ]
    return [
        name for name in names if not name.startswith(FOREIGN) and not re.search("[A-Z]{4}", name)
    ]


def _exists(name: str) -> bool:
    bases = [ROOT, ROOT / "launcher", ROOT / "benchmarks", ROOT / "tests"]
    if any((base / name).exists() for base in bases):
        return True
    return "/" not in name and any(any(base.rglob(name)) for base in bases[1:])
