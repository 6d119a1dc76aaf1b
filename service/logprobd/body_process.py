"""A process that parses large bodies: `python -m logprobd.body_process FD`, its end of a socket pair.

It takes the served model first, then bodies one by one, and gives back flat plans or errors, until the other end
closes.
"""

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from logprobd.dialects.flat import FlatPlan, flatten
from logprobd.dialects.parsing import PARSERS, ParseFirst, ParseRequest
from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle: it drains first
    connection: Connection[Any, Any] = Connection(fd)
    try:
        first: ParseFirst = connection.recv()
        served = first.served_model()
        connection.send(None)
        while True:
            connection.send(answer_to(connection.recv(), served))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the service is gone


def answer_to(request: ParseRequest, served: ServedModel) -> FlatPlan | ApiError:
    try:
        return flatten(PARSERS[request.dialect](request.body, served))
    except ApiError as error:
        return error


if __name__ == "__main__":
    main(int(sys.argv[1]))
