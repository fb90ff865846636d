"""From files and `key=value` settings to a Config, or to all that is wrong with them at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from train.config import files, messages
from train.config.messages import Problem
from train.config.schema import Config
from train.config.section import NamedSection
from train.errors import UsageError

Check = Callable[[Mapping[str, Any]], Sequence[Problem]]


def load(
    paths: Sequence[Path], overrides: Sequence[str] = (), checks: Mapping[str, Check] | None = None
) -> tuple[Config, dict[str, str]]:
    """The Config of the files, left to right, and then the `key=value` settings; and where each given key was said.

    A layer that changes the `name` of a section drops the arguments of the layers below it, and one that gives `steps`
    or `epochs` drops the other. `checks` judge the sections they are named after (dotted), with the values that could
    be read. UsageError tells all problems at once, a line each.
    """
    problems: list[str] = []
    root = _layers(paths, overrides, problems)
    given = {name: {} for name, field in Config.model_fields.items() if messages.section(field)} | files.plain(root)
    found: dict[messages.Key, str] = {}
    config = None
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        found = messages.explain(error, Config, given)
    for name, check in (checks or {}).items():
        section = tuple(name.split("."))
        known = _readable(section, given, found)
        for problem in check(known) if known is not None else ():
            found.setdefault((*section, *problem.key.split(".")), problem.message)
    problems += [f"{files.find(root, key)}: {'.'.join(map(str, key))}: {message}" for key, message in found.items()]
    if problems or config is None:
        raise UsageError("\n".join(problems))
    return config, files.places(root)


def _layers(paths: Sequence[Path], overrides: Sequence[str], problems: list[str]) -> files.Node:
    layers, unreadable = [], []
    for path in paths:
        try:
            layers += files.read_file(path, problems)
        except UsageError as error:
            unreadable.append(str(error))
    settings = files.read_overrides(overrides, problems)
    if unreadable:
        raise UsageError("\n".join(unreadable + problems))
    named = {
        name: {key: declared.default for key, declared in section.model_fields.items()}
        for name, field in Config.model_fields.items()
        if (section := messages.section(field)) and issubclass(section, NamedSection)
    }
    root = reduce(lambda lower, upper: files.overlay(lower, upper, named, {"steps", "epochs"}), [*layers, settings])
    return files.Node(root.value, layers[-1].place if layers else settings.place)


def _readable(section: tuple[str, ...], given: Any, found: Mapping[messages.Key, str]) -> dict[str, Any] | None:
    """The values of a section without the keys that are wrong by themselves; None when there is nothing to judge."""
    schema: type[BaseModel] = Config
    for part in section:
        schema = messages.section(schema.model_fields[part]) or schema
        given = given.get(part, {}) if isinstance(given, dict) else None
    wrong = {key[len(section)] for key in found if key[: len(section)] == section and len(key) > len(section)}
    decisive = {"name", *(key for key, field in schema.model_fields.items() if field.is_required())}
    if not isinstance(given, dict) or wrong & decisive:
        return None
    return schema.model_validate({key: value for key, value in given.items() if key not in wrong}).model_dump()


def unknown_argument(section: str, key: str, arguments: Sequence[str]) -> Problem:
    """What a check says about an argument that the named optimizer, model, ... does not take."""
    level = [f"{section}.{name}" for name in (*_declared(section), *arguments)]
    return Problem(key, messages.unknown_key(f"{section}.{key}", level, Config))


def _declared(section: str) -> list[str]:
    return [key.removeprefix(f"{section}.") for key in messages.keys(Config) if key.startswith(f"{section}.")]
