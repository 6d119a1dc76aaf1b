"""Every option of the program, declared once: a flag, a LOGPROBD_<NAME> variable and a line of --help."""

import ipaddress
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "LOGPROBD_"
WORKER_DEVICES = r"(cpu(\+cpu)*|cuda:\d+(\+cuda:\d+)*)"  # of one worker

Precision = Literal["auto", "float32", "bfloat16", "float16", "autocast"]
HeadPrecision = Literal["auto", "model", "float32"]


MaxBatchTokens = Annotated[
    int | None,
    Field(description="tokens that make a batch full; without it, what a pass may have under the limit", ge=1),
]
ApiKey = Annotated[
    SecretStr | None, Field(description="key, or several comma separated, that requests must bring; a client's is one")
]


def default_cache_dir() -> Path:
    """The user's cache, where the XDG base directory specification puts it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logprobd"


class CommandSettings(BaseSettings):
    """What the options of all commands have in common."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)


class ModelSettings(CommandSettings):
    """Which model, and how it is computed."""

    model: Annotated[
        str | None, Field(description="folder, GGUF file or Hub id; without it, the embedded SmolLM2-135M-Instruct")
    ] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit of a Hub model")] = None
    tokenizer: Annotated[str | None, Field(description="folder or Hub id of the tokenizer, if not the model's")] = None
    devices: Annotated[
        str,
        Field(
            description="auto, cpu, cuda:0,cuda:1 ...; one worker each, cpu,cpu is legal; cuda:0+cuda:1 is one worker "
            "whose model is spread over both"
        ),
    ] = "auto"
    precision: Annotated[
        Precision,
        Field(description="auto, float32, bfloat16, float16, or autocast: float32 weights under bfloat16 autocast"),
    ] = "auto"
    head_precision: Annotated[
        HeadPrecision, Field(description="auto or model (the model's own), or float32: of the language model head")
    ] = "auto"
    memory_limit: Annotated[
        str | None,
        Field(
            description="memory of each worker's device, such as 12GiB, or a fraction of the device such as 0.5; "
            "without it, most of what is free at start"
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Field(
            description="compute every sequence by itself, so that its bits never depend on company; slower, and not "
            "needed for a shared layout on a CPU"
        ),
    ] = False
    trust_remote_code: Annotated[bool, Field(description="run code that a model folder or Hub repository brings")] = (
        False
    )
    cache_dir: Annotated[Path, Field(description="where converted GGUF files are kept")] = Field(
        default_factory=default_cache_dir
    )

    @field_validator("devices")
    @classmethod
    def are_devices(cls, devices: str) -> str:
        names = "".join(devices.split())
        if not re.fullmatch(rf"auto|{WORKER_DEVICES}(,{WORKER_DEVICES})*", names):
            raise ValueError(f"expected auto, or devices such as cpu, cuda:0,cuda:1 or cuda:0+cuda:1; got {devices!r}")
        for worker in names.split(","):
            gpus = worker.split("+") if "cuda" in worker else []
            if len(set(gpus)) < len(gpus):
                raise ValueError(f"a GPU stands twice in {worker}: a model is spread over different ones")
        return names

    @field_validator("memory_limit")
    @classmethod
    def is_memory(cls, limit: str | None) -> str | None:
        if limit is not None:
            parse_memory_limit(limit)
        return limit

    @property
    def all_devices(self) -> list[str]:
        """The devices of all workers, in order; one that several processes use stands there for each of them."""
        return re.split(r"[,+]", self.devices)

    @property
    def memory_bound(self) -> "MemoryLimit | None":
        """The memory limit as numbers."""
        return None if self.memory_limit is None else parse_memory_limit(self.memory_limit)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes, or where that is None, as a fraction of the device."""

    bytes: int | None
    fraction: float = 1.0


def parse_memory_limit(text: str) -> MemoryLimit:
    """A number with a unit (12GiB, 500MB), of bytes, or a fraction of the device up to 1."""
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return MemoryLimit(None, float(text))
    try:
        return MemoryLimit(int(TypeAdapter(ByteSize).validate_python(text)))
    except ValidationError:
        raise ValueError(f"expected a size such as 12GiB, or a fraction such as 0.5; got {text!r}") from None


class ServeSettings(ModelSettings):
    """The options of `logprobd serve`."""

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(description="port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    max_batch_tokens: MaxBatchTokens = None
    max_sequence_tokens: Annotated[
        int | None, Field(description="longest prompt and completion together; the model's context without it", ge=2)
    ] = None
    max_request_sequences: Annotated[
        int, Field(description="completions of one request; more are refused, to be sent in parts", ge=1)
    ] = 131_072
    max_body_bytes: Annotated[int, Field(description="largest request body", ge=1)] = 64 << 20
    max_queued_tokens: Annotated[
        int, Field(description="tokens waiting or running before new requests get a 429", ge=1)
    ] = 4_000_000
    request_timeout: Annotated[float, Field(description="seconds until a request is answered 504", gt=0)] = 600.0
    drain_timeout: Annotated[float, Field(description="seconds for accepted requests to finish on SIGTERM", ge=0)] = (
        30.0
    )
    worker_deadline: Annotated[
        float,
        Field(
            description="least seconds until a worker that does not answer is replaced; else 30 times as long as usual",
            gt=0,
        ),
    ] = 30.0
    no_auth: Annotated[bool, Field(description="listen on a public address without an API key")] = False
    log_format: Annotated[Literal["console", "json"], Field(description="how log lines look")] = "console"
    api_key_file: Annotated[Path | None, Field(description="file with such keys, one a line")] = None
    admin_key_file: Annotated[Path | None, Field(description="file with keys for /admin, one a line")] = None
    api_key: ApiKey = None
    admin_key: Annotated[
        SecretStr | None, Field(description="key, or several comma separated, that requests to /admin must bring")
    ] = None

    @field_validator("api_key_file", "admin_key_file")
    @classmethod
    def has_keys(cls, file: Path | None) -> Path | None:
        if file is not None and not keys_in(None, file):
            raise ValueError(f"{file} has no key in it, or cannot be read")
        return file

    @cached_property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open the service; empty where none is asked for."""
        return keys_in(self.api_key, self.api_key_file)

    @cached_property
    def admin_keys(self) -> tuple[str, ...]:
        """The keys that open /admin; where there is none, there is no /admin."""
        return keys_in(self.admin_key, self.admin_key_file)

    @model_validator(mode="after")
    def is_not_open_to_the_world(self) -> Self:
        if not self.api_keys and not self.no_auth and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is reachable from outside: set LOGPROBD_API_KEY (or --api-key-file), or give "
                "--no-auth to go without"
            )
        return self


def keys_in(given: SecretStr | None, file: Path | None = None) -> tuple[str, ...]:
    """Keys, comma separated in a variable and one a line in a file."""
    text = "" if given is None else given.get_secret_value().replace(",", "\n")
    with suppress(OSError):
        text += "\n" + ("" if file is None else file.read_text())
    return tuple(key.strip() for key in text.splitlines() if key.strip())


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


SECRETS = frozenset({"api_key", "admin_key"})
"""Options that come from the environment only: a flag would show in the list of processes."""
