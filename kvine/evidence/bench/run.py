"""A bench from beginning to end: the machine, then the engines, then what their figures come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.engine.resources import checked_threads
from kvine.errors import ConfigError, ModelLoadError
from kvine.evidence.bench.floors import Floor, Floors
from kvine.evidence.bench.machine import Machine, measure_machine
from kvine.evidence.bench.players import KVINE, Peer, stored_weights
from kvine.evidence.bench.report import Bench, CacheFree, Entrant, Row, What, row_of
from kvine.evidence.bench.rounds import Player, Rounds
from kvine.evidence.bench.settings import Prompts, Settings, leading_matches, prompts_for
from kvine.evidence.bench.tasks import Key, tasks_of
from kvine.evidence.plan.machine import planned_device
from kvine.evidence.plan.sources import subject_of
from kvine.evidence.plan.subject import Subject
from kvine.evidence.progress import Progress, silent
from kvine.hub import ModelSource
from kvine.models.cache_specs import cache_specs
from kvine.models.config import ModelConfig
from kvine.text.tokenizer import load_tokenizer

ORDER: tuple[What, ...] = ("ready", "prefill", "decode", "batch", "prefix_hit", "peak_memory")
MEASURES_MACHINE = "measuring the machine"


def run_bench(
    source: ModelSource,
    settings: Settings,
    peers: Sequence[Peer] = (),
    *,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Measures Kvine, and other engines beside it.

    Args:
        source: Kvine's model.
        settings: what to measure, and how.
        peers: the others; those that are not installed are skipped, unless their Python was named.
        progress: told of every measurement.
        tell: hears in a sentence what is left out or changed.

    Raises:
        ConfigError: for options that cannot work, or a peer that was named with its Python and fails.
        KvineError: what keeps Kvine itself from being measured.
    """
    device = planned_device(settings.device)
    if peers and device != "cpu":
        raise ConfigError("Other engines are measured on the CPU only: add --device cpu.")
    subject = subject_of(str(source.path), dtype=settings.dtype, device=device, weights="exact")  # as peers hold them
    if subject.model is None:
        raise ModelLoadError(f"{source.name}: {subject.not_run}")
    threads = checked_threads(settings.threads)
    prompts = prompts_for(load_tokenizer(source), settings, subject.max_context)
    if prompts.was_cut:
        tell(f"The long prompt is cut to {len(prompts.long)} tokens, to fit the model's context.")
    progress(MEASURES_MACHINE, 0, 1)
    scene = _Scene(
        source, settings, subject, subject.model, device, prompts, measure_machine(subject.dtype, device, threads)
    )
    players = [Player(KVINE, None, scene.own_load)]
    rounds = Rounds(players, settings, prompts, progress, tell)
    for peer in peers:
        file = peer.file(source)
        if file is None:
            rounds.skip(peer.name, None, peer.wants)
        else:
            players.append(Player(peer.name, peer, scene.load(str(file))))
    rounds.run(tuple(tasks_of(settings, prompts)))
    progress(MEASURES_MACHINE, 0, 1)  # once more: a floor is to be what this machine can do when nothing disturbs it
    scene = replace(scene, machine=scene.machine.best_of(measure_machine(subject.dtype, device, threads)))
    return Bench(
        source.name,
        subject.dtype,
        device,
        settings.repeats,
        settings.tokens,
        scene.machine,
        tuple(scene.entrant(player, players[0]) for player in players),
        tuple(scene.rows(players)),
        _cache_free(players[0]),
        tuple(rounds.skipped),
        bool(peers),
    )


