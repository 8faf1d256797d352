"""What mixes tokens in a layer, by the tensors that are there.

Headers do not lie about this: a softmax layer stores a key projection, a Mamba layer its
``A_log`` and ``conv1d``, multi-head latent attention its ``kv_a`` projection.  The
configuration's pattern says which softmax layers have a window; *whether* a layer has a
cache, a state, both (Falcon-H1) or neither (an MLP layer of Nemotron-H) is read here.

Families of mixers and what marks them:

- ``gqa``: k_proj, or a fused query-key-value projection.
- ``mla``: kv_a_proj_with_mqa (DeepSeek); with an ``indexer`` it is sparse (``dsa``).
- ``mamba1``: A_log and x_proj.  ``mamba2``: A_log, conv1d, in_proj without x_proj.
- ``gdn``: Gated DeltaNet, A_log with in_proj_qkv(z), in_proj_ba or a_proj (Qwen3-Next, 3.5).
- ``kda``: Kimi Delta Attention, A_log with a low-rank forget gate (f_a_proj).
- ``lightning``: qkv_proj with output_gate (MiniMax-01, M1).
- ``shortconv``: conv.conv (LFM2).

A mixer with a tensor that no family is known to have is UNPROVEN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ikit_ops.decode.names import CROSS_ATTENTION, MIXER, MLP
from ikit_ops.decode.vocabulary import words
from ikit_ops.decode.weights import Slot

FUSED_QKV = words("qkv_proj query_key_value Wqkv c_attn W_pack qkv wqkv attn_qkv")
_KEY = frozenset({"k_proj", "wk", "k_linear"})
_LATENT = words("kv_a_proj_with_mqa kv_a_proj fused_qkv_a_proj_with_mqa fused_qkv_a_proj")
_SOFTMAX = (
    FUSED_QKV
    | _KEY
    | _LATENT
    | words(
        "q_proj v_proj o_proj out_proj dense c_proj wq wv wo q_norm k_norm v_norm q_layernorm "
        "k_layernorm query_layernorm key_layernorm sinks attention_sink_bias rotary_emb.inv_freq "
        "g_proj gate_proj gate q_a_proj q_a_layernorm q_b_proj kv_a_layernorm kv_b_proj "
        "attn_sub_norm inner_attn_ln bias masked_bias rope_freqs temperature k_b_proj v_b_proj "
        "indexer.wq_b indexer.wk indexer.k_norm indexer.weights_proj indexer.attn_q_b "
        "indexer.attn_k indexer.proj"
    )
)
_RECURRENT = words(
    "A_log D dt_bias in_proj out_proj x_proj dt_proj conv1d norm dt_layernorm b_layernorm "
    "c_layernorm q_proj k_proj v_proj o_proj q_conv1d k_conv1d v_conv1d a_proj b_proj g_proj "
    "f_a_proj f_b_proj g_a_proj g_b_proj o_norm in_proj_a in_proj_b in_proj_ba in_proj_qkv "
    "in_proj_qkvz in_proj_z qkv_proj output_gate slope_rate query_decay key_decay diagonal_decay "
    "conv ssm_a forget_gate_down forget_gate_up"
)
INDEXER = frozenset({"indexer"})
_NORMS = ("q_layernorm.norms.", "k_layernorm.norms.")  # StableLM-2 has a norm for each head


@dataclass
class Mixer:
    """The token mixer of one layer: its family, and its modules by leaf name.

    ``modules``: leaf -> parameter -> slot (``modules["k_proj"]["weight"].shape``).
    ``strange``: leaves that the family is not known to have.
    """

    family: str
    container: str
    modules: dict[str, dict[str, Slot]] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)

    def slot(self, leaf: str) -> Slot | None:
        """The weight of a leaf module, whatever its format calls it; None when absent."""
        parameters = self.modules.get(leaf)
        if not parameters:
            return None
        for name in ("weight", "", "weight_packed", "qweight"):
            if name in parameters:
                return parameters[name]
        return next(iter(parameters.values()))


def mixers_by_layer(slots: Iterable[Slot], stack: str) -> dict[int, list[Mixer]]:
    """The mixers of every layer of a stack, most layers having one."""
    found: dict[int, dict[str, Mixer]] = {}
    for slot in slots:
        place = slot.place
        if place.layer is None or place.stack != stack or not place.module:
            continue
        container, leaf = _inner_container(place.module)
        if not leaf or place.role not in ("attention", "norms", "aux", "unknown", "mtp"):
            continue
        if place.role == "mtp" and container == "mixer" and leaf in MLP:
            continue
        layer = found.setdefault(place.layer, {})
        mixer = layer.setdefault(container, Mixer("", container))
        mixer.modules.setdefault(leaf, {})[place.parameter] = slot
    result: dict[int, list[Mixer]] = {}
    for number, containers in found.items():
        for mixer in containers.values():
            mixer.family, mixer.strange = _family(mixer)
        result[number] = [m for m in containers.values() if m.family != "none"]
    return result


def _inner_container(module: str) -> tuple[str, str]:
    """(container, leaf) of a mixer's module, wherever it sits.

    It may lie deeper (``shared_transformer.self_attn.q_proj``), or be nested in one of its
    kind (GPT-Neo's ``attn.attention.q_proj``).
    """
    parts = module.split(".")
    for at, part in enumerate(parts[:-1]):
        if part in MIXER:
            end = at + 1
            while end < len(parts) - 1 and parts[end] in MIXER:
                end += 1
            return ".".join(parts[:end]), ".".join(parts[end:])
    return "", ""


def _family(mixer: Mixer) -> tuple[str, list[str]]:
    """The family of a mixer, and the leaves that it is not known to have."""
    leaves = set(mixer.modules)
    first = {leaf.partition(".")[0] for leaf in leaves}
    if CROSS_ATTENTION.intersection(mixer.container.split(".")):
        return "cross", []
    unheard = sorted(leaves - _RECURRENT)
    if "A_log" in leaves or "ssm_a" in leaves:
        return _recurrent(leaves), unheard
    if "qkv_proj" in leaves and "output_gate" in leaves:
        return "lightning", unheard
    if mixer.container in ("conv", "short_conv", "shortconv"):
        return ("shortconv", unheard) if "conv" in leaves else ("unknown", sorted(leaves))
    strange = sorted(leaf for leaf in leaves - _SOFTMAX if not leaf.startswith(_NORMS))
    if leaves & _LATENT:
        return ("dsa" if first & INDEXER else "mla"), strange
    if leaves & (_KEY | FUSED_QKV):
        return "gqa", sorted({*strange, *(leaf for leaf in leaves if leaf.startswith("indexer."))})
    if leaves & {"q_proj", "wq"}:
        return "query_only", strange
    if leaves <= _SOFTMAX:
        return "none", []  # a norm or a buffer alone mixes nothing
    return "unknown", strange


def _recurrent(leaves: set[str]) -> str:
    """The family of a mixer that has a decay (``A_log``)."""
    if leaves & {"f_a_proj", "forget_gate_down"}:
        return "kda"
    if leaves & {"in_proj_qkvz", "in_proj_qkv", "in_proj_ba", "a_proj"}:
        return "gdn"
    if "x_proj" in leaves:
        return "mamba1"
    if "conv1d" in leaves and "in_proj" in leaves:
        return "mamba2"
    return "unknown"
