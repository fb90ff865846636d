"""What is wrong with a configuration, in the words of the person who wrote it: which key, what is allowed, the mend."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from train.config.values import shown

Key = tuple[str | int, ...]


class Problem(NamedTuple):
    """What a check says about its section: `key` is relative to that section."""

    key: str
    message: str


def section(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that is a section."""
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def fields(schema: type[BaseModel], above: str = "") -> dict[str, FieldInfo]:
    """Every key and every section that the schema declares, dotted."""
    found: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        found[above + name] = field
        if inner := section(field):
            found |= fields(inner, f"{above}{name}.")
    return found


def keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every key that the schema declares, dotted."""
    return {name: field for name, field in fields(schema).items() if not section(field)}


def explain(error: ValidationError, schema: type[BaseModel], given: Mapping[str, Any]) -> dict[Key, str]:
    """One sentence a key. The branches of a union are separate errors to pydantic and are joined by "or" here."""
    alternatives: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        alternatives.setdefault(_key(detail["loc"], schema, given), []).append(detail)
    return {key: _sentence(key, details, schema) for key, details in alternatives.items()}


def _key(location: Key, schema: type[BaseModel], given: Any) -> Key:
    """The location without the names of union branches, which pydantic appends."""
    key: list[str | int] = []
    model: type[BaseModel] | None = schema
    for part in location:
        field = model.model_fields.get(str(part)) if model else None
        is_given = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if not field and not is_given:
            break
        key.append(part)
        model = section(field)
        given = given[part] if is_given else None
    return tuple(key)


def _sentence(key: Key, details: list[ErrorDetails], schema: type[BaseModel]) -> str:
    first = details[0]
    dotted = ".".join(map(str, key))
    match first["type"]:
        case "extra_forbidden":
            level = dotted.rpartition(".")[0]
            return unknown_key(dotted, [name for name in fields(schema) if name.rpartition(".")[0] == level], schema)
        case "missing":
            return f"is needed: {keys(schema)[dotted].description}"
        case "value_error":
            return str(first["ctx"]["error"])
    allowed = dict.fromkeys(_allowed(detail) for detail in details)
    return f"must be {' or '.join(allowed)}, not {shown(first['input'])}"


def _allowed(detail: ErrorDetails) -> str:
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "int_parsing" | "int_type":
            return "a whole number"
        case "float_parsing" | "float_type":
            return "a number"
        case "finite_number":
            return "a finite number"
        case "greater_than_equal":
            return f"at least {limits['ge']:g}"
        case "greater_than":
            return f"more than {limits['gt']:g}"
        case "less_than":
            return f"less than {limits['lt']}"
        case "literal_error":
            return str(limits["expected"]).replace("'", "")
        case "string_type":
            return "text"
        case "string_too_short":
            return "a text that is not empty"
        case "string_too_long":
            return f"at most {limits['max_length']} characters"
        case "string_pattern_mismatch":
            return f"text that matches {limits['pattern']}"
        case "path_type":
            return "a path"
        case "tuple_type":
            return "a list in brackets"
        case "model_type":
            return "a section with keys below it"
    return detail["msg"]


def unknown_key(key: str, level: Iterable[str], schema: type[BaseModel]) -> str:
    """`key` and `level`, the keys that are allowed beside it, are dotted."""
    if key in keys(schema):
        return f"a dotted key is for the command line; in a file write `{key.replace('.', ': {')}: ...{'}' * key.count('.')}`"
    level = list(level)
    matches = nearest(key, level, schema)
    question = f"; did you mean {' or '.join(matches)}?" if matches else ""
    return f"unknown key{question} (allowed: {', '.join(name.rpartition('.')[2] for name in level)})"


def nearest(key: str, level: Iterable[str], schema: type[BaseModel]) -> list[str]:
    """The dotted keys that `key` may have meant: the same name at its level, then elsewhere, then what looks alike.

    Looking alike is by name, by dotted name (`batch_size`) and by the words that describe a key (`learning-rate`).
    """
    level = list(level)
    everywhere = list(dict.fromkeys([*level, *keys(schema)]))
    last = _folded(key.rpartition(".")[2])
    for names in (level, everywhere):
        if same := [name for name in names if last in (_folded(name.rpartition(".")[2]), _folded(name))]:
            return same[:3]
    spellings = {_folded(name): name for name in everywhere}
    for name, field in keys(schema).items():
        spellings.setdefault(_folded(re.split(r"[,;:(]", field.description or "")[0]), name)
    beside = {_folded(name.rpartition(".")[2]): name for name in level}
    for candidates in (beside, spellings):
        if close := difflib.get_close_matches(last, candidates, n=1, cutoff=0.6):
            return [candidates[close[0]]]
    return []


def _folded(name: str) -> str:
    return re.sub(r"[-_. ]+", "_", name.strip("- ")).lower()
