"""The kinds of fault that an examination can name, and what each looks like from outside."""

from collections.abc import Mapping
from types import MappingProxyType

UNKNOWN = "unknown"

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "position-stuck-at-0": "keys are stored as if every token stood at position 0",
        "position-stuck-at-1": "keys are stored as if every token stood at position 1",
        "position-off-by-one-in-decode": "decoded tokens are rotated one position too far, the prompt's are not",
        "position-off-by-one-everywhere": "keys are rotated one position too far; distances, and the text, are right",
        "position-wrong": "keys are rotated to positions that are not theirs",
        "rope-pairs-interleaved": "rotation pairs neighbouring dimensions where the model pairs the halves of a head",
        "rotation-wrong": "keys are rotated by other angles than the model's",
        "query-position-wrong": "keys are right, but queries are rotated to another position",
        "slot-off-by-one": "keys and values lie one place beside their own",
        "slot-wrong": "keys and values lie in places that are not theirs",
        "never-written": "keys and values were never written",
        "keys-or-values-altered": "what is stored is right but scaled, its heads permuted, or K and V exchanged",
        "mask-without-history": "a query sees what its own step has computed, and nothing before",
        "own-token-not-seen": "a query does not see its own token",
        "future-tokens-seen": "a query sees tokens that come after it",
        "history-partly-missing": "part of the past is not read",
        "block-table-wrong": "a block is read in the place of another",
        "values-misaligned": "weights are right, but they meet the values of other tokens",
        "batch-rows-share-cache": "one sequence's keys and values lie in the cache of another one in its batch",
        "reads-another-sequence": "a query reads the past of another sequence",
        "padding-attended": "empty places after the text take part in attention",
        "left-padding-attended": "copies of the first token stand before the text and take part in attention",
        "stale-fork-table": "after a fork a branch reads through the block table that another branch had",
        "stale-beam-reorder": "after beams have changed places, some layers read through the tables from before",
        "cache-wider-than-model": "K and V are stored wider than asked for: the text is right, the bytes are not",
        "cache-narrower-than-intended": "K and V have been rounded to fewer bits than asked for",
        "bits-reinterpreted": "the bits of one dtype are read as those of another",
        "cache-on-another-device": "K and V are on another device than the model",
        "kv-heads-tiled": "KV heads are tiled over the query heads (0 1 0 1) instead of repeated (0 0 1 1)",
        "head-map-wrong": "query heads read other KV heads than theirs",
        "window-one-short": "a window is one token too short",
        "window-one-long": "a window is one token too long",
        "window-wrong": "a window has another length than it should",
        "sinks-not-moved": "past the window, sinks are read at their true distance instead of the one inside the cache",
        "sinks-forgotten": "the sinks are not read once the window has left them behind",
        "published-before-filled": "a block was found by another request before anything was written to it",
        "hash-collision-trusted": "a request was given the blocks of another text, whose key happens to be equal",
        "rolled-back-token-returns": "tokens that were rolled back are still read",
        "shared-block-overwritten": "a block that two sequences share was written to without being copied",
        "block-reused-while-held": "a block that a sequence holds was given to another one",
        "scale-missing": "scores are not multiplied by the attention scale",
        "scale-wrong": "scores are multiplied by another factor than the model's",
        "softcap-missing": "scores are not soft-capped",
        "other-tokens-fed": "the model is fed other tokens than it was given",
        "logits-of-another-row": "hidden states are right, but logits are those of another row",
        "blocks-never-released": "blocks stay taken after every sequence has ended",
        "step-fails": "a model call fails",
        UNKNOWN: "something is wrong, and none of the known mistakes makes just this of it",
    }
)
