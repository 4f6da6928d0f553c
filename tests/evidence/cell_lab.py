"""A tiny model on which the tests run cells: those of a design, or drawn at random."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tiny_models import VOCAB, random_prompt, write_checkpoint

from kvine.engine.build import standard_parts
from kvine.engine.engine import EngineParts
from kvine.evidence.cells.covering import Choice, Design, cover
from kvine.evidence.cells.factors import Level, Scope, refusal, registered
from kvine.evidence.cells.oracle import Oracle
from kvine.evidence.cells.outcome import CellsReport
from kvine.evidence.cells.run import Bench, CellRuns
from kvine.evidence.cells.setup import Prompt
from kvine.models.load import load_model

NEW_TOKENS = 4
LENGTHS = (9, 1, 24)
PlantFault = Callable[[EngineParts], EngineParts]


class Lab:
    """One random model in fp32 and bf16, and all factors."""

    def __init__(self, folder: Path, kind: str, seed: int = 0, *, quick: bool = True, weights: str = "exact") -> None:
        source = write_checkpoint(folder, kind, seed)
        self._models = {
            dtype: load_model(source, dtype=dtype, device="cpu", weights=weights) for dtype in ("fp32", "bf16")
        }
        prompts = tuple(Prompt(f"{n} tokens", tuple(random_prompt(n, seed + n))) for n in LENGTHS)
        cpu = torch.device("cpu")
        self.scope = Scope(self._models["fp32"].config, prompts, ("fp32", "bf16"), NEW_TOKENS, quick, cpu)
        self.factors = registered(self.scope)
        self._oracles = {dtype: Oracle(model, VOCAB) for dtype, model in self._models.items()}

    def design(self, seed: int = 0) -> Design:
        return cover(self.factors, seed)

    def draw(self, chance: random.Random) -> Choice:
        """Any cell that no factor refuses."""
        while True:
            choice: dict[str, Level] = {}
            for factor in chance.sample(self.factors, len(self.factors)):
                open_ = [
                    level
                    for level in factor.levels
                    if level.unfit is None and refusal(self.factors, {**choice, factor.name: level}) is None
                ]
                if not open_:
                    break
                choice[factor.name] = chance.choice(open_)
            else:
                return {factor.name: choice[factor.name] for factor in self.factors}

    def run(self, cells: Sequence[Choice], fault: PlantFault = lambda parts: parts) -> CellsReport:
        runs = CellRuns(self.scope, Design(tuple(cells), 0, (), 0))
        for dtype, model in self._models.items():

            def make_parts(cache, config, model=model):
                return fault(standard_parts(model, cache, config, vocab_size=VOCAB, eos_ids=()))

            runs.run(Bench(dtype, model.config, self._oracles[dtype], make_parts))
        return runs.report
