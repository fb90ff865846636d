"""Configuration files and `key=value` settings as trees of text that remember where each key was said.

Nothing is guessed from the look of a value: every scalar stays the text that was written, and the schema
says what it is.
"""

import difflib
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from train.config.values import NULLS, Text, expand
from train.errors import UsageError

COMMAND_LINE = "command line"
PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


@dataclass(frozen=True)
class Place:
    """Where something was said: a line of a file as the person named that file, or the command line (no line)."""

    source: str
    line: int | None
    folder: Path  # what a relative path said here is relative to

    def at(self, node: yaml.Node) -> "Place":
        return self if self.source == COMMAND_LINE else replace(self, line=node.start_mark.line + 1)

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    value: "str | list[Node] | dict[str, Node]"
    place: Place
    quoted: bool = False


def read_file(path: Path, problems: list[str], above: tuple[Path, ...] = ()) -> list[Node]:
    """The file's layers, that of its furthest `base` first.

    What leaves the rest readable, such as a key given twice, is added to `problems`. UsageError when a file is not.
    """
    if path.resolve() in [file.resolve() for file in above]:
        chain = " -> ".join(str(file) for file in (*above, path))
        raise UsageError(f"{path}: is its own base: {chain}")
    place = Place(str(path), None, path.absolute().parent)
    root = _tree(_compose(_text(path), str(path)), place, "", problems)
    if not isinstance(root.value, dict):
        raise UsageError(f"{path}: must be a mapping of keys to values (such as `steps: 100`), not a list or a text")
    layers = [Node(root.value, place)]
    if base := root.value.pop("base", None):
        if not isinstance(base.value, str) or is_null(base):
            raise UsageError(f"{base.place}: base: must be the path of one configuration file")
        try:
            below = os.path.normpath(path.parent / expand(base.value))
            layers = read_file(Path(below), problems, (*above, path)) + layers
        except (UsageError, ValueError) as error:
            raise UsageError(f"{base.place}: base: {error}") from None
    return layers


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        there = {file.stem: file for file in path.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(path.stem, there, n=1)
        question = f"; did you mean {there[near[0]]}?" if near else ""
        raise UsageError(f"{path}: no such file (looked for {path.absolute()}){question}") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; name a YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _compose(text: str, source: str) -> yaml.Node:
    try:
        # BaseLoader resolves nothing: a tag other than text, list or mapping was written by the person.
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source}:{mark.line + 1}" if mark else source
        if error.problem and r"'\t'" in error.problem:
            raise UsageError(f"{at}: a tab; YAML is indented with spaces") from None
        if error.context == "expected a single document in the stream":
            raise UsageError(f"{at}: a second document (`---`); put one configuration in a file") from None
        raise UsageError(f"{at}: is not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{source}:{line}: holds a control character, which YAML does not allow") from None
    except RecursionError:
        raise UsageError(f"{source}: is nested too deeply") from None
    if node is None:
        raise UsageError(f"{source}: is empty; a configuration needs keys (such as `steps: 100`)")
    return node


