"""What of the environment a child gets."""

from __future__ import annotations

import pytest

from ikit_mcp.process.environment import (
    OFFLINE,
    benchmark_environment,
    clean_environment,
    engine_variable_names,
)
from ikit_mcp.process.secrets import secret_name
from ikit_mcp.registry import OpError

HERE = {
    "PATH": "/bin",
    "HOME": "/home/u",
    "LANG": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "VLLM_USE_V1": "1",
    "VLLM_API_KEY": "made-up-value",
    "INDEX": "https://u:made-up@host/",
    "AWS_PROFILE": "work",
    "EDITOR": "vi",
}


def test_a_clean_environment_has_the_list_and_what_is_kept() -> None:
    base = {name: HERE[name] for name in ("PATH", "HOME", "LANG", "CUDA_VISIBLE_DEVICES")}
    assert clean_environment(source=HERE) == base
    kept = clean_environment(["VLLM_USE_V1", "NOT_SET"], source=HERE)
    assert kept == {**base, "VLLM_USE_V1": "1"}


def test_a_private_home_takes_the_place_of_the_users() -> None:
    assert clean_environment(private_home="/tmp/x", source=HERE)["HOME"] == "/tmp/x"


def test_the_source_defaults_to_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "xx_YY")
    monkeypatch.setenv("MADE_UP_TOKEN", "made-up-value")
    assert clean_environment()["LANG"] == benchmark_environment()["LANG"] == "xx_YY"
    assert "MADE_UP_TOKEN" not in benchmark_environment()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("VLLM_API_KEY", "word KEY"),
        ("INDEX", "URL user information"),
        ("AWS_PROFILE", "prefix AWS_"),
        ("UNSET_TOKEN", "word TOKEN"),
        ("A=B", "not a variable's name"),
        ("", "not a variable's name"),
    ],
)
def test_a_secret_may_not_be_kept(name: str, rule: str) -> None:
    with pytest.raises(OpError) as caught:
        clean_environment([name], source=HERE)
    assert rule in str(caught.value) and "made-up" not in str(caught.value)


def test_a_listed_variable_with_a_secret_in_it_is_refused() -> None:
    with pytest.raises(OpError, match="PATH") as caught:
        clean_environment(source={"PATH": "/bin:hf_FAKEfakeFAKEfake00"})
    assert "hf_" not in str(caught.value)


def test_a_benchmark_gets_everything_but_the_secrets() -> None:
    kept = ["PATH", "HOME", "LANG", "CUDA_VISIBLE_DEVICES", "VLLM_USE_V1", "EDITOR"]
    assert list(benchmark_environment(HERE)) == kept
    assert "VLLM_API_KEY" in benchmark_environment(HERE, allow=["VLLM_API_KEY"])


def test_engine_variables_are_told_by_name_as_kept_or_dropped() -> None:
    found = engine_variable_names(["VLLM_", "CUDA_"], ["LANG", "OMP_NUM_THREADS"], HERE)
    assert found.present == ("CUDA_VISIBLE_DEVICES", "LANG", "VLLM_API_KEY", "VLLM_USE_V1")
    assert found.kept == ("CUDA_VISIBLE_DEVICES", "LANG", "VLLM_USE_V1")
    assert found.dropped == ("VLLM_API_KEY",)
    clean = clean_environment(source=HERE)
    assert "VLLM_USE_V1" in engine_variable_names(["VLLM_"], [], HERE, given=clean).dropped
    assert engine_variable_names([], ["NO_SUCH_VARIABLE_HERE"]).present == ()


def test_the_offline_variables_are_no_secrets() -> None:
    assert [name for name, value in OFFLINE.items() if secret_name(name, value)] == []
