"""The clip server over real sockets, with a made-up model: who is answered, and with what."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ikit_ops.clips.engine import asked, service, web
from ikit_ops.clips.engine.asked import Able, Asked
from ikit_ops.clips.engine.recipes import RecipeError
from ikit_ops.clips.engine.timeline import Timeline
from ikit_ops.clips.recorder import StepDumpError

ASKED = {"prompt": "kite", "width": 64, "height": 64, "num_frames": 9, "fps": 24, "steps": 4,
         "guidance_scale": 3.0, "seed": 1}  # fmt: skip
JSON = {"Content-Type": "application/json"}
LIMIT = 30.0


class Maker:
    """A model that makes bytes, waits where a test says so, and fails where it says so."""

    able = Able(lambda request: {"video": (1, 4, 2, 2, 2)})

    def __init__(self) -> None:
        self.seen: list[Asked] = []
        self.error: BaseException | None = None
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.until_unwanted = False

    def make(self, asked: Asked, timeline: Timeline, wanted: Callable[[], bool]) -> Any:
        self.seen.append(asked)
        timeline.enter("denoise")
        self.started.set()
        assert self.go.wait(LIMIT)
        while self.until_unwanted:
            if not wanted():
                raise service.Abandoned
        if self.error is not None:
            raise self.error
        return SimpleNamespace(mp4=b"mp4 " * 1000, sha256="ab" * 32, steps_ms=[1.0, 2.0],
                               peak_bytes=2_000_000, recipe_sha256="cd" * 32)  # fmt: skip


class Served:
    """A running server."""

    def __init__(self, folder: Path, maker: Any, model: str = "ltx", queue: int = 2) -> None:
        config = {"dumps": str(folder), "dtype": "fp32", "device": "cpu", "queue": queue}
        load = maker if callable(maker) else lambda: maker
        self.server = web.Server(
            ("127.0.0.1", 0), lambda: service.Engine(config, load), queue, folder / model
        )
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self.server.engine.stop()

    def ready(self) -> None:
        while self.server.engine.state == "loading":
            threading.Event().wait(0.001)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON
    ) -> tuple[int, dict[str, Any], Any]:
        """Status, JSON body (or its bytes) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers))
            response = connection.getresponse()
            told = response.read()
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(told), response.headers
            return response.status, {"bytes": told}, response.headers
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        """All that comes back until the server ends the connection."""
        with socket.create_connection(("127.0.0.1", self.port), LIMIT) as connection:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(65536):
                found += piece
            return found


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def served(tmp_path: Path, maker: Maker) -> Iterator[Served]:
    running = Served(tmp_path, maker)
    running.ready()
    yield running
    maker.until_unwanted = False
    maker.go.set()
    running.close()


def test_a_clip_is_answered_with_stages_that_add_up_to_the_servers_time(
    served: Served, maker: Maker
) -> None:
    status, told, headers = served.ask("POST", "/clips", ASKED)
    assert (status, told["bytes"]) == (200, b"mp4 " * 1000)
    assert maker.seen[0].request["noise_seed"] == 1
    stages = json.loads(headers["X-Stage-Durations"])
    assert set(stages) == {"receive", "queue", "prepare", "denoise", "answer"}
    total = float(headers["X-Server-Time-S"]) * 1e3
    assert sum(stages.values()) == pytest.approx(total, abs=0.01)
    inference = float(headers["X-Inference-Time-S"]) * 1e3
    assert inference == pytest.approx(total - stages["queue"], abs=0.01)
    assert headers["X-Video-Sha256"] == "ab" * 32
    assert headers["X-Recipe-Sha256"] == "cd" * 32
    assert (headers["X-Peak-Memory-MB"], headers["X-Step-Durations"]) == ("2.0", "[1.0, 2.0]")
    assert (headers["X-Model"], headers["Server"]) == ("ltx", "ikit-clips/1")
    assert len(headers["X-Request-Id"]) == 32


