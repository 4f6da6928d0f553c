"""`kvine models`: the models known by name, and what the caches on this disk hold."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.terminal import human_bytes, show_output, write_json

if TYPE_CHECKING:
    from rich.table import Table


def models(json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List the models known by name with their licences, and what has been fetched."""
    listing = _listing()
    if json:
        write_json(listing)
        return
    from rich.text import Text

    place = f"\nIn the caches on this disk; Kvine's own is {listing['cache_folder']}:\n"
    show_output(_aliases_table(listing["aliases"]), Text(place), _cached_table(listing["cached"]))


def _listing() -> dict[str, Any]:
    from kvine import hub

    cached = hub.cached_models()
    fetched = {model.name for model in cached}
    return {
        "aliases": [
            {
                "name": alias.name,
                "bytes": alias.nbytes,
                "licence": alias.licence,
                "licence_url": alias.licence_url,
                "fetched": alias.name in fetched,
                "default": alias.name == hub.DEFAULT_MODEL,
            }
            for alias in hub.ALIASES.values()
        ],
        "cache_folder": str(hub.kvine_home()),
        "cached": [asdict(model) | {"path": str(model.path)} for model in cached],
    }


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    return table


def _aliases_table(aliases: list[dict[str, Any]]) -> "Table":
    table = _table("name", "size", "licence", "fetched")
    for alias in aliases:
        table.add_row(
            alias["name"] + (" (default)" if alias["default"] else ""),
            human_bytes(alias["bytes"]),
            f"{alias['licence']}, {alias['licence_url']}",
            "yes" if alias["fetched"] else f"no: kvine pull {alias['name']}",
        )
    return table


def _cached_table(cached: list[dict[str, Any]]) -> "Table":
    table = _table("name", "format", "size", "path")
    for model in cached:
        table.add_row(model["name"], model["format"], human_bytes(model["nbytes"]), model["path"])
    return table
