"""`kvine pull`: fetches a model by name, and proves that what lies on the disk is what its name stands for."""

from typing import Annotated

import typer

from kvine.cli.terminal import human_bytes, note, write_json


def pull(
    name: Annotated[str, typer.Argument(help="An alias (see kvine models), or a Hugging Face hub id.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fetch a model into the cache folder; an alias's SHA-256 is verified, also where it was there before."""
    from kvine import hub
    from kvine.cli.progress import FetchProgress

    alias = hub.ALIASES.get(name)
    with FetchProgress() as progress:
        source = hub.pull(name, progress=progress)
        if alias is not None:
            hub.verify(name, progress=progress)
    licence = source.licence or "not recorded: see the model's page"
    if json:
        write_json(
            {
                "name": source.name,
                "path": str(source.path),
                "format": source.format,
                "licence": source.licence,
                "licence_url": alias.licence_url if alias else None,
                "sha256": alias.sha256 if alias else None,
                "bytes": alias.nbytes if alias else None,
            }
        )
        return
    note(f"{source.name}: {source.path}", style="bold")
    note(f"licence: {licence}{f' ({alias.licence_url})' if alias else ''}")
    if alias is not None:
        note(f"sha256: {alias.sha256}, verified · {human_bytes(alias.nbytes)}")
