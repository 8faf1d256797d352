"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.example import write_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell's background job ignores SIGINT, and every child inherits that: here, none does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _forget_the_caller_s_key() -> Iterator[None]:
    """What a caller named as a key stays a secret of the process: here, of one test."""
    yield
    os.environ.pop("IKIT_CALLER_KEY", None)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model directory with the header of Llama-3.1-8B and holes for weights."""
    return write_checkpoint(tmp_path / "llama")
