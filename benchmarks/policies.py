"""The tables and pictures of docs/policies.md: what policies cost at 512, 4,096 and 8,192 tokens.

Quality is measured in fp32, where rounding hides nothing, by `kvine eval`: most of an hour, and it does not mind what
else runs. Bytes and decode steps are measured in bf16, in which a CPU computes by default, and do mind: each policy
reads the text by itself and then decodes. Both leave JSON in a folder, and `fill` makes of it what the page shows.

    python benchmarks/policies.py quality build/policies
    python benchmarks/policies.py speed build/policies                    # where nothing else runs
    python benchmarks/policies.py speed build/policies --lengths 8192 --policies 0:6    # or in pieces
    python benchmarks/policies.py fill build/policies docs/policies.md
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvine.evidence.quality import Evaluation, Policy, Scored, parse_policies
from kvine.evidence.quality.picture import draw_evaluation
from kvine.evidence.quality.reader import Reader, read_all
from kvine.evidence.quality.texts import first_tokens, prose
from kvine.llm import LLM

LENGTHS = (512, 4096, 8192)
CODECS = ("fp16", "int8", "k8v4", "int4", "int4-token", "int2", "int2-token")
WINDOWS = {512: (64, 256), 4096: (256, 1024), 8192: (256, 1024)}
IN_CACHE = ",sinks=4,sink-rule=in-cache"
AT_ITS_PLACE = ",sinks=4"
LONG = 8192  # from here on only those that matter are measured: each takes minutes
STEPS = 48  # of decoding, the first not counted
EVAL = "from kvine.cli.start import main; main()"


def names(length: int) -> str:
    """The policies of a length, as `kvine eval` takes them."""
    codecs = [codec for codec in CODECS if length < LONG or codec in ("int8", "k8v4", "int4", "int2")]
    kinds = ("", AT_ITS_PLACE, IN_CACHE) if length < LONG else ("", IN_CACHE)
    windows = [f"window={window}{kind}" for window in WINDOWS[length] for kind in kinds]
    both = [f"kv-dtype={codec},window={WINDOWS[length][-1]}{IN_CACHE}" for codec in ("int8", "int4")]
    return "; ".join([*(f"kv-dtype={codec}" for codec in codecs), *windows, *both[length >= LONG :]])


def policies(length: int) -> list[Policy]:
    """The same, the exact one first."""
    return parse_policies(f"exact; {names(length)}")[0]


def measure_quality(folder: Path, lengths: Sequence[int], threads: int | None) -> None:
    """Writes quality-LENGTH.json: what `kvine eval --json` prints."""
    for length in lengths:
        command = ["eval", "--dtype", "fp32", "--tokens", str(length), "--decode-steps", "0", "--json"]
        command += ["--policies", names(length), *([] if threads is None else ["--threads", str(threads)])]
        done = subprocess.run([sys.executable, "-c", EVAL, *command], check=True, stdout=subprocess.PIPE)
        (folder / f"quality-{length}.json").write_bytes(done.stdout)


@torch.inference_mode()
def measure_speed(folder: Path, lengths: Sequence[int], chosen: slice, threads: int | None) -> None:
    """Writes speed-LENGTH.json, or what is new of it: bytes, and the median of decode steps at the end of the text."""
    llm = LLM("smollm2-135m", dtype="bf16", threads=threads)
    for length in lengths:
        path = folder / f"speed-{length}.json"
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        ids = first_tokens(llm.tokenizer, prose(length), length)
        for policy in policies(length)[chosen]:
            with Reader(llm, policy.cache, length) as reader:
                read_all(reader, ids[:-STEPS])
                for token in ids[-STEPS:]:
                    reader.step(token)
                known[policy.name] = {"ms": reader.step_ms, "bytes": reader.end_bytes, "peak_bytes": reader.peak_bytes}
            print(f"{length:,}: {policy.name}: {reader.step_ms:.2f} ms", file=sys.stderr)
            path.write_text(json.dumps(known, indent=1))


def evaluation(folder: Path, length: int) -> Evaluation:
    """One length's figures together."""
    quality = json.loads((folder / f"quality-{length}.json").read_text())
    speed = json.loads((folder / f"speed-{length}.json").read_text())
    told = {one["name"]: one for one in quality["policies"]}
    scored = tuple(
        Scored(
            name=policy.name,
            cache=policy.cache,
            **speed[policy.name],
            **{field: told[policy.name][field] for field in ("tokens", "perplexity", "kl", "top1", "mass_lost")},
            mass_lost_by_layer=tuple(told[policy.name]["mass_lost_by_layer"]),
        )
        for policy in policies(length)
    )
    return Evaluation(quality["model"], "bf16", "cpu", length, length, quality["text_tokens"], scored)


def table(outcome: Evaluation) -> str:
    """Markdown, a line for each policy."""
    lines = ["| policy | perplexity | | KL | top-1 | mass lost | K/V | at most | step |", "|---|" + "---|" * 8]
    for one in outcome.policies:
        kl = "0" if one.kl == 0 else f"{one.kl:.2g}"
        memory = " | ".join(f"{size / 2**20:.1f} MiB" for size in (one.bytes, one.peak_bytes))
        lines.append(
            f"| `{one.name}` | {one.perplexity:,.2f} | {outcome.increase(one):+.1%} | {kl} | {one.top1:.1%} | "
            f"{one.mass_lost:.1%} | {memory} | {one.ms:.1f} ms |"
        )
    return "\n".join(lines)


def fill(folder: Path, page: Path) -> None:
    """Puts each length's table between its marks in the page, and its picture into the page's assets."""
    words = page.read_text("utf-8")
    for length in LENGTHS:
        if not all((folder / f"{kind}-{length}.json").exists() for kind in ("quality", "speed")):
            print(f"{length:,}: not measured, left as it is", file=sys.stderr)
            continue
        outcome = evaluation(folder, length)
        begin, end = f"<!-- policies {length} -->\n", "<!-- end of policies -->"
        if begin not in words:
            sys.exit(f"{page} has no line {begin.strip()!r}, where the table of {length:,} tokens belongs.")
        before, _, rest = words.partition(begin)
        _, _, after = rest.partition(end)
        words = f"{before}{begin}\n{table(outcome)}\n\n{end}{after}"
        draw_evaluation(outcome, page.parent / "assets" / f"policies-{length}.svg")
    page.write_text(words, "utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "speed", "fill"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path, nargs="?", default=Path("docs/policies.md"))
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--policies", default=":", help="which of a length's, such as 0:6; of speed only")
    parser.add_argument("--threads", type=int)
    told = parser.parse_args()
    told.folder.mkdir(parents=True, exist_ok=True)
    if told.what == "quality":
        measure_quality(told.folder, told.lengths, told.threads)
    elif told.what == "speed":
        chosen = slice(*(int(n) if n else None for n in told.policies.split(":")))
        measure_speed(told.folder, told.lengths, chosen, told.threads)
    else:
        fill(told.folder, told.page)


if __name__ == "__main__":
    main()
