"""What goes wrong for a user, as exceptions whose message is one sentence: the value, the limit, the remedy.

They also derive from the built-in exception that scikit-learn's conventions expect, so code that catches ``ValueError``
around any estimator catches ours.
"""


class SiamMMError(Exception):
    """Any failure that the user can do something about; the command line prints its message and ends."""

    exit_code = 2
    """An error that stays until the user changes something."""


class InputError(SiamMMError, ValueError):
    """The data or a parameter cannot be used as given."""


class StoredFileError(SiamMMError, ValueError):
    """A file that should hold a saved model or a table of embeddings does not, or is damaged."""


class LostRankError(SiamMMError, RuntimeError):
    """Another process of the same training ended, or stands still; starting all of them again may help."""

    exit_code = 75
    """The usual code for a failure that may pass (``EX_TEMPFAIL``), which schedulers can tell from other errors."""


class Stopped(Exception):  # noqa: N818 - a wish that was granted, not an error
    """A run was asked to stop and has saved itself; the message says how to go on."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ZeroRowWarning(UserWarning):
    """Some rows have a length of 0, hence no direction: the estimators keep them and warn, the commands refuse them."""
