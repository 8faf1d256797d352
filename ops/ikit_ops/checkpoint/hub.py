"""Headers of a model on the Hub: a few kilobytes of it, never the weights.

A server that honours ``Range`` gives the first bytes of a shard alone, and a safetensors
header is at the front.  One guess of 128 KiB holds the header of almost every shard (the
longest of Kimi-K2's 207 is 89 kB); a longer one costs a second request for exactly the
rest.  Shards are asked for in parallel, so the time is that of the slowest.

Everything is read at one commit, which is resolved first: a push between two requests
must not mix two models.  Where the cache holds that commit, its files are read instead.
The endpoint is that of HF_ENDPOINT, never an argument, and a token is sent over https or
to this machine only.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.checkpoint import files, hub_cache, local, merge, select
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    REDOWNLOAD,
    Header,
    header_length,
    parse_header,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FIRST_RANGE = 1 << 17
PARALLEL = 64
TIMEOUT_SECONDS = 20.0
_ATTEMPTS = 3
_LONGEST_PAUSE = 10.0
_RETRY_STATUS = (429, 500, 502, 503, 504)
_CHUNK = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


T = TypeVar("T")


class Part(NamedTuple):
    """Bytes of a remote file from its start on, and the file's size when the server told."""

    data: bytes
    size: int | None


