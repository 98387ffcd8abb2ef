"""The JSON Schema of job files, for completion and checks in editors.

`python -m launcher.batch.json_schema` writes it to `schema.json` beside this module, where editors
find it.
"""

from __future__ import annotations

from pathlib import Path

from launcher.batch.schema import JobFile
from launcher.inventory.json_schema import write

if __name__ == "__main__":
    write(JobFile, Path(__file__).with_name("schema.json"))
