"""Records samples.json anew: `python -m kvine.evidence.traps.record_samples`. Takes minutes, on the default model."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kvine.evidence.traps.catalogue import TRAPS, Trap
from kvine.evidence.traps.examine import Lab
from kvine.evidence.traps.samples import Sample
from kvine.evidence.traps.seams import broken, healthy
from kvine.evidence.traps.stories import STORIES, tell
from kvine.hub import resolve
from kvine.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m"
FILE = Path(__file__).with_name("samples.json")


def record_sample(lab: Lab, tokenizer: Tokenizer, trap: Trap) -> Sample:
    """What the model writes with and without a fault."""
    story = STORIES[trap.story]
    model = lab.model(story.dtype)
    texts = [tell(story, build(model, story.cache), tokenizer) for build in (healthy, broken(trap.fault))]
    return Sample(f"{lab.source.name} in {story.dtype}", story.what, story.prompt, *texts)


def main() -> None:
    """Records every sample."""
    torch.set_num_threads(1)
    source = resolve(MODEL)
    lab, tokenizer = Lab(source), load_tokenizer(source)
    samples = {}
    for trap in TRAPS.values():
        print(trap.name, file=sys.stderr, flush=True)
        samples[trap.name] = asdict(record_sample(lab, tokenizer, trap))
    FILE.write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
