"""What looks like a secret: rules for names, for values, and for command lines.

A name says what a value is for, so names are judged by their *words* (``HF_TOKEN`` but not
``TOKENIZERS_PARALLELISM``, ``SIGNING_KEY`` but not ``KEYBOARD``): camelCase and punctuation
separate words.  Language models made "token" an everyday word, so the ways of counting tokens
are allowed before anything is refused.

A value is judged by the marks that issuers give their keys (``hf_``, ``ghp_``, ``AKIA``), by
the places where credentials stand (the user information of a URL, a signed query, an
authorization header), and never by its randomness: that would hit commit ids and digests.

Every pattern is linear: each starts at a fixed mark, repeats single character classes only,
and bounds what could run on.  The marks are also searched for first, so that an ordinary text
costs a few scans of its bytes.  The rules come from what secret scanners publish as their
lists of names and prefixes; they are our own wording of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED = frozenset(
    _names(
        """PWD OLDPWD TOKENIZERS_PARALLELISM NCCL_PASS_SUBCOMMS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
    SSL_CERT_FILE SSL_CERT_DIR KEYBOARD KEYMAP TRITON_CACHE_DIR KEY_CACHE_FORMAT KEY_CACHE_DTYPE
    DESKTOP_SESSION XDG_SESSION_ID XDG_SESSION_TYPE XDG_SESSION_CLASS XDG_SESSION_DESKTOP
    DBUS_SESSION_BUS_ADDRESS
    HF_HUB_DISABLE_IMPLICIT_TOKEN"""
    )
)
"""Names that look bad and are not."""

ALLOWED_PATTERNS = re.compile(
    r"""^(?:MAX|MIN|NUM)_(?:[A-Z0-9]+_)*TOKENS?$       # MAX_NUM_BATCHED_TOKENS
    | _(?:MAX|MIN|NUM)_(?:[A-Z0-9]+_)*TOKENS(?:_|$)    # VLLM_MAX_TOKENS_PER_EXPERT
    | TOKENS_PER_ | (?:^|_)NUM_TOKENS? | (?:^|_)TOKENIZER
    | (?:^|_)(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE|AUDIO|VIDEO|SPECIAL|PROMPT)_TOKEN(?:_IDS?)?$
    | (?:^|_)(?:AS|STOP|ALLOWED|BAD|SUPPRESS)_TOKENS?_IDS$ | (?:^|_)PIN_MEMORY$""",
    re.VERBOSE,
)
"""Ways of counting and naming the tokens of a language model, over the normalised name."""

WORDS = frozenset(
    _names(
        """TOKEN SECRET SECRETS PASSWORD PASSWORDS PASSWD PASSPHRASE PASS PWD KEY KEYS CREDENTIAL
    CREDENTIALS CREDS CRED COOKIE COOKIES BEARER AUTHORIZATION AUTH JWT PAT SAS SIGNATURE DSN
    NETRC KUBECONFIG SESSION SESSIONID CSRF XSRF OAUTH OTP TOTP PIN SALT HMAC ENCRYPTION WEBHOOK
    CERT PEM PFX KEYSTORE LICENSE SERVICEACCOUNT APIKEY APITOKEN AUTHTOKEN ACCESSKEY SECRETKEY
    PRIVATEKEY"""
    )
)
"""Words that are refused wherever they stand in a name."""

TOKENS_OF = frozenset(_names("API AUTH ACCESS HF GH REFRESH"))
"""Words that make a plural TOKENS one of credentials."""

PARTS = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL"
    r"|CONNECTION_?STRING|CONN_STR"
)
"""Refused anywhere in a name, also glued to other words."""

SUFFIXES = ("TOKEN", "APIKEY", "PASS", "SECRET", "PWD")
"""Refused at the end of a word: GHTOKEN, DBPASS."""

INNOCENT_SUFFIXES = ("BYPASS", "COMPASS", "SUBPASS", "OVERPASS", "UNDERPASS", "TRESPASS")

EXACT = re.compile(
    r"(?:DATABASE_URL|REDIS_URL|MONGO[A-Z0-9_]*_UR[A-Z0-9_]*|AMQP_URL|CELERY_BROKER_URL|HTTP_PROXY"
    r"|HTTPS_PROXY|ALL_PROXY|PGPASSFILE|MYSQL_PWD|KRB5CCNAME)"
)
"""Names whose values carry credentials by custom."""

PREFIXES = _names(
    """AWS_ AZURE_ GOOGLE_ GCP_ GCLOUD_ GH_ GITHUB_ GITLAB_ CI_JOB_ VAULT_ NGC_ OPENAI_ ANTHROPIC_
    COHERE_ MISTRAL_ GROQ_ REPLICATE_ CLOUDFLARE_ SNOWFLAKE_ DATABRICKS_ KUBERNETES_ SSH_ GPG_
    SUDO_ TWINE_ UV_INDEX_ PIP_INDEX_URL PIP_EXTRA_INDEX_URL"""
)
"""Beginnings of names that tell an identity: refused, although not always secret."""

LITERAL_FLAGS = frozenset(("--header", "--user", "-H", "-u"))
"""Flags of clients whose value is a credential, whatever their name says."""


@dataclass(frozen=True)
class Finding:
    """A rule that refuses: its number in the list of name rules (3 to 7), and what it saw."""

    number: int
    rule: str


@dataclass(frozen=True)
class ValueRule:
    """One mark of a secret: ``marks`` (lower case) must occur for ``pattern`` to be tried.

    The group ``secret`` of the pattern, or all of it, is what must not be shown.
    """

    rule: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]


_EDGE = r"(?<![A-Za-z0-9])"  # "task-risk-..." holds "sk-" only inside a word
_MIXED = r"(?=[a-z_-]{0,40}[A-Z0-9])"  # issued keys are never all lower case, names of things are
_SHOWN = r"(?!\[redacted: )"  # what has been redacted stays as it is
_QUERY = (
    "sig|signature|token|access_token|refresh_token|id_token|auth_token|api_key|apikey|api-key|key"
    "|password|passwd|secret|client_secret|x-amz-signature|x-amz-security-token|x-amz-credential"
    "|x-goog-signature|x-goog-credential"
)
_ASSIGNED = (
    "api[_-]?key|(?:hf|auth|access|api|bearer|refresh|session|hub)[_-]?token|passw(?:or)?d"
    "|passphrase|(?:client[_-])?secret(?:[_-]?key)?|private[_-]?key|access[_-]?key"
)


def _key(rule: str, *marks: str, body: str) -> ValueRule:
    """A rule for keys that begin, at the edge of a word, with one of the marks."""
    heads = "|".join(re.escape(mark) for mark in marks)
    pattern = re.compile(f"{_EDGE}(?:{heads}){body}")
    return ValueRule(rule, tuple(mark.lower() for mark in marks), pattern)


VALUE_RULES: tuple[ValueRule, ...] = (
    ValueRule(
        "private key block",
        ("private key-----",),
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----"
            r"(?:(?!-----END)[A-Za-z0-9+/=\s:,\\-]){0,20000}+(?:-----END [A-Z0-9 ]{0,60}-----)?"
        ),
    ),
    ValueRule(
        "URL user information",
        ("://",),
        re.compile(
            r"://(?P<secret>[^\s/?#@:\"'<>]{0,512}:[^\s/?#\"'<>]{1,2048})@"
            r"|(?<=http)s?://(?P<token>[^\s/?#@:\"'<>]{1,2048})@"
        ),
    ),
    ValueRule(
        "URL query secret",
        ("sig=", "signature=", "token=", "key=", "password=", "passwd=", "secret=", "credential="),
        re.compile(rf"(?i:[?&;](?:{_QUERY}))={_SHOWN}(?P<secret>[^\s&#;\"'<>]+)"),
    ),
    _key("Hugging Face token", "hf_", "api_org_", body=_MIXED + "[A-Za-z0-9]{16,}"),
    _key("sk- key", "sk-", body=r"(?:proj|ant|or|svcacct|admin|lf)-[\w-]{16,}"),
    _key("sk- key", "sk-", body=_MIXED + r"\w{16,}"),
    _key("GitHub token", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", body="[A-Za-z0-9]{16,}"),
    _key("GitHub token", "github_pat_", body=r"\w{20,}"),
    _key("GitLab token", "glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", body=r"[\w-]{16,}"),
    _key("AWS access key id", "AKIA", "ASIA", "ABIA", "ACCA", body=r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _key("Google API key", "AIza", body=r"[\w-]{30,}"),
    _key("Google OAuth token", "ya29.", body=r"[\w-]{20,}"),
    _key("NVIDIA API key", "nvapi-", body=r"[\w-]{20,}"),
    _key("Slack token", *(f"xox{kind}-" for kind in "abeoprs"), body=r"[A-Za-z0-9-]{10,}"),
    ValueRule(
        "JSON web token",
        ("eyj", "eya", "eyk"),
        # The edge holds all that the body does, or each of many "eyJ-" would run to the end.
        re.compile(r"(?<![\w-])ey[JAK][\w-]{8,}+\.ey[JAK][\w-]{8,}+(?:\.[\w-]+)?"),
    ),
    _key("npm token", "npm_", body="[A-Za-z0-9]{30,}"),
    _key("PyPI token", "pypi-AgE", body=r"[\w-]{16,}"),
    _key("Databricks token", "dapi", body="[a-f0-9]{32}(?![A-Za-z0-9])"),
    _key("API key", "pplx-", "gsk_", "xai-", "r8_", "rpa_", body=_MIXED + "[A-Za-z0-9]{20,}"),
    _key("Stripe key", "sk_live_", "rk_live_", "sk_test_", "rk_test_", body="[A-Za-z0-9]{10,}"),
    _key("SendGrid key", "SG.", body=r"[\w-]{16,}+\.[\w-]{16,}"),
    ValueRule(
        "authorization header",
        ("bearer", "basic", "token"),
        re.compile(
            r"\b(?:(?i:bearer)[ \t]{1,8}(?P<secret>(?=[a-z.~+/=_-]{0,40}[A-Z0-9])[\w.~+/=-]{16,})"
            r"|(?:Basic|Token|basic|token)[ \t]{1,8}"
            r"(?P<token>(?=[A-Za-z_-]{0,40}[0-9+/=])[\w+/=-]{16,}))"
        ),
    ),
    ValueRule(
        "storage account key",
        ("accountkey=", "sharedaccesskey="),
        re.compile(rf"(?:AccountKey|SharedAccessKey)={_SHOWN}(?P<secret>[A-Za-z0-9+/=%]{{8,}})"),
    ),
)
"""Marks of secrets in any text, in the order they are tried."""

ASSIGNMENT = ValueRule(
    "assignment",
    ("key", "token", "passw", "passphrase", "secret"),
    re.compile(
        # "api_key = x", "--api-key=x" and '"api_key": "x"'; a colon without quotes is prose.
        rf"(?i:(?<![a-z])(?:{_ASSIGNED}))\\?[\"']?[ ]?(?:=[ ]?\\?[\"']?|:[ ]?\\?[\"']){_SHOWN}"
        r"(?!(?:None|null|true|false|True|False|str|Optional|SecretStr)\b)"
        r"(?P<secret>[^\s\"',;(){}\[\]<>\\]{4,})"
    ),
)
"""``api_key='...'``, as engines log their configuration."""


def words_of(name: str) -> str:
    """The name with its words apart, in capitals: ``myApiKey`` -> ``MY_API_KEY``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"[^A-Za-z0-9]+", "_", apart).upper().strip("_")


