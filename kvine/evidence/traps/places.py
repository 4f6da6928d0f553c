"""Where to look after a diagnosis: for each kind of fault the engine's functions in which such a mistake would live.

The examination sees an engine from outside and names what it looks like; the way from there to a line of code is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvine.evidence.traps.kinds import KINDS, UNKNOWN


@dataclass(frozen=True)
class Place:
    """A file, from the repository's root, and the functions in it to read first."""

    file: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {', '.join(self.functions)}"


@dataclass(frozen=True)
class Kind:
    """What is known of one kind of fault.

    Attributes:
        name, meaning: as in `KINDS`.
        traps: the trap of the same name that shows it, or the nearest ones where there is none.
        places: where to look, the likeliest first.
    """

    name: str
    meaning: str
    traps: tuple[str, ...]
    places: tuple[Place, ...]


_BATCH = Place("kvine/engine/runner.py", ("Runner.batch",))
_SLOTS = Place("kvine/engine/runner.py", ("Runner._group",))
_STEP = Place("kvine/attention/cached.py", ("StepAttention.__init__", "StepAttention.__call__"))
_ANGLES = Place("kvine/rope.py", ("RotaryEmbedding.cos_sin", "rotate"))
_FREQUENCIES = Place("kvine/rope_scaling.py", ("inverse_frequencies", "attention_scaling"))
_STORE = Place("kvine/cache/pool.py", ("KVPool.row_index", "KVPool.write"))
_COPY = Place("kvine/cache/pool.py", ("KVPool.copy",))
_STORAGE = Place("kvine/cache/pool.py", ("KVPool.__init__",))
_PACKED = Place("kvine/cache/packed_pool.py", ("PackedPool.unsealed", "PackedPool.seal"))
_PACK = Place("kvine/cache/codec.py", ("pack", "unpack"))
_SEALED = Place("kvine/attention/packed.py", ("PackedStep.__init__", "PackedStep.attend"))
_CODEC = Place("kvine/cache/codec.py", ("storage_dtype", "encode"))
_VISIBLE = Place("kvine/cache/spec.py", ("CacheSpec.visible", "CacheSpec.window_start"))
_DEAD = Place("kvine/cache/spec.py", ("CacheSpec.dead_blocks", "CacheSpec.live_blocks"))
_MOVED = Place("kvine/cache/spec.py", ("CacheSpec.sinks_move_from",))
_WINDOWS = Place("kvine/models/cache_specs.py", ("cache_specs",))
_GATHER = Place("kvine/attention/sdpa.py", ("SdpaBackend._plan_request", "SdpaBackend.attend", "_select"))
_SCORES = Place("kvine/attention/sdpa.py", ("_fused", "_by_hand"))
_PLAN = Place("kvine/attention/native.py", ("NativeBackend.plan", "NativeBackend.attend"))
_KERNEL = Place("kvine/kernels/native/attention.cpp", ("Stretch::attend", "Stretch::read", "Stretch::read_tile"))
_TILES = Place(
    "kvine/kernels/native/prefill.cpp", ("TileOfQueries::attend", "TileOfQueries::seen", "TileOfQueries::read")
)
_PAGED = Place("kvine/kernels/native/paged.hpp", ("place_of", "load_queries", "locate", "Sums::merge", "write"))
_REFERENCE = Place("kvine/attention/reference.py", ("ReferenceBackend.attend",))
_WIRING = Place("kvine/engine/build.py", ("standard_parts",))
_TABLES = Place("kvine/cache/manager.py", ("CacheManager.reserve", "CacheManager._attach"))
_COMMIT = Place("kvine/cache/manager.py", ("CacheManager.commit", "CacheManager._publish_next"))
_FORK = Place("kvine/cache/manager.py", ("CacheManager.fork", "CacheManager._copy_on_write"))
_SWITCH = Place("kvine/engine/lines.py", ("switch",))
_CROP = Place("kvine/cache/manager.py", ("CacheManager.crop", "CacheManager._release_from"))
_RELEASE = Place("kvine/cache/manager.py", ("CacheManager.release", "CacheManager._release_block"))
_REFERENCES = Place("kvine/cache/blocks.py", ("BlockPool.take", "BlockPool.acquire", "BlockPool.release"))
_WRITABLE = Place("kvine/cache/blocks.py", ("BlockPool.writable",))
_INDEX = Place("kvine/cache/prefix.py", ("PrefixIndex.child", "PrefixIndex.longest_overlap"))
_COPIES = Place("kvine/engine/runner.py", ("Runner.make_copies", "Runner.run"))
_PROJECTIONS = Place("kvine/models/decoder.py", ("Decoder._attention",))
_CONFIG = Place("kvine/models/config_hf.py", ("config_from_hf",))
_LOGITS = Place("kvine/models/decoder.py", ("Decoder.logits",))

