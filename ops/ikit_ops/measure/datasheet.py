"""What vendors say that their devices' memory can move, in GB/s (1e9 bytes).

Figures of the vendors' own datasheets, as published on 2026-11-30 or before.  They are peaks of
the bus, which no kernel sustains: 85 to 95 % is what to expect, and more than 100 % is a sign
that something was cached, or that the table is wrong.  A device that is not here has no figure;
none is guessed from a similar name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AS_OF = "2026-11-30"
_NVIDIA, _AMD = "NVIDIA datasheet", "AMD datasheet"


@dataclass(frozen=True)
class Figure:
    """One line of a datasheet: whose, how much, and where it is from."""

    device: str
    gbs: float
    source: str


# The first pattern that matches the whole name (as the driver gives it, any case) decides.
_TABLE = (
    (r"(?:NVIDIA )?B200", 8000.0, f"{_NVIDIA} B200"),
    (r"(?:NVIDIA )?GH200 480GB", 4000.0, f"{_NVIDIA} GH200 (96 GB HBM3)"),
    (r"(?:NVIDIA )?GH200 144G HBM3e", 4900.0, f"{_NVIDIA} GH200 (144 GB HBM3e)"),
    (r"(?:NVIDIA )?H200(?: NVL)?", 4800.0, f"{_NVIDIA} H200"),
    (r"(?:NVIDIA )?H100 80GB HBM3", 3350.0, f"{_NVIDIA} H100 SXM"),
    (r"(?:NVIDIA )?H100 NVL", 3900.0, f"{_NVIDIA} H100 NVL"),
    (r"(?:NVIDIA )?H100 PCIe", 2000.0, f"{_NVIDIA} H100 PCIe"),
    (r"(?:NVIDIA )?A100-SXM4-80GB", 2039.0, f"{_NVIDIA} A100 80GB SXM"),
    (r"(?:NVIDIA )?A100 80GB PCIe", 1935.0, f"{_NVIDIA} A100 80GB PCIe"),
    (r"(?:NVIDIA )?A100-(?:SXM4|PCIE)-40GB", 1555.0, f"{_NVIDIA} A100 40GB"),
    (r"(?:NVIDIA )?A40", 696.0, f"{_NVIDIA} A40"),
    (r"(?:NVIDIA )?A30", 933.0, f"{_NVIDIA} A30"),
    (r"(?:NVIDIA )?A10G?", 600.0, f"{_NVIDIA} A10"),
    (r"(?:NVIDIA )?L40S?", 864.0, f"{_NVIDIA} L40 and L40S"),
    (r"(?:NVIDIA )?L4", 300.0, f"{_NVIDIA} L4"),
    (r"(?:NVIDIA )?(?:Tesla )?T4", 320.0, f"{_NVIDIA} T4"),
    (r"(?:NVIDIA )?(?:Tesla )?V100-SXM2-(?:16|32)GB", 900.0, f"{_NVIDIA} V100 SXM2"),
    (r"(?:NVIDIA )?RTX A6000", 768.0, f"{_NVIDIA} RTX A6000"),
    (r"(?:NVIDIA )?RTX 6000 Ada Generation", 960.0, f"{_NVIDIA} RTX 6000 Ada"),
    (r"(?:NVIDIA )?RTX PRO 6000 Blackwell Workstation Edition", 1792.0, f"{_NVIDIA} RTX PRO 6000"),
    (r"(?:NVIDIA )?GeForce RTX 5090", 1792.0, f"{_NVIDIA} GeForce RTX 5090"),
    (r"(?:NVIDIA )?GeForce RTX 4090", 1008.0, f"{_NVIDIA} GeForce RTX 4090"),
    (r"(?:NVIDIA )?GeForce RTX 3090 Ti", 1008.0, f"{_NVIDIA} GeForce RTX 3090 Ti"),
    (r"(?:NVIDIA )?GeForce RTX 3090", 936.0, f"{_NVIDIA} GeForce RTX 3090"),
    (r"(?:AMD )?Instinct MI355X(?: OAM)?", 8000.0, f"{_AMD} Instinct MI355X"),
    (r"(?:AMD )?Instinct MI325X(?: OAM)?", 6000.0, f"{_AMD} Instinct MI325X"),
    (r"(?:AMD )?Instinct MI300X(?: OAM)?", 5300.0, f"{_AMD} Instinct MI300X"),
    (r"(?:AMD )?Instinct MI210", 1638.0, f"{_AMD} Instinct MI210"),
    (r"(?:AMD )?Radeon RX 7900 XTX", 960.0, f"{_AMD} Radeon RX 7900 XTX"),
)


def figure(device: str | None) -> Figure | None:
    """The datasheet's figure for a device by the name that its driver gives, or None."""
    for pattern, gbs, source in _TABLE:
        if device and re.fullmatch(pattern, device.strip(), re.IGNORECASE):
            return Figure(device.strip(), gbs, source)
    return None