def name_finding(name: str, value: str | None = None) -> Finding | None:
    """What refuses this name, or this value under any name; None when nothing does."""
    normal, raw = words_of(name), name.upper()
    if not {normal, raw} & ALLOWED and not ALLOWED_PATTERNS.search(normal):
        words = normal.split("_") + raw.split("_")
        for finding in (
            _word(words, value),
            _part(words, normal, raw),
            _exact(normal, raw),
            _prefix(normal, raw),
        ):
            if finding is not None:
                return finding
    rule = secret_value(value) if value else None
    return Finding(7, f"value: {rule}") if rule else None


def _word(words: Sequence[str], value: str | None) -> Finding | None:
    """Rule 3: a whole word; TOKENS needs a companion, or a value that is no number."""
    for word in words:
        if word in WORDS:
            return Finding(3, f"word {word}")
    if "TOKENS" in words and (TOKENS_OF & set(words) or not is_plain(value)):
        return Finding(3, "word TOKENS")
    return None


def is_plain(value: str | None) -> bool:
    """Whether the value is unknown, a number or a boolean."""
    plain = r"\s*(?:[-+]?[\d.,_]+(?:e[-+]?\d+)?|true|false|yes|no|on|off|none|null)?\s*"
    return value is None or re.fullmatch(plain, value, re.IGNORECASE) is not None


