"""`kvine cache`: what a folder of blocks holds, whether it is sound, and how to empty, keep or carry it."""

import json as json_module
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.terminal import human_bytes, note, show_output, stderr_console, write_json

if TYPE_CHECKING:
    from kvine.cache.disk import DiskStore

UNSOUND = 1

cache = typer.Typer(no_args_is_help=True, help="Look after a folder that --cache-dir keeps computed blocks in.")

Folder = Annotated[str, typer.Option("--cache-dir", metavar="FOLDER", help="The folder.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@cache.command()
def info(cache_dir: Folder, json: Json = False) -> None:
    """Show what a folder holds, for which models, and what restoring costs beside computing."""
    with _opened(cache_dir) as store:
        listing = _listing(store)
    if json:
        write_json(listing)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("of", "blocks", "tokens", "size", "restoring, ms/token", "computing, ms/token"):
        table.add_column(title, justify="left" if title == "of" else "right", overflow="fold")
    for space in listing["namespaces"]:
        cells = (
            space["label"] or "unknown",
            f"{space['blocks']:,}",
            f"{space['tokens']:,}",
            human_bytes(space["bytes"]),
        )
        times = [_ms(space[key]) for key in ("restore_ms_per_token", "compute_ms_per_token")]
        table.add_row(*map(Text, (*cells, *times)))
    room = f"{human_bytes(listing['bytes_on_disk'])} of {human_bytes(listing['bytes_limit'])} on disk"
    lines = [f"{listing['folder']}: {listing['blocks']:,} blocks, {room}"]
    if listing["set_aside"]:
        lines.append(f"A damaged file was set aside: {listing['set_aside']}")
    show_output(Text("\n".join(lines)), table)


@cache.command()
def verify(cache_dir: Folder, json: Json = False) -> None:
    """Read every block and check it. Exit code 1 if one is damaged; damaged ones are removed."""
    sound, damaged = 0, []
    with _opened(cache_dir) as store, _bar("checking", store.stats().bytes_stored) as advance:
        for block in store.scan():
            advance(block.num_bytes)
            if block.name is None:
                damaged.append(block)
            else:
                sound += 1
        removed = store.discard([block.address for block in damaged])
        set_aside = store.folder.damage
    if json:
        reasons = Counter(block.reason for block in damaged)
        write_json(
            {
                "sound": sound,
                "damaged": len(damaged),
                "removed": removed,
                "reasons": dict(reasons),
                "set_aside": set_aside,
            }
        )
    else:
        note(f"{sound:,} blocks are sound, {len(damaged):,} are damaged" + (" and were removed" if damaged else ""))
    if damaged or set_aside:
        raise typer.Exit(UNSOUND)


@cache.command()
def clear(cache_dir: Folder, json: Json = False) -> None:
    """Forget all blocks, and a file that was set aside."""
    with _opened(cache_dir) as store:
        before = store.stats()
        store.clear()
        store.folder.set_aside.unlink(missing_ok=True)
        freed = before.bytes_on_disk - store.stats().bytes_on_disk
    if json:
        write_json({"blocks": before.num_blocks, "bytes_freed": freed})
    else:
        note(f"{before.num_blocks:,} blocks forgotten, {human_bytes(max(0, freed))} freed")


@cache.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="The file to write.")], cache_dir: Folder, json: Json = False
) -> None:
    """Write all blocks to one file, which tells whether it is whole."""
    from kvine.cache.archive import export_blocks

    with _opened(cache_dir) as store, _bar("exporting", store.stats().bytes_stored) as advance:
        moved = export_blocks(store, file, advance)
    if json:
        write_json({"file": str(file), "blocks": moved.num_blocks, "bytes": moved.num_bytes, "damaged": moved.left_out})
        return
    left = f"; {moved.left_out:,} damaged ones were left out" if moved.left_out else ""
    note(f"{moved.num_blocks:,} blocks in {file}, {human_bytes(moved.num_bytes)}{left}")


@cache.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that kvine cache export has written.")],
    cache_dir: Folder,
    cache_size: Annotated[str | None, typer.Option(help="Most that the folder takes; by default as before.")] = None,
    json: Json = False,
) -> None:
    """Take in the blocks of a file: all of them, or none if anything is wrong with it."""
    if not file.is_file():
        from kvine.errors import RequestError

        raise RequestError(f"There is no file {file}: give one that kvine cache export has written.")
    with _opened(cache_dir, cache_size, create=True) as store, _bar("importing", 2 * file.stat().st_size) as advance:
        from kvine.cache.archive import import_blocks

        moved = import_blocks(store, file, advance)
    if json:
        write_json({"file": str(file), "blocks": moved.num_blocks, "new": moved.num_blocks - moved.left_out})
    else:
        note(f"{moved.num_blocks:,} blocks in {file}, {moved.num_blocks - moved.left_out:,} of them new here")


@contextmanager
def _opened(folder: str, size: str | None = None, *, create: bool = False) -> Iterator["DiskStore"]:
    from kvine.cache.disk_folder import disk_store

    store = disk_store(folder, size, create=create)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, at a terminal only."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _listing(store: "DiskStore") -> dict[str, Any]:
    stats = store.stats()
    blocks: Counter[bytes] = Counter()
    sizes: Counter[bytes] = Counter()
    tokens: dict[bytes, dict[bytes, int]] = {}
    damaged = 0
    for block in store.scan():
        if block.name is None:
            damaged += 1
            continue
        space = block.name.namespace
        blocks[space] += 1
        sizes[space] += block.num_bytes
        tokens.setdefault(space, {})[block.name.key] = len(block.name.tokens)
    remarks = store.remarks()
    spaces = []
    for space in sorted(blocks, key=lambda s: -sizes[s]):
        count = sum(tokens[space].values())
        spaces.append(
            {"namespace": space.hex(), "blocks": blocks[space], "tokens": count, "bytes": sizes[space]}
            | _measured(remarks.get(space, b"{}"), sizes[space] / count)
        )
    aside = store.folder.set_aside
    return {
        "folder": str(store.folder.path),
        "blocks": stats.num_blocks,
        "damaged": damaged,
        "bytes_stored": stats.bytes_stored,
        "bytes_on_disk": stats.bytes_on_disk,
        "bytes_limit": stats.bytes_limit,
        "set_aside": str(aside) if aside.exists() else None,
        "namespaces": spaces,
    }


def _measured(remark: bytes, bytes_per_token: float) -> dict[str, Any]:
    """What the last process with these blocks has measured; null where it has not."""
    said = json_module.loads(remark)
    restore, compute = said.get("restore_s_per_byte"), said.get("compute_s_per_token")
    return {
        "label": said.get("label"),
        "restore_ms_per_token": None if restore is None else restore * bytes_per_token * 1e3,
        "compute_ms_per_token": None if compute is None else compute * 1e3,
    }


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"
