"""Requests as bytes and replies as arrays, in either form: JSON, or the binary one, which is many times faster."""

import json
from dataclasses import dataclass, field

import httpx
from safetensors import SafetensorError

from logprobd_client import wire_binary, wire_json
from logprobd_client.errors import BadReplyError
from logprobd_client.requests import Options, Part
from logprobd_client.results import Result

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class Message:
    """An HTTP request without the address that it goes to."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def encode(part: Part, options: Options, binary: bool) -> Message:
    """A part as a request. The binary form is for ids only."""
    form, kind = (wire_binary, SAFETENSORS) if binary else (wire_json, JSON)
    return Message("POST", "/logprobs", form.encode(part, options), {"Content-Type": kind, "Accept": kind})


def decode(response: httpx.Response, part: Part, options: Options) -> Result:
    """The scores in a reply, one item a completion of the part; raises BadReplyError if that is not what it holds."""
    try:
        kind = media_type(response)
        form = {JSON: wire_json, SAFETENSORS: wire_binary}[kind]
        result: Result = form.decode(response.content, part, options)
        check_counts(result, part, options)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise bad_reply(response, error) from error
    return result


def read_json(response: httpx.Response) -> dict[str, object]:
    """A reply that is a JSON object."""
    try:
        body = json.loads(response.content)
    except ValueError as error:
        raise bad_reply(response, error) from error
    if not isinstance(body, dict):
        raise bad_reply(response, TypeError(f"a JSON {type(body).__name__}"))
    return body


def media_type(response: httpx.Response) -> str:
    kind: str = response.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower()


def bad_reply(response: httpx.Response, error: Exception) -> BadReplyError:
    return BadReplyError(
        f"{response.url} answered as no logprobd service does ({media_type(response) or 'no Content-Type'}): {error!r}"
    )


def check_counts(result: Result, part: Part, options: Options) -> None:
    """Raise ValueError unless there is one answer a completion, and one number a token of each."""
    completions = part.completions
    if len(result.logprobs) != len(completions):
        raise ValueError(f"{len(result.logprobs)} answers for {len(completions)} completions")
    if options.reduce != "none":
        return
    for completion, logprobs in zip(completions, result.logprobs, strict=True):
        if not isinstance(completion, str) and len(logprobs) != len(completion):
            raise ValueError(f"{len(logprobs)} logprobs for a completion of {len(completion)} tokens")
