"""The one exception that means: the user can put this right."""


class UserError(Exception):
    """A mistake in a command, a config or a file; its text is one sentence saying what, where and what to do.

    `main` prints it without a traceback and exits with code 2.
    """
