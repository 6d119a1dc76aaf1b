"""Every option of the program, declared once: a flag, a LOGPROBD_<NAME> variable and a line of --help."""

import ipaddress
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from logprobd.sequences import MAX_TOP_LOGPROBS

ENV_PREFIX = "LOGPROBD_"

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


class ModelSettings(BaseSettings):
    """Which model, and how it is computed."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    model: Annotated[
        str | None, Field(description="folder, GGUF file or Hub id; without it, the embedded SmolLM2-135M-Instruct")
    ] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit of a Hub model")] = None
    tokenizer: Annotated[str | None, Field(description="folder or Hub id of the tokenizer, if not the model's")] = None
    devices: Annotated[
        str, Field(description="auto, cpu, cuda:0,cuda:1 ...; one worker process each, cpu,cpu is legal")
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
        names = [name.strip() for name in devices.split(",")]
        unknown = [name for name in names if not re.fullmatch(r"cpu|cuda:\d+", name)]
        if unknown and names != ["auto"]:
            raise ValueError(f"expected auto, or devices such as cpu or cuda:0,cuda:1; got {devices!r}")
        return ",".join(names)

    @field_validator("memory_limit")
    @classmethod
    def is_memory(cls, limit: str | None) -> str | None:
        if limit is not None:
            parse_memory_limit(limit)
        return limit

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
    max_body_bytes: Annotated[int, Field(description="largest request body", ge=1)] = 64 << 20
    max_queued_tokens: Annotated[
        int, Field(description="tokens waiting or running before new requests get a 429", ge=1)
    ] = 4_000_000
    request_timeout: Annotated[float, Field(description="seconds until a request is answered 504", gt=0)] = 600.0
    drain_timeout: Annotated[float, Field(description="seconds for accepted requests to finish on SIGTERM", ge=0)] = (
        30.0
    )
    no_auth: Annotated[bool, Field(description="listen on a public address without an API key")] = False
    log_format: Annotated[Literal["console", "json"], Field(description="how log lines look")] = "console"
    api_key: ApiKey = None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open the service; empty where none is asked for."""
        return keys_of(self.api_key)

    @model_validator(mode="after")
    def is_not_open_to_the_world(self) -> Self:
        if not self.api_keys and not self.no_auth and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is reachable from outside: set LOGPROBD_API_KEY, or give --no-auth to go without"
            )
        return self


class ScoreSettings(ModelSettings):
    """The options of `logprobd score`."""

    url: Annotated[
        str | None, Field(description="score through the service at this address, instead of loading a model")
    ] = None
    prompt_column: Annotated[str, Field(description="column of the prompts: text or token ids", min_length=1)] = (
        "prompt"
    )
    completion_column: Annotated[
        str,
        Field(description="column of the completions: one a row (text or token ids), or a list of them", min_length=1),
    ] = "completion"
    output_column: Annotated[
        str | None,
        Field(
            description="column that is added; without it, logprobs (sum with --reduce sum); other columns that are "
            "asked for then begin with its name, as in NAME_entropy",
            min_length=1,
        ),
    ] = None
    temperature: Annotated[float, Field(description="logits are divided by it", gt=0, allow_inf_nan=False)] = 1.0
    reduce: Annotated[Literal["none", "sum"], Field(description="none, or sum: one number a completion")] = "none"
    top_logprobs: Annotated[
        int,
        Field(
            description="also the columns top_ids and top_logprobs: the N most likely tokens at each position",
            ge=0,
            le=MAX_TOP_LOGPROBS,
        ),
    ] = 0
    entropy: Annotated[bool, Field(description="also the column entropy (nats) of each position's distribution")] = (
        False
    )
    tokens: Annotated[
        bool, Field(description="also the columns token_ids and tokens: what was scored, as ids and as text")
    ] = False
    no_special_tokens: Annotated[
        bool, Field(description="text prompts: without the special tokens that the tokenizer adds by default")
    ] = False
    keep_going: Annotated[
        bool,
        Field(
            description="give a row that cannot be scored nulls, and its reason in a column error, instead of stopping "
            "there; the exit code is 1 all the same"
        ),
    ] = False
    overwrite: Annotated[
        bool, Field(description="replace OUT, and what an interrupted run with other options left of it")
    ] = False
    max_batch_tokens: MaxBatchTokens = None
    section_rows: Annotated[
        int, Field(description="rows that are read at a time; prompts that they share are computed once", ge=1)
    ] = 1024
    retry_timeout: Annotated[
        float, Field(description="seconds to go on asking a service that is gone or busy (--url)", gt=0)
    ] = 600.0
    api_key: ApiKey = None

    @property
    def first_api_key(self) -> str | None:
        """The key that requests to --url bring."""
        return next(iter(keys_of(self.api_key)), None)

    @field_validator("url")
    @classmethod
    def is_http(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"https?://[^/]", url):
            raise ValueError(f"expected an address such as http://127.0.0.1:8000; got {url!r}")
        return url

    @model_validator(mode="after")
    def loads_or_asks(self) -> Self:
        local = sorted(self.model_fields_set & set(ModelSettings.model_fields) - {"cache_dir"})
        if self.url is not None and local:
            option = local[0].replace("_", "-")
            raise ValueError(f"--{option} is for a model that is loaded here; with --url the service has its own")
        return self


def keys_of(given: SecretStr | None) -> tuple[str, ...]:
    """Comma-separated keys."""
    keys = "" if given is None else given.get_secret_value()
    return tuple(key.strip() for key in keys.split(",") if key.strip())


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


SECRETS = frozenset({"api_key"})
"""Options that come from the environment only: a flag would show in the list of processes."""
