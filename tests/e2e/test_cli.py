"""The command line as people and scripts use it: output, exit status, signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import plugin
from helpers.evidence import flip_a_byte, save
from ikit_mcp import registry
from ikit_mcp.cli import build_parser, main
from ikit_mcp.snippets import SHELLS, commands


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for commands that run in this process."""
    monkeypatch.setenv("IKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IKIT_PLUGINS", raising=False)
    return tmp_path / "home"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints with --json; it must end with status 0."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_roofline_prints_the_stored_record_and_nothing_else(
    home: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = printed(capsys, "roofline", str(llama), "--gpu-bw", "3350")
    stored = home / "evidence" / record["evidence_id"][:2] / record["evidence_id"]
    assert json.loads((stored / "evidence.json").read_text(encoding="utf-8")) == record
    again = record["provenance"]["reproduce"]
    assert again.startswith(f"ikit roofline {llama} --gpu-bw 3350")


def test_the_reproduce_line_rebuilds_the_same_numbers(
    home: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = printed(capsys, "roofline", str(llama), "--context", "4096", "--batch", "4")
    words = first["provenance"]["reproduce"].split()
    assert words[0] == "ikit"
    second = printed(capsys, *words[1:])
    assert second["metrics"] == first["metrics"] and second["data"] == first["data"]
    assert second["provenance"]["request"]["args"] == first["provenance"]["request"]["args"]


def test_a_person_reads_a_table_and_a_pipe_gets_tabs(home: Path, llama: Path) -> None:
    argv = [sys.executable, "-m", "ikit_mcp.cli", "roofline", str(llama), "--gpu-bw", "3350"]
    piped = subprocess.run(
        argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert "weight_bytes\t15009857536\tB\tderived" in piped.stdout
    parent, child = pty.openpty()
    with subprocess.Popen(argv, stdout=child, stderr=subprocess.DEVNULL, stdin=child) as process:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 65_536):
                shown += part
        except OSError:  # the other side of a terminal closes with an error
            pass
        assert process.wait(30) == 0
    os.close(parent)
    assert b"\t" not in shown and b"weight_bytes          15009857536  B" in shown


def test_exit_status_tells_refused_from_misused_and_not_valid(
    home: Path, tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roofline", str(tmp_path / "nothing")]) == 1
    assert "Next:" in capsys.readouterr().err
    assert main(["roofline", str(llama), "--context", "-1"]) == 2
    assert "a whole number from 0" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        main(["roofline", str(llama), "--contxt", "5"])
    assert usage.value.code == 2 and "did you mean --context?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["roofline", str(llama), "--gpu-bw", "3350", "--check"]) == 0


def test_check_follows_the_verdict_of_verify(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = save(home, 1)
    assert main(["evidence", "verify", "--check"]) == 0
    flip_a_byte(home, record.evidence_id, b"100")
    assert main(["evidence", "verify"]) == 0
    assert main(["evidence", "verify", "--check"]) == 3


def test_check_follows_the_integrity_of_what_is_shown(home: Path) -> None:
    record = save(home, 1)
    assert main(["evidence", "show", record.evidence_id, "--check"]) == 0
    flip_a_byte(home, record.evidence_id, b"100")
    assert main(["evidence", "show", record.evidence_id, "--check"]) == 3


def test_verify_names_the_problem_of_each_record(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = save(home, 1)
    flip_a_byte(home, record.evidence_id, b"record 1")
    assert main(["evidence", "verify"]) == 0
    assert "altered" in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_shown_as_its_escape(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = save(home, 1, data={"name": "a\u202eb\u009b31mc\u2028d"})
    assert main(["evidence", "show", record.evidence_id, "--path", "data"]) == 0
    out = capsys.readouterr().out
    assert "\\u202e" in out and not set("\u202e\u009b\u2028") & set(out)


def test_a_bug_on_the_command_line_is_an_id_and_a_traceback_without_the_secret(
    tmp_path: Path,
) -> None:
    secret = "correct-horse-battery-staple"
    env = {**os.environ, **plugin.environment(ACME_API_KEY=secret), "IKIT_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "ikit_mcp.cli", "acme", "bug"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 1 and "internal error" in done.stderr
    assert "RuntimeError" in done.stderr and secret not in done.stderr


def test_a_full_disk_behind_the_output_is_said_in_one_line(home: Path) -> None:
    command = f"{sys.executable} -m ikit_mcp.cli evidence list > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 1 and "cannot write the output" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signing_key_that_cannot_be_used_is_told_before_anything_is_measured(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IKIT_SIGNING_KEY", "/nowhere/key.pem")
    assert main(["bandwidth", "--device", "cpu", "--seconds", "1"]) == 1
    told = capsys.readouterr().err
    assert "cannot read the signing key /nowhere/key.pem" in told and "…" not in told


def test_a_home_of_nobody_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IKIT_HOME", "~no-such-user-here/ikit")
    assert main(["evidence", "list"]) == 1
    assert "no such user" in capsys.readouterr().err


def test_check_is_3_for_a_record_that_is_not_valid(tmp_path: Path) -> None:
    env = {**os.environ, **plugin.environment(ACME_API_KEY="made-up-4711-4711-4711")}
    argv = [sys.executable, "-m", "ikit_mcp.cli", "acme", "leak", "--where", "data", "--check"]
    done = subprocess.run(
        argv, env={**env, "IKIT_HOME": str(tmp_path)}, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr


def test_list_and_show_and_verify_work_on_what_is_stored(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [save(home, n).evidence_id for n in range(3)]
    listed = printed(capsys, "evidence", "list", "--limit", "2")
    assert [i["evidence_id"] for i in listed["items"]] == ids[:0:-1] and listed["next_offset"] == 2
    shown = printed(capsys, "evidence", "show", ids[0][:10], "--path", "metrics.dram_read_gbs")
    assert shown["value"]["value"] == 100
    assert printed(capsys, "evidence", "verify") == {
        "checked": 3, "ok": True, "problems": [], "leftovers": [],
    }  # fmt: skip
    assert main(["evidence", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("evidence_id\tkind\tvalid\tstarted") for row in rows)


def test_a_new_key_signs_records_and_verification_trusts_it(
    home: Path, llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = printed(capsys, "evidence", "keygen")
    monkeypatch.setenv("IKIT_SIGNING_KEY", key["private"])
    record = printed(capsys, "roofline", str(llama))
    shown = printed(capsys, "evidence", "show", record["evidence_id"], "--path", "kind")
    assert shown["integrity"]["signature"] == {
        "key_id": key["key_id"], "ok": True, "trusted": True, "problem": None,
    }  # fmt: skip
    Path(key["public"]).unlink()
    shown = printed(capsys, "evidence", "show", record["evidence_id"], "--path", "kind")
    assert shown["integrity"]["signature"]["trusted"] is False and shown["integrity"]["ok"]


def test_control_c_ends_a_long_command_and_what_it_started(tmp_path: Path) -> None:
    env = {**os.environ, **plugin.environment(), "IKIT_HOME": str(tmp_path / "home"),
           "IKIT_LOCK_DIR": str(tmp_path / "locks")}  # fmt: skip
    argv = [sys.executable, "-m", "ikit_mcp.cli", "acme", "long", "--steps", "100000"]
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        while b"step" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
        assert b"cancelled" in process.stderr.read() and process.stdout.read() == b""


def test_a_reader_that_goes_away_is_no_traceback(home: Path) -> None:
    for number in range(60):
        save(home, number)
    command = f"{sys.executable} -m ikit_mcp.cli evidence list --limit 60 | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert "Traceback" not in done.stderr


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, ikit_mcp.cli as c; from ikit_mcp.registry import load; load()\n"
        "heavy = {'mcp', 'pydantic', 'torch', 'numpy', 'huggingface_hub', 'cryptography'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_help_of_every_command_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [path for path, _ in commands(build_parser(registry.load(None)))]
    assert ("evidence", "list") in paths and ("roofline",) in paths
    for path in paths:
        with pytest.raises(SystemExit) as ended:
            main([*path, "--help"])
        assert ended.value.code == 0 and "usage: ikit" in capsys.readouterr().out


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_completion_scripts_name_every_command_and_option(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "inspect" not in script  # operations' names are not commands
    for word in ("roofline", "verify", "gpu-bw", "install-snippet"):
        assert word in script


def test_the_bash_completion_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "ikit.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")

    def completed(*words: str) -> set[str]:
        line = " ".join(f"'{w}'" for w in words)
        code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _ikit; " \
               'echo "${COMPREPLY[@]}"'  # fmt: skip
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True,
                              stdin=subprocess.DEVNULL, cwd=tmp_path)  # fmt: skip
        return set(done.stdout.split())

    assert {"roofline", "evidence"} <= completed("ikit", "")
    assert completed("ikit", "evidence", "ver") == {"verify"}
    assert completed("ikit", "roofline", "model", "--gpu") == {"--gpu-bw"}
    assert completed("ikit", "evidence", "show", "abc", "--pa") == {"--path"}


def test_install_snippet_prints_what_a_client_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-snippet", "--client", "codex"]) == 0
    assert "tool_timeout_sec" in capsys.readouterr().out


def test_svg_writes_the_stored_picture_and_says_so_beside_the_record(
    home: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a picture.svg"
    target.write_text("an older one, longer than nothing", encoding="utf-8")
    words = ["roofline", str(llama), "--gpu-bw", "3350", "--json", "--svg", str(target)]
    assert main(words) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    stored = home / "evidence" / record["evidence_id"][:2] / record["evidence_id"]
    assert target.read_bytes() == (stored / "roofline.svg").read_bytes()
    assert f"roofline.svg of {record['evidence_id'][:12]} written to {target}" in shown.err


def test_svg_is_refused_before_the_call_where_no_file_can_be(
    home: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for target, why in ((folder, "is a folder"), (tmp_path / "no" / "x.svg", "there is no folder")):
        assert main(["roofline", str(llama), "--svg", str(target)]) == 1
        assert why in capsys.readouterr().err
    assert list(folder.iterdir()) == [] and not list(home.rglob("evidence.json"))


def test_svg_that_cannot_be_written_names_the_record_that_is_stored(
    home: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = tmp_path / ("x" * 300 + ".svg")
    assert main(["roofline", str(llama), "--json", "--svg", str(too_long)]) == 1
    shown = capsys.readouterr()
    assert f"stored as {json.loads(shown.out)['evidence_id'][:12]}" in shown.err


def test_svg_of_a_record_without_a_picture_is_an_error_after_the_record(tmp_path: Path) -> None:
    keys = plugin.environment(ACME_API_KEY="made-up-4711-4711-4711")
    env = {**os.environ, **keys, "IKIT_HOME": str(tmp_path / "home")}
    target = tmp_path / "none.svg"
    argv = [sys.executable, "-m", "ikit_mcp.cli", "acme", "leak", "--where", "data", "--json",
            "--svg", str(target)]  # fmt: skip
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    record = json.loads(done.stdout)
    assert done.returncode == 1 and not target.exists()
    assert f"record has no picture; the record is stored as {record['evidence_id'][:12]}" in (
        done.stderr
    )


def test_svg_is_an_option_of_what_makes_records_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["evidence", "list", "--svg", str(tmp_path / "x.svg")])
    assert usage.value.code == 2 and "--svg" in capsys.readouterr().err