def _part(words: Sequence[str], normal: str, raw: str) -> Finding | None:
    """Rule 4: a part of the name, or the end of a word."""
    found = PARTS.search(normal) or PARTS.search(raw)
    if found:
        return Finding(4, f"contains {found[0]}")
    for word in words:
        for suffix in SUFFIXES:
            if word.endswith(suffix) and not word.endswith(INNOCENT_SUFFIXES):
                return Finding(4, f"ends with {suffix}")
    return None


def _exact(normal: str, raw: str) -> Finding | None:
    """Rule 5: names whose values carry credentials by custom."""
    found = EXACT.fullmatch(normal) or EXACT.fullmatch(raw)
    return Finding(5, f"exact {found[0]}") if found else None


def _prefix(normal: str, raw: str) -> Finding | None:
    """Rule 6: names that tell an identity."""
    for prefix in PREFIXES:
        if normal.startswith(prefix) or raw.startswith(prefix):
            return Finding(6, f"prefix {prefix}")
    return None


def secret_name(name: str, value: str | None = None) -> str | None:
    """The rule that refuses a variable of this name (and value, where known), or None."""
    finding = name_finding(name, value)
    return finding.rule if finding else None


def secret_value(text: str) -> str | None:
    """The rule that finds a secret anywhere in the text, or None."""
    lower = text.lower()
    for rule in VALUE_RULES:
        if any(mark in lower for mark in rule.marks) and rule.pattern.search(text):
            return rule.rule
    return None


