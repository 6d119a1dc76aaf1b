"""The options of `logprobd plan`."""

import math
import re
from typing import Annotated, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from logprobd.settings import CommandSettings, Precision


class PlanSettings(CommandSettings):
    """The options of `logprobd plan`."""

    model: Annotated[str | None, Field(description="folder with a config.json, that file, or Hub id; required")] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit of a Hub model")] = None
    precision: Annotated[
        Precision, Field(description="of the weights: auto (the checkpoint's), float32, bfloat16, float16 or autocast")
    ] = "auto"
    parameters: Annotated[
        float | None, Field(description="of the model, such as 8e9, where they cannot be counted", gt=0)
    ] = None
    active_parameters: Annotated[
        float | None,
        Field(description="of all layers that one token meets, without embedding and head, likewise", gt=0),
    ] = None
    device_memory: Annotated[ByteSize, Field(description="memory of a device", gt=0)] = ByteSize(80 << 30)
    devices: Annotated[str, Field(description="how many devices, or their names: 8, or cuda:0,cuda:1")] = "1"
    rate: Annotated[
        str, Field(description="floating point operations a second that a device reaches: 200T, 1.2P or 2e14")
    ] = "200T"
    measured: Annotated[
        float | None,
        Field(
            description="computed tokens a second that one replica was measured to reach with such groups; goes before "
            "--rate",
            gt=0,
        ),
    ] = None
    group: Annotated[int, Field(description="completions of a prompt", ge=1)] = 16
    prompt: Annotated[int, Field(description="tokens of a prompt", ge=1)] = 1024
    completion: Annotated[int, Field(description="tokens of a completion", ge=1)] = 2048
    trainers: Annotated[int, Field(description="trainer processes that ask", ge=1)] = 1
    groups: Annotated[int, Field(description="groups that each of them asks for in a step", ge=1)] = 1
    step: Annotated[float, Field(description="seconds from one such request to the next", gt=0)] = 60.0

    @field_validator("devices")
    @classmethod
    def are_devices(cls, devices: str) -> str:
        if not re.fullmatch(r"[1-9]\d*|(cpu|cuda:\d+)([,+](cpu|cuda:\d+))*", devices):
            raise ValueError(f"expected a number, or devices such as cuda:0,cuda:1; got {devices!r}")
        return devices

    @field_validator("rate")
    @classmethod
    def is_rate(cls, rate: str) -> str:
        parse_rate(rate)
        return rate

    @model_validator(mode="after")
    def names_a_model(self) -> Self:
        if self.model is None:
            raise ValueError("give --model: a folder with a config.json, that file, or a Hub id")
        return self

    @property
    def num_devices(self) -> int:
        return int(self.devices) if self.devices.isdigit() else len(re.split("[,+]", self.devices))

    @property
    def flops(self) -> float:
        """Floating point operations a second of one device."""
        return parse_rate(self.rate)


def parse_rate(text: str) -> float:
    """Operations a second: a positive number, with G, T or P for 1e9, 1e12 or 1e15."""
    factor = {"G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1:], 1.0)
    try:
        rate = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"expected operations a second such as 200T or 2e14; got {text!r}")
    return rate
