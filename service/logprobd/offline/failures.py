"""How a run ends early. The messages are sentences for whoever started it."""


class RefusedError(Exception):
    """Impossible options or a bad row: nothing more is scored (exit code 2)."""


class StoppedError(Exception):
    """The run cannot go on; what was scored is kept (exit code 1)."""
