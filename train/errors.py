"""What can go wrong for a person, with the exit code that says whose turn it is."""


class LockstepError(Exception):
    """A failure that is explained in words; `main` prints the message and no traceback."""

    exit_code = 1

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        """`everywhere`: all processes raise it alike, so that one of them tells it."""
        super().__init__(message)
        self.everywhere = everywhere


class UsageError(LockstepError):
    """The command or the configuration is wrong; nothing has been created or read."""

    exit_code = 2


class RunError(LockstepError):
    """The data, a file, the device or the numbers went wrong while the configuration was fine."""


STOPPED_EXIT_CODE = 75  # sysexits' EX_TEMPFAIL: stopped by a signal after a save; the same command goes on
