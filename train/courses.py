"""A run as a course: a generator that gives away the computing of each step, to be done here or beside that of others."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from train.errors import LockstepError

T = TypeVar("T")
Work = Callable[[], Any]
Course = Generator[Work, Any, T]  # it is sent what its work has given, and thrown what that has raised


def complete(course: Course[T]) -> T:
    """The end of a course whose work is done here, piece by piece."""
    move: Callable[[], Work] = partial(next, course)
    while True:
        try:
            work = move()
        except StopIteration as end:
            result: T = end.value
            return result
        move = _answer(course, done(work))


def conduct(
    courses: Mapping[int, Course[T]],
    submit: Callable[[Work], Future[Any]],
    surroundings: Callable[[int], AbstractContextManager[Any]],
) -> dict[int, T | LockstepError]:
    """The end of each course, or the error that it explains; the others go on then.

    They take turns: while the work of one is waited for, that of the others is under way where `submit` allows it. All else
    that a course does is done in this thread, within the course's `surroundings`.
    """
    ends: dict[int, T | LockstepError] = {}
    under_way: deque[tuple[int, Future[Any]]] = deque()

    def go_on(name: int, move: Callable[[], Work]) -> None:
        with surroundings(name):
            try:
                under_way.append((name, submit(move())))
            except StopIteration as end:
                ends[name] = end.value
            except LockstepError as error:
                _forget_what_was_computed(error)
                ends[name] = error

    for name, course in courses.items():
        go_on(name, partial(next, course))
    while under_way:
        name, future = under_way.popleft()
        go_on(name, _answer(courses[name], future))
    return ends


def done(work: Work) -> Future[Any]:
    """The work's outcome, made here and now."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future


def _forget_what_was_computed(error: BaseException | None) -> None:
    """Else an error that is kept would keep the memory of its step from the others, by the frames that it went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _answer(course: Course[T], future: Future[Any]) -> Callable[[], Work]:
    """How the course goes on with what has become of its work, which is waited for."""
    error = future.exception()
    return partial(course.throw, error) if error else partial(course.send, future.result())
