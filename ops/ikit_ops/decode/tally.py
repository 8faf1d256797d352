"""What a count is asked for, and the sheet that it is written on.

Every slot that a step reads is entered once, with its group and its bytes on one device;
the groups, the formats and the layers are sums over those entries, so that they agree to
the byte.  A term that is not established is entered as UNPROVEN beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ikit_ops.decode import groups
from ikit_ops.decode.kv import KvLayer
from ikit_ops.decode.weights import Slot


@dataclass(frozen=True)
class Options:
    """What the count is asked for: the arguments of ``roofline`` that decide bytes."""

    context: int = 1024
    kv_dtype: str = "bf16"
    state_dtype: str | None = None
    include_mtp: bool = False
    mla_cache: str = "latent"
    batch: int = 1
    tensor_parallel: int = 1


@dataclass
class Counts:
    """A byte count; every number in bytes of one decode step (a token, at batch 1).

    Attributes:
        method: headers or config.
        stored_bytes: bytes of all tensors in the files; None when none were read.
        groups: read group -> bytes read.
        not_read: group -> bytes that are stored and not read.
        read_twice: bytes that stand in two read groups (a tied embedding's row).
        per_layer: bytes by decoder layer.
        by_format: weight format -> bytes read.
        kv, state, moe: the terms, in detail; None when the model has none.
        unproven: [{term, why, bytes}]: what is not established, and the counted bytes
            that rest on it.
        limitations: what the count does not cover, in words.
        quant: the algorithm that the quantisation config declares.
        head_is_embedding: whether the embedding table is read as the head.
        beyond: layers behind the model's that no key of the configuration announces.
        kv_layers: what each attention layer reads of its cache, for other contexts.
    """

    method: str
    stored_bytes: int | None
    groups: dict[str, int] = field(default_factory=dict)
    not_read: dict[str, int] = field(default_factory=dict)
    read_twice: int = 0
    per_layer: list[dict[str, Any]] = field(default_factory=list)
    by_format: dict[str, int] = field(default_factory=dict)
    kv: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    moe: dict[str, Any] | None = None
    unproven: list[dict[str, Any]] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)
    quant: str | None = None
    head_is_embedding: bool = False
    beyond: list[int] = field(default_factory=list)
    kv_layers: list[KvLayer] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of one step."""
        return sum(self.groups.values())

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of one step."""
        return int(self.kv["read_bytes"]) if self.kv else 0

    @property
    def state_bytes(self) -> int | None:
        """Recurrent state bytes of one step, read and written; None without state."""
        return int(self.state["read_write_bytes"]) if self.state else None

    @property
    def step_bytes(self) -> int:
        """All bytes of one step."""
        return self.weight_bytes + self.kv_bytes + (self.state_bytes or 0)

    @property
    def proven_bytes(self) -> int:
        """The step's bytes without those that rest on an UNPROVEN term."""
        return self.step_bytes - sum(int(item["bytes"]) for item in self.unproven)

    @property
    def dtype(self) -> str | None:
        """Weight formats that carry at least 1 % of the weight bytes read, largest first."""
        total = sum(self.by_format.values())
        large = [(n, f) for f, n in self.by_format.items() if n * 100 >= total and n]
        return "+".join(f for _, f in sorted(large, key=lambda item: (-item[0], item[1]))) or None

    def to_json(self) -> dict[str, Any]:
        """The count as the record keeps it (``data.counts``)."""
        return {
            "method": self.method,
            "stored_bytes": self.stored_bytes,
            "groups": {name: self.groups[name] for name in groups.READ if self.groups.get(name)},
            "not_read": [
                {"group": name, "bytes": size, "why": groups.NOT_READ[name]}
                for name, size in self.not_read.items()
                if size
            ],
            "read_twice_bytes": self.read_twice,
            "per_layer": self.per_layer,
            "read_bytes_by_format": dict(sorted(self.by_format.items(), key=lambda i: -i[1])),
            "kv": self.kv,
            "state": self.state,
            "moe": self.moe,
            "unproven": self.unproven,
        }

    def doubt(self, term: str, why: str, size: int = 0) -> None:
        """Record an UNPROVEN term and the counted bytes that rest on it."""
        self.unproven.append({"term": term, "why": why, "bytes": size})


def add_read(
    counts: Counts, reads: dict[int, int], slot: Slot, group: str, read: int, options: Options
) -> int:
    """Add what one device reads of a slot, of which a step reads ``read`` bytes in all; that."""
    device = split(read, group, slot.place.module, options.tensor_parallel)
    counts.groups[group] = counts.groups.get(group, 0) + device
    reads[id(slot)] = reads.get(id(slot), 0) + device
    return device


def split(read: int, group: str, module: str, devices: int) -> int:
    """Bytes of one device, when a weight is split over ``devices`` or held by all."""
    if devices == 1 or group in groups.REPLICATED_GROUPS:
        return read
    leaf = module.rpartition(".")[2]
    if leaf in groups.REPLICATED_MODULES and group != "routed_experts":
        return read
    return -(-read // devices)
