"""What leaves: known secrets in every dress, and nothing of ordinary text."""

from __future__ import annotations

import base64
import json
import os
import random
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.process.secrets import known_secrets, redact, redact_bytes, redact_json, variants

VALUE = "made/up+val:ue 0é1"
SECRETS = {"MADE_UP_TOKEN": VALUE}
SHOWN = "[redacted: MADE_UP_TOKEN]"


def test_only_values_that_are_secrets_count(tmp_path: Path) -> None:
    environ = {
        "MADE_UP_TOKEN": "made-up-value-1",  # a word
        "PGPASSWORD": " made-up-value-2\n",  # a part; blanks do not belong to it
        "KRB5CCNAME": "made-up-cache",  # exact
        "AWS_PROFILE": "production",  # an identity alone
        "AWS_SOMETHING": "prefix AKIAFAKEFAKEFAKEFAKE suffix",  # an identity, and a marked value
        "AWS_DEFAULT_REGION": "us-east-1",
        "GITHUB_WORKSPACE": str(tmp_path),
        "TLS_KEY": str(tmp_path),  # a path that exists
        "LONG_KEY": "x" * 5000,  # too long for one
        "ODD_KEY": "with\0nul-inside",
        "MY_SECRET": "short",
        "SEED_KEY": "1234567890",
        "REGION_KEY": "eu-central-1",
        "ZONE_KEY": "us-central1",
        "HTTPS_PROXY": "https://user:made-up-pw@proxy:3128",
        "DATABASE_URL": "postgres://made-up-user:pw@db/x",
        "REDIS_URL": "redis://cache:6379/0",
        "SLACK_WEBHOOK": "https://hooks.example/services/T0/B0",
        "INDEX": "https://made-up-user@host/simple",
        "STORE_CONNECTION_STRING": "AccountName=x;AccountKey=RkFLRUZBS0U=;Suffix=y",
        "HF_HOME": "/not/there/but/harmless",
    }
    assert known_secrets(environ) == {
        "MADE_UP_TOKEN": "made-up-value-1",
        "PGPASSWORD": "made-up-value-2",
        "KRB5CCNAME": "made-up-cache",
        "AWS_SOMETHING": "AKIAFAKEFAKEFAKEFAKE",
        "LONG_KEY": "x" * 5000,
        "ODD_KEY": "with\0nul-inside",
        "HTTPS_PROXY": "made-up-pw",
        "DATABASE_URL": "made-up-user:pw",
        "INDEX": "made-up-user",
        "STORE_CONNECTION_STRING": "RkFLRUZBS0U=",
    }


def test_a_region_and_the_working_folder_redact_nothing() -> None:
    environ = {"AWS_DEFAULT_REGION": "us-east-1", "GITHUB_WORKSPACE": str(Path.cwd())}
    text = f"ran in {Path.cwd()} (us-east-1)"
    assert redact(text, known_secrets(environ)) == text


@pytest.mark.parametrize(
    "dressed",
    [
        VALUE,
        quote(VALUE),
        quote(VALUE, safe=""),
        quote_plus(VALUE),
        quote(VALUE, safe="").replace("%2F", "%2f").replace("%3A", "%3a").replace("%2B", "%2b")
        .replace("%C3%A9", "%c3%a9"),
        json.dumps(VALUE)[1:-1],
    ],
)  # fmt: skip
def test_a_known_secret_is_replaced_in_every_dress(dressed: str) -> None:
    assert redact(f"<{dressed}>", SECRETS) == f"<{SHOWN}>"
    assert redact_bytes(f"<{dressed}>".encode(), SECRETS) == f"<{SHOWN}>".encode()


@given(st.binary(max_size=5), st.binary(max_size=5))
def test_a_known_secret_is_found_inside_any_base64(before: bytes, after: bytes) -> None:
    data = before + VALUE.encode() + after
    for text in (base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()):
        assert SHOWN in redact(text, SECRETS)


