"""The commands: what a terminal can ask of Kvine. The only room that knows of `typer` and `rich`."""
