"""Every error that forerun raises on purpose, as one tree.

    ForerunError
    ├── ConfigError                 a setting of the engine or the program is wrong
    │   └── UnknownOption           a name that no setting has (also a TypeError)
    ├── RequestError                a request cannot be served as it was asked
    │   ├── InvalidParameter        a sampling option outside its range
    │   ├── EmptyPrompt             there is nothing to continue
    │   ├── InvalidToken            a token id that the vocabulary does not have
    │   ├── ContextTooLong          prompt does not fit the context
    │   ├── InvalidConstraint       a schema, pattern or grammar that cannot be enforced
    │   └── TemplateError           the chat template refused the messages
    ├── ModelError                  a model cannot be used
    │   ├── ModelNotFound           no such name, folder or file
    │   ├── ModelFileError          a file is missing, cut short or not what it claims
    │   └── UnsupportedModel        readable, but nothing here can run it
    ├── FetchError                  a model could not be fetched
    ├── DependencyMissing           an optional library is needed and not installed
    ├── CapacityError               not enough memory or cache for what was asked
    ├── Overloaded                  too much waits already; come back later
    │   └── RateLimited             one key has too much under way
    ├── DeadlineExceeded            a request's time was over before its answer was whole
    ├── InvalidLogits               the model produced NaN or infinity for a request
    ├── NoTokenPossible             a request's options leave no token that could come next
    └── EngineClosed                the engine was closed while the request waited
        └── EngineDied              the engine's thread ended by a surprise

A message names the offending value, the limit and the way out. `http_status` is what a server
answers; the command line prints the message in one line and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContextTooLong",
    "DeadlineExceeded",
    "DependencyMissing",
    "EmptyPrompt",
    "EngineClosed",
    "EngineDied",
    "FetchError",
    "ForerunError",
    "InvalidConstraint",
    "InvalidLogits",
    "InvalidParameter",
    "InvalidToken",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "NoTokenPossible",
    "Overloaded",
    "RateLimited",
    "RequestError",
    "TemplateError",
    "UnknownOption",
    "UnsupportedModel",
    "nearest_name",
    "refuse_unknown",
]


class ForerunError(Exception):
    """Base of everything that forerun raises on purpose."""

    http_status = 500
    exit_code = 2


class ConfigError(ForerunError, ValueError):
    """A setting of the engine or the program is wrong."""

    http_status = 400


class UnknownOption(ConfigError, TypeError):
    """A name that no setting has."""


class RequestError(ForerunError, ValueError):
    """A request cannot be served as it was asked."""

    http_status = 400


class InvalidParameter(RequestError):
    """A sampling option lies outside its range or has the wrong type."""


class EmptyPrompt(RequestError):
    """The prompt has no tokens."""


class InvalidToken(RequestError):
    """A token id lies outside the vocabulary."""


class ContextTooLong(RequestError):
    """The prompt does not fit the context."""


class InvalidConstraint(RequestError):
    """A schema, pattern or grammar is wrong, too big, or more than can be enforced here."""


class TemplateError(RequestError):
    """The chat template is missing, broken, or refused the messages."""


class ModelError(ForerunError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """There is no such name, folder or file."""

    http_status = 404


class ModelFileError(ModelError):
    """A file of a model is missing, cut short, or not what it claims to be."""


class UnsupportedModel(ModelError):
    """The model is readable, but nothing here can run it."""


class FetchError(ForerunError):
    """A model could not be fetched."""

    exit_code = 1


class DependencyMissing(ForerunError, ImportError):
    """An optional library is needed and not installed."""


class CapacityError(ForerunError):
    """There is not enough memory or cache for what was asked."""

    http_status = 503


class Overloaded(ForerunError):
    """Too much waits already; `retry_after_s` says when to come back."""

    http_status = 503

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """One key has too much under way."""

    http_status = 429


class DeadlineExceeded(ForerunError):
    """A request's time was over before its answer was whole."""

    http_status = 504


class InvalidLogits(ForerunError):
    """The model produced NaN or infinity for a request."""


class NoTokenPossible(ForerunError):
    """A request's options leave no token that could come next."""

    http_status = 400


class EngineClosed(ForerunError):
    """The engine was closed while the request waited."""

    http_status = 503


class EngineDied(EngineClosed):
    """The engine's thread ended by a surprise; a new engine is needed."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Say which known name a misspelt one probably meant, or list them all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `UnknownOption` for the first of `given` that is not among `known`."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UnknownOption(f"unknown option {name!r} for {where}; {nearest_name(name, names)}")