def test_the_form_of_other_servers_makes_a_clip_too(served: Served, maker: Maker) -> None:
    body = "prompt=caf%C3%A9&size=64x64&num_frames=9&negative_prompt=grey&model=org/ltx"
    kind = {"Content-Type": "Application/x-www-form-urlencoded"}
    assert served.ask("POST", "/v1/videos/sync", body.encode(), kind)[0] == 200
    assert (maker.seen[0].request["prompt"], maker.seen[0].negative_prompt) == ("café", "grey")
    status, told, _ = served.ask(
        "POST", "/v1/videos/sync", b"prompt=a&model=other&num_frames=9&size=64x64", kind
    )
    assert (status, told["field"], told["nearest"]) == (422, "model", "ltx")
    path = str(served.server._path).encode()
    kept = served.ask("POST", "/v1/videos/sync", b"prompt=a&num_frames=9&model=" + path, kind)
    assert kept[0] == 200


@pytest.mark.parametrize("name", ["模型 %", "müsli", "\udcff", "a\r\nX-Evil: 1"])
def test_a_model_of_any_name_is_answered_in_ascii(tmp_path: Path, maker: Maker, name: str) -> None:
    running = Served(tmp_path, maker, model=name)
    try:
        running.ready()
        status, _, headers = running.ask("POST", "/clips", ASKED)
        assert status == 200
        assert headers["X-Model"].isascii() and headers.get("X-Evil") is None
        if name == "模型 %":
            assert headers["X-Model"] == "%E6%A8%A1%E5%9E%8B %25"
        assert running.ask("GET", "/health")[1]["model"] == name
    finally:
        running.close()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "LOCALHOST:1", "localhost", "localhost.", "[::1]",
             "[::1]:99", "127.3.2.1"],
)  # fmt: skip
def test_every_name_of_this_machine_is_served(served: Served, host: str) -> None:
    assert served.ask("GET", "/health", None, {"Host": host})[0] == 200
    assert web.loopback(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil@127.0.0.1", "127.0.0.1:x", "", "::1",
             "[::1", "localhost/x", "10.0.0.1", "0x7f000001", "localhost evil", "[fe80::1]"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_name_is_served_nor_told_where_the_dumps_are(
    served: Served, maker: Maker, host: str, method: str
) -> None:
    path, body = ("/health", None) if method == "GET" else ("/clips", ASKED)
    status, told, headers = served.ask(method, path, body, {"Host": host, **JSON})
    assert (status, told) == (403, {"error": "only loopback names are served"})
    assert headers["Connection"] == "close"
    assert maker.seen == []


def test_a_request_of_two_hosts_or_none_is_refused(served: Served) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        assert served.raw(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n").startswith(
            b"HTTP/1.1 403 "
        )


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "file://", "https://localhost.a"]
)
def test_a_page_of_another_origin_is_refused(served: Served, maker: Maker, origin: str) -> None:
    assert served.ask("POST", "/clips", ASKED, {**JSON, "Origin": origin})[0] == 403
    assert served.ask("GET", "/health", None, {"Origin": origin})[0] == 403
    assert maker.seen == []
    assert (
        served.ask("POST", "/clips", ASKED, {**JSON, "Origin": "http://localhost:3000"})[0] == 200
    )


@pytest.mark.parametrize("kind", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "x/y"}])
def test_a_body_that_any_page_may_send_is_refused(
    served: Served, maker: Maker, kind: dict[str, str]
) -> None:
    assert served.ask("POST", "/clips", ASKED, kind)[0] == 415
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert served.ask("POST", "/clips", b"prompt=a", form)[0] == 415
    assert maker.seen == []


def inner() -> bytes:
    body = json.dumps(ASKED).encode()
    return (
        b"POST /clips HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /clips HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {}", 403),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\nContent-Length: {}", 403),
        ("POST /other HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}", 404),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked", 400),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked", 411),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
         "Content-Length: {}", 411),
        ("POST /clips HTTP/1.1\r\nHost: localhost", 411),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: {}", 400),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5", 400),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0x10", 400),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999", 413),
        ("PUT /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}", 501),
        ("POST /clips HTTP/1.1\r\nHost: localhost\r\nX: " + "a" * 70_000, 431),
        ("nonsense", 400),
    ],
)  # fmt: skip
def test_nothing_after_an_early_refusal_is_taken_for_a_request(
    served: Served, maker: Maker, head: str, status: int
) -> None:
    answer = served.raw(head.format(len(inner())).encode() + b"\r\n\r\n" + inner())
    assert maker.seen == []
    if not head.startswith("nonsense"):
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
        top, _, body = answer.partition(b"\r\n\r\n")
        assert b"application/json" in top and b"Connection: close" in top
    else:
        body = answer.partition(b"\r\n\r\n")[2] or answer
    assert json.loads(body)["error"]


