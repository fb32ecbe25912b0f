"""The error of services and commands that cannot do what a person asked for."""


class CommandError(Exception):
    """What was asked for cannot be done; the message says why, and what to do."""