@given(st.text(min_size=8, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_no_known_secret_ever_passes(value: str, before: str, after: str) -> None:
    clean = redact(before + value + after, {"X_KEY": value})
    assert value not in clean or value in "[redacted: X_KEY]"


def test_a_secret_inside_a_longer_secret_leaves_no_rest() -> None:
    secrets = {"A_KEY": "made-up-value", "B_KEY": "made-up-value-and-more"}
    assert redact("made-up-value-and-more", secrets) == "[redacted: B_KEY]"
    assert redact("made-up-value", secrets) == "[redacted: A_KEY]"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "https://user:p@ss:w0rd@host:3128/x?a=1",
            "https://[redacted: URL user information]@host:3128/x?a=1",
        ),
        (
            "GET /v1?a=1&api_key=FAKEFAKE&b=2 failed",
            "GET /v1?a=1&api_key=[redacted: URL query secret]&b=2 failed",
        ),
        (
            "Authorization: Bearer FAKEFAKEFAKEFAKE\n",
            "Authorization: Bearer [redacted: authorization header]\n",
        ),
        ("key hf_FAKEfakeFAKEfake00.", "key [redacted: Hugging Face token]."),
        (
            "ServerArgs(api_key='made-up', ssl_keyfile_password=\"made-up\", port=1)",
            "ServerArgs(api_key='[redacted: assignment]',"
            ' ssl_keyfile_password="[redacted: assignment]", port=1)',
        ),
        (
            "{\\\"hf_token\\\": \\\"made-up\\\"}",
            "{\\\"hf_token\\\": \\\"[redacted: assignment]\\\"}",
        ),
        (
            "a -----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nAA+/=\n"
            "-----END RSA PRIVATE KEY----- b",
            "a [redacted: private key block] b",
        ),
    ],
)  # fmt: skip
def test_only_the_secret_itself_is_replaced(text: str, clean: str) -> None:
    assert redact(text, {}) == clean


def test_json_is_cleaned_in_values_keys_and_under_secret_keys() -> None:
    value = {
        "list": [f"a {VALUE}", 1, 2.5, None, True, ("x", VALUE)],
        VALUE: 1,
        "https://u:pw@h": 2,
        "https://v:pw@h": 3,
        "api_key": "made-up",
        "openaiApiKey": "made-up",
        "password": "",
        "secret_count": 3,
        "api_key_env": "MADE_UP_TOKEN",
        "ssl_keyfile_password": None,
        "max_tokens": "128",
        7: "seven",
    }
    assert redact_json(value, SECRETS) == {
        "list": [f"a {SHOWN}", 1, 2.5, None, True, ["x", SHOWN]],
        SHOWN: 1,
        "https://[redacted: URL user information]@h": 2,
        "https://[redacted: URL user information]@h'": 3,
        "api_key": "[redacted: contains API_KEY]",
        "openaiApiKey": "[redacted: contains API_KEY]",
        "password": "",
        "secret_count": 3,
        "api_key_env": "MADE_UP_TOKEN",
        "ssl_keyfile_password": None,
        "max_tokens": "128",
        7: "seven",
    }
    clean = redact_json(value, SECRETS)
    assert redact_json(clean, SECRETS) == clean


def test_json_that_is_nested_without_end_is_cut() -> None:
    value: object = VALUE
    for _ in range(5000):
        value = [value]
    assert "left out" in json.dumps(redact_json(value, SECRETS))


def test_binary_data_loses_known_secrets_and_nothing_else() -> None:
    binary = b"\xff\x00" + VALUE.encode() + b"hf_FAKEfakeFAKEfake00"
    assert redact_bytes(binary, SECRETS) == (
        b"\xff\x00" + SHOWN.encode() + b"hf_FAKEfakeFAKEfake00"
    )
    plain = b"nothing here"
    assert redact_bytes(plain, SECRETS) is plain


def test_without_secrets_given_those_of_the_environment_are_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MADE_UP_TOKEN", VALUE)
    assert redact(VALUE) == redact_json([VALUE])[0] == SHOWN
    assert redact_bytes(VALUE.encode()) == SHOWN.encode()
    monkeypatch.delenv("MADE_UP_TOKEN")
    assert redact(VALUE) == VALUE


def test_a_value_that_is_no_unicode_is_searched_as_its_bytes() -> None:
    value = os.fsdecode(b"made-up-\xff\xfe-value")
    assert b"made-up-\xff\xfe-value" in variants(value)
    assert redact_bytes(b"<made-up-\xff\xfe-value>", {"A_KEY": value}) == b"<[redacted: A_KEY]>"


def test_no_short_form_is_searched_for() -> None:
    dice = random.Random(3)
    for _ in range(100):
        value = "".join(dice.choices("aZ0/+ %é", k=dice.randrange(8, 12)))
        assert min(map(len, variants(value))) >= 8
