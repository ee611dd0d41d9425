"""The exceptions unison raises on purpose.

Every message is written for the person who reads it: what was expected, what was found, which
parameter or file it concerns by its full name, and what to do. The command line prints the message
of a `UnisonError` as one sentence and exits with code 2; anything else is a bug and keeps its
traceback.
"""


class UnisonError(Exception):
    """Base of the errors that a user can cause and mend."""


class BadInput(UnisonError, ValueError):
    """An argument, file or setting that cannot be used as given."""


class UnsupportedOperation(UnisonError, NotImplementedError):
    """Something unison knows about and declines to do wrongly."""


class NeedsWhole(UnisonError, RuntimeError):
    """Something that needs the whole of a parameter, of which this rank holds a part.

    No `NotImplementedError`, which libraries take for "try another way" (safetensors would go on
    and write nothing).
    """


class Diverged(UnisonError, ArithmeticError):
    """Training produced a value that is not finite."""


class OutOfRoom(UnisonError, RuntimeError):
    """Memory or a disk that is full, or a folder that cannot be written any more."""


class CheckpointFailed(UnisonError, OSError):
    """A file of a checkpoint could not be written or read."""


class Stopped(UnisonError):
    """A run that a signal asked to stop, and that did, between two steps.

    Attributes:
        number: The signal.
    """

    def __init__(self, message: str, number: int = 15) -> None:
        super().__init__(message)
        self.number = number
