"""The `train` command: everything beside training itself, a verb each. `python -m train` is the same from a checkout."""

from __future__ import annotations

from importlib import import_module

import click

from train.ending import leave

# Each verb, and the module and attribute of its click command. A command's module imports click and little else, so that
# `--help` is quick; what does the work is imported when the verb is called.
VERBS = {
    "bench": "train.bench.command:bench",
    "diff": "train.receipt.command:diff",
    "doctor": "train.doctor.command:doctor",
    "plan": "train.plan.command:plan",
    "verify": "train.receipt.command:verify",
}


class Verbs(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module, _, attribute = VERBS[name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """What there is to do with runs beside training them, which is `accelerate launch train/main.py`.

    Exit codes: 0 done, 1 failed, 2 usage or configuration.
    """


def run() -> None:
    """The command as a process of its own."""
    try:
        main()
    except SystemExit as ended:  # as click tells the exit code
        assert isinstance(ended.code, int)
        leave(ended.code)
