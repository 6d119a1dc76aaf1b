"""Which model the service serves: the same from the first step to the last, and after a resume."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logprobd_client.client import Client
from logprobd_client.errors import LogprobdError
from logprobd_client.trl.waiting import in_thread, on_all_ranks, within

STATE_KEY = "logprobd_reference"
"""Under `stateful_callbacks` in a checkpoint's trainer_state.json."""

COMPARED = ("fingerprint", "precision")


class ReferenceChangedError(LogprobdError):
    """The service serves another model, or in another precision, than the run began with."""


class Identity:
    """The model that a run is held to: what is expected of it, or the first that is seen."""

    def __init__(self, expected: Mapping[str, Any] | None = None) -> None:
        self.model = None if expected is None else dict(expected)

    def check(self, model: Mapping[str, Any], since: str = "since this run began") -> None:
        """Raises ReferenceChangedError if `model` (as in a reply) is another one; `since` ends its sentence."""
        if self.model is None:
            self.model = named(model)
        for name in COMPARED:
            if name in self.model and self.model[name] != model.get(name):
                raise ReferenceChangedError(
                    f"the reference's {name} is not the same {since}: it was {self.model[name]!r} "
                    f"(model {self.model.get('id')}) and is {model.get(name)!r} (model {model.get('id')})"
                )


def named(model: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model as in a reply, what tells it from others, and its name for people."""
    return {name: model.get(name) for name in ("id", *COMPARED)}


class ReferenceIdentityCallback(TrainerCallback):
    """Holds a run, and every run resumed from its checkpoints, to one reference.

    The trainers of this package bring it themselves. At the start it asks the service what it serves (for at most
    `timeout` seconds) and compares that with `expect` (`fingerprint`, `precision`, or both) and, on a resume, with what
    the checkpoint says. A difference is a ReferenceFailedError on every rank, caused by a ReferenceChangedError.
    """

    def __init__(
        self, client: Client, *, expect: Mapping[str, Any] | Identity | None = None, timeout: float = 600.0
    ) -> None:
        self.client = client
        self.identity = expect if isinstance(expect, Identity) else Identity(expect)
        self.timeout = timeout

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask, compare, and have the answer written with every checkpoint."""
        on_all_ranks(lambda: self._compare(state))

    def _compare(self, state: TrainerState) -> None:
        late = f"the service did not say within {self.timeout:g} s what it serves"
        model = within(self.timeout, in_thread(self.client.info), late)["model"]
        callbacks: Any = state.stateful_callbacks
        if saved := callbacks.get(STATE_KEY):
            Identity(saved["attributes"]).check(model, "as in the checkpoint that is resumed")
        self.identity.check(model)
        # In the form of an exported callback, because transformers reads all that stands there as one.
        callbacks[STATE_KEY] = {"args": {}, "attributes": named(model)}
