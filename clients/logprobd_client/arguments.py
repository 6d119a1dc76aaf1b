"""A call's arguments, in whatever form people have them, as one form; what is of no use is named."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logprobd_client.requests import Call, Candidates, Group, IntArray, Options

INT32 = np.dtype(np.int32)

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: a list, a numpy array, or whatever numpy can read as one (a tensor on the CPU)."""

Text = str | Ids
"""Text, or token ids (ids are never re-tokenized)."""


def read_call(prompts: Iterable[Text], completions: Iterable[Any], candidate_ids: Any, options: Options) -> Call:
    """A call's arguments in one form; raises ValueError, naming the argument, for what is of no use."""
    if isinstance(prompts, str) or isinstance(completions, str):
        raise ValueError("prompts and completions are lists, also where there is one of each; got text")
    prompts, completions = list(prompts), list(completions)
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; give one entry a prompt")
    grouped = is_grouped(completions)
    entries = [list(entry) for entry in completions] if grouped else [[entry] for entry in completions]
    wanted = read_candidates(candidate_ids, entries, grouped)
    groups: list[Group] = []
    for number, (prompt, entry) in enumerate(zip(prompts, entries, strict=True)):
        if grouped:
            read = [read_text(value, "completions", number, index) for index, value in enumerate(entry)]
        else:
            read = [read_text(entry[0], "completions", number)]
        groups.append(Group(read_text(prompt, "prompts", number), read, None if wanted is None else wanted[number]))
    sizes = [len(entry) for entry in entries] if grouped else None
    has_text = any(isinstance(value, str) for value in chain(prompts, *entries))
    return Call(join_equal_prompts(groups), sizes, options, has_text)


def is_grouped(completions: Sequence[Any]) -> bool:
    """Whether there is a list of completions a prompt. Token ids are integers; a group holds text or lists."""
    for entry in completions:
        if isinstance(entry, str) or not isinstance(entry, Iterable):
            return False
        if hasattr(entry, "ndim"):  # an array, or a tensor
            return bool(entry.ndim > 1)
        for item in entry:
            return isinstance(item, str) or not hasattr(item, "__index__") or getattr(item, "ndim", 0) > 0
    return False


def join_equal_prompts(groups: list[Group]) -> list[Group]:
    """Neighbours with the same prompt as one group, as trainers repeat a prompt for each of its completions.

    What has no completions is left out.
    """
    joined: list[Group] = []
    for group in groups:
        if not group.completions:
            continue
        if joined and is_same(joined[-1].prompt, group.prompt):
            joined[-1].completions.extend(group.completions)
            if joined[-1].candidates is not None:
                joined[-1].candidates.extend(group.candidates or [])
        else:
            joined.append(group)
    return joined


def is_same(one: str | IntArray, other: str | IntArray) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one == other
    return one is other or (len(one) == len(other) and one.tobytes() == other.tobytes())


def read_text(value: Any, name: str, *place: int) -> str | IntArray:
    return value if isinstance(value, str) else read_ids(value, name, *place)


def read_ids(value: Any, name: str, *place: int) -> IntArray:
    """Ids as one array (n,). Whether the model knows them is for the service to say.

    `name` and `place` say where they stand: "completions", 3, 1 is `completions[3][1]`.
    """
    try:
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], bool):  # a mask in the place of ids; true is not 1
                raise TypeError("got booleans")
            return array_of_list(value)
        return array_of_ids(np.asarray(value), num_dimensions=1)
    except (TypeError, OverflowError) as error:
        where = name + "".join(f"[{index}]" for index in place)
        raise ValueError(f"{where}: expected text or a list of token ids (integers below 2**31): {error}") from None


def array_of_list(ids: Sequence[Any]) -> IntArray:
    """A list of integers as int32; raises TypeError or OverflowError.

    The standard library's array reads a list twice as fast as numpy does, and takes no floats.
    """
    read = np.asarray(array("I", ids)).view(np.int32)
    if len(read) and np.minimum.reduce(read) < 0:
        raise OverflowError(f"got {max(ids)}")
    return read


def array_of_ids(ids: NDArray[Any], num_dimensions: int) -> IntArray:
    """An array of whatever integers as int32; raises TypeError or OverflowError."""
    if ids.dtype == INT32 and ids.ndim == num_dimensions:  # needs no look at its numbers
        return np.ascontiguousarray(ids)
    if ids.ndim != num_dimensions or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"got an array of {ids.dtype} with shape {ids.shape}")
    if ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**31:
        raise OverflowError(f"got {ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def read_candidates(candidate_ids: Any, entries: list[list[Any]], grouped: bool) -> list[list[Candidates]] | None:
    """Candidates for every completion, nested as the completions: one list (or row of an array) a token."""
    if candidate_ids is None:
        return None
    if len(candidate_ids) != len(entries):
        raise ValueError(f"candidate_ids: {len(candidate_ids)} entries for {len(entries)} prompts; give one a prompt")
    read = []
    for number, (entry, given) in enumerate(zip(entries, candidate_ids, strict=True)):
        name = f"candidate_ids[{number}]"
        if grouped and (not hasattr(given, "__len__") or len(given) != len(entry)):
            raise ValueError(f"{name}: expected {len(entry)} entries, one a completion")
        items = [(f"{name}[{index}]", item) for index, item in enumerate(given)] if grouped else [(name, given)]
        read.append([candidates_of(item, name) for name, item in items])
    return read


def candidates_of(given: Any, name: str) -> Candidates:
    """The candidates of one completion: an array (tokens, width), or a list of ids a token."""
    if not hasattr(given, "__len__"):
        raise ValueError(f"{name}: expected one list of token ids a token, got {given!r}")
    if not hasattr(given, "ndim"):
        lists = [read_ids(ids, name, token) for token, ids in enumerate(given)]
        lengths = np.array([len(ids) for ids in lists], dtype=np.int32)
        return Candidates(np.concatenate([np.zeros(0, dtype=np.int32), *lists]), lengths)
    try:
        ids = array_of_ids(np.asarray(given), num_dimensions=2)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name}: expected an array (tokens, candidates) of token ids: {error}") from None
    return Candidates(ids.ravel(), np.full(len(ids), ids.shape[1], dtype=np.int32), ids.shape[1])
