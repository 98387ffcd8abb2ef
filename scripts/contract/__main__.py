"""Command line of the contract: `make contract`, or `python -m scripts.contract OPTION…`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from platformdirs import user_cache_path
from rich.console import Console

from launcher.core.errors import VlaunchError
from launcher.recipes.update import check_fields
from launcher.upstream import PROGRAMS
from launcher.upstream.entries import Program, load_program
from scripts.contract import download
from scripts.contract.judge import Finding, judge_program
from scripts.contract.source import Source
from scripts.contract.table import print_findings

_NEWEST = 3  # minor versions that are checked


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=user_cache_path("vlaunch") / "contract",
    help="Folder of downloads; it may be deleted at any time.",
)
@click.option("--offline", is_flag=True, help="Use downloaded versions only.")
@click.option(
    "--version",
    "chosen",
    metavar="PROGRAM=VERSION",
    multiple=True,
    help="Check this version instead of the newest ones, such as `vllm=0.33.0`. Repeatable.",
)
@click.option(
    "--source",
    "sources",
    metavar="PROGRAM=VERSION=FOLDER",
    multiple=True,
    help="Check the source in a folder, as that version. Repeatable.",
)
@click.option("--brief", is_flag=True, help="Leave out entries that every version has.")
def main(
    folder: Path, offline: bool, chosen: tuple[str, ...], sources: tuple[str, ...], brief: bool
) -> None:
    """Check what vlaunch relies on against the source of vLLM, Ray and NCCL.

    Downloads the three newest minor versions, reads them without executing anything, and exits
    with 1 if an entry is missing whose absence has no stated consequence, or a recipe has a field
    that vlaunch does not know.
    """
    findings, recipes = list[Finding](), list[str]()
    try:
        for program, version, source in _sources(folder, offline, chosen, sources):
            findings += judge_program(program, version, source)
            if (source.root / "recipes").is_dir():
                lines = check_fields(source.root)
                recipes += [f"{program.name} {version}: recipe {line}" for line in lines]
    except VlaunchError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        raise click.ClickException(f"{error}{hint}") from None
    console = Console(width=None if sys.stdout.isatty() else 150)
    print_findings(console, findings, brief=brief)
    for name in dict.fromkeys(finding.program for finding in findings):
        known = load_program(name).versions
        versions = {finding.version for finding in findings if finding.program == name}
        if newer := [version for version in versions if known.position(version) == "newer"]:
            console.print(
                f"add {', '.join(newer)} to `checked` in launcher/upstream/{name}.json once its"
                " entries are right"
            )
    for line in recipes:
        console.print(line, style="red", markup=False, soft_wrap=True)
    sys.exit(bool(recipes) or any(finding.is_failure for finding in findings))


def _sources(
    folder: Path, offline: bool, chosen: tuple[str, ...], sources: tuple[str, ...]
) -> Iterator[tuple[Program, str, Source]]:
    """Yield the programs and versions to check, with their source."""
    for spec in sources:
        name, version, path = spec.split("=", 2)
        yield load_program(name), version, Source.load(Path(path))
    if sources and not chosen:
        return
    pairs = [tuple(spec.split("=", 1)) for spec in chosen] or _default_versions(folder, offline)
    for name, version in pairs:
        program = load_program(name)
        root = download.fetch_source(program.package, version, folder, offline=offline)
        index = folder / f".index-{program.package}-{version}.json"
        yield program, version, Source.load(root, index)


def _default_versions(folder: Path, offline: bool) -> Iterator[tuple[str, str]]:
    """Yield the newest versions of each program with a package; of NCCL, those that are listed."""
    for name in PROGRAMS:
        program = load_program(name)
        if name == "nccl":
            yield from ((name, version) for version in program.versions.checked)
        elif program.package:
            versions = (
                download.downloaded_releases(program.package, folder)
                if offline
                else download.list_releases(program.package)
            )
            for version in download.newest_minors(versions, _NEWEST):
                yield name, version


if __name__ == "__main__":
    main()
