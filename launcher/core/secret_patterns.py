"""Patterns of unknown secrets: well-known token formats, and values after secret-like names.

`redaction` removes the values that this program knows; logs and inventories may contain others.
"""

import re
from functools import cache

from launcher.core.redaction import MASK, redact

# Token prefixes of Hugging Face, OpenAI, GitHub, GitLab, NVIDIA, Slack and Docker Hub; not inside a
# longer name such as `task-…`.
_FORM = (
    r"[dghnsx](?<![A-Za-z0-9][a-z])(?:(?<=h)f_|(?<=s)k-|(?<=g)(?:h[pousr]_|ithub_pat_|lpat-)"
    r"|(?<=n)vapi-|(?<=x)ox[abprs]-|(?<=d)ckr_pat_)[A-Za-z0-9_-]"
)
# Inventories reject this length; in logs half of it is redacted.
VALUE = re.compile(_FORM + r"{16,}")
# Names of variables that hold secrets, and of some switches.
NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE"
    r"|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)
# Names of variables that may hold a secret and are not shown.
SUSPECT_NAME = re.compile(r"KEY|TOKEN(?!_PATH$)|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
# Secret parameters of Arrow URIs (arrow/filesystem/s3fs.cc, gcsfs.cc).
ADDRESS_OPTION = re.compile(
    r"[?&](?:access_key|secret_key|session_token|access_token|token|password)=", re.IGNORECASE
)
# `InvalidAuthToken: …` is an error's name.
_KEY_NAMES = (
    r"[ACPSTacpst](?:(?<=[Aa])(?i:pi[_-]?key|ccess[_-]?key(?:[_-]id)?)|(?<=[Pp])(?i:assw(?:or)?d)"
    r"|(?<=[Ss])(?i:ecret)|(?<=[Cc])(?i:redentials?)|(?<=t)oken|(?<=[Tt])(?<![a-z].)(?i:oken))"
)
# In JSON nested n times as text, 2ⁿ-1 backslashes precede a quote.
_ASSIGNMENT = r"\\{0,15}[\"']?[ \t]{0,3}[=:][ \t]{0,3}"
# Matches of `keep` stay in the text. Every pattern takes linear time; `re` skips most of a text
# quickly if a pattern begins with a character set.
_PATTERNS = (
    (
        # Up to its end; else as far as lines are base64, because errors may follow.
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
    # Anchored to the start of the token, not to each `eyJ` in it.
    r"(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]{11,}\.eyJ)(?P<keep>(?:(?!eyJ)[A-Za-z0-9_-])*)"
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"(?P<keep>\w://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}(?=@)",
    r"(?P<keep>[?&](?i:token|sig|signature|x-amz-signature|x-amz-security-token"
    r"|x-amz-credential|access_token)=)[^\s&\"']+",
    r"(?P<keep>-(?<![\w-]-)-?[\w-]{0,40}(?i:token|secret|passwo?r?d|api-?key)(?:"
    r" |=|[\"'],\s{0,12}[\"']))"
    r"(?![-/~.$])[^\s\"',]{6,}",
    # `HF_TOKEN=…`, `"api_key": "…"`, unless the value looks like a path, a reference or a
    # structure.
    rf"(?P<keep>{_KEY_NAMES}{_ASSIGNMENT}(?:(?P<deep>\\{{0,15}})(?P<quote>[\"']))?)"
    r"(?(quote)(?:(?P=deep)(?P=deep)\\.|(?!(?P=deep)(?P=quote))[^\n]){4,500}"
    r"|(?![{\[*$~/<(\"'\\]|None\b|True\b)[^\s\"',;\\]{8,})",
)


def redact_secrets(text: str) -> str:
    """Redact known values and everything that looks like a secret."""
    text = redact(text)
    for pattern in _compiled_patterns():
        text = pattern.sub(lambda match: match["keep"] + MASK, text)
    return text


@cache
def _compiled_patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in _PATTERNS)
