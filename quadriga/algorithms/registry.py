"""Names for functions: one registry per kind, open to the user's own functions."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from quadriga.config.names import allow_name
from quadriga.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by name.

    A name is a registered one, or `package.module:function`, or `path/to/file.py:function`.

    Args:
        kind: what the functions are, for messages ("advantage estimator").
        config_key: where a user sets the name, for messages ("algorithm.adv_estimator").
    """

    def __init__(self, kind: str, config_key: str) -> None:
        self.kind = kind
        self.config_key = config_key
        self.config_keys = tuple(
            key.strip() for key in config_key.replace(" or ", ",").replace(" and ", ",").split(",")
        )
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator that registers a function under one or more names; a taken name is an error, a reload is not."""

        def decorate(fn: F) -> F:
            for name in names:
                taken = self._functions.get(name)
                if taken is not None and _identity(taken) != _identity(fn):
                    raise ConfigError(
                        f"{self.kind} {name!r} is already registered, by {'.'.join(_identity(taken))}.",
                        "choose another name",
                    )
                self._functions[name] = fn
                for key in self.config_keys:
                    allow_name(key, name)
            return fn

        return decorate

    def names(self) -> list[str]:
        return sorted(self._functions)

    def get(self, name: str) -> F:
        """The function of that name.

        Raises:
            ConfigError: no such name (the known ones and the nearest are listed), module, file or function.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return self._load(name)
        nearest = difflib.get_close_matches(name, self._functions, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"Unknown {self.kind} {name!r}.{hint} Known: {', '.join(self.names())}.",
            f"set {self.config_key} to one of them, or to your own as 'module:function' or 'path/to/file.py:function'",
        )

    def call(self, name: str, inputs: Mapping[str, Any], hints: Mapping[str, str] | None = None) -> Any:
        """Calls the named function with those of `inputs` that it takes; an input that is None counts as not given.

        Raises:
            ConfigError: an argument without default is not among the inputs; `hints[argument]` says how to get it.
        """
        fn = self.get(name)
        given = {key: value for key, value in inputs.items() if value is not None}
        parameters = inspect.signature(fn).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for p in named:
            if p.default is p.empty and p.name not in given:
                raise ConfigError(
                    f"{self.kind} {name!r} needs {p.name!r}, which was not given.",
                    (hints or {}).get(p.name, f"it can be given: {', '.join(sorted(given))}"),
                )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return fn(**given)
        return fn(**{p.name: given[p.name] for p in named if p.name in given})

    def _load(self, spec: str) -> F:
        source, _, attribute = spec.rpartition(":")
        module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source, self.config_key)
        fn: Any = module
        for part in attribute.split("."):
            fn = getattr(fn, part, None)
        if not callable(fn):
            raise ConfigError(
                f"{self.config_key}={spec!r}: {source} has no function {attribute!r}.",
                f"define `def {attribute}(...)` there, or correct the name",
            )
        return fn


def _identity(fn: Callable[..., Any]) -> tuple[str, str]:
    return getattr(fn, "__module__", "?"), getattr(fn, "__qualname__", repr(fn))


def _import_module(name: str, config_key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module exists; something that it imports does not
        raise ConfigError(
            f"{config_key} names the module {name!r}, which cannot be found.",
            "put its folder on PYTHONPATH, or give the path of the file as 'path/to/file.py:function'",
        ) from error


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{path} is not a file.", "correct the path in 'path/to/file.py:function'")
    # One module per path, so that a file asked for twice runs once.
    name = f"quadriga_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} cannot be imported as Python.", "give a .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
