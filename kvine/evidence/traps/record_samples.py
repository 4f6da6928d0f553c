"""Records samples.json anew: `python -m kvine.evidence.traps.record_samples`. Takes minutes, on the default model."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kvine.evidence.traps.catalogue import TRAPS, Trap
from kvine.evidence.traps.examine import Build, Lab
from kvine.evidence.traps.samples import Sample
from kvine.evidence.traps.seams import broken, healthy
from kvine.evidence.traps.stories import STORIES, Story, tell
from kvine.hub import resolve
from kvine.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m"
FILE = Path(__file__).with_name("samples.json")


class Recorder:
    """Tells each story without a fault once, and with every fault that has it as its own.

    Args:
        lab: of the model.
        tokenizer: of the model.
    """

    def __init__(self, lab: Lab, tokenizer: Tokenizer) -> None:
        self._lab = lab
        self._tokenizer = tokenizer
        self._healthy: dict[str, str] = {}

    def sample(self, trap: Trap) -> Sample:
        """What the model writes with and without a fault."""
        story = STORIES[trap.story]
        if trap.story not in self._healthy:
            self._healthy[trap.story] = self._tell(story, healthy)
        text = self._tell(story, broken(trap.fault))
        model = f"{self._lab.source.name} in {story.dtype}"
        return Sample(model, story.what, story.prompt, self._healthy[trap.story], text)

    def _tell(self, story: Story, build: Build) -> str:
        return tell(story, build(self._lab.model(story.dtype), story.cache), self._tokenizer)


def main() -> None:
    """Records every sample."""
    torch.set_num_threads(1)
    source = resolve(MODEL)
    recorder = Recorder(Lab(source), load_tokenizer(source))
    samples = {}
    for trap in TRAPS.values():
        print(trap.name, file=sys.stderr, flush=True)
        samples[trap.name] = asdict(recorder.sample(trap))
    FILE.write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
