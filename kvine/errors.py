"""The errors that users see. Each message is a sentence that says what to do; anything else that is raised is a bug."""


class KvineError(Exception):
    """Base of every error that a user can cause."""


class ConfigError(KvineError):
    """An option, or a combination of options, that cannot work."""


class FetchError(KvineError):
    """A model could not be found, fetched or verified."""


class ModelLoadError(KvineError):
    """A checkpoint that is damaged, incomplete, contradictory or of an unknown kind."""


class RequestError(KvineError):
    """A request that cannot be served as asked: its prompt, its parameters or its chat messages."""


class ContextLengthError(RequestError):
    """A request that is longer than the model's context or than the cache can ever hold."""


class StepError(KvineError):
    """A model call failed; its requests have ended and what they held is free again."""


class SessionError(KvineError):
    """A session's file that cannot be written, or that this model and cache cannot take in."""


class KvineWarning(UserWarning):
    """Something that works, but not as well as it could, and what to do about it."""
