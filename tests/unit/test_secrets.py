"""Names, values and command lines that look like secrets, and those that only sound like them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.process.secrets import redact, secret_argv, secret_name, secret_value

CASES = Path(__file__).parents[1] / "data" / "cases"


def cases(name: str) -> list[tuple[str, str]]:
    """The (subject, decision) rows of a table."""
    lines = (CASES / name).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(subject, decision) for subject, decision in rows]


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


ALLOWED = """HF_HOME HF_HUB_OFFLINE HF_ENDPOINT TRANSFORMERS_OFFLINE VLLM_ATTENTION_BACKEND
    VLLM_USE_V1 VLLM_WORKER_MULTIPROC_METHOD VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
    VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE SGLANG_NUM_RESERVED_DECODE_TOKENS TOKENIZERS_PARALLELISM
    MAX_NUM_BATCHED_TOKENS MAX_TOKENS KEYBOARD KEYMAP MONKEY TURKEY_MODE PWD OLDPWD PATH HOME
    LANG COMPASS_DIR NCCL_BYPASS_X NCCL_DEBUG NCCL_PASS_SUBCOMMS CUDA_VISIBLE_DEVICES
    CUDA_CACHE_PATH LD_LIBRARY_PATH OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF
    TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR SSL_CERT_FILE GGML_CUDA_FORCE_MMQ
    ROCR_VISIBLE_DEVICES VLLM_PIN_MEMORY EOS_TOKEN_ID DESKTOP_SESSION tokens_per_second
    GPU_DEVICE_ORDINAL"""
REFUSED = """HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACEHUB_API_TOKEN HF_TOKEN_PATH VLLM_API_KEY
    SGLANG_API_KEY LLAMA_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
    AWS_PROFILE AWS_DEFAULT_REGION AZURE_CLIENT_SECRET AZURE_STORAGE_CONNECTION_STRING
    AZURE_STORAGE_SAS GOOGLE_APPLICATION_CREDENTIALS GOOGLE_API_KEY KUBECONFIG NGC_API_KEY
    NVIDIA_API_KEY WANDB_API_KEY OPENAI_API_KEY ANTHROPIC_AUTH_TOKEN PGPASSWORD PGPASSFILE
    MYSQL_PWD REDIS_PASSWD DB_PASS DBPASS SENTRY_DSN DATABASE_URL REDIS_URL HTTPS_PROXY
    PIP_EXTRA_INDEX_URL SESSION_COOKIE JSESSIONID_COOKIE GH_PAT GITHUB_TOKEN GHTOKEN
    CI_JOB_TOKEN DOCKER_AUTH_CONFIG SSH_AUTH_SOCK SSH_CONNECTION SSH_PRIVATE_KEY TLS_CERT
    TLS_KEY SIGNING_KEY SLACK_WEBHOOK BEARER X_CSRFTOKEN myApiKey apiToken RPA_CREDENTIALS
    ENCRYPTION_SALT VAULT_ADDR AGENT_MESSAGING_TOKEN KRB5CCNAME TOTP_SEED SUDO_COMMAND
    https_proxy MONGODB_URI HFTOKEN HF_TOKENS API_TOKENS my-secret-thing db.password
    serviceAccount"""


@pytest.mark.parametrize("name", ALLOWED.split())
def test_a_name_that_only_sounds_secret_is_allowed(name: str) -> None:
    assert secret_name(name) is None


@pytest.mark.parametrize("name", REFUSED.split())
def test_a_secret_name_is_refused(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize(("name", "decision"), cases("secret_names.tsv"))
def test_the_table_of_names_is_kept(name: str, decision: str) -> None:
    assert (secret_name(name) is not None) == (decision == "refuse")


@pytest.mark.parametrize(("value", "decision"), cases("secret_values.tsv"))
def test_the_table_of_values_is_kept(value: str, decision: str) -> None:
    assert (secret_value(value) is not None) == (decision == "secret")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("HF_TOKEN", "word TOKEN"),
        ("PGPASSWORD", "contains PASSWORD"),
        ("GHTOKEN", "ends with TOKEN"),
        ("https_proxy", "exact HTTPS_PROXY"),
        ("AWS_PROFILE", "prefix AWS_"),
    ],
)
def test_the_rule_says_what_it_saw(name: str, rule: str) -> None:
    assert secret_name(name) == rule


def test_plural_tokens_are_judged_by_the_value_where_it_is_known() -> None:
    assert secret_name("PROMPT_TOKENS") is None
    for number in ("128", " 1e6 ", "true", "1,024", ""):
        assert secret_name("PROMPT_TOKENS", number) is None
    assert secret_name("PROMPT_TOKENS", "abc-def") == "word TOKENS"


def test_any_name_is_refused_for_a_value_that_gives_itself_away() -> None:
    assert secret_name("INDEX_URL", "https://user:made-up@host/simple") == (
        "value: URL user information"
    )
    assert secret_name("INDEX_URL", "https://host/simple") is None
    assert secret_name("TOKENIZERS_PARALLELISM", "hf_FAKEfakeFAKEfake00")


@pytest.mark.parametrize(
    "value",
    [
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "amqp://guest:made-up@host",
        "http://made-up-user@host/path",
        "x?sig=abc",
        "https://h/p?a=1&X-Amz-Signature=0f0f",
        "api_org_FAKEfakeFAKEfake00",
        "sk-proj-FAKE-FAKE_FAKEFAKE",
        "sk-ant-api03-fakefakefakefake",
        "github_pat_FAKEFAKEFAKEFAKEFAKE00",
        "glpat-FAKEFAKEFAKEFAKEFAKE",
        "key is AKIAFAKEFAKEFAKEFAKE.",
        "AIzaFAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKE",
        "ya29.FAKEFAKEFAKEFAKEFAKE",
        "nvapi-FAKEFAKEFAKEFAKEFAKE",
        "xoxb-0000-FAKEFAKE",
        "eyJhbGciOiJmYWtlIn0.eyJzdWIiOiJmYWtlIn0.c2ln",
        "npm_FAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKE0000",
        "pypi-AgEFAKEFAKEFAKEFAKE",
        "dapi0123456789abcdef0123456789abcdef",
        "pplx-FAKEFAKEFAKEFAKEFAKE",
        "gsk_FAKEFAKEFAKEFAKEFAKE",
        "r8_FAKEFAKEFAKEFAKEFAKE",
        "rpa_FAKEFAKEFAKEFAKEFAKE",
        "xai-FAKEFAKEFAKEFAKEFAKE",
        "sk_live_FAKEFAKE0000",
        "SG.FAKEFAKEFAKEFAKE.FAKEFAKEFAKEFAKE",
        "Authorization: Basic dXNlcjpmYWtlZmFrZQ==",
        "authorization: token FAKEFAKEFAKEFAKE00",
        "AccountName=x;AccountKey=RkFLRUZBS0U=;",
        "SharedAccessKey=RkFLRUZBS0U=",
    ],
)
def test_what_issuers_and_places_mark_as_secret_is_found(value: str) -> None:
    assert secret_value(value)
    assert "FAKE" not in redact(value, {}).upper().replace("[REDACTED", "")


ORDINARY = [
    "task-risk-assessment-model-v1 and desk-sharing-arrangements-0001",
    "0123456789abcdef0123456789abcdef01234567",
    "sha256:" + "0f" * 32,
    "max_tokens=128 num_speculative_tokens=3 token_ids=[1, 2, 3]",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x3_nn_align8>",
    "model.layers.17.self_attn.q_proj.weight blk.0.attn_q.weight token_embd.weight",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
    "flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>",
    "git@github.com:org/repo.git ssh://git@host/repo postgres://user@host/db",
    "http://127.0.0.1:8000/v1 https://huggingface.co/meta-llama/Llama-3.1-8B?page=2",
    "basic block-sparse attention, token classification pipelines, bearer of good news",
    "api_key=None password: str secret_key = Optional[str]",
    "the api_key: must be the name of a variable, as the key=value pairs say",
    "GPU-5f1c0b8e-1111-2222-3333-444455556666 00000000:01:00.0",
    "hf_transfer_max_parallel hf_quantizerconfigurations",
    "gpu_token_throughput 12 tok/s, token 17 of 128",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert secret_value(text) is None
    assert redact(text, {}) == text


FLAGS = words("""--api-key --admin-api-key --hf-token --ssl-keyfile-password --auth-token --password
    --wandb-key --header --user -H -u""")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_for_a_credential_is_refused(flag: str) -> None:
    assert secret_argv(["serve", flag, "made-up"])
    assert secret_argv(["serve", f"{flag}=made-up"])
    assert secret_argv(["serve", flag])


HARMLESS_FLAGS = words("""--max-num-batched-tokens --num-speculative-tokens --tokenizer
    --kv-cache-dtype --prompt-tokens --return-tokens-as-token-ids --key-cache-format
    --eos-token-id""")


@pytest.mark.parametrize("flag", HARMLESS_FLAGS)
def test_a_flag_that_only_sounds_like_one_is_allowed(flag: str) -> None:
    assert secret_argv(["serve", flag, "128"]) is None
    assert secret_argv(["serve", f"{flag}=128", "--other"]) is None
    assert secret_argv(["serve", flag, "--other"]) is None


@pytest.mark.parametrize(
    "argv",
    [
        ["env", "HF_TOKEN=made-up", "serve"],
        ["nsys", "profile", "--env-var=HF_TOKEN=made-up"],
        ["docker", "run", "-e", "HF_TOKEN=made-up"],
        ["java", "-Dapi.key=made-up"],
        ["curl", "-uuser:made-up"],
        ["curl", "https://user:made-up@host/"],
        ["serve", '{"api_key": "made-up"}'],
        ["serve", "Bearer FAKEFAKEFAKEFAKE"],
    ],
)
def test_a_secret_is_found_wherever_it_stands_on_the_line(argv: list[str]) -> None:
    rule = secret_argv(argv)
    assert rule and "made-up" not in rule and "FAKE" not in rule


@pytest.mark.parametrize(
    "argv",
    [
        ["python3.11", "-u", "-m", "vllm.entrypoints.openai.api_server"],
        ["llama-server", "-ub", "512"],
        ["nsys", "profile", "-o", "report", "/usr/bin/python", "-S", "-u", "worker.py"],
        ["python", "-c", "import os; print(os.environ)"],
        ["serve", "--speculative-config", '{"method":"eagle","num_speculative_tokens":3}'],
        ["serve", "max_tokens=128", "-", "--", "-n", "-x=1"],
        ["serve", "--model", "meta-llama/Llama-3.1-8B-Instruct", "/data/key=3/file"],
        [],
    ],
)
def test_an_ordinary_command_line_is_allowed(argv: list[str]) -> None:
    assert secret_argv(argv) is None


HOSTILE = [
    "a", ":", "://", "://:", "?key=", "-----BEGIN PRIVATE KEY-----", "eyJ", "eyJ-", "eyJaaaaaaaa.",
    "sk-", "sk-proj-", "Bearer ", "token a-", "hf_", "hf_a-", "SG.", "SG-", "api_key=",
    "api_key = ", "http://", "a@", "https://a:", "://a:b", "AccountKey=", "xoxb-", "A\n", "npm_a",
    "a_b", "Ab", "[redacted: ", "\\\"", "'", " = ", "ghp_", "secret:\"",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_grows_no_faster_than_a_hostile_text(piece: str) -> None:
    """16 times the text may take 16 times the CPU (60 with noise), not 256 times."""

    def cost(size: int) -> float:
        text = piece * (size // len(piece))
        start = time.process_time()
        redact(text, {})
        secret_argv([text, "x"])
        return time.process_time() - start

    small = min(cost(1 << 16) for _ in range(2))
    assert cost(1 << 20) < 60 * max(small, 0.005)


@given(st.text(alphabet="abAB01:/@?=&-._ \"'sk", max_size=200))
def test_what_was_redacted_stays_as_it_is(text: str) -> None:
    once = redact(text, {})
    assert redact(once, {}) == once


def test_random_digests_and_ids_are_never_hit() -> None:
    dice = random.Random(5)
    for _ in range(300):
        text = f"{dice.randbytes(20).hex()} {dice.randbytes(32).hex()} {dice.getrandbits(60)}"
        assert secret_value(text) is None
