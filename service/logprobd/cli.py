"""The command line: `logprobd serve`, `score`, `check` and `plan`."""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import structlog
import uvicorn
from pydantic.fields import FieldInfo

from logprobd import __version__, logs, options, tracing
from logprobd.app import create_app
from logprobd.local import LocalBackend
from logprobd.offline.failures import RefusedError, StoppedError
from logprobd.offline.score import run as run_score
from logprobd.offline.settings import ScoreSettings
from logprobd.own_process import REPRODUCIBLE_MKL
from logprobd.plan_settings import PlanSettings
from logprobd.service import Service
from logprobd.settings import ENV_PREFIX, SECRETS, CommandSettings, ModelSettings, ServeSettings
from logprobd.worker import ModelRefused

GARBAGE_THRESHOLDS = (10_000, 20, 1_000)  # Python's own: 700, 10, 10
LAST_SECONDS = 5  # after a drain, for answers that are still being written
MAX_HEADER_BYTES = 32 << 10  # of a request's line and headers together

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. What cannot start says so in one line and returns 2."""
    given = vars(build_parser().parse_args(arguments))
    command = given.pop("command")
    try:
        options.refuse_unknown_variables(PlanSettings if command == "plan" else ServeSettings)
        run = prepared(command, given)
    except options.ImpossibleOptionsError as error:
        refuse(str(error))
    return run()


def prepared(command: str, given: dict[str, Any]) -> Callable[[], int]:
    """What runs a subcommand, once its options are known to be possible."""
    if command == "plan":
        return partial(plan, options.load(PlanSettings, given))
    if command == "check":
        return partial(check, options.load(ModelSettings, given))
    if command == "score":
        files = given.pop("input"), given.pop("output")
        return partial(score, options.load(ScoreSettings, given), *files)
    return partial(serve, options.load(ServeSettings, given))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="logprobd", description="Per-token logprobs of given completions, over HTTP.")
    parser.add_argument("--version", action="version", version=f"logprobd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    subcommands: tuple[tuple[str, type[CommandSettings], str], ...] = (
        ("serve", ServeSettings, "serve a model over HTTP"),
        ("score", ScoreSettings, "score a JSONL or Parquet file of prompts and completions into another"),
        ("check", ModelSettings, "load a model, compare with its own forward and say how it would be served"),
        ("plan", PlanSettings, "say from a configuration how many devices a training run needs, without loading it"),
    )
    for name, settings, summary in subcommands:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == "score":
            command.add_argument("input", metavar="IN", type=Path, help="file of rows: .jsonl or .parquet")
            command.add_argument("output", metavar="OUT", type=Path, help="the same rows with more columns, likewise")
        for option, field in settings.model_fields.items():
            if option not in SECRETS:
                add_option(command, option, field)
    return parser


def add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """One field of the settings as a flag. Left out, it stays unset: variables and defaults come after."""
    flag = "--" + name.replace("_", "-")
    text = f"{field.description} ({ENV_PREFIX}{name.upper()})".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    if field.default is not None and field.default_factory is None:
        text += f" [{field.default}]"
    parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar=metavar_of(field), help=text)


def metavar_of(field: FieldInfo) -> str:
    kinds = (field.annotation, *get_args(field.annotation))
    if float in kinds:
        return "SECONDS" if (field.description or "").startswith("seconds") else "NUMBER"
    return "N" if int in kinds else "VALUE"


def refuse(message: str) -> NoReturn:
    print(f"logprobd: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(settings: ModelSettings) -> int:
    """Print how a model would be served; 1 if it would not be."""
    os.environ.update(REPRODUCIBLE_MKL | os.environ)  # as in a worker, and before MKL is loaded
    from logprobd.engine.check import run_check  # torch is this command's own: `serve` must not import it

    return run_check(settings)


def plan(settings: PlanSettings) -> int:
    """Print how many devices a training run needs; 1 if the model's size is unknown or it does not fit."""
    from logprobd.plan import TooLargeError, plan_lines  # with the Hub's client, which `serve` does without
    from logprobd.shape import UnknownShapeError

    try:
        lines = list(plan_lines(settings))
    except (UnknownShapeError, TooLargeError) as error:
        print(f"logprobd: {error}", file=sys.stderr)
        return 1
    for name, value in lines:
        print(f"{name:<16}{value}")
    return 0


def score(settings: ScoreSettings, given: Path, out: Path) -> int:
    """Score a file; 0 if every row was, 1 if some or all were not, 2 if nothing could even begin."""
    logs.configure("console")
    try:
        summary = run_score(settings, given, out)
    except RefusedError as refused:
        refuse(str(refused))
    except (StoppedError, ModelRefused, OSError) as stopped:
        print(f"logprobd: {stopped}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("logprobd: interrupted; the same command goes on from here", file=sys.stderr)
        return 1
    failed = f", {summary.failed} of them not scored (column error)" if summary.failed else ""
    print(f"{out}: {summary.rows} rows{failed}, {summary.tokens} tokens")
    return 1 if summary.failed else 0


def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a drain, 1 if the model is refused or the port is taken."""
    logs.configure(settings.log_format)
    tracing.configure()
    log.info("starting", version=__version__, **settings.model_dump(mode="json", exclude=set(SECRETS)))
    spare_the_event_loop()
    backend = LocalBackend(settings)
    service = Service(settings, backend)
    config = uvicorn.Config(
        create_app(service),
        settings.host,
        settings.port,
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        timeout_graceful_shutdown=LAST_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
    )
    return asyncio.run(run_until_stopped(service, backend, _Server(config)))


def spare_the_event_loop() -> None:
    """Look for cyclic garbage less often: a search among a huge request's objects holds up everybody for 100 ms."""
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*GARBAGE_THRESHOLDS)


async def run_until_stopped(service: Service, backend: LocalBackend, server: "_Server") -> int:
    """Serve HTTP at once, while the model loads; on a signal drain first, then close."""
    loop, stop = asyncio.get_running_loop(), service.stop_asked
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    serving = asyncio.create_task(server.serve())
    working = asyncio.create_task(service.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        log.info("draining")
        service.draining = True
        await backend.drain()
    server.should_exit = True
    failed = working.done() or not server.started
    await asyncio.gather(serving, return_exceptions=True)
    working.cancel()
    try:
        await working
    except ModelRefused as refused:
        log.error("model refused", reason=str(refused))
    except asyncio.CancelledError:
        pass
    stopping.cancel()
    return 1 if failed else 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: a signal must not close the listener before the drain."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
