"""A stand-in for ``nvidia-smi`` on machines without a GPU: two devices, one of them busy."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """#!/bin/sh
case "$*" in
  *query-gpu=uuid*) echo "GPU-aaaaaaaa-0000, NVIDIA Test 1, 81559, 580.159"
                    echo "GPU-bbbbbbbb-1111, NVIDIA Test 2, 81559, 580.159" ;;
  *query-compute-apps=gpu_uuid*) echo "GPU-bbbbbbbb-1111, 4242, /usr/bin/other, 1024" ;;
  *) exit 6 ;;
esac
"""


def install(folder: Path) -> Path:
    """Put the stand-in into a folder for PATH; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(SCRIPT, encoding="utf-8")
    program.chmod(0o755)
    return folder
