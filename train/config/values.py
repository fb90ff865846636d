"""What a scalar of a configuration may mean, and the way back to YAML.

A scalar stays the text that was written until the schema says what it is: `no`, `012` and `12:30` are text where text
is declared, and `1e-4` is a number where a number is. Only the arguments of a named optimizer, model, ... have no
declared type; `free` reads those.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, StringConstraints

NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class Text(str):
    """A scalar as it was written: whether in quotes, and the folder that a relative path in it starts from."""

    quoted: bool
    folder: Path

    def __new__(cls, text: str, quoted: bool, folder: Path) -> "Text":
        self = super().__new__(cls, text)
        self.quoted = quoted
        self.folder = folder
        return self


def free(value: Any) -> Any:
    """An argument without a declared type by the core rules of YAML 1.2 (1e-4 is a number); quoted text stays text."""
    if isinstance(value, dict):
        return {key: free(item) for key, item in value.items()}
    if isinstance(value, list):
        return [free(item) for item in value]
    return value if not isinstance(value, Text) or value.quoted else core(str(value))


def core(text: str) -> Any:
    if text in NULLS:
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", text):
        return int(text, base=0)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text


def shown(value: Any) -> str:
    """A value in a message about it."""
    match value:
        case None:
            return "empty"
        case dict():
            return "a mapping"
        case list():
            return "a list"
    return f"'{value}'"


def dump(values: Mapping[str, Any]) -> str:
    """YAML that reads back as the same values, by these rules and by other YAML readers' alike."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    pass


def _quoted_where_needed(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape line and control characters, of which PyYAML would lose some (U+0085) in other styles.
    style = '"' if not text.isprintable() else "'" if core(text) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted_where_needed)


def expand(text: str) -> str:
    """`~` and `$VAR` or `${VAR}` filled in; ValueError when a variable is not set."""

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"the variable ${name} is not set")
        return os.environ[name]

    text = re.sub(r"\$(\w+)|\$\{(\w+)\}", variable, text)
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise ValueError(f"{text} names a home folder that is not known") from None


def absolute_path(value: Any) -> Any:
    """Relative to the file's folder, or to the working directory for the command line and defaults."""
    if not isinstance(value, str | Path):
        return value
    if not str(value):
        raise ValueError("must be a path, not an empty text")
    folder = value.folder if isinstance(value, Text) else Path.cwd()
    return Path(os.path.normpath(folder / expand(str(value))))


def data_path(value: Any) -> Any:
    """A local path made absolute; the name of a data set on the Hub (`org/name`) and a URL as they are.

    It is local when it starts with `/`, `./`, `../`, `~` or `$`, or when it exists (for a pattern such as
    `shards/*.tar`: when the folder before the first wildcard does), relative to the file that says it.
    """
    if not isinstance(value, str) or "://" in value:
        return value
    if "://" in (expanded := expand(value)):
        return expanded
    path = str(absolute_path(value))
    is_local = value.startswith(("/", "./", "../", "~", "$")) or Path(*before_wildcard(path)).exists()
    return path if is_local else expanded


def before_wildcard(path: str) -> tuple[str, ...]:
    """The leading components of a path that hold no wildcard."""
    parts = Path(path).parts
    return parts[: next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))]


def without_machine(path: str) -> str:
    """The last component of a local path (of a pattern: from the folder before the wildcard); a Hub name as it is."""
    if not path.startswith("/"):
        return path
    return str(Path(*Path(path).parts[max(len(before_wildcard(path)) - 1, 1) :]))


@dataclass(frozen=True)
class Every:
    """How often, or how long: a number of steps or of epochs; 0 is never."""

    count: int
    unit: Literal["steps", "epochs"] = "steps"

    @staticmethod
    def read(value: Any) -> "Every":
        if isinstance(value, Every):
            return value
        match = re.fullmatch(r"(\d+)(?: +(step|epoch)s?)?", str(value).strip(), re.ASCII)
        if not match:
            raise ValueError(f"must be steps or epochs (500, 1 epoch, 2 epochs; 0: never), not {shown(value)}")
        return Every(int(match[1]), "epochs" if match[2] == "epoch" and int(match[1]) else "steps")

    def written(self) -> int | str:
        return self.count if self.unit == "steps" else str(self)

    def __str__(self) -> str:
        if self.unit == "steps":
            return str(self.count)
        return f"{self.count} epoch{'s' if self.count > 1 else ''}"


def _switch(value: Any) -> Any:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"must be true or false (also yes, no, on, off, 1, 0), not {shown(value)}")
    return words[str(value).lower()]


def _transform(value: Any) -> Any:
    """`name`, or `{name: {argument: value}}`; without arguments it is the name alone."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, dict | None):
            return {str(name): free(arguments)} if arguments else str(name)
    raise ValueError("must be the name of a transform, or one name with a mapping of its arguments: `Name: {size: 32}`")


def _several(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise ValueError(f"names {', '.join(map(str, twice))} twice")
    if len(seeds) == 1:
        raise ValueError(f"has one seed, for which there is run.seed: {seeds[0]}")
    return seeds


Switch = Annotated[bool, BeforeValidator(_switch)]
Interval = Annotated[Every, BeforeValidator(Every.read), PlainSerializer(Every.written)]
Filled = Annotated[str, StringConstraints(min_length=1)]
LocalPath = Annotated[Path, BeforeValidator(absolute_path)]
DataPath = Annotated[Filled, BeforeValidator(data_path)]
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[tuple[Seed, ...], AfterValidator(_several)]
Auto = Literal["auto"]
Transforms = tuple[Annotated[str | dict[str, dict[str, Any]], BeforeValidator(_transform)], ...]
