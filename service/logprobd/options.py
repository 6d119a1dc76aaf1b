"""Settings from flags and variables, or one line on why they are impossible."""

import os
from typing import Any, TypeVar

from pydantic import ValidationError

from logprobd.errors import field_path
from logprobd.offline.settings import ScoreSettings
from logprobd.settings import ENV_PREFIX, CommandSettings, ServeSettings

S = TypeVar("S", bound=CommandSettings)


class ImpossibleOptionsError(ValueError):
    """Nothing can start with these options; the message is one line, without their values where they are secret."""


def load(settings: type[S], given: dict[str, Any]) -> S:
    """Settings from what is given, then variables, then defaults."""
    try:
        return settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = field_path(first["loc"])
    option = f"--{name.replace('_', '-')}: " if name else ""
    raise ImpossibleOptionsError(f"{option}{first['msg'].removeprefix('Value error, ')}")


def refuse_unknown_variables(settings: type[CommandSettings] = ServeSettings) -> None:
    """Raise if a LOGPROBD_ variable is neither one of a service's nor of these settings."""
    known = {
        ENV_PREFIX + name.upper()
        for name in ServeSettings.model_fields | ScoreSettings.model_fields | settings.model_fields
    }
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise ImpossibleOptionsError(
            f"unknown variable {', '.join(unknown)}; `logprobd COMMAND --help` lists those that there are"
        )