@dataclass(frozen=True)
class _Scene:
    """What is measured where, which all engines share."""

    source: ModelSource
    settings: Settings
    subject: Subject
    model: ModelConfig
    device: str
    prompts: Prompts
    machine: Machine

    def load(self, model: str) -> dict[str, Any]:
        """What a process is told first."""
        return {
            "model": model,
            "dtype": self.subject.dtype,
            "threads": self.machine.threads,
            "context": len(self.prompts.long) + self.settings.tokens,
            "sequences": max(self.settings.batches, default=1),
            "sequence_tokens": len(self.prompts.short) + self.settings.tokens,
        }

    @property
    def own_load(self) -> dict[str, Any]:
        """What Kvine's is told."""
        room = self.load(str(self.source.path))
        needs = max(room["context"], room["sequences"] * (room["sequence_tokens"] + CacheConfig.block_size))
        blocks = ((spec.num_blocks(needs), spec.bytes_per_block(self.subject.dtype)) for spec in self.specs)
        memory = 2 * sum(count * size for count, size in blocks)  # finished prompts stay cached beside the next ones
        return {**room, "device": self.device, "weights": self.settings.weights, "kv_memory": memory}

    @property
    def specs(self) -> tuple[CacheSpec, ...]:
        """What queries see."""
        return cache_specs(self.model, CacheConfig())

    def weights(self, player: Player) -> str:
        """What its weights are kept in."""
        if player.name == "llama.cpp" and (stored := stored_weights(player.model_path)) is not None:
            return stored.kind
        return str(player.facts["weights"])

    def floors(self, player: Player) -> Floors | None:
        """What this engine could reach; None where the size of its weights is not known."""
        step, held = player.facts["step_bytes"], player.facts["held_bytes"]
        kv_dtype, exact = player.facts.get("kv_dtype", self.subject.dtype), self.subject.weights
        if step is None and (stored := stored_weights(player.model_path)) is not None:
            step, held = stored.step_bytes, stored.held_bytes
        elif step is None and exact is not None and player.facts["weights"] == self.subject.dtype:
            step, held = exact.bytes_per_step(1), exact.nbytes
        if step is None or kv_dtype is None:
            return None
        return Floors(self.machine, self.model, self.specs, kv_dtype, step, held)

    def entrant(self, player: Player, kvine: Player) -> Entrant:
        """Who it was."""
        same = None
        if player is not kvine and player.token_ids is not None and kvine.token_ids is not None:
            same = leading_matches(kvine.token_ids, player.token_ids)
        return Entrant(player.name, player.facts["version"], self.weights(player), player.load["model"], same)

    def rows(self, players: Sequence[Player]) -> list[Row]:
        """All figures, by what they are of and there by engine."""
        keys = dict.fromkeys(key for player in players for key in player.figures)
        wanted = [key for key in keys if key.what in ORDER and self.settings.wants(key.what)]
        rows = []
        for key in sorted(wanted, key=lambda key: (ORDER.index(key.what), key.context, key.batch)):
            ours: Row | None = None
            for player in players:
                if key not in player.figures or key in player.given_up:
                    continue
                row = self._row(player, key)
                if player.peer is None:
                    ours = row
                elif ours is not None:
                    row = replace(row, kvine_ratio=ours.value / row.value)
                rows.append(row)
        return rows

    def _row(self, player: Player, key: Key) -> Row:
        what: What = key.what  # type: ignore[assignment]  # one of ORDER
        figures, floors = player.figures[key], self.floors(player)
        row = row_of(player.name, self.weights(player), what, key.context, key.batch, figures)
        if floors is None or what == "ready":
            return row
        if what == "peak_memory":
            return replace(row, floor=float(floors.memory(key.context)))
        least = self._least(floors, key)
        seconds_to_unit = {"prefill": 1.0, "decode": 1e3, "prefix_hit": 1e3}
        tokens = key.batch * self.settings.tokens
        floor = tokens / least.seconds if what == "batch" else least.seconds * seconds_to_unit[what]
        return replace(row, floor=floor, bound=least.bound)

    def _least(self, floors: Floors, key: Key) -> Floor:
        if key.what == "prefill":
            return floors.prefill(key.context)
        if key.what == "decode":
            return floors.decode(key.context, self.settings.tokens)
        if key.what == "batch":
            return floors.batch(key.batch, key.context, self.settings.tokens)
        return floors.prefix_hit(key.context)


def _cache_free(kvine: Player) -> CacheFree | None:
    found = {key.what: (key.context, median(figures)) for key, figures in kvine.figures.items()}
    if "cache_free" not in found or "cached" not in found:
        return None
    return CacheFree(found["cache_free"][0], found["cached"][1], found["cache_free"][1])
