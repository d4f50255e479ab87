"""Exceptions that a user of MARLaaS can cause and can act on."""


class MarlaasError(Exception):
    """Base of everything MARLaaS raises on purpose; its text is fit to show to a user as it is."""


class SpecError(MarlaasError):
    """A fleet file that cannot be run. Each problem names the field, the value given and what is allowed."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class ModelError(MarlaasError):
    """A base model that cannot be found, read or run by the native engine."""


class AdapterError(MarlaasError):
    """An adapter that does not fit the base model or the pool."""


class JobNotOpen(AdapterError):
    """A job that the device does not know, or knows no longer."""


class JobTaken(MarlaasError):
    """Another runner trains the same job; this one ends, and the job goes on there."""


class BatchError(MarlaasError):
    """A training batch that is refused; only its own tenant notices."""


class RequestError(MarlaasError):
    """A sampling request that is refused; only its own tenant notices."""


class AdapterMissing(RequestError):
    """A sampling request for an adapter version that the device does not have, or has no longer."""


class EnvironmentFailure(MarlaasError):
    """An environment that failed: does not import, raised, ran out of time or answered nonsense."""


class PoolClosed(MarlaasError):
    """The pool was closed, or its device thread ended, while work was waiting."""
