"""Write launcher/recipes/data/ from vLLM's recipes, and the hardware profiles of a checkout of
github.com/vllm-project/recipes.

    make recipes FROM=vllm-0.33.0.tar.gz PROFILES=../recipes

Keeps the keys that vlaunch reads (`launcher/recipes/schema.py`) of the recipes that can run under
it, as `vlaunch recipes update` does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.inventory import document
from launcher.recipes import library, update
from launcher.recipes.library import Hardware
from launcher.recipes.source import read_source

SOURCE = "https://github.com/vllm-project/vllm"
PROFILES = "https://github.com/vllm-project/recipes"
ACCELERATORS = {"NVIDIA": "nvidia", "AMD": "amd", "Intel": "cpu"}
DATA = Path(library.__file__).parent / "data"
NOTICE = """The file recipes.json holds parts of the vLLM project's recipes, from the folder recipes
of {origin} ({source}), and hardware profiles of
{profiles}, commit {commit} ({date}),
both under the Apache License 2.0 in the file LICENSE. Changes: guides, descriptions, serving
strategies and recipes that vlaunch cannot run are left out, and the YAML files are written as one
JSON file.
"""


def main(source: Path, profiles: Path) -> None:
    """Write recipes.json and NOTICE."""
    log = ["git", "-C", str(profiles), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(log, check=True, capture_output=True, text=True).stdout.split()
    taxonomy: Any = document.parse_document((profiles / "taxonomy.yaml").read_text()).data
    hardware = {
        name: {
            "accelerator": ACCELERATORS[profile["brand"]],
            **{key: profile[key] for key in ("generation", "gpu_count", "vram_gb")},
        }
        for name, profile in taxonomy["hardware_profiles"].items()
        if profile["brand"] in ACCELERATORS and profile["generation"] != "xpu"
    }
    recipes = read_source(source)
    result = update.judge_recipes(
        recipes, [Hardware(name=name, **profile) for name, profile in hardware.items()]
    )
    text = update.format_library(recipes, hardware, result.recipes)
    (DATA / "recipes.json").write_text(text, encoding="utf-8")
    notice = NOTICE.format(
        origin=recipes.origin, source=SOURCE, profiles=PROFILES, commit=commit, date=date
    )
    (DATA / "NOTICE").write_text(notice, encoding="utf-8")
    for name, reasons in result.rejected.items():
        print(f"rejected {name}: {'; '.join(reasons)}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
