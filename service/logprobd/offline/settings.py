"""The options of `logprobd score`."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from logprobd.sequences import MAX_TOP_LOGPROBS
from logprobd.settings import ApiKey, MaxBatchTokens, ModelSettings, keys_in


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
        return next(iter(keys_in(self.api_key)), None)

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
