"""Names for functions: one registry per kind, open to the user's own functions; and the one importer of `file.py:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from quadriga.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_ADDED: dict[str, set[str]] = {}


def name_of(name: Any) -> str:
    """A name as text: a member of an Enum stands for its value, else it could be compared with no other name."""
    return str(name.value if isinstance(name, Enum) else name)


def allow_name(path: str, name: str) -> None:
    """Let the key `path` take `name` too: for a registry's decorator, so that names a user registers are accepted."""
    _ADDED.setdefault(path, set()).add(name)


def added_names(path: str) -> set[str]:
    """What `allow_name` has added for this key in this process."""
    return _ADDED.get(path, set())


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
        self._loaded: dict[str, F] = {}  # by module or file: looked up once, not in every micro-batch

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator that registers a function under one or more names; a taken name is an error, a reload is not."""

        def decorate(fn: F) -> F:
            for name in map(name_of, names):
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
        name = name_of(name)
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]
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
        takes = _parameters_of(fn)
        for required in takes.required:
            if required not in given:
                raise ConfigError(
                    f"{self.kind} {name!r} needs {required!r}, which was not given.",
                    (hints or {}).get(required, f"it can be given: {', '.join(sorted(given))}"),
                )
        if takes.everything:
            return fn(**given)
        return fn(**{key: given[key] for key in takes.names if key in given})

    def _load(self, spec: str) -> F:
        source, _, attribute = spec.rpartition(":")
        fn = import_named(source, attribute, self.config_key)
        if not callable(fn):
            raise ConfigError(f"{self.config_key}={spec!r} is no function.", f"define `def {attribute}(...)` there")
        return fn


class _Parameters(NamedTuple):
    """What a function can be called with by keyword."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    everything: bool


@lru_cache(maxsize=256)
def _parameters_of(fn: Callable[..., Any]) -> _Parameters:
    """Read from the signature once: a loss is called in every micro-batch."""
    parameters = inspect.signature(fn).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _Parameters(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _identity(fn: Callable[..., Any]) -> tuple[str, str]:
    return getattr(fn, "__module__", "?"), getattr(fn, "__qualname__", repr(fn))


WRITTEN_FOR_VERL = (
    "It is written for verl: start the run by `python -m quadriga.compat.verl -m verl.trainer.main_ppo …`, "
    "or begin the file with `import quadriga.compat.verl`."
)


def is_file(place: str) -> bool:
    """Whether a place names a Python file rather than a dotted module."""
    return place.endswith(".py") or os.sep in place


def import_named(place: str, attribute: str, key: str) -> Any:
    """What is called `attribute` (dots lead into classes) in a Python file or a dotted module of the user's.

    Args:
        place: `path/to/file.py` (with `~` and variables), or `package.module`.
        key: where the user has named it, for messages.

    Raises:
        ConfigError: no such file or module, or nothing of that name in it. What the code itself raises comes as it is.
    """
    value = import_place(place, key)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{key}: {place} has no {attribute!r}.", "define it there, or correct the name")
        value = getattr(value, part)
    return value


def import_place(place: str, key: str) -> ModuleType:
    """The module at a dotted name (`pkg://` before it says so) or in a Python file; see `import_named`."""
    try:
        return _import_place(place.removeprefix("pkg://"), key)
    except ModuleNotFoundError as error:
        if error.name == "verl":
            error.add_note(WRITTEN_FOR_VERL)
        raise


def _import_place(place: str, key: str) -> ModuleType:
    if is_file(place):
        return _import_file(Path(os.path.expandvars(place)).expanduser().resolve(), key)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise  # the module exists; something that it imports does not
        raise ConfigError(
            f"{key} names the module {place!r}, which cannot be found.",
            "put its folder on PYTHONPATH, or give the path of the file as 'path/to/file.py'",
        ) from error


def import_libraries(places: str | Iterable[str] | None, key: str) -> None:
    """Import modules or files for what they register; ConfigError for one that cannot be found."""
    for place in [places] if isinstance(places, str) else places or ():
        import_place(place, key)


def _import_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}: the file {path} does not exist.", "correct the path")
    # One module for each path, so that a file asked for twice runs once, and two files of one name are two modules.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}: {path} cannot be imported as Python.", "give a file that ends in .py")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # its neighbours can be imported, as when it is run as a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
