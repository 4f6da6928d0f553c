"""One text through the model with real numbers: what a token attends to, what is computed, what the cache holds.

Everything is taken from a run through the engine's own cache; the room only watches, reads and counts.
"""

from kvine.explain.explanation import Explanation as Explanation
from kvine.explain.run import explain as explain
