"""The client: prompts and completions in, numpy arrays out, nested as they were sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from logprobd_client.errors import ConnectionFailedError, error_of

Text = str | Sequence[int] | NDArray[np.integer[Any]]
"""Text, or token ids (ids are never re-tokenized)."""

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Result:
    """Scores, nested as the completions were given: one item a completion, or a list of them a prompt.

    `logprobs` items are float32 arrays of one number a completion token, or floats with `reduce="sum"`.
    `entropy`, `top_ids`, `top_logprobs` and `token_ids` are None unless asked for (`token_ids` come with text).
    """

    logprobs: list[Any]
    entropy: list[Any] | None
    top_ids: list[Any] | None
    top_logprobs: list[Any] | None
    token_ids: list[Any] | None
    temperature: float
    model: dict[str, Any]
    usage: dict[str, int]


class Client:
    """A connection to a logprobd service.

        with Client("http://127.0.0.1:8000") as client:
            result = client.score(["The capital of France is"], [[" Paris.", " Lyon."]])
            print(result.logprobs[0][0].sum())

    Raises the errors of `logprobd_client.errors`. `expect` (model, weights_version, fingerprint) goes with
    every call, so that a changed reference is noticed; `transport` is httpx's, for tests.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        expect: Mapping[str, Any] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._expect = expect
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Any],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_logprobs: int = 0,
        reduce: str | None = None,
    ) -> Result:
        """Logprobs of completions, of which there is one a prompt, or a list a prompt."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; give one entry a prompt")
        grouped = is_grouped(completions)
        body: dict[str, Any] = {
            "groups": [
                {"prompt": on_wire(prompt), "completions": [on_wire(c) for c in (entry if grouped else [entry])]}
                for prompt, entry in zip(prompts, completions, strict=True)
            ],
            "temperature": temperature,
            "entropy": entropy,
            "top_logprobs": top_logprobs,
            "reduce": reduce or "none",
        }
        if self._expect is not None:
            body["expect"] = dict(self._expect)
        return result_of(self._post("/logprobs", body), grouped)

    def info(self) -> dict[str, Any]:
        """What the service serves, and its limits."""
        return self._answer(self._send(self._http.build_request("GET", "/info")))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._answer(self._send(self._http.build_request("POST", path, json=body)))

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._http.send(request)
        except httpx.TransportError as error:
            raise ConnectionFailedError(f"{request.url}: {error}") from error

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            headers = response.headers
            is_json = headers.get("content-type", "").startswith("application/json")
            body = response.json() if is_json else response.text
            raise error_of(response.status_code, body, headers.get("retry-after"), headers.get("x-request-id", ""))
        answer: dict[str, Any] = response.json()
        return answer


def is_grouped(completions: Sequence[Any]) -> bool:
    """Whether there is a list of completions a prompt. Token ids are integers; a group holds text or lists."""
    for entry in completions:
        if isinstance(entry, str):
            return False
        for item in entry:
            return isinstance(item, str) or not isinstance(item, int | np.integer)
    return False


def on_wire(value: Text) -> str | list[int]:
    """Text as it is; ids, also as arrays, as a plain list."""
    return value if isinstance(value, str) else np.asarray(value, dtype=np.int64).tolist()


def result_of(reply: dict[str, Any], grouped: bool) -> Result:
    """A reply in the shape of the call."""
    groups = [group["completions"] for group in reply["groups"]]

    def collect(*names: str, dtype: type[np.generic] = np.float32) -> list[Any] | None:
        def item(scores: dict[str, Any]) -> Any:
            value = next((scores[name] for name in names if scores.get(name) is not None), None)
            return np.array(value, dtype=dtype) if isinstance(value, list) else value

        items = [[item(scores) for scores in group] for group in groups]
        if all(value is None for group in items for value in group):
            return None
        return items if grouped else [group[0] for group in items]

    return Result(
        logprobs=collect("logprobs", "sum") or [],
        entropy=collect("entropy"),
        top_ids=collect("top_ids", dtype=np.int32),
        top_logprobs=collect("top_logprobs"),
        token_ids=collect("token_ids", dtype=np.int32),
        temperature=reply["temperature"],
        model=reply["model"],
        usage=reply["usage"],
    )