def secret_argv(argv: Sequence[str]) -> str | None:
    """The rule that refuses this command line, or None; the rule never holds the value.

    Refused: a flag whose name asks for a credential, ``NAME=value`` of such a name, and any
    argument that looks like a secret.  A flag never makes its neighbour part of it: a boolean
    one has no value.
    """
    for index, word in enumerate(argv):
        following = argv[index + 1] if index + 1 < len(argv) else None
        rule = _flag(argv, index, following) or secret_value(word) or _assignment(word)
        if rule is not None:
            return f"argument {index}: {rule}"
    return None


def _flag(argv: Sequence[str], index: int, following: str | None) -> str | None:
    """What refuses the word as a flag, ``--name``, ``--name=value`` or ``--env=NAME=value``."""
    word = argv[index]
    name, equals, value = word.partition("=")
    # Glued (-uNAME:PASSWORD, -HName: value) they hold a colon; -ub is an option of its own.
    if name in LITERAL_FLAGS or (word[:2] in ("-u", "-H") and ":" in word[2:]):
        return None if _of_python(argv, index) else f"flag {name[:2] if name[1] != '-' else name}"
    if name.startswith("-") and re.search(r"[A-Za-z]{2}", name):
        given = value if equals else following
        if given is not None and given.startswith("-") and not equals:
            given = None
        return secret_name(name.lstrip("-"), given)
    return None


def _of_python(argv: Sequence[str], index: int) -> bool:
    """Whether the word stands among a Python interpreter's own options: its -u is harmless."""
    for word in reversed(argv[:index]):
        if not word.startswith("-"):
            return re.fullmatch(r"(?:python|pypy)[\d.]*", PurePath(word).name) is not None
    return False


def _assignment(word: str) -> str | None:
    """What refuses ``NAME=value``, bare or after a flag's ``=``, or ``{"api_key": "..."}``."""
    for part in (word, word.partition("=")[2]):
        found = re.match(r"-{0,2}([A-Za-z_][\w.-]*)=(.+)", part, re.DOTALL)
        rule = secret_name(found[1], found[2]) if found else None
        if rule:
            return rule
    found = ASSIGNMENT.pattern.search(word)
    return ASSIGNMENT.rule if found else None
