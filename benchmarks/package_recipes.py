"""Write launcher/recipes/data/ from a checkout of github.com/vllm-project/recipes.

    make recipes FROM=../recipes

Keeps the keys that vlaunch reads (`launcher/recipes/schema.py`): no guides, no strategies, and no
recipes for vLLM-Omni, which vlaunch does not start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.inventory import document
from launcher.recipes import library

SOURCE = "https://github.com/vllm-project/recipes"
ACCELERATORS = {"NVIDIA": "nvidia", "AMD": "amd", "Intel": "cpu"}
DATA = Path(library.__file__).parent / "data"
NOTICE = """The file recipes.json holds parts of the vLLM project's recipes,
{source}, commit {commit} ({date}),
under the Apache License 2.0 in the file LICENSE. Changes: guides, descriptions, serving strategies
and recipes for vLLM-Omni are left out, and the YAML files are written as one JSON file.
"""


def main(checkout: Path) -> None:
    """Write recipes.json, NOTICE and LICENSE."""
    log = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(log, check=True, capture_output=True, text=True).stdout.split()
    folder = checkout / "models"
    recipes = {
        str(path.relative_to(folder).with_suffix("")): library.read_recipe(path)
        for path in sorted(folder.glob("*/*.yaml"), key=lambda path: str(path).lower())
    }
    taxonomy: Any = document.parse_document((checkout / "taxonomy.yaml").read_text()).data
    hardware = {
        name: json.dumps(
            {
                "accelerator": ACCELERATORS[profile["brand"]],
                **{key: profile[key] for key in ("generation", "gpu_count", "vram_gb")},
            }
        )
        for name, profile in taxonomy["hardware_profiles"].items()
        if profile["brand"] in ACCELERATORS and profile["generation"] != "xpu"
    }
    models = {
        name: recipe.model_dump_json(exclude_defaults=True)
        for name, recipe in recipes.items()
        if "omni" not in recipe.meta.tasks
    }
    parts = {
        "source": json.dumps(f"{SOURCE} at {commit}"),
        "hardware": _lines(hardware),
        "recipes": _lines(models),
    }
    text = ",\n".join(f"{json.dumps(key)}: {value}" for key, value in parts.items())
    (DATA / "recipes.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    (DATA / "NOTICE").write_text(NOTICE.format(source=SOURCE, commit=commit, date=date))
    (DATA / "LICENSE").write_text((checkout / "LICENSE").read_text())


def _lines(entries: dict[str, str]) -> str:
    """Write one line for each entry, so that a diff shows what changed."""
    lines = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
