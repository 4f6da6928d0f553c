"""Writes docs/traps.md from the same data that `kvine traps` shows: `python -m kvine.evidence.traps.page`."""

from pathlib import Path

from kvine.evidence.traps.catalogue import TRAPS, Trap
from kvine.evidence.traps.kinds import KINDS
from kvine.evidence.traps.places import kind_named
from kvine.evidence.traps.samples import Sample, load_samples

FILE = Path(__file__).parents[3] / "docs" / "traps.md"

HEAD = """# Traps

<!-- Written by `python -m kvine.evidence.traps.page`: change that, the catalogue or the samples. -->

The classic mistakes of a KV cache. Each is built into a test engine by one wrong part, handed to `build_engine`; the
engine that you use has no switch for any of them. `kvine traps` lists them, `kvine traps NAME` shows one as below,
or says where to look for a kind of fault that the examination has named.

<!-- not run: minutes -->
```console
$ kvine verify --inject all     # builds in each, and says what the examination makes of it
$ kvine traps --examine         # examines the engine as it is, your changes included
```

Both take minutes on the default model. Exit code 0: all faults were caught and named for what they are, or nothing was
found. 1: one was not, or a fault was found. `verify --inject --json` prints one object: `ok`; `faults[{name, caught,
named_as, layer, position, probe, evidence}]`; `healthy`, what was found in the engine without a fault; and
`unsuitable`, faults that the model cannot have, such as tiled heads where heads are not shared. `traps --examine
--json` prints `ok`, the same fields of what was found, and `kind{name, meaning, traps, places[{file, functions}]}`,
null if nothing was.

## How a fault is named

The examination is handed a function that builds an engine, and never learns what is in it.

1. It **tries** the engine: a prompt at once and in chunks, a batch of different lengths, forks in other places of the
   batch, rollbacks, prefix hits, a second request for a text that is half read, keys that collide, less memory than
   texts, windows and sinks, full blocks packed in 8 bits, an fp16 model, a bf16 model with its cache in fp16. The
   simple come first.
2. It **compares** each layer with what the textbook makes of the q, k and v that this layer was given, so that neither
   rounding nor a fault of an earlier layer counts against a later one; and all keys and values that the engine lends
   with what has to be stored. The textbook is code of its own: another rotation, mask, head map and codec. A number in
   a packed block may lie half a step from what was packed, whichever of two steps rounding has taken it to.
3. In the first layer that differs, in the first thing tried that fails, it **asks where wrong keys and values come
   from**: another position's rotation, another slot, another text, nowhere, fewer bits, other bits, another block's
   scales.
4. If what is stored is right, it **simulates** known mistakes of reading, one after the other, with the textbook. The
   one that reproduces what the engine has computed, row by row, is what happened. Of block tables that stay behind it
   also asks in which layers: in all, or in some, as after a beam switch that was not carried through.
5. If none does, it says `unknown`, and where.

The bound of rounding is measured for each layer: sixteen times the difference between fp64 and the model's own dtype,
and between whole products and single rows, and never less than sixteen units in the last place of the largest value.
With packed weights the difference between products that round what they multiply and products that do not is measured
too, and the bound is wider. So weights are exact unless you say otherwise: with `kvine verify --inject all --weights
packed` 29 of the 30 faults are caught in SmolLM2, and 26 named for what they are. Sinks that are read one place too far
hide in that rounding; two other faults that concern sinks look like a cache that keeps too few bits, and a fork's
stale block table like that of a beam.

## How well it does

Changes that it was not written for, made once it was finished by changing one thing in each part of an engine
(`python tests/evidence/score_trap_mutants.py`, a tiny Llama): **34 of 34 caught, 24 of 34 sensibly named**. On the
first try 23 were; bugs planted by hand then had two hypotheses widened, one of which names one more of them. A name is
sensible if it leads to the right part of the engine; `unknown` never is. Among what it cannot name: one head of many
exchanged, a soft cap that nobody asked for, values that are shifted with their mask, layers that share their memory.

Bugs planted in a copy of the engine, found with `kvine traps --examine` on a tiny Llama, all with exit code 1:

| changed line | named |
|---|---|
| `cached.py`: positions one further in a step of one token | `position-off-by-one-in-decode`, layer 0, position 11 |
| `blocks.py`: `writable` without counting references | `shared-block-overwritten`, layer 0, position 10 |
| `prefix.py`: a node found without comparing tokens | `hash-collision-trusted`, layer 0, position 0 |
| `spec.py`: `<=` for `<` in the window | `window-one-long`, layer 0, position 6 |
| `sdpa.py`: the last block replaced by the one before | `block-table-wrong`, layer 0, position 8 |

What it cannot see: what needs another length, dtype or option than it tries; a wrong weight; and a fault in the parts
that are outside the cache, such as the norm or the sampler. `kvine verify` compares with transformers for that.

## Names

| looks like | what that is | where to look, the likeliest first |
|---|---|---|
"""


def render() -> str:
    """The page."""
    samples = load_samples()
    rows = [f"| `{kind}` | {what} | {_places(kind)} |" for kind, what in KINDS.items()]
    sections = [_section(trap, samples[trap.name]) for trap in TRAPS.values()]
    return "\n\n".join([HEAD + "\n".join(rows), *sections]) + "\n"


def _section(trap: Trap, sample: Sample) -> str:
    return "\n\n".join(
        (
            f"## {trap.name}",
            trap.symptom,
            _fenced("py", "# wrong\n" + trap.wrong),
            f"{sample.model}, {sample.what}, after {sample.prompt!r}:",
            _fenced("text", f"healthy: {sample.healthy}"),
            _fenced("text", f"broken:  {sample.broken}"),
            f"Find it: `kvine verify --inject {trap.name}`. Right, in `{trap.file}`:",
            _fenced("py", trap.right),
        )
    )


def _places(kind: str) -> str:
    return "; ".join(f"`{place.file}`: {', '.join(place.functions)}" for place in kind_named(kind).places)


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def main() -> None:
    """Writes it."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
