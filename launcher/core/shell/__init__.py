"""The shell programs that run on nodes, one file each, and how a file becomes the text that is
sent.

Each of them also runs where it lies (`cd launcher/core/shell && sh ./lock_look.sh '' lab`), and
shellcheck sees it as it is.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from itertools import dropwhile
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCED = re.compile(r"^\. \./(\w+)\.sh\n", re.MULTILINE)
_QUOTED = re.compile(r'"\$\(cat \./(\w+)\.sh\)"')


@cache
def program(name: str) -> str:
    """Return the program `NAME.sh` as the text that is sent to a node.

    The comment that it begins with stays here. A node has none of the other files, so they come
    along: `. ./OTHER.sh`, on a line of its own, becomes what that file says, and
    `"$(cat ./OTHER.sh)"` becomes the same as one quoted word.
    """
    lines = (_FOLDER / f"{name}.sh").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(dropwhile(lambda line: line.startswith("#"), lines)).lstrip("\n")
    text = _SOURCED.sub(lambda match: program(match[1]), text)
    return _QUOTED.sub(lambda match: shlex.quote(program(match[1]).rstrip("\n")), text)
