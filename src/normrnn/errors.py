"""The one exception for what a user can put right."""


class UserError(Exception):
    """A mistake or mishap that a person can act on; the command line prints it as one sentence.

    `code` is the exit code: 2 for a wrong call, 1 for anything found while working.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(UserError):
    """A wrong call: exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=2)