def read_hub(
    model: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """The checkpoint of a Hub id, at one commit.

    Args:
        model: ``owner/name``.
        revision: branch, tag or commit; None for the default branch.
        weights: False reads the configuration alone.
        progress: called with (headers read, headers to read).

    Raises:
        OpError: no access, no such model or revision, no connection and no cached
            copy, or a checkpoint that cannot be counted; with the next step.
    """
    if hub_cache.offline():
        return _cached(model, revision, weights, progress, "offline mode is on (HF_HUB_OFFLINE)")
    if revision is not None and hub_cache.COMMIT.fullmatch(revision):
        found = _try_cache(model, revision, weights, progress)
        if found is not None:
            return found
    try:
        remote = Remote(model, revision)
    except _Unreachable as error:
        return _cached(model, revision, weights, progress, str(error))
    found = _try_cache(model, remote.commit, weights, progress)
    if found is not None:
        return found
    return remote.read(weights, progress)


def _cached(
    model: str,
    revision: str | None,
    weights: bool,
    progress: Callable[[int, int], None] | None,
    why: str,
) -> Checkpoint:
    """The cached snapshot, when the Hub cannot be asked; OpError without one."""
    found = hub_cache.snapshot(model, revision)
    if found is None:
        at = f" at revision {excerpt(revision, 60)}" if revision else ""
        raise OpError(
            f"{model}{at}: {why}, and the Hub cache has no snapshot of it",
            "allow the connection, or download the model first",
        )
    folder, commit = found
    checkpoint = local.read_folder(
        folder, source="hub-cache", name=model, revision=commit, progress=progress
    )
    checkpoint.location = model
    if not weights:
        checkpoint.tensors, checkpoint.format = {}, None
        checkpoint.no_weights = "the configuration was asked for"
    checkpoint.notes.append(f"{why}: the cached commit may be older than the Hub's")
    return checkpoint


def _try_cache(
    model: str, commit: str, weights: bool, progress: Callable[[int, int], None] | None
) -> Checkpoint | None:
    """The cached files of a commit, if the cache has all that the count needs of it."""
    found = hub_cache.snapshot(model, commit)
    if found is None or not weights:
        return None
    try:
        checkpoint = local.read_folder(
            found[0], source="hub-cache", name=model, revision=commit, progress=progress
        )
    except OpError:
        return None  # an interrupted download: the Hub has the rest
    if checkpoint.format is None or checkpoint.config is None:
        return None
    checkpoint.location = model
    return checkpoint


class _Unreachable(Exception):
    """The Hub could not be reached at all; a cached copy may do."""


class Remote:
    """One model on the Hub at one commit.

    Attributes:
        commit: the commit that the revision was resolved to.
        names: file names at the top of the repository.
    """

    def __init__(self, model: str, revision: str | None) -> None:
        # imported here: half a second that no local model should pay
        from huggingface_hub import HfApi, constants

        self.model = model
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        token = None if _may_carry_token(self.endpoint) else False
        self.api: HfApi = HfApi(endpoint=self.endpoint, token=token, library_name="ikit-mcp")
        headers = _utilities().build_hf_headers(token=token, library_name="ikit-mcp")
        self.headers: dict[str, str] = {**headers, "Accept-Encoding": "identity"}
        info = self._asked(lambda: self.api.model_info(model, revision=revision, timeout=10.0))
        self.commit = str(info.sha or "")
        if not hub_cache.COMMIT.fullmatch(self.commit):
            raise OpError(f"{model}: the Hub named no commit", "check HF_ENDPOINT")
        self.names = {item.rfilename for item in info.siblings or [] if "/" not in item.rfilename}

    def read(self, weights: bool, progress: Callable[[int, int], None] | None) -> Checkpoint:
        """Configuration and headers of the commit."""
        checkpoint = Checkpoint("hub", self.model, self.model, self.commit)
        wanted = [n for n in (local.CONFIG_NAME, local.QUANT_NAME) if n in self.names]
        if select.INDEX_NAME in self.names and weights:
            wanted.append(select.INDEX_NAME)
        found = dict(zip(wanted, self._each(wanted, self._small), strict=True))
        for key, name in (("config", local.CONFIG_NAME), ("quant_config", local.QUANT_NAME)):
            if name in found:
                setattr(checkpoint, key, files.parse_json(found[name], name))
        if not weights:
            checkpoint.no_weights = "the configuration was asked for"
            return checkpoint
        weight_map = None
        if select.INDEX_NAME in found:
            weight_map = files.weight_map_of(found[select.INDEX_NAME], select.INDEX_NAME)
        selection = select.select_weight_files(self.names, weight_map)
        checkpoint.skipped, checkpoint.notes = selection.skipped, selection.notes
        checkpoint.no_weights = selection.refusal
        if selection.files:
            self._headers(checkpoint, selection.files, weight_map, progress)
        elif checkpoint.config is None:
            raise OpError(
                f"{self.model}: no config.json, and {selection.refusal}",
                "give a model with safetensors files, or download its .gguf and give the path",
            )
        return checkpoint

    def _headers(
        self,
        checkpoint: Checkpoint,
        shards: list[str],
        weight_map: dict[str, str] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """The headers of all shards, in parallel, merged in the order of their names."""
        checkpoint.format = "safetensors"
        headers = self._each(shards, self._header, progress)
        for shard, header in zip(shards, headers, strict=True):
            merge.add_file(checkpoint, shard, header, weight_map)
        if weight_map is not None:
            merge.compare_with_index(checkpoint, weight_map)
        merge.note_duplicates(checkpoint)

    def _each(
        self,
        names: list[str],
        work: Callable[[str], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """``work`` on every name, in parallel; the first failure ends it."""
        if not names:
            return []
        pool = ThreadPoolExecutor(min(len(names), PARALLEL), "headers")
        try:
            futures = {pool.submit(work, name): at for at, name in enumerate(names)}
            results: list[Any] = [None] * len(names)
            for done, future in enumerate(as_completed(futures)):
                results[futures[future]] = future.result()
                if progress is not None:
                    progress(done + 1, len(names))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a cancel must not wait for all
        return results

    def _header(self, name: str) -> Header:
        """The header of one remote safetensors file."""
        first = self._range(name, 0, FIRST_RANGE)
        length = header_length(first.data, first.size, name)
        raw = first.data[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(raw) < length:  # compared with the bytes that came, not with those asked for
            rest = self._range(name, LENGTH_BYTES + len(raw), LENGTH_BYTES + length)
            raw += rest.data
        if len(raw) < length:
            raise OpError(f"{name}: ended inside its header", REDOWNLOAD)
        return parse_header(raw, first.size, name)

    def _small(self, name: str) -> bytes:
        """A remote file as a whole, bounded."""
        index = name == select.INDEX_NAME
        limit = files.MAX_INDEX_BYTES if index else files.MAX_CONFIG_BYTES
        data = self._range(name, 0, limit + 1, ranged=False).data
        if len(data) > limit:
            raise OpError(f"{name}: more than the {limit} bytes allowed", "check the repository")
        return data

    def _range(self, name: str, start: int, end: int, *, ranged: bool = True) -> Part:
        """Bytes [start, end) of a remote file at the commit, fewer when it is shorter."""
        url = f"{self.endpoint}/{quote(self.model)}/resolve/{self.commit}/{quote(name)}"
        headers = dict(self.headers)
        if ranged:
            headers["Range"] = f"bytes={start}-{end - 1}"
        try:
            return self._asked(lambda: _get(url, headers, start, end))
        except _Unreachable as error:
            raise OpError(f"{self.model}: {name}: {error}", "try again") from None

    def _asked(self, request: Callable[[], T]) -> T:
        """What a request answers; failures become an OpError with the next step."""
        from huggingface_hub import errors

        name = self.model
        try:
            return request()
        except errors.GatedRepoError:
            raise OpError(
                f"{name} is gated: its licence must be accepted first",
                "accept the licence on the model's page and set HF_TOKEN",
            ) from None
        except errors.RepositoryNotFoundError:
            raise OpError(
                f"{name}: no such model on the Hub, or a private one",
                "check the id; for a private model set HF_TOKEN",
            ) from None
        except errors.RevisionNotFoundError:
            raise OpError(
                f"{name}: no such revision", "give a branch, tag or commit of the model"
            ) from None
        except errors.EntryNotFoundError:
            raise OpError(
                f"{name}: a file that the Hub lists is not there", "try again, or another revision"
            ) from None
        except errors.HFValidationError:
            raise OpError(f"{name!r} is no Hub id", "give owner/name") from None
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status in (401, 403):
                raise OpError(
                    f"{name}: the Hub refuses access (HTTP {status})",
                    "set HF_TOKEN to a token that may read the model",
                ) from None
            raise _Unreachable(f"the Hub answered with HTTP {status}") from None
        except errors.OfflineModeIsEnabled:
            raise _Unreachable("offline mode is on (HF_HUB_OFFLINE)") from None
        except (_http_error(), OSError) as error:
            kind = type(error).__name__
            what = "did not answer in time" if "Timeout" in kind else f"is not reached ({kind})"
            raise _Unreachable(f"the Hub {what}") from None


def _get(url: str, headers: dict[str, str], start: int, end: int) -> Part:
    """Read [start, end) of a URL; a transport failure is tried again, a refusal is not."""
    utilities = _utilities()
    session = utilities.get_session()
    for attempt in range(_ATTEMPTS):
        last = attempt == _ATTEMPTS - 1
        try:
            with session.stream(
                "GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
            ) as response:
                if response.status_code in _RETRY_STATUS and not last:
                    time.sleep(_pause(attempt, response.headers.get("Retry-After", "")))
                    continue
                if response.status_code == 416:  # nothing there: an empty file
                    return Part(b"", 0)
                if response.status_code >= 400:
                    response.read()
                utilities.hf_raise_for_status(response)
                return _body(response, start, end)
        except _http_error():
            if last:
                raise
    raise AssertionError("the last attempt returns or raises")


def _body(response: Any, start: int, end: int) -> Part:
    """The asked bytes of a response, whether or not the server honoured the range.

    A server that sends the whole file is read up to ``end`` and hung up on.
    """
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    partial = response.status_code == 206 and found is not None
    position = int(found[1]) if partial and found else 0
    total = found[3] if partial and found else response.headers.get("Content-Length", "")
    parts: list[bytes] = []
    for chunk in response.iter_raw(_CHUNK):
        wanted = chunk[max(start - position, 0) : max(end - position, 0)]
        position += len(chunk)
        if wanted:
            parts.append(wanted)
        if position >= end:
            break
    return Part(b"".join(parts), int(total) if total.isdigit() else None)


def _pause(attempt: int, retry_after: str) -> float:
    """Seconds before the next attempt: what the server asks for, within reason."""
    asked = float(retry_after) if retry_after.isdigit() else 0.25 * 2**attempt
    return min(asked, _LONGEST_PAUSE)


def _utilities() -> Any:
    """The helpers of the Hub's client, which it exports without declaring them."""
    return importlib.import_module("huggingface_hub.utils")


def _http_error() -> type[Exception]:
    """The transport's base error: httpx or httpx2, as the Hub's client uses."""
    from huggingface_hub import errors

    kind: type[Exception] = vars(errors)["HTTPError"]
    return kind


def _may_carry_token(endpoint: str) -> bool:
    """Whether a token may go there: over https, or to this machine."""
    parts = urlsplit(endpoint)
    return parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1")