def _tree(node: yaml.Node, place: Place, key: str, problems: list[str], parents: tuple[yaml.Node, ...] = ()) -> Node:
    where = f"{place}: {key}: " if key else f"{place}: "
    if node in parents:
        raise UsageError(f"{where}an alias (*) must not stand inside what it names")
    if node.tag not in PLAIN_TAGS:
        problems.append(f"{where}YAML tags (!) are not supported; write the value itself")
    parents = (*parents, node)
    if isinstance(node, yaml.ScalarNode):
        return Node(node.value, place, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        items = [(place.at(item), item) for item in node.value]
        return Node([_tree(item, at, f"{key}.{i}", problems, parents) for i, (at, item) in enumerate(items)], place)
    tree: dict[str, Node] = {}
    for name, value in node.value:
        at = place.at(name)
        if not isinstance(name, yaml.ScalarNode):
            problems.append(f"{at}: a key must be text, not a list or a mapping")
            continue
        dotted = f"{key}.{name.value}" if key else str(name.value)
        if name.value == "<<":
            problems.append(f"{at}: {dotted}: merge keys are not supported; use `base: other.yaml`")
        elif name.value in tree:
            problems.append(f"{at}: {dotted}: given twice; the first is on line {tree[name.value].place.line}")
        else:
            tree[name.value] = _tree(value, at, dotted, problems, parents)
    return Node(tree, place)


def read_overrides(overrides: Sequence[str], problems: list[str]) -> Node:
    """One layer of all `section.key=value`, the last of two equal keys winning."""
    place = Place(COMMAND_LINE, None, Path.cwd())
    layer = Node({}, place)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(f"{place}: {override}: is neither a configuration file (.yaml) nor key=value")
            continue
        node = _override_value(key, text.strip(), place, problems)
        for part in reversed(key.strip().split(".")):
            node = Node({part: node}, place)
        layer = merge(layer, node)
    return layer


def _override_value(key: str, text: str, place: Place, problems: list[str]) -> Node:
    """Only what opens as a YAML list, mapping or quoted text is parsed: ` #`, `*` and `: ` are common in plain text."""
    if text.startswith(("[", "{", '"', "'")):
        try:
            return _tree(_compose(text, str(place)), place, key, problems)
        except UsageError:
            pass  # not YAML after all: its text
    return Node(text, place)


def merge(lower: Node, upper: Node) -> Node:
    """`upper` over `lower`: mappings key by key, all else replaced."""
    if not isinstance(lower.value, dict) or not isinstance(upper.value, dict):
        return upper
    both = lower.value.keys() & upper.value.keys()
    merged = {key: merge(lower.value[key], upper.value[key]) for key in both}
    return Node({**lower.value, **upper.value, **merged}, upper.place)


def overlay(lower: Node, upper: Node, named: Mapping[str, Mapping[str, Any]], rivals: Set[str]) -> Node:
    """Merge two layers, where `upper` drops what it makes senseless in `lower`.

    `named` gives the declared keys, with their defaults, of each section whose `name` decides which other arguments
    there are: under another name only the declared keys stay. Of the keys in `rivals` only one can be given.
    """
    assert isinstance(lower.value, dict) and isinstance(upper.value, dict)
    kept = dict(lower.value)
    for section in named.keys() & kept.keys() & upper.value.keys():
        kept[section] = _fitting(kept[section], upper.value[section], named[section])
    if any(key in upper.value and not is_null(upper.value[key]) for key in rivals):
        kept = {key: node for key, node in kept.items() if key not in rivals}
    return merge(Node(kept, lower.place), upper)


def _fitting(lower: Node, upper: Node, declared: Mapping[str, Any]) -> Node:
    if not isinstance(lower.value, dict) or not isinstance(upper.value, dict) or "name" not in upper.value:
        return lower
    name = lower.value["name"].value if "name" in lower.value else declared["name"]
    if upper.value["name"].value == name:
        return lower
    return Node({key: node for key, node in lower.value.items() if key in declared}, lower.place)


def is_null(node: Node) -> bool:
    return isinstance(node.value, str) and not node.quoted and node.value in NULLS


def plain(node: Node) -> Any:
    """The tree as dict, list, None and Text."""
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [plain(value) for value in node.value]
    return None if is_null(node) else Text(node.value, node.quoted, node.place.folder)


def find(root: Node, key: Sequence[str | int]) -> Place:
    """The place of a key, or of the nearest section above it that was given."""
    node = root
    for part in key:
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[str(part)]
        elif isinstance(node.value, list) and str(part).isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
        else:
            break
    return node.place


def places(node: Node, key: str = "") -> dict[str, str]:
    """Dotted key -> where it was said, for every key that was."""
    if not isinstance(node.value, dict):
        return {key: str(node.place)}
    found: dict[str, str] = {}
    for name, value in node.value.items():
        found |= places(value, f"{key}.{name}" if key else name)
    return found
