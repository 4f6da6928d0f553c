"""The examination: has this engine a fault, and what kind of fault does it look like?

The examiner is given a way to build the engine, and nothing else. It tries it, compares with the textbook, finds the
first layer in which anything is wrong, and asks which known mistake would make just this of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvine.cache.pool import KVPool
from kvine.config import CacheConfig
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.evidence.progress import Progress, silent
from kvine.evidence.traps.bench import Bench, Recording, Row, WrongLengthError
from kvine.evidence.traps.kinds import UNKNOWN
from kvine.evidence.traps.probes import PROBES, Probe, Words
from kvine.evidence.traps.reads import explain_reads
from kvine.evidence.traps.scene import Scene
from kvine.evidence.traps.symptoms import (
    Bounds,
    Symptoms,
    find_symptoms,
    layers_reading_wrongly,
    measure_bounds,
    own_passes,
)
from kvine.evidence.traps.textbook import Textbook
from kvine.evidence.traps.writes import explain_stored
from kvine.hub import ModelSource
from kvine.models.load import LoadedModel, load_model

Build = Callable[[LoadedModel, CacheConfig], EngineParts]


@dataclass(frozen=True)
class Finding:
    """What an examination has found.

    Attributes:
        caught: whether anything is wrong.
        named_as: a key of `KINDS`; None if nothing is wrong.
        probe: what was tried when it first showed.
        layer: the first in which it shows; None where it shows in no particular one.
        position: the earliest position, in the earliest step, of the text that shows it.
        evidence: what was seen, in a sentence.
    """

    caught: bool
    named_as: str | None = None
    probe: str | None = None
    layer: int | None = None
    position: int | None = None
    evidence: str = "nothing is wrong"


class Lab:
    """Models and right answers, kept from one examination to the next.

    Args:
        source: of the model.
        dtype: in which most of the examination is done.
        weights: how they are kept, as `LLM` takes it.
        cache: how the examined engines keep the past.
        seed: of the texts.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        dtype: str = "fp32",
        weights: str = "exact",
        cache: CacheConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.weights = weights
        self.cache = cache or CacheConfig(block_size=4)
        self.seed = seed
        self._models: dict[str, LoadedModel] = {}
        self._books: dict[tuple[str, CacheConfig], tuple[Textbook, Bounds]] = {}

    def model(self, dtype: str = "base") -> LoadedModel:
        """The model in one dtype, loaded when first asked for; on the CPU, where the textbook computes."""
        name = self.dtype if dtype == "base" else dtype
        if name not in self._models:
            self._models[name] = load_model(self.source, dtype=name, device="cpu", weights=self.weights)
        return self._models[name]

    def words(self) -> Words:
        """The texts of this lab's probes."""
        return Words(self.model().config.vocab_size, self.cache.block_size, self.seed)

    def book(self, probe: Probe) -> tuple[Textbook, Bounds]:
        """The right answers for a probe, and how far rounding may be from them."""
        key = (probe.dtype, probe.change(self.cache))
        if key not in self._books:
            book = Textbook(self.model(probe.dtype), key[1])
            self._books[key] = book, measure_bounds(book, self.words().text(0, 5 * self.cache.block_size + 7))
        return self._books[key]


def examine(lab: Lab, build: Build, *, progress: Progress = silent, probes: Sequence[Probe] = PROBES) -> Finding:
    """Looks for a fault, and names the first.

    Args:
        lab: of the model.
        build: makes the engine under examination; `standard_parts` makes a healthy one.
        progress: told of each probe.
        probes: what to try, in this order; the first that fails is the one that is explained.
    """
    for number, probe in enumerate(probes):
        progress(probe.name, number, len(probes))
        finding = _try(lab, build, probe)
        if finding.caught:
            return finding
    return Finding(False)


def record(lab: Lab, build: Build, probe: Probe) -> tuple[Recording, EngineParts]:
    """Runs one probe; whatever an engine does wrong ends up in the recording."""
    parts = build(lab.model(probe.dtype), probe.change(lab.cache))
    probe.prepare(parts)
    bench = Bench(parts)
    try:
        probe.script(bench, lab.words())
        bench.close()
    except Exception as error:  # a broken part may fail in any way, and that is a finding
        bench.recording.error = error
    return bench.recording, parts


