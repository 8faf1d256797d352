"""One clip over HTTP: what is taken for one, in which dialect, and what a failure says."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fakes import clips_jobs, rough_server
from fakes.clips_server import mp4_of
from fakes.rough_server import FTYP, answering, reply, sending
from ikit_mcp.registry import OpError
from ikit_ops.clips import client, making
from ikit_ops.clips.account import Answer
from ikit_ops.clips.client import Line, Server
from ikit_ops.clips.making import Dialect
from ikit_ops.clips.recorder import request_of

REQUEST = request_of(
    {"prompt": "kite", "width": 96, "height": 64, "num_frames": 9, "fps": 24, "steps": 2,
     "guidance_scale": 3.0, "seed": 5}
)  # fmt: skip
MP4 = mp4_of(b"a clip")
TYPE = "Content-Type: video/mp4"


def make(
    url: str, folder: Path, dialect: Dialect | None = None, **changed: Any
) -> tuple[Answer, Path]:
    target = folder / "clip.mp4"
    line = Line(Server.of(url), time.monotonic() + 30)
    request = {**REQUEST, **changed}
    return making.make(line, 3, request, dialect or Dialect("clips"), target), target


def failure(folder: Path, data: bytes, **changed: Any) -> str:
    """What is said of that answer; nothing may be left of it."""
    with answering(sending(data)) as url:
        answer, target = make(url, folder, **changed)
    assert answer.error is not None and answer.sha256 is None
    assert not target.exists()
    return answer.error


@pytest.mark.parametrize("kind", [TYPE, "content-type: Application/Octet-Stream; x=1"])
def test_an_mp4_is_written_and_hashed(tmp_path: Path, kind: str) -> None:
    with answering(sending(reply(MP4, kind, "x-inference-time-s: 0.0"))) as url:
        answer, target = make(url, tmp_path)
    assert answer.error is None and target.read_bytes() == MP4
    assert answer.sha256 == hashlib.sha256(MP4).hexdigest()
    assert (answer.index, answer.bytes) == (3, len(MP4))
    assert answer.latency_s > 0 and answer.ended_s <= time.monotonic()


def test_chunks_and_an_answer_that_ends_with_its_connection_are_mp4s_too(tmp_path: Path) -> None:
    size = f"{len(MP4):x}\r\n".encode()
    chunked = reply(size + MP4 + b"\r\n0\r\n\r\n", TYPE, "Transfer-Encoding: chunked", length=None)
    for data in (chunked, reply(MP4, TYPE, length=None)):
        with answering(sending(data)) as url:
            answer, target = make(url, tmp_path)
        assert answer.error is None and target.read_bytes() == MP4
        target.unlink()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (reply(b"<html>log in</html>", "Content-Type: text/html"), "type text/html: <html>log in"),
        (reply(b'{"id": "v", "status": "queued"}', "Content-Type: application/json"), "queued"),
        (reply(MP4), "an answer of type unknown"),
        (reply(b"<html>", TYPE), "an answer of 6 bytes, which is no mp4"),
        (reply(b"<html>log in</html>", TYPE), "no mp4: it begins with b'<html>log in"),
        (reply(b"\0\0\0\x18moov" + b"x" * 99, TYPE), "no mp4: it begins with"),
        (reply(b"", TYPE), "an answer of 0 bytes, which is no mp4"),
        (reply(MP4[:7], TYPE), "an answer of 7 bytes, which is no mp4"),
        (reply(MP4, TYPE, length=10_000), f"the answer ended after {len(MP4)} of 10000 bytes"),
        (reply(MP4[:-1], TYPE, length=None), "inside of a box of the mp4"),
        (reply(FTYP + b"\0\0\0\2free", TYPE, length=None), "inside of a box of the mp4"),
        (reply(b"5\r\nhello\r\n", TYPE, "Transfer-Encoding: chunked", length=None), "broke off"),
        (reply(b"18\r\n" + FTYP + b"\r\n", TYPE, "Transfer-Encoding: chunked", length=None),
         "broke off"),
        (reply(b"zz\r\n", TYPE, "Transfer-Encoding: chunked", length=None), "broke off"),
        (reply(b'{"detail": "full"}', status="429 Slow down"), "HTTP 429: full"),
        (reply(b"[" * 9_000, status="500 No"), "HTTP 500: [[["),
        (reply(b'["no"]', status="500 No"), "HTTP 500: ['no']"),
        (reply(b"", "Location: http://127.0.0.1:1/", status="302 Found"), "HTTP 302"),
        (reply(MP4, TYPE, "X-Video-Sha256: 00"), "sha256 is not the one that the server names"),
        (b"", "RemoteDisconnected"),
        (b"SSH-2.0-OpenSSH_9\r\n", "BadStatusLine"),
        (reply(MP4, "Content-Type: " + "x" * 70_000), "LineTooLong"),
    ],
)  # fmt: skip
def test_what_is_no_whole_mp4_is_told_as_what_it_is(tmp_path: Path, data: bytes, said: str) -> None:
    with answering(sending(data)) as url:
        answer, target = make(url, tmp_path)
    assert said in str(answer.error)
    assert not target.exists()


def test_an_answer_is_no_larger_than_the_clips_pixels(tmp_path: Path) -> None:
    most = client.most_bytes(REQUEST)
    assert most == 3 * 96 * 64 * 9 + (16 << 20)
    told = failure(tmp_path, reply(MP4, TYPE, length=most + 1))
    assert told == f"{most + 1} bytes are announced, and the clip's pixels are {most}"
    endless = rough_server.Drip(reply(FTYP, TYPE, length=None), b"\0" * (1 << 20))
    with answering(endless) as url:
        answer, target = make(url, tmp_path)
        endless.gone.set()
    assert answer.error == f"the answer goes on after the {most} bytes of the clip's pixels"
    assert not target.exists()
    assert client.most_bytes({"width": 10**4, "height": 10**4, "num_frames": 10**5}) == 4 << 30


def test_a_large_box_and_one_to_the_end_end_where_the_file_does(tmp_path: Path) -> None:
    large = FTYP + b"\0\0\0\1mdat" + (20).to_bytes(8, "big") + b"1234"
    for data in (large, FTYP + b"\0\0\0\0mdat1234"):
        with answering(sending(reply(data, TYPE, length=None))) as url:
            answer, target = make(url, tmp_path)
        assert answer.error is None, answer.error
        target.unlink()


def test_a_file_that_is_there_or_a_full_disk_is_ours_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"mine")
    with answering(sending(reply(MP4, TYPE))) as url:
        with pytest.raises(OpError, match=r"clip\.mp4 cannot be written: File exists"):
            make(url, tmp_path)
        assert (tmp_path / "clip.mp4").read_bytes() == b"mine"
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 -- the writer closes it
    monkeypatch.setattr(Path, "open", lambda *args, **more: full)
    with (
        answering(sending(reply(MP4, TYPE))) as url,
        pytest.raises(OpError, match="cannot be written: No space left") as caught,
    ):
        make(url, tmp_path / "other")
    assert "make room" in caught.value.next_step


def test_a_prompt_is_sent_as_utf_8_and_a_second_seed_only_where_it_differs() -> None:
    body, kind = client.body_of({**REQUEST, "prompt": "café — 日本\n", "audio": False}, "videos")
    assert 'name="prompt"\r\n\r\ncafé — 日本\n\r\n--'.encode() in body
    assert b'name="generate_sound"\r\n\r\nfalse\r\n' in body
    assert b"noise_seed" not in body and kind.startswith("multipart/form-data; boundary=ikit")
    body, _ = client.body_of({**REQUEST, "noise_seed": 6}, "videos")
    assert b'name="seed"\r\n\r\n5\r\n' in body and b'name="noise_seed"\r\n\r\n6\r\n' in body
    assert json.loads(client.body_of(REQUEST, "clips")[0]) == REQUEST


def test_only_a_server_of_ours_has_a_word_for_the_noise_seed() -> None:
    Dialect("videos").check(REQUEST)
    Dialect("clips").check({**REQUEST, "noise_seed": 6, "task": "t2v"})
    Dialect("videos", ours=True).check({**REQUEST, "noise_seed": 6})
    with pytest.raises(OpError, match="noise_seed"):
        Dialect("videos").check({**REQUEST, "noise_seed": 6})


def test_a_server_without_sync_is_asked_for_a_job_which_is_polled_and_fetched(
    tmp_path: Path,
) -> None:
    dialect = Dialect("videos")
    with clips_jobs.serving() as (url, jobs):
        answer, target = make(url, tmp_path, dialect)
        assert answer.error is None and target.read_bytes() == mp4_of(b"video_1")
        assert dialect.jobs
        target.unlink()
        again, _ = make(url, tmp_path, dialect)
    assert again.sha256 == hashlib.sha256(mp4_of(b"video_2")).hexdigest()
    assert jobs.seen == [
        "POST /v1/videos/sync", "POST /v1/videos", "GET /v1/videos/video_1",
        "GET /v1/videos/video_1", "GET /v1/videos/video_1/content", "POST /v1/videos",
        "GET /v1/videos/video_2", "GET /v1/videos/video_2", "GET /v1/videos/video_2/content",
    ]  # fmt: skip
    assert jobs.asked[0] == {
        "prompt": "kite", "size": "96x64", "num_frames": 9, "fps": 24, "num_inference_steps": 2,
        "guidance_scale": 3.0, "seed": 5,
    }  # fmt: skip
    assert answer.server_time_s == 0.015 and answer.peak_bytes == 2 << 30
    assert answer.model is None  # it names another maker's


@pytest.mark.parametrize(
    ("end", "said"),
    [({"status": "failed", "error": {"message": "out of memory"}}, "failed: out of memory"),
     ({"status": "cancelled", "error": "by hand"}, "ended as cancelled: by hand"),
     ({"status": None}, "ended as None"), ([], "an answer that is no job: []"),
     ({"status": ["x"]}, "ended as ['x']")],
)  # fmt: skip
def test_a_job_that_fails_is_told_with_its_reason(tmp_path: Path, end: Any, said: str) -> None:
    with clips_jobs.serving() as (url, jobs):
        jobs.end = end
        answer, target = make(url, tmp_path, Dialect("videos"))
    assert said in str(answer.error) and not target.exists()


@pytest.mark.parametrize("name", [None, 3, "", "../x", "a/b", "x" * 300, "a b"])
def test_a_job_whose_id_is_no_name_is_not_asked_for(tmp_path: Path, name: Any) -> None:
    with clips_jobs.serving() as (url, jobs):
        jobs.created = {"id": name}
        answer, _ = make(url, tmp_path, Dialect("videos"))
    assert answer.error == "the job that was made has no id"
    assert not any(each.startswith("GET") for each in jobs.seen)


def test_a_server_that_knows_neither_path_says_so(tmp_path: Path) -> None:
    dialect = Dialect("videos")
    with clips_jobs.serving() as (url, jobs):
        jobs.unknown = ("/v1/videos/sync", "/v1/videos")
        answer, _ = make(url, tmp_path, dialect)
    assert "neither /v1/videos/sync nor /v1/videos is served" in str(answer.error)
    assert not dialect.jobs


def test_a_refused_job_is_told_in_the_servers_words(tmp_path: Path) -> None:
    def answer_with(connection: socket.socket, request: bytes) -> None:
        unknown = b"/sync" in request.split(b"\r\n")[0]
        connection.sendall(reply(b'{"detail": "fps is whole"}',
                                 status="404 No" if unknown else "422 No"))  # fmt: skip

    with answering(answer_with) as url:
        answer, _ = make(url, tmp_path, Dialect("videos"))
    assert answer.error == "HTTP 422: fps is whole"


def test_a_path_that_is_gone_after_a_clip_is_a_failure_and_no_other_dialect(
    tmp_path: Path,
) -> None:
    dialect = Dialect("videos", at_once=True)
    with clips_jobs.serving() as (url, jobs):
        answer, _ = make(url, tmp_path, dialect)
    assert "HTTP 405" in str(answer.error) and jobs.seen == ["POST /v1/videos/sync"]
    with clips_jobs.serving() as (url, jobs):
        jobs.unknown = ("/clips",)
        answer, _ = make(url, tmp_path, Dialect("clips"))
    assert "HTTP 405" in str(answer.error) and jobs.seen == ["POST /clips"]


@pytest.mark.parametrize(
    "url",
    ["", "localhost:80", "ftp://a", "http://", "http://u:p@h", "http://@h", "http://h?q=1",
     "http://h:99999", "http://h:0", "http://h:x", "http://h/ü", "http://bücher", "http://a..b:80",
     f"http://{'a' * 80}:80", "http://h h", "http://h\n", "http://h#x", "http://[::1"],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(OpError, match="no address of a clip server"):
        Server.of(url)


def test_an_address_has_its_schemes_port_and_its_path_less_the_last_slash() -> None:
    assert Server.of("https://h/").connect(1.0).port == 443
    assert Server.of("http://[::1]:8/base/") == Server("http", "::1", 8, "/base")


@pytest.mark.parametrize(
    ("data", "told"),
    [(reply(b""), {}), (reply(b"[]"), {}), (reply(b"[" * 9000), {}), (reply(b"\xff"), {}),
     (reply(b'{"a": 1}'), {"a": 1}), (reply(b'{"a": 1}', length=None), {"a": 1}),
     (reply(b"x" * 100_000), {}), (reply(b"{}", status="404 No"), {})],
)  # fmt: skip
def test_a_health_of_any_kind_is_a_server(data: bytes, told: dict[str, Any]) -> None:
    with answering(sending(b""), sending(data)) as url:
        line = Line(Server.of(url), time.monotonic() + 30)
        assert client.health(line) == told


@pytest.mark.parametrize("data", [b"", b"SSH-2.0-OpenSSH_9\r\n"])
def test_what_speaks_no_http_is_no_server(data: bytes) -> None:
    with answering(sending(b""), sending(data)) as url:
        line = Line(Server.of(url), time.monotonic() + 30)
        with pytest.raises(OpError, match="no clip server answers"):
            client.health(line)


def test_a_line_that_was_cut_asks_nothing_any_more(tmp_path: Path) -> None:
    with answering(sending(reply(MP4, TYPE))) as url:
        line = Line(Server.of(url), time.monotonic() + 30)
        line.cut()
        answer = making.make(line, 0, REQUEST, Dialect("clips"), tmp_path / "x.mp4")
    assert answer.error == "no whole answer when the time was up"
    with pytest.raises(ConnectionAbortedError):
        line.wait(30)


@pytest.mark.parametrize("ending", ["garbage", "cut"])
def test_a_handshake_that_fails_or_hangs_ends(tmp_path: Path, ending: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        line = Line(Server.of(url), time.monotonic() + 60)

        def answer_the_hello() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                if ending == "cut":
                    line.cut()
                    while connection.recv(65536):  # until the client hangs up
                        pass
                else:
                    connection.sendall(b"HTTP/1.1 400 No\r\n\r\n")

        thread = threading.Thread(target=answer_the_hello)
        thread.start()
        answer = making.make(line, 0, REQUEST, Dialect("clips"), tmp_path / "x.mp4")
        thread.join(20)
        assert not thread.is_alive()
    expected = "no whole answer when the time was up" if ending == "cut" else "SSLError"
    assert expected in str(answer.error)
