"""Whether the disk holds what is still to come."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ikit_mcp.registry import OpError
from ikit_ops.clips import room
from ikit_ops.clips.room import RESERVE_BYTES, Room, contract_bytes, size_text

USUAL = {"width": 768, "height": 512, "num_frames": 121, "fps": 24, "steps": 30, "audio": None}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free bytes of each folder's disk, by the folder's name; each has a disk of its own."""
    left: dict[str, int] = {}
    whole = shutil.disk_usage(Path.cwd())
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: whole._replace(free=left[Path(path).name])
    )
    monkeypatch.setattr(room, "_disk", lambda folder: hash(folder.name))
    return left


def test_the_contracts_example_has_the_contracts_bytes() -> None:
    assert contract_bytes(USUAL) == 292_132_320
    silent = contract_bytes({**USUAL, "audio": False})
    assert silent == 91 * 4 * 128 * 16 * 16 * 24 + 480


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (2352, "2.35 kB"), (292_132_320, "292 MB"),
     (29e9, "29 GB")],
)  # fmt: skip
def test_sizes_are_told_in_the_unit_that_fits(count: float, text: str) -> None:
    assert size_text(count) == text


def test_dumps_are_projected_before_one_was_seen_and_by_what_was_seen_after(
    free: dict[str, int],
) -> None:
    free |= {"out": 10**9, "dumps": RESERVE_BYTES + 3 * 292_132_320}
    made = Room(Path("out"), Path("dumps"))
    made.expect([USUAL, {**USUAL, "steps": 2}])
    assert made.check(3) == "876 MB"
    with pytest.raises(OpError, match=r"4 clips to come need 1.17 GB .* in dumps"):
        made.check(4)
    made.saw(1000, 500_000_000)
    with pytest.raises(OpError, match=r"3 clips to come need 1.5 GB"):
        made.check(3)
    assert (made.free_bytes, made.free_in_out) == (free["dumps"], 10**9)


def test_the_disk_of_the_clips_is_looked_at_too(free: dict[str, int]) -> None:
    free |= {"out": RESERVE_BYTES + 10_000}
    made = Room(Path("out"), None)
    made.expect([USUAL])
    assert made.check(100) == ""  # the clips' size is not known yet
    made.saw(4_000, None)
    assert made.check(2) == ""
    with pytest.raises(OpError, match=r"3 clips to come need 12 kB .*4 kB an mp4\)"):
        made.check(3)
    free["out"] = 100
    with pytest.raises(OpError, match=r"^clips need 268 MB to spare; 100 bytes are free in out"):
        made.check(0)


def test_dumps_and_clips_on_one_disk_are_added_up(
    free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_disk", lambda folder: 1)
    free |= {"out": RESERVE_BYTES + 1_500, "dumps": RESERVE_BYTES + 1_500}
    made = Room(Path("out"), Path("dumps"))
    made.saw(1_000, 1_000)
    with pytest.raises(OpError, match="1 clips to come need 2 kB"):
        made.check(1)


def test_a_clip_without_a_dump_ends_the_projection(free: dict[str, int]) -> None:
    free |= {"out": 10**9, "dumps": RESERVE_BYTES}
    made = Room(Path("out"), Path("dumps"))
    made.expect([USUAL])
    made.saw(10, None)
    assert made.check(3) == "" and made.dump_bytes is None
