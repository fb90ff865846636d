"""The launched script: `accelerate launch train/main.py [CONFIG.yaml ...] [key=value ...]`."""

import os
import signal
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib would be imported from the wrong folder
# A script's folder comes first on the path, where train/data would hide other packages and a fork's random.py the library.
sys.path[:] = [os.path.dirname(_here), *(folder for folder in sys.path if os.path.realpath(folder or ".") != _here)]  # noqa: PTH120

import click  # noqa: E402

from train import failure  # noqa: E402
from train.ending import leave  # noqa: E402
from train.errors import STOPPED_EXIT_CODE  # noqa: E402


def _steps(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    first, _, last = (text or "").partition("..")
    if text is not None and not (first.isdecimal() and last.isdecimal()):
        raise click.BadParameter("write the first and the last step, such as 10..20")
    if text is None:
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read when torch is imported: else its profiler remarks on itself
    return int(first), int(last)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("settings", nargs=-1, metavar="[CONFIG.yaml ...] [key=value ...]")
@click.option("--dry-run", is_flag=True, help="Print the resolved config and the plan, and stop.")
@click.option("--stop-at", type=click.IntRange(1), metavar="STEP", help="Save after this step and stop, as a signal would.")
@click.option(
    "--profile",
    callback=_steps,
    metavar="FIRST..LAST",
    help="Trace these steps, both included, and say what their time goes into.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(settings: tuple[str, ...], dry_run: bool, stop_at: int | None, profile: tuple[int, int] | None, debug: bool) -> None:
    """Train what the CONFIG files say, each over the one before, with key=value settings over all of them.

    Without a CONFIG it trains the digits that come with the project. The same command again goes on where the run was
    stopped, from outputs/NAME-HASH, on any number of processes.

    \b
    accelerate launch train/main.py
    accelerate launch train/main.py configs/mnist.yaml optimizer.lr=0.1 epochs=2
    accelerate launch --multi_gpu --num_processes 2 train/main.py configs/cifar10.yaml

    Exit codes: 0 done, 1 failed, 2 usage or configuration, 75 stopped by a signal, or by --stop-at, after a save.
    """
    try:
        from train.parallel import machines
        from train.run import read_settings, run

        machines.join()
        status = run(*read_settings(settings), dry_run=dry_run, stop_at=stop_at, profile=profile)
        machines.leave()
    except Exception as error:
        leave(_told(error, debug=debug))
    if status == "stopped":
        failure.tell_launcher("stopped after a save: the same command goes on from there")
        leave(STOPPED_EXIT_CODE)
    leave(0)


def _told(error: Exception, *, debug: bool) -> int:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises when one more worker dies
        for number in (signal.SIGTERM, signal.SIGINT):  # the launcher's, to those that are left; they would promise a save
            signal.signal(number, signal.SIG_IGN)
        return failure.tell(error, debug=debug)
    except RuntimeError as another:  # from torch's handler of SIGCHLD, which had seen one more worker die
        return failure.tell(another, debug=debug)


if __name__ == "__main__":
    main()
