"""Things found by name with free-form arguments: whether the name exists and the arguments fit, before anything is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from train.config import Problem, unknown_argument


def imported(name: str) -> Callable[..., Any]:
    """What `package.module:NAME` names. LookupError says why it cannot be had."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # its module may hold any mistake
        raise LookupError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise LookupError(f"{name} is {found!r}, which cannot be called")
    made: Callable[..., Any] = found
    return made


def check_name(name: str, known: Iterable[str], kind: str, also: str = "") -> list[Problem]:
    """One problem when there is no such name; `also` says which other ones there are."""
    known = sorted(known)
    if name in known:
        return []
    near = get_close_matches(name.lower(), (folded := {known_name.lower(): known_name for known_name in known}), n=1)
    question = f"; did you mean {folded[near[0]]}?" if near else ""
    listed = ", ".join(known) if len(known) <= 40 else f"{', '.join(known[:6])} ... {len(known)} in all"
    return [Problem("name", f"there is no {kind} {name}{question} (known: {listed}{f'; also {also}' if also else ''})")]


def check_arguments(
    section: str, call: Callable[..., Any], arguments: Mapping[str, Any], given: Iterable[str] = ()
) -> list[Problem]:
    """What is wrong with `call(..., **arguments)` when the trainer gives the arguments `given` itself."""
    parameters = dict(inspect.signature(call).parameters)
    open_ended = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in given
    }
    problems = []
    for name in arguments:
        if name in given:
            problems.append(Problem(name, "is set by the trainer and cannot be given here"))
        elif name not in named and not open_ended:
            problems.append(unknown_argument(section, name, sorted(named)))
        elif name in named and (allowed := _switch(named[name])) and not any(arguments[name] is value for value in allowed):
            words = {True: "true", False: "false", None: "empty"}
            problems.append(Problem(name, f"must be {' or '.join(words[value] for value in allowed)}, not {arguments[name]!r}"))
    for name, parameter in named.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            problems.append(Problem(name, "is needed"))
    return problems


def _switch(parameter: inspect.Parameter) -> tuple[bool | None, ...]:
    """The values of a parameter that is on, off or, perhaps, neither; none for another kind of parameter."""
    if parameter.annotation is parameter.empty:
        return (True, False) if isinstance(parameter.default, bool) else ()
    written = inspect.formatannotation(parameter.annotation).strip("'")  # as text, which it is in some modules already
    return {"bool": (True, False), "bool | None": (True, False, None), "Optional[bool]": (True, False, None)}.get(written, ())
