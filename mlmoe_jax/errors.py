"""The exception that means: the user can put this right; and the exit codes of the program."""

DONE, FOUND_PROBLEMS, USER_ERROR, OUTDATED, DISK_ERROR, INTERRUPTED = 0, 1, 2, 3, 4, 130


def success(outdated: bool) -> int:
    """Return the exit code of a command that used a model, which may be `outdated` as a `Run` can be."""
    return OUTDATED if outdated else DONE


class UserError(Exception):
    """A mistake in a command, a config or a file; its text is one sentence saying what, where and what to do.

    `main` prints it without a traceback and exits with `exit_code`.
    """

    exit_code = USER_ERROR


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error, without its period; of an OSError the reason, without the path."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(". ")[0].rstrip(".")


class DiskError(UserError):
    """A disk that is full, read-only or failing; once there is space, the same command resumes."""

    exit_code = DISK_ERROR


class Stopped(Exception):
    """Raised by a training after SIGTERM or Ctrl-C, once the current step is saved."""