def test_two_requests_on_one_connection_are_both_served(served: Served, maker: Maker) -> None:
    bad = inner().replace(b'"steps": 4', b'"steps": 0')
    answer = served.raw(bad + inner().replace(b"Host:", b"Connection: close\r\nHost:"))
    assert answer.count(b"HTTP/1.1 422") == answer.count(b"HTTP/1.1 200") == 1
    assert len(maker.seen) == 1


def test_a_body_that_ends_early_is_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), LIMIT) as connection:
        connection.sendall(inner()[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 400" in connection.recv(1000)


def test_a_body_that_does_not_come_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.Handler, "timeout", 0.05)
    assert served.raw(inner()[:-5]).startswith(b"HTTP/1.1 408 ")


def test_health_and_models_tell_what_is_served(served: Served, tmp_path: Path) -> None:
    status, told, _ = served.ask("GET", "/health")
    assert (status, told["status"], told["dump_dir"]) == (200, "ready", str(tmp_path))
    assert told["dump_dir_writable"] is True and told["queued"] == 0
    assert served.ask("GET", "/v1/models")[1]["data"][0]["id"] == "ltx"
    assert served.ask("GET", "/other")[0] == served.ask("POST", "/clips?x=1", ASKED)[0] == 404


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (StepDumpError("no room for a dump"), 500, "no room for a dump"),
        (RecipeError("no such levels"), 500, "no such levels"),
        (OSError(errno.ENOSPC, "full"), 507, "the clip could not be made"),
        (MemoryError(), 500, "not enough memory"),
        (KeyError("/secret/path"), 500, "the clip could not be made"),
    ],
)
def test_a_clip_that_fails_is_told_without_the_insides(
    served: Served, maker: Maker, error: BaseException, status: int, words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    maker.error = error
    found, told, headers = served.ask("POST", "/clips", ASKED)
    assert found == status
    assert words in told["error"]
    assert type(error).__name__ not in told["error"] and "secret" not in told["error"]
    assert told["request_id"] == headers["X-Request-Id"]
    assert told["request_id"] in caplog.text and "Traceback" in caplog.text
    maker.error = None
    assert served.ask("POST", "/clips", ASKED)[0] == 200  # and the next one is served


def test_a_full_disk_is_told_as_one() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError as error:
            raise StepDumpError("no room") from error
    except StepDumpError as error:
        assert service.status_of(error) == 507
    assert service.status_of(ValueError()) == 500


def test_a_server_that_fails_itself_still_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("insides")

    monkeypatch.setattr(asked, "check", broken)
    status, told, headers = served.ask("POST", "/clips", ASKED)
    assert status == 500
    assert told["request_id"] == headers["X-Request-Id"] and "insides" not in told["error"]
    assert "ZeroDivisionError" in caplog.text


def test_a_server_that_loads_or_failed_to_says_so(tmp_path: Path) -> None:
    go = threading.Event()

    def load() -> Any:
        assert go.wait(LIMIT)
        raise ValueError("no such weights")

    running = Served(tmp_path, load)
    try:
        assert running.ask("GET", "/health")[:1] == (503,)
        assert running.ask("POST", "/clips", ASKED)[1]["error"] == "the model is loading"
        go.set()
        assert running.server.engine.failed.wait(LIMIT)
        told = running.ask("GET", "/health")[1]
        assert (told["status"], told["problem"]) == ("failed", "no such weights")
        assert running.ask("POST", "/clips", ASKED)[1]["error"] == "no such weights"
    finally:
        running.close()


def lane(served: Served, answers: list[int], **changed: Any) -> threading.Thread:
    thread = threading.Thread(
        target=lambda: answers.append(served.ask("POST", "/clips", {**ASKED, **changed})[0])
    )
    thread.start()
    return thread


def until(true: Callable[[], bool]) -> None:
    for _ in range(int(LIMIT * 1000)):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


def test_a_full_queue_answers_429_and_serves_those_that_wait(served: Served, maker: Maker) -> None:
    maker.go.clear()
    answers: list[int] = []
    lanes = [lane(served, answers)]
    assert maker.started.wait(LIMIT)
    lanes += [lane(served, answers, seed=n) for n in (2, 3)]
    until(lambda: served.server.engine.jobs.qsize() == 2)
    status, _, headers = served.ask("POST", "/clips", ASKED)
    assert (status, headers["Retry-After"]) == (429, "5")
    maker.go.set()
    for each in lanes:
        each.join()
    assert answers == [200, 200, 200]


def test_whoever_left_while_waiting_is_passed_over(served: Served, maker: Maker) -> None:
    maker.go.clear()
    answers: list[int] = []
    first = lane(served, answers)
    assert maker.started.wait(LIMIT)
    gone = socket.create_connection(("127.0.0.1", served.port), LIMIT)
    gone.sendall(inner())
    until(lambda: served.server.engine.jobs.qsize() == 1)
    gone.close()
    last = lane(served, answers, seed=9)
    until(lambda: served.server.engine.jobs.qsize() == 2)
    maker.go.set()
    first.join()
    last.join()
    assert answers == [200, 200]
    assert [each.request["seed"] for each in maker.seen] == [1, 9]


def test_a_clip_is_given_up_when_its_client_leaves(served: Served, maker: Maker) -> None:
    maker.until_unwanted = True
    gone = socket.create_connection(("127.0.0.1", served.port), LIMIT)
    gone.sendall(inner())
    assert maker.started.wait(LIMIT)
    gone.close()
    until(lambda: served.server.engine.jobs.qsize() == 0)
    answers: list[int] = []
    after = lane(served, answers, seed=9)
    until(lambda: len(maker.seen) == 2)
    maker.until_unwanted = False
    after.join()
    assert answers == [200]


def test_a_client_that_sent_more_is_still_there() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(LIMIT)
        assert web.waits(here)
        there.sendall(b"GET")
        assert web.waits(here)
        there.close()
        assert web.waits(here)
        assert here.recv(3) == b"GET"
        assert not web.waits(here)
    assert not web.waits(here)


def test_a_server_that_stops_gives_its_clip_up_and_removes_its_unfinished_dumps(
    tmp_path: Path, maker: Maker
) -> None:
    maker.until_unwanted = True
    running = Served(tmp_path, maker)
    running.ready()
    answers: list[int] = []
    lanes = [lane(running, answers)]
    assert maker.started.wait(LIMIT)
    lanes.append(lane(running, answers))
    until(lambda: running.server.engine.jobs.qsize() == 1)
    (tmp_path / f".{os.getpid()}-5-{'a' * 32}.partial").touch()
    (tmp_path / ".1-5-other.partial").touch()
    running.close()
    for each in lanes:
        each.join()
    assert sorted(answers) == [499, 503]
    assert [path.name for path in tmp_path.iterdir()] == [".1-5-other.partial"]
    assert len(maker.seen) == 1


def test_connections_beyond_the_room_are_told_and_closed(
    tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "SPARE_CONNECTIONS", 0)
    running = Served(tmp_path, maker, queue=1)
    try:
        running.ready()
        held = [socket.create_connection(("127.0.0.1", running.port), LIMIT) for _ in range(2)]
        for each in held:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert each.recv(15) == b"HTTP/1.1 200 OK"
        assert running.raw(b"").startswith(b"HTTP/1.1 503 ")
        for each in held:
            each.close()
        until(lambda: running.server._room.acquire(blocking=False))
    finally:
        running.close()


def test_a_client_may_send_a_refused_body_to_its_end(served: Served) -> None:
    size = web.MAX_BODY + 1
    head = f"POST /clips HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), LIMIT) as connection:
        connection.sendall(head.encode())
        answer = b""
        while piece := connection.recv(65536):  # to the end of what the server has to say
            answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ")
        for _ in range(16):  # as most clients do, who read no answer before
            connection.sendall(b"x" * (size // 16))


def test_a_connection_that_breaks_is_no_news_and_another_failure_is(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (ConnectionResetError(), RuntimeError("insides")):
        try:
            raise error
        except (OSError, RuntimeError):
            served.server.handle_error(None, None)
    assert "insides" in caplog.text and "ConnectionReset" not in caplog.text