def _try(lab: Lab, build: Build, probe: Probe) -> Finding:
    recording, parts = record(lab, build, probe)
    book, bounds = lab.book(probe)
    wrong_place = _examine_storage(parts, book)
    if wrong_place is not None:
        kind, evidence = wrong_place
        return Finding(True, kind, probe.name, 0, 0, evidence)
    if isinstance(recording.error, WrongLengthError):
        (text, (meant, _)), *_ = recording.wrong_lengths.items()
        kind = UNKNOWN if recording.parents[text] is None else "rolled-back-token-returns"
        return Finding(True, kind, probe.name, None, meant, f"{recording.error}.")
    passes = own_passes(book, recording, bounds)
    symptoms = find_symptoms(book, recording, passes, bounds)
    if symptoms.any:
        scene = Scene(book, symptoms.layer or 0, lab.cache.block_size, recording, passes, bounds)
        kind, evidence = _name(scene, symptoms)
        return Finding(True, kind, probe.name, symptoms.layer, symptoms.position, evidence)
    if recording.error is not None:
        error = recording.error
        position = recording.rows[-1].position + 1 if recording.rows else 0
        return Finding(True, "step-fails", probe.name, None, position, f"{type(error).__name__}: {error}".rstrip())
    if left := parts.manager.bytes_referenced:
        evidence = f"{left:,} bytes are still held after every sequence has ended"
        return Finding(True, "blocks-never-released", probe.name, None, None, evidence)
    return Finding(False)


def _examine_storage(parts: EngineParts, book: Textbook) -> tuple[str, str] | None:
    """Where K and V are, in which dtype, and how many bytes they take: no run is needed to see that."""
    assert isinstance(parts.runner, Runner)
    wanted = book.storage
    for pool in parts.runner.attention.pools:
        for stored in (pool.k, pool.v):
            if stored.device != book.model.device:
                return "cache-on-another-device", f"K and V are on {stored.device}, the model on {book.model.device}"
            if isinstance(pool, KVPool) and stored.dtype != wanted:
                wider = torch.finfo(stored.dtype).eps < torch.finfo(wanted).eps
                kind = "cache-wider-than-model" if wider else "cache-narrower-than-intended"
                return kind, (
                    f"a token takes {_bytes(pool, stored.dtype)} bytes in a layer as {stored.dtype}, "
                    f"and {_bytes(pool, wanted)} as {wanted}, which was asked for"
                )
    return None


def _bytes(pool: KVPool, dtype: torch.dtype) -> int:
    return 2 * pool.spec.num_kv_heads * pool.spec.head_dim * dtype.itemsize


def _name(scene: Scene, symptoms: Symptoms) -> tuple[str, str]:
    if symptoms.fed:
        return "other-tokens-fed", f"{len(symptoms.fed)} rows begin with the embedding of another token"
    if symptoms.layer is None:
        return _name_logits(scene, symptoms)
    if symptoms.stored:
        explained = explain_stored(scene, symptoms.stored, reads_are_right=not symptoms.reads)
        if explained is not None:
            return explained
        return UNKNOWN, f"{len(symptoms.stored)} positions of layer {scene.layer} hold other keys or values than theirs"
    hypothesis = explain_reads(scene, symptoms.reads)
    if hypothesis is None:
        return UNKNOWN, f"what is stored is right; {len(symptoms.reads)} rows of layer {scene.layer} attend otherwise"
    seen = f"what is stored is right; attention is reproduced by this: {hypothesis.detail}"
    if hypothesis.kind == "stale-fork-table":
        wrong = layers_reading_wrongly(scene.book, scene.recording, scene.passes, scene.bounds, symptoms.reads)
        if len(wrong) < scene.book.config.num_layers:
            return "stale-beam-reorder", f"{seen}, in {len(wrong)} of {scene.book.config.num_layers} layers"
    return hypothesis.kind, seen


def _name_logits(scene: Scene, symptoms: Symptoms) -> tuple[str, str]:
    """All layers are right, and what comes out of the last is not."""
    recording, decoder = scene.recording, scene.book.model.decoder

    def is_anothers(row: Row) -> bool:
        ours = recording.logits[row.step][row.index].double()
        theirs = decoder.logits(recording.states[row.step]["final_norm", -1]).double()  # [N, vocabulary]
        same = ((ours - theirs).abs() <= scene.bounds.logits).all(1)
        same[row.index] = False
        return bool(same.any())

    if all(is_anothers(row) for row in symptoms.logits):
        return "logits-of-another-row", "every wrong row of logits is right for another row of its step"
    return UNKNOWN, f"all layers are right; {len(symptoms.logits)} rows of logits are not"
