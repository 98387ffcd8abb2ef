"""An excerpt of a real `make demo` as docs/demo.svg, from its log: `make recording LOG=FILE`.

Rich, which prints vlaunch's output anyway, draws the terminal. Each command is shown with the end
of its output; "…" stands for omitted lines, and no line is changed.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

PAGE = Path(__file__).parent.parent / "docs" / "demo.svg"
# Commands of the excerpt, and the number of their last output lines.
LINES = {"check": 1, "up": 3, "check-nccl": 8, "serve": 7, "status": 8, "batch": 6}
_COMMAND = re.compile(r"^(?:sudo )?\.venv/bin/(vlaunch (\S+).*)$")
# Output of make and of other programs, which ends a command's own.
_OTHER = re.compile(r"^(rm -rf|cat |mkdir |export |make\[|make:)")


def parse_commands(log: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each command line of a log, the command's name, and its output."""
    command, name, output = "", "", list[str]()
    for line in re.sub(r"\\\n\s*", "", log).splitlines():
        if (match := _COMMAND.match(line)) or _OTHER.match(line):
            if name:
                yield command, name, output
            command, name, output = (match[1], match[2], []) if match else ("", "", [])
        else:
            output.append(line.rstrip())
    if name:
        yield command, name, output


def render_svg(log: str) -> str:
    """Return the picture as SVG."""
    console = Console(record=True, width=112, file=io.StringIO(), color_system="truecolor")
    for command, name, output in parse_commands(log):
        if name not in LINES:
            continue
        console.print(Text(f"$ {command}", style="bold"))
        excerpt = output[-LINES[name] :]
        if len(excerpt) < len(output):
            console.print(Text("…", style="dim"))
        for line in excerpt:
            console.print(_styled(line))
        console.print()
    svg = console.export_svg(title="make demo (excerpt)", unique_id="demo")
    # Fonts of another server: pictures in a page may not load them.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def _styled(line: str) -> Text:
    text = Text(line, overflow="ellipsis", no_wrap=True)
    text.highlight_regex(r"^\s*ok\b|\bPASS\b|\banswering\b|\bready\b|\bpassed\b", "green")
    text.highlight_regex(r"^(endpoint|model|placement|network|KV cache|fingerprint)\b", "cyan")
    return text


if __name__ == "__main__":
    PAGE.write_text(render_svg(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
