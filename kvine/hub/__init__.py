"""From a name to a model on this disk: an alias, a Hugging Face id, a folder or a .gguf file.

What has been fetched once is found again without the network; what is half fetched never looks whole.
"""

from kvine.hub.catalogue import ALIASES, DEFAULT_MODEL, Alias, HubFile, Wheel
from kvine.hub.progress import LogProgress, Progress
from kvine.hub.sources import CachedModel, ModelSource, cached_models, find_config, kvine_home, pull, resolve, verify

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "Alias",
    "CachedModel",
    "HubFile",
    "LogProgress",
    "ModelSource",
    "Progress",
    "Wheel",
    "cached_models",
    "find_config",
    "kvine_home",
    "pull",
    "resolve",
    "verify",
]
