"""What the verbs of the `train` command have in common."""

from __future__ import annotations

from typing import Any

import click

from train import failure


class Verb(click.Command):
    """A command whose errors are told as a run's are, with the same exit codes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def invoke(self, context: click.Context) -> Any:
        debug = context.params.pop("debug")
        try:
            return super().invoke(context)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            context.exit(failure.tell(error, debug=debug))
