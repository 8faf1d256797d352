"""The groups of a byte count, and which of them a token reads.

Every stored byte is in exactly one group.  *Read* groups are what one decode step
streams from memory; *not read* groups are resident all the same, and a count that
divides a speed by the size on disk is wrong by them.  With one sequence,

    sum(read) + sum(not read) == stored bytes + bytes read twice

where the bytes read twice are the embedding row of a model whose head is the embedding
itself: the row is gathered, and the whole table is read again as the head.
"""

from __future__ import annotations

from ikit_ops.decode.vocabulary import words

READ = (
    "embedding_row",
    "per_layer_embedding_row",
    "attention",
    "mlp",
    "router",
    "routed_experts",
    "shared_experts",
    "norms",
    "lm_head",
    "aux",
    "other",
)
NOT_READ = {
    "towers": "vision and audio towers and their projectors: text decoding does not run them",
    "mtp": "multi-token-prediction layers: the main model does not run them",
    "embedding_rest": "the embedding tables beyond the row of one token",
    "unrouted_experts": "experts that the router does not pick",
    "dead_duplicates": "copies and constants (causal masks, decay tables) that engines do not load",
}
# Weights that every device of a tensor-parallel group holds and reads in full (vLLM's
# ReplicatedLinear and its norms); all other weights are split across the devices.
REPLICATED_GROUPS = frozenset(
    {"embedding_row", "per_layer_embedding_row", "router", "norms", "aux"}
)
REPLICATED_MODULES = words(
    "q_a_proj kv_a_proj_with_mqa kv_a_proj fused_qkv_a_proj_with_mqa shared_expert_gate sinks"
)
