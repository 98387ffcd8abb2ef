"""Shell programs that run on nodes, one file each.

Each also runs from this folder (`cd launcher/core/shell && sh ./lock_look.sh '' lab`), and
shellcheck checks it unchanged.
"""

import re
import shlex
from functools import cache
from itertools import dropwhile
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCED = re.compile(r"^\. \./(\w+)\.sh\n", re.MULTILINE)
_QUOTED = re.compile(r'"\$\(cat \./(\w+)\.sh\)"')


@cache
def program_text(name: str) -> str:
    """Return `NAME.sh` as the text sent to a node.

    Drops its leading comment and includes other files, which nodes do not have: `. ./OTHER.sh` on a
    line of its own becomes that file's text, `"$(cat ./OTHER.sh)"` the same text as one quoted
    argument.
    """
    lines = (_FOLDER / f"{name}.sh").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(dropwhile(lambda line: line.startswith("#"), lines)).lstrip("\n")
    text = _SOURCED.sub(lambda match: program_text(match[1]), text)
    return _QUOTED.sub(lambda match: shlex.quote(program_text(match[1]).rstrip("\n")), text)
