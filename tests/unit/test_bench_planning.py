"""Before anything runs: engine, model, device, threads, addresses; what is refused, and why."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import AMD, CPU, GPU, plan
from helpers.tiny_models import shared_gguf
from ikit_mcp.call import Call, Settings
from ikit_mcp.process import devices
from ikit_mcp.registry import EXECUTES, MEASURES, OpError, load
from ikit_ops.engines import adapter_named, adapters, find, openai, planning
from ikit_ops.engines.adapter import Found, device_variables, key_values
from ikit_ops.engines.llamacpp import option_values, split_options


@pytest.fixture
def call(tmp_path: Path) -> Call:
    operation = load(None).get("bench")
    return Call(operation=operation, args={}, settings=Settings(tmp_path / "home"), scope=EXECUTES)


def arguments(**changes: Any) -> dict[str, Any]:
    """The arguments of bench at their defaults, but for the changes."""
    usual: dict[str, Any] = {arg.name: arg.default for arg in load(None).get("bench").args}
    usual["model"] = "acme/model"
    return usual | changes


# --- effects ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, MEASURES),
        ({"engine": "vllm"}, MEASURES),
        ({"engine": "cmd"}, EXECUTES),
        ({"command": ["true"]}, EXECUTES),
        ({"python": sys.executable}, MEASURES),
        ({"python": "/somewhere/else/python"}, EXECUTES),
        ({"engine_args": ["trust_remote_code=true"]}, EXECUTES),
        ({"engine_args": ["--trust-remote-code true"]}, EXECUTES),
        ({"engine_args": ["worker_cls=evil.Worker"]}, EXECUTES),
        ({"engine_args": ["max_model_len=1"]}, MEASURES),
        (
            {"engine_args": ['structured_outputs_config={"reasoning_parser_plugin": "/x.py"}']},
            EXECUTES,
        ),
        ({"engine_args": ['kv_transfer_config={"kv_connector_module_path": "x.y"}']}, EXECUTES),
        ({"engine_args": ['ec_transfer_config={"ec-connector-module-path": "x.y"}']}, EXECUTES),
        ({"engine_args": ['a=[[{"b": {"worker_cls": "x"}}]]']}, EXECUTES),
        ({"engine_args": ['a={"\\u0077orker_cls": "x"}']}, EXECUTES),
        ({"engine_args": ['a="{\\"worker_cls\\": 1}"']}, EXECUTES),
        ({"engine_args": ["a={worker_cls: x}"]}, EXECUTES),
        ({"engine_args": ['a={"x": NaN, "worker_cls": 1}']}, EXECUTES),
        (
            {"engine_args": ['compilation_config={"mode": 3, "inductor_passes": {"a": "os.x"}}']},
            EXECUTES,
        ),
        ({"engine_args": ["custom_weight_loader=x.y"]}, EXECUTES),
        ({"engine_args": ["compilation_config.worker_cls=x"]}, EXECUTES),
        ({"engine_args": ['--r"p"c HOST']}, EXECUTES),
        ({"engine_args": ["--r\\pc HOST"]}, EXECUTES),
        ({"engine_args": ["'--rpc' HOST"]}, EXECUTES),
        ({"engine_args": ['r"p"c=HOST']}, EXECUTES),
        ({"engine_args": ['"--ctx-size" 512 "--rpc=HOST"']}, EXECUTES),
        ({"engine_args": ["attn_implementation=kernels-community/flash-attn"]}, EXECUTES),
        ({"engine_args": ['attn_implementation={"": "sdpa", "text": "owner/kernel"}']}, EXECUTES),
        ({"engine_args": ['hf_overrides={"_attn_implementation": "owner/kernel"}']}, EXECUTES),
        ({"engine_args": ["attn_implementation=sdpa"]}, MEASURES),
        ({"engine_args": ['compilation_config={"mode": 3, "cudagraph_mode": "NONE"}']}, MEASURES),
        ({"engine_args": ["download_dir=/a/b", "--ctx-size 512", "fa=on"]}, MEASURES),
        ({"engine_args": ["[" * 100_000, 'x={"a": "']}, MEASURES),
        ({"engine_args": ["x=" + '{"a":' * 900 + '{"worker_cls": 1}' + "}" * 900]}, EXECUTES),
    ],
)
def test_a_call_executes_when_the_caller_names_what_is_run(
    given: dict[str, Any], expected: Any
) -> None:
    assert planning.effects_of(arguments(**given)) == expected


def test_interpreters_that_the_user_lists_are_measured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IKIT_PYTHONS", "/a/bin/python:/b/bin/python, /c/bin/python")
    for python in ("/a/bin/python", "/b/bin/python", "/c/bin/python"):
        assert planning.effects_of(arguments(python=python)) == MEASURES
    assert planning.effects_of(arguments(python="/b/bin/../bin/python")) == EXECUTES


# --- engine arguments ------------------------------------------------------------------------


def test_values_are_json_where_they_parse_and_text_where_not() -> None:
    given = ["max_model_len=4096", "dtype=bfloat16", 'compilation_config={"mode": 3}', "x=true",
             "y=None", "--kebab-case=1.5", "url=a=b", "big=NaN"]  # fmt: skip
    assert key_values(given) == {
        "max_model_len": 4096, "dtype": "bfloat16", "compilation_config": {"mode": 3}, "x": True,
        "y": None, "kebab_case": 1.5, "url": "a=b", "big": "NaN",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [["max_model_len"], ["=5"], ["a b=1"], ["a=1", "a=2"]])
def test_items_that_are_no_assignments_are_refused(bad: list[str]) -> None:
    with pytest.raises(OpError):
        key_values(bad)


def test_options_of_llama_are_words_whatever_way_they_are_given() -> None:
    words = split_options(["--ctx-size 512", "flash_attn=on", "-ngl", "-1", "--no-kv-offload"])
    assert words == ["--ctx-size", "512", "--flash-attn", "on", "-ngl", "-1", "--no-kv-offload"]
    assert option_values(words) == {
        "ctx_size": "512", "flash_attn": "on", "ngl": "-1", "no_kv_offload": True,
    }  # fmt: skip
    with pytest.raises(OpError, match="open quote"):
        split_options(['--model "x'])


@pytest.mark.parametrize(
    "option", ["--host 0.0.0.0", "--port 1", "--log-file /tmp/x", "--hf-repo a/b", "-m other.gguf",
               "--slot-save-path /tmp"],
)  # fmt: skip
def test_options_that_would_open_the_server_or_write_files_are_refused(option: str) -> None:
    adapter = adapter_named("llamacpp")
    with pytest.raises(OpError, match="cannot be given"):
        adapter.config(plan(path=shared_gguf(), engine_args=(option,)), Found())


def test_the_embedded_server_gets_room_for_the_workload_and_its_threads() -> None:
    config = adapter_named("llamacpp").config(plan(path=shared_gguf(), threads=3), Found())
    assert config["vocabulary"] == 2048
    options = option_values(config["options"])
    assert options == {"threads": "3", "threads_batch": "3", "ctx_size": "648", "parallel": "1"}
    mine = plan(path=shared_gguf(), engine_args=("-t 1", "-c 4096"), device_asked="cpu")
    options = option_values(adapter_named("llamacpp").config(mine, Found())["options"])
    assert options == {"parallel": "1", "n_gpu_layers": "0", "t": "1", "c": "4096"}


@pytest.mark.parametrize(
    "secret", ["api_key=abcdefgh12345678", "hf_token=abcdefgh", "--api-key abcdefgh12345678"]
)
def test_a_key_among_the_engines_arguments_is_refused_and_not_repeated(
    call: Call, secret: str
) -> None:
    with pytest.raises(OpError) as caught:
        planning.make_plan(call, arguments(engine="vllm", engine_args=[secret]))
    assert "abcdefgh" not in str(caught.value) and "api_key_env" in str(caught.value)


# --- which engine ---------------------------------------------------------------------------


def test_auto_takes_the_engine_that_can_read_the_model(call: Call, tmp_path: Path) -> None:
    adapter, made = planning.make_plan(call, arguments(model=str(shared_gguf())))
    assert adapter.name == "llamacpp"
    assert made.path == shared_gguf() and made.device is not None
    assert made.threads is None or made.threads >= 1
    assert planning.make_plan(call, arguments(command=["true"]))[0].name == "cmd"
    adapter, made = planning.make_plan(call, arguments(url="http://127.0.0.1:9/v1"))
    assert adapter.name == "openai" and made.device is None and made.platform is None


def test_an_interpreter_is_found_wherever_the_engine_will_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planning.absolute("venv/bin/python") == str(tmp_path / "venv/bin/python")
    assert planning.absolute("sh") == shutil.which("sh")
    assert planning.absolute(None) is None


def test_the_name_of_a_served_model_is_the_servers_whatever_lies_here(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    served = arguments(model="tiny", url="http://127.0.0.1:9/v1")
    assert planning.make_plan(call, served)[1].path is None


def test_auto_without_an_engine_says_what_it_looked_for(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("IKIT_PYTHONS", raising=False)
    with pytest.raises(OpError, match=r"no engine for safetensors.*vLLM.*SGLang"):
        planning.make_plan(call, arguments(model=str(tmp_path)))


def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(call: Call) -> None:
    for model in ("./nowhere", "/nowhere/model", "lost.gguf", "~/lost"):
        with pytest.raises(OpError, match="no such file"):
            planning.make_plan(call, arguments(model=model, engine="vllm"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "vllm", "url": "http://x"}, "url is for engine=openai"),
        ({"engine": "vllm", "command": ["x"]}, "command is for engine=cmd"),
        ({"engine": "cmd", "api_key_env": "X"}, "api_key_env is for engine=openai"),
        ({"engine": "vllm", "device": "cuda:77"}, "not here"),
        ({"url": "http://127.0.0.1:9/v1", "threads": 2}, "threads does not reach"),
        ({"url": "http://127.0.0.1:9/v1", "python": "/p"}, "no Python of its own"),
        ({"command": ["x"], "url": "http://127.0.0.1:9/v1"}, "url is for engine=openai"),
        ({"engine": "llamacpp", "threads": 2, "engine_args": ["-t 3"]}, "given twice"),
        ({"engine": "llamacpp", "threads": 2, "engine_args": ["threads=3"]}, "given twice"),
        (
            {"engine": "cmd", "command": ["x"], "threads": 2, "engine_args": ["threads=3"]},
            "given twice",
        ),
        ({"engine": "cmd", "command": ["x"], "python": "/p"}, "no Python of its own"),
        ({"model": str(Path.cwd()), "engine": "vllm", "revision": "main"}, "a local path"),
        ({"engine": "vllm", "python": "no-such-python-here"}, "on PATH"),
    ],
)
def test_arguments_that_would_be_left_unused_are_refused(
    call: Call, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(OpError, match=words):
        planning.make_plan(call, arguments(**changes))


def test_a_python_without_the_engine_or_without_python_is_told(call: Call) -> None:
    with pytest.raises(OpError, match="vLLM is not in"):
        find.find_distribution(call, adapter_named("vllm"), sys.executable)
    with pytest.raises(OpError, match="did not answer"):
        find.find_distribution(call, adapter_named("vllm"), "/bin/true")
    with pytest.raises(OpError, match="no/such/python"):
        find.find_distribution(call, adapter_named("vllm"), "/no/such/python")


def test_another_python_is_asked_for_its_distributions(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stale = "/no/such/python"
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv("IKIT_PYTHONS", f"{stale}:{link}")
    monkeypatch.setattr(find, "own_version", lambda names: None)
    adapter = adapter_named("llamacpp")
    monkeypatch.setattr(type(adapter), "distributions", ("pip",))
    assert find.find_distribution(call, adapter, None).python == str(link)


def test_every_engine_of_the_contract_is_there_in_the_order_of_auto() -> None:
    assert list(adapters()) == ["vllm", "sglang", "llamacpp", "transformers", "openai", "cmd"]
    with pytest.raises(OpError, match="use vllm"):
        adapter_named("nothing")


# --- devices ---------------------------------------------------------------------------------


def test_an_engine_sees_its_one_device_and_its_threads_by_variables() -> None:
    assert device_variables(plan(threads=2)) == {"OMP_NUM_THREADS": "2"}
    asked = plan(GPU, device_asked="cuda:0", devices=(GPU,))
    assert device_variables(asked) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    both = plan(GPU, device_asked="cuda", devices=(GPU, replace(GPU, uuid="GPU-9")))
    assert device_variables(both) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-9"}
    amd = plan(AMD, device_asked="rocm", devices=(AMD,))
    assert device_variables(amd) == {"ROCR_VISIBLE_DEVICES": "GPU-2"}
    hidden = device_variables(plan(CPU, device_asked="cpu", devices=(CPU,), threads=None))
    assert hidden == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def test_several_devices_are_taken_in_the_order_asked(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(GPU, id="cuda:1", uuid="GPU-9")
    monkeypatch.setattr(devices, "devices", lambda: [GPU, other, CPU])
    assert [d.id for d in planning.chosen_devices(call, "cuda:1,cuda:0")] == ["cuda:1", "cuda:0"]
    assert planning.chosen_devices(call, "GPU-9")[0].id == "cuda:1"
    assert planning.chosen_devices(call, "auto")[0].id == "cuda:0"
    with pytest.raises(OpError, match="cuda:0, cuda:1, cpu"):
        planning.chosen_devices(call, "rocm")


# --- servers and keys ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", ("http", "127.0.0.1", 8000, "/v1")),
        ("http://localhost:8000", ("http", "localhost", 8000, "/v1")),
        ("https://example.com/api/v3/", ("https", "example.com", None, "/api/v3")),
        ("http://[::1]:1/v1", ("http", "::1", 1, "/v1")),
    ],
)
def test_a_base_url_is_taken_apart(url: str, expected: tuple[Any, ...]) -> None:
    assert openai.address(url) == expected


@pytest.mark.parametrize(
    "url",
    [None, "", "127.0.0.1:8000", "ftp://x/v1", "http://", "http://u:p@host/v1", "http://h/v1?k=1",
     "http://h/v1#x", "http://h/v 1", "http://h/v1\r\nX: y", "http://h\n/v1", " http://h/v1",
     "http://h/v\t1", "http://h/\u202e", "http://h/\x00", "http://h:99999/v1",
     "file:///etc/passwd", "http://169.254.169.254/v1"],
)  # fmt: skip
def test_what_is_no_plain_base_url_is_refused(url: str | None) -> None:
    with pytest.raises(OpError):
        openai.address(url)


def test_a_key_goes_to_this_machine_or_to_allowed_hosts_over_tls_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("IKIT_KEY_HOSTS", raising=False)
    openai.refuse_key(openai.address("http://127.0.0.1:8000/v1"))
    openai.refuse_key(openai.address("http://[::1]:8000/v1"))
    with pytest.raises(OpError, match="IKIT_KEY_HOSTS"):
        openai.refuse_key(("https", "api.example.invalid", None, "/v1"))
    monkeypatch.setenv("IKIT_KEY_HOSTS", "other.example, API.example.invalid")
    openai.refuse_key(("https", "api.example.invalid", None, "/v1"))
    with pytest.raises(OpError, match="plain http"):
        openai.refuse_key(("http", "api.example.invalid", None, "/v1"))
    with pytest.raises(OpError):
        openai.refuse_key(("https", "evil-api.example.invalid", None, "/v1"))


def test_a_host_that_only_looks_like_this_machine_is_not() -> None:
    for host in ("127.0.0.1.example.invalid", "localhost.example.invalid", "0.0.0.0.invalid", ""):
        assert not openai.is_loopback(host)
    assert openai.is_loopback("127.8.9.1") and openai.is_loopback("localhost")


def test_a_name_that_leads_to_this_machine_now_may_lead_elsewhere_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [(2, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: here)
    assert not openai.is_loopback("rebound.example.invalid")
    assert openai.is_loopback("localhost")
    elsewhere = [(2, 1, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: elsewhere)
    assert not openai.is_loopback("localhost")


def test_the_key_is_in_no_file_and_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "made-up-value-123")
    adapter = adapter_named("openai")
    served = plan(None, url="http://127.0.0.1:9/v1", api_key_env="SOME_NAME", path=None)
    assert "made-up-value" not in str(adapter.config(served, Found()))
    assert "made-up-value" not in str(adapter.command(served, Found(), Path("/c.json")))
    assert adapter.environment(served) == {openai.KEY_VARIABLE: "made-up-value-123"}
    with pytest.raises(OpError, match="do not reach"):
        adapter.config(replace(served, engine_args=("a=1",)), Found())


def test_a_variable_that_is_not_set_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    served = plan(None, url="http://127.0.0.1:9/v1", api_key_env="NOT_THERE", path=None)
    with pytest.raises(OpError, match="NOT_THERE is not set"):
        adapter_named("openai").find(call, served)


def test_a_command_that_carries_a_key_is_refused(call: Call) -> None:
    adapter = adapter_named("cmd")
    with pytest.raises(OpError, match="needs command"):
        adapter.find(call, plan())
    with pytest.raises(OpError, match="looks like a secret") as caught:
        adapter.find(call, plan(command=("x", "--api-key", "abcdefgh12345678")))
    assert "abcdefgh" not in str(caught.value)


# --- what each engine is asked, and what of it is compared with what it ran --------------------


def test_requests_of_vllm_are_named_as_its_flags() -> None:
    asked = adapter_named("vllm").requested(
        plan(engine_args=(
            "dtype=half", 'compilation_config={"cudagraph_mode": "FULL", "mode": 3}',
            'attention_config={"backend": "x"}',
        ))
    )  # fmt: skip
    assert asked == {"dtype": "half", "cudagraph_mode": "FULL"}
    assert adapter_named("vllm").requested(plan(engine_args=("compilation_config=3",))) == {}


def test_requests_of_llama_are_named_as_its_flags() -> None:
    words = ("-t 4", "-fa on", "--cache-type-k q8_0", "--mlock")
    asked = adapter_named("llamacpp").requested(plan(engine_args=words))
    assert asked == {"n_threads": "4", "flash_attn": "on", "cache_type_k": "q8_0"}


def test_a_command_gets_assignments_and_words_as_they_are() -> None:
    told = adapter_named("cmd").options(plan(engine_args=("a=1", "b=[2", "--flag", 'c="x"')))
    assert told == {"a": 1, "b": "[2", "2": "--flag", "c": "x"}
    assert adapter_named("cmd").requested(plan(engine_args=("a=1",))) == {}


def test_engines_with_a_local_model_are_kept_off_the_hub() -> None:
    for name in ("vllm", "sglang"):
        assert adapter_named(name).environment(plan())["HF_HUB_OFFLINE"] == "1"
        assert "HF_HUB_OFFLINE" not in adapter_named(name).environment(plan(path=None))


def test_llama_needs_a_gguf_file(tmp_path: Path) -> None:
    adapter = adapter_named("llamacpp")
    for path in (None, tmp_path):
        with pytest.raises(OpError, match=r"needs a \.gguf file"):
            adapter.config(plan(path=path), Found())
    (tmp_path / "m.gguf").symlink_to(shared_gguf())
    with pytest.raises(OpError, match="a link that ends outside"):
        adapter.config(plan(path=tmp_path), Found())
    (tmp_path / "m.gguf").unlink()
    shutil.copy(shared_gguf(), tmp_path / "m.gguf")
    config = adapter.config(plan(path=tmp_path), Found())
    assert config["model"] == str(tmp_path / "m.gguf")
    shutil.copy(shared_gguf(), tmp_path / "other.gguf")
    with pytest.raises(OpError, match="2 GGUF models"):
        adapter.config(plan(path=tmp_path), Found())
    (tmp_path / "model.safetensors").touch()
    assert not find.is_gguf(tmp_path), "a folder of both is of the engines that read it whole"


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1e999]", '{"a": -1e400}'])
def test_a_number_that_no_record_can_hold_stays_a_text(text: str) -> None:
    assert key_values([f"scale={text}"]) == {"scale": text}
    command = adapter_named("cmd")
    assert command.options(plan(engine_args=(f"scale={text}", "x"))) == {"scale": text, "1": "x"}
    assert command.options(plan(engine_args=("scale=1.5e3",))) == {"scale": 1500.0}
