"""`kvine experiment`: measurements that show what a part of the engine is good for, a module for each."""

import typer

from kvine.cli.experiment.bits import bits
from kvine.cli.experiment.cache import cache
from kvine.cli.experiment.endless import endless
from kvine.cli.experiment.meaning import meaning
from kvine.cli.experiment.walls import walls
from kvine.cli.experiment.window import window

experiment = typer.Typer(no_args_is_help=True, help="Measure what a part of the engine is good for.")


@experiment.callback()
def _group() -> None:
    """Measure what a part of the engine is good for."""


experiment.command()(cache)
experiment.command()(walls)
experiment.command()(window)
experiment.command()(meaning)
experiment.command()(bits)
experiment.command()(endless)