_PLACES: Mapping[str, tuple[Place, ...]] = MappingProxyType(
    {
        "position-stuck-at-0": (_STEP, _BATCH),
        "position-stuck-at-1": (_STEP, _BATCH),
        "position-off-by-one-in-decode": (_BATCH, _STEP),
        "position-off-by-one-everywhere": (_BATCH, _STEP, _ANGLES),
        "position-wrong": (_BATCH, _STEP, _ANGLES),
        "rope-pairs-interleaved": (_ANGLES,),
        "rotation-wrong": (_ANGLES, _FREQUENCIES),
        "query-position-wrong": (_STEP, _BATCH),
        "slot-off-by-one": (_SLOTS, _STORE),
        "slot-wrong": (_SLOTS, _STORE),
        "never-written": (_STORE, _SLOTS, _COPY),
        "keys-or-values-altered": (_STORE, _STEP, _PROJECTIONS),
        "mask-without-history": (_VISIBLE, _PLAN, _GATHER, _REFERENCE),
        "own-token-not-seen": (_VISIBLE, _PLAN, _GATHER, _REFERENCE),
        "future-tokens-seen": (_VISIBLE, _SCORES, _KERNEL, _TILES, _PAGED, _PLAN, _GATHER),
        "history-partly-missing": (_PLAN, _GATHER, _VISIBLE, _DEAD),
        "block-table-wrong": (_PLAN, _GATHER, _SLOTS, _TABLES),
        "values-misaligned": (_STORE, _COPY, _PLAN, _GATHER, _SCORES, _KERNEL, _TILES, _PAGED),
        "batch-rows-share-cache": (_SLOTS, _TABLES),
        "reads-another-sequence": (_SLOTS, _PLAN, _GATHER, _TABLES),
        "padding-attended": (_PLAN, _GATHER, _REFERENCE),
        "left-padding-attended": (_PLAN, _GATHER, _REFERENCE),
        "stale-fork-table": (_SLOTS, _SWITCH, _FORK),
        "stale-beam-reorder": (_SWITCH, _PLAN, _GATHER, _SLOTS, _FORK),
        "cache-wider-than-model": (_CODEC, _STORAGE),
        "cache-narrower-than-intended": (_CODEC, _STORAGE, _STORE),
        "bits-reinterpreted": (_CODEC, _STORE, _PLAN, _GATHER),
        "scales-of-another-block": (_PACKED, _PACK, _SEALED),
        "cache-on-another-device": (_STORAGE, _WIRING),
        "kv-heads-tiled": (_SCORES, _KERNEL, _TILES, _PAGED, _REFERENCE),
        "head-map-wrong": (_SCORES, _KERNEL, _TILES, _PAGED, _PLAN, _GATHER, _REFERENCE),
        "window-one-short": (_VISIBLE, _DEAD, _PLAN, _GATHER),
        "window-one-long": (_VISIBLE, _PLAN, _GATHER),
        "window-wrong": (_WINDOWS, _VISIBLE, _CONFIG),
        "sinks-not-moved": (_MOVED, _STEP, _SCORES, _KERNEL, _TILES, _PAGED),
        "sinks-off-by-one": (_MOVED, _STEP),
        "sinks-forgotten": (_VISIBLE, _PLAN, _GATHER, _DEAD),
        "published-before-filled": (_COMMIT, _TABLES),
        "hash-collision-trusted": (_INDEX,),
        "rolled-back-token-returns": (_CROP, _PLAN, _GATHER, _BATCH),
        "shared-block-overwritten": (_WRITABLE, _FORK, _COPIES),
        "block-reused-while-held": (_REFERENCES, _RELEASE, _DEAD),
        "scale-missing": (_SCORES, _KERNEL, _TILES, _PAGED, _STEP),
        "scale-wrong": (_SCORES, _KERNEL, _TILES, _PAGED, _STEP, _CONFIG),
        "softcap-missing": (_PLAN, _GATHER, _SCORES, _KERNEL, _TILES, _PAGED, _CONFIG),
        "other-tokens-fed": (_BATCH, Place("kvine/engine/request.py", ("Line.tokens",))),
        "logits-of-another-row": (_BATCH, _COPIES, _LOGITS),
        "blocks-never-released": (_RELEASE, _REFERENCES, Place("kvine/engine/scheduler.py", ("Scheduler._let_go",))),
        "step-fails": (_COPIES, _STEP, _STORAGE),
        UNKNOWN: (_STEP, _STORE, _PLAN, _GATHER, _BATCH),
    }
)

# Of kinds that no trap builds in: the nearest traps.
_NEAREST: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "position-wrong": ("position-stuck-at-0", "position-off-by-one-everywhere"),
        "rotation-wrong": ("rope-pairs-interleaved",),
        "query-position-wrong": ("position-off-by-one-in-decode",),
        "slot-wrong": ("slot-off-by-one",),
        "never-written": ("slot-off-by-one", "published-before-filled"),
        "keys-or-values-altered": ("bits-reinterpreted", "kv-heads-tiled"),
        "history-partly-missing": ("mask-without-history", "window-one-short"),
        "block-table-wrong": ("stale-fork-table", "slot-off-by-one"),
        "values-misaligned": ("slot-off-by-one",),
        "reads-another-sequence": ("batch-rows-share-cache", "stale-fork-table"),
        "head-map-wrong": ("kv-heads-tiled",),
        "window-wrong": ("window-one-short", "window-one-long"),
        "block-reused-while-held": ("shared-block-overwritten",),
        "scale-wrong": ("scale-missing",),
        "softcap-missing": ("scale-missing",),
        "step-fails": ("cache-on-another-device",),
        "other-tokens-fed": (),
        "logits-of-another-row": (),
        "blocks-never-released": (),
        UNKNOWN: (),
    }
)


def kind_named(name: str) -> Kind:
    """A kind of `KINDS`, with where to look. Raises KeyError for a name that is none."""
    return Kind(name, KINDS[name], _NEAREST.get(name, (name,)), _PLACES[name])
