"""What looks like a secret, whoever it belongs to: forms of well-known tokens, telling names, and
values that stand behind them.

`redaction` takes out the values that this program knows. A log may hold others, which nobody told
us of, and somebody may write one where it does not belong.
"""

from __future__ import annotations

import re
from functools import cache

from launcher.core.redaction import MASK, redact

# What tokens of Hugging Face, OpenAI, GitHub, GitLab, NVIDIA, Slack and Docker Hub begin with; not
# in the middle of a word: `task-…` is none.
_FORM = (
    r"[dghnsx](?<![A-Za-z0-9][a-z])(?:(?<=h)f_|(?<=s)k-|(?<=g)(?:h[pousr]_|ithub_pat_|lpat-)"
    r"|(?<=n)vapi-|(?<=x)ox[abprs]-|(?<=d)ckr_pat_)[A-Za-z0-9_-]"
)
# Long enough to be refused where a person writes it; in a log, half as much is taken out.
VALUE = re.compile(_FORM + r"{16,}")
# The name of a variable that holds one; some switches have such names, too.
NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE"
    r"|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)
# A variable that might hold one, and is better not shown.
DOUBTFUL_NAME = re.compile(r"KEY|TOKEN(?!_PATH$)|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
# What Arrow's addresses may carry after `?` that is one (arrow/filesystem/s3fs.cc, gcsfs.cc).
ADDRESS_OPTION = re.compile(
    r"[?&](?:access_key|secret_key|session_token|access_token|token|password)=", re.IGNORECASE
)
# `InvalidAuthToken: …` is an error's name.
_TELLING = (
    r"[ACPSTacpst](?:(?<=[Aa])(?i:pi[_-]?key|ccess[_-]?key(?:[_-]id)?)|(?<=[Pp])(?i:assw(?:or)?d)"
    r"|(?<=[Ss])(?i:ecret)|(?<=[Cc])(?i:redentials?)|(?<=t)oken|(?<=[Tt])(?<![a-z].)(?i:oken))"
)
# A quote has 2ⁿ-1 backslashes before it in JSON that is text in JSON, n times over.
_IS = r"\\{0,15}[\"']?[ \t]{0,3}[=:][ \t]{0,3}"
# Each keeps what `keep` caught, so that a reader sees what stood there. Each takes time in
# proportion to a text, most of which `re` skips where a pattern begins with a set of characters.
_PATTERNS = (
    (
        # Up to its end; without one, as far as the lines are base64: errors may follow.
        r"(?P<keep>)-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?:(?!-----BEGIN )[\s\S]){0,20000}?"
        r"-----END [A-Z ]{0,40}PRIVATE KEY-----|(?:(?:\s|\\[nr]){1,4}(?:[A-Za-z0-9+/]{16,}={0,2}"
        r"|(?:Proc-Type|DEK-Info): [^\s\\]{1,80}))*)"
    ),
    r"(?P<keep>(?i:authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:bearer|basic"
    r"|token)\s{1,3}))[^\s\"',;]+",
    r"(?P<keep>[Bb]earer\s{1,3})[A-Za-z0-9._~+/=-]{6,}",
    r"(?P<keep>)" + _FORM + r"{8,}",
    r"(?P<keep>)A(?:KIA|SIA|ROA|IDA)[0-9A-Z]{16}\b",
    r"(?P<keep>)AIza[0-9A-Za-z_-]{35}",
    # Tried once for each word, and not at each `eyJ` in it.
    r"(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]{11,}\.eyJ)(?P<keep>(?:(?!eyJ)[A-Za-z0-9_-])*)"
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"(?P<keep>\w://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}(?=@)",
    r"(?P<keep>[?&](?i:token|sig|signature|x-amz-signature|x-amz-security-token"
    r"|x-amz-credential|access_token)=)[^\s&\"']+",
    r"(?P<keep>-(?<![\w-]-)-?[\w-]{0,40}(?i:token|secret|passwo?r?d|api-?key)(?:"
    r" |=|[\"'],\s{0,12}[\"']))"
    r"(?![-/~.$])[^\s\"',]{6,}",
    # `HF_TOKEN=…`, `"api_key": "…"`; what begins like a path, a reference or a structure is
    # none.
    rf"(?P<keep>{_TELLING}{_IS}(?:(?P<deep>\\{{0,15}})(?P<quote>[\"']))?)"
    r"(?(quote)(?:(?P=deep)(?P=deep)\\.|(?!(?P=deep)(?P=quote))[^\n]){4,500}"
    r"|(?![{\[*$~/<(\"'\\]|None\b|True\b)[^\s\"',;\\]{8,})",
)


def clean(text: str) -> str:
    """Return text without the values that the program knows and without what looks like another
    secret.
    """
    text = redact(text)
    for pattern in _compiled():
        text = pattern.sub(lambda match: match["keep"] + MASK, text)
    return text


@cache
def _compiled() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in _PATTERNS)
