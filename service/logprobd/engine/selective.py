"""Selective logprobs: what is asked of each scored token, without a log-softmax over everything.

The idea is that of TRL's pull request 2773 (`selective_log_softmax`): log p(t) = logit_t - logsumexp(logits).
Here it goes on from there: only rows that predict a completion token reach the head, a chunk of rows at
a time, so that logits of more than one chunk never exist; the logsumexp is float32 whatever the model's
dtype; one logsumexp serves every token predicted from the same row at the same temperature; entropy,
top-k and candidates are read off the same chunk. (Within a chunk that stays in the cache, torch's fused
log-softmax takes two thirds of the time of its logsumexp.) Where each of several processes has the logits of a part
of the vocabulary, a row's maximum and sum are exchanged, and the answers added up, never the logits. Nothing is known
here of prompts or packing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from logprobd.engine.blocks import ROWS
from logprobd.engine.ranks import EVERY_ID, Vocabulary
from logprobd.sequences import FloatArray, IntArray

Head = Callable[[torch.Tensor], torch.Tensor]
"""Maps hidden rows (rows, hidden_size) to logits (rows, vocab_size)."""

Pass = tuple[int, torch.Tensor]
"""What one forward pass gave: the last hidden states (rows, hidden_size), and the first one's place among all rows."""

TOP_ENTRIES = 1 << 20  # logprobs ranked at a time, each as a 64-bit integer

# What a float32 can divide by: temperatures beyond these count as the nearest of them.
COLDEST, HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The tokens to score, n of them, each predicted from one hidden row.

    Shapes (n,): `rows` (index into the hidden states), `ids`, `temperatures`, `entropy` (is it wanted),
    `top_logprobs` (how many), `ranks` (are they wanted). Shapes (m,): `candidate_ids` and `candidate_owners`, the
    token (0 ... n-1) at whose position each is asked for.
    """

    rows: IntArray
    ids: IntArray
    temperatures: FloatArray
    entropy: NDArray[np.bool_]
    top_logprobs: IntArray
    ranks: NDArray[np.bool_]
    candidate_ids: IntArray
    candidate_owners: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The answers, in the order of the targets.

    Shapes: `logprobs`, `entropy` and `ranks` (n,), `top_ids` and `top_logprobs` (n, largest k),
    `candidate_logprobs` (m,). All of a row's logprobs are NaN where the model gave NaN or +inf.
    """

    logprobs: FloatArray
    entropy: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray
    candidate_logprobs: FloatArray
    ranks: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """The distinct (row, temperature) pairs `start:end` with every own token's logprob, on the device."""

    start: int
    end: int
    logprobs: torch.Tensor  # (pairs, own ids), float32


def select(
    head: Head,
    passes: Iterable[Pass],
    targets: Targets,
    chunk_rows: int,
    device: torch.device,
    vocabulary: Vocabulary = EVERY_ID,
) -> Selected:
    """Score `targets` from the hidden states of forward passes, `chunk_rows` rows of logits at a time.

    `vocabulary` is the part of it that the head gives logits of.
    """
    rows, temperatures, pair_of_token = distinct_pairs(targets)
    tokens = _Asked(pair_of_token, targets.ids, device, vocabulary)
    ranked = np.flatnonzero(targets.ranks)
    likelier = _Likelier(pair_of_token[ranked], targets.ids[ranked], device, vocabulary)
    candidates = _Asked(pair_of_token[targets.candidate_owners], targets.candidate_ids, device, vocabulary)
    by_pair = _ByPair(
        maximum_by(pair_of_token, targets.top_logprobs, len(rows)),
        maximum_by(pair_of_token, targets.entropy, len(rows)),
        device,
        vocabulary,
    )
    for first, states in passes:
        begin, end = np.searchsorted(rows, (first, first + len(states))).tolist()
        for start in range(begin, end, chunk_rows):
            pairs = slice(start, min(start + chunk_rows, end))
            logprobs = normalized(head, states, rows[pairs] - first, temperatures[pairs], vocabulary)
            chunk = _Chunk(start, pairs.stop, logprobs)
            tokens.take(chunk)
            likelier.take(chunk)
            candidates.take(chunk)
            by_pair.take(chunk)
    return Selected(
        logprobs=tokens.in_order_asked(),
        entropy=by_pair.entropy.cpu().numpy()[pair_of_token],
        top_ids=by_pair.top_ids.cpu().numpy()[pair_of_token],
        top_logprobs=by_pair.top_logprobs.cpu().numpy()[pair_of_token],
        candidate_logprobs=candidates.in_order_asked(),
        ranks=spread(ranked, likelier.in_order_asked() + 1, len(targets.ids)),
    )


def spread(places: NDArray[np.int64], ranks: FloatArray, length: int) -> IntArray:
    """Ranks (length,), where they were asked for; 0 elsewhere."""
    everywhere = np.zeros(length, dtype=np.int32)
    everywhere[places] = ranks
    return everywhere


def distinct_pairs(targets: Targets) -> tuple[NDArray[np.int64], FloatArray, NDArray[np.int64]]:
    """Rows and temperatures of the distinct pairs, sorted by row, and the pair of each token."""
    temperatures = np.clip(targets.temperatures.astype(np.float64), COLDEST, HOTTEST)
    keys = np.stack([targets.rows.astype(np.float64), temperatures], axis=1)
    distinct, pair_of_token = np.unique(keys, axis=0, return_inverse=True)
    return distinct[:, 0].astype(np.int64), distinct[:, 1].astype(np.float32), pair_of_token.reshape(-1)


def maximum_by(pair_of_token: NDArray[np.int64], values: NDArray[np.generic], num_pairs: int) -> IntArray:
    """The largest of the tokens' values for each pair."""
    largest = np.zeros(num_pairs, dtype=np.int32)
    np.maximum.at(largest, pair_of_token, values.astype(np.int32))
    return largest


def normalized(
    head: Head, states: torch.Tensor, rows: NDArray[np.int64], temperatures: FloatArray, vocabulary: Vocabulary
) -> torch.Tensor:
    """Run the head over some rows and normalize in float32: (rows, own ids).

    The row's maximum is subtracted before the division, so that no temperature overflows. The head gets whole
    multiples of rows: matrix products of one to seven rows take other kernels, which round differently.
    """
    filled = np.pad(rows, (0, -len(rows) % ROWS), mode="edge")
    logits = head(states.index_select(0, torch.from_numpy(filled).to(states.device)))[: len(rows)]
    divisors = torch.from_numpy(temperatures).to(logits.device)
    if vocabulary.ranks.size > 1:
        return vocabulary.normalize(logits.float(), divisors)
    if (temperatures != 1).any():
        logits = logits.float()
        logits = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(divisors[:, None])
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # In place: the CPU's kernel reads a row three times before it writes it, and half the memory stays in cache.
        torch.ops.aten._log_softmax.out(logits, -1, False, out=logits)
        return logits
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


class _Asked:
    """Tokens whose logprob is wanted, each under a pair; sorted by pair, those of a chunk stand together."""

    def __init__(self, pairs: NDArray[np.int64], ids: IntArray, device: torch.device, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._order = np.argsort(pairs, kind="stable")
        self._pairs = pairs[self._order]
        self._device_pairs = torch.from_numpy(self._pairs).to(device)
        self._ids = torch.from_numpy(ids[self._order].astype(np.int64)).to(device)
        self._answers = torch.zeros(len(ids), dtype=torch.float32, device=device)  # of this process

    def take(self, chunk: _Chunk) -> None:
        begin, end = np.searchsorted(self._pairs, (chunk.start, chunk.end)).tolist()
        local = self._device_pairs[begin:end] - chunk.start
        self._answers[begin:end] = self._answer(chunk.logprobs, local, self._ids[begin:end])

    def _answer(self, logprobs: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.pick(logprobs, rows, ids)

    def in_order_asked(self) -> FloatArray:
        answers = np.empty(len(self._order), dtype=np.float32)
        answers[self._order] = self._vocabulary.ranks.add(self._answers).cpu().numpy()
        return answers


class _Likelier(_Asked):
    """Tokens of which it is wanted how many others are likelier (exact in float32 up to 2**24)."""

    def _answer(self, logprobs: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # A few rows at a time: many tokens may follow one row.
        few = max(1, TOP_ENTRIES // logprobs.shape[1])
        own = self._vocabulary.ranks.add(self._vocabulary.pick(logprobs, rows, ids))
        likelier = [
            (logprobs[some] > limits[:, None]).sum(dim=-1)
            for some, limits in zip(rows.split(few), own.split(few), strict=True)
        ]
        return torch.cat(likelier) if likelier else own


class _ByPair:
    """What is read off a pair's whole distribution, for the pairs that ask for it."""

    def __init__(self, top_logprobs: IntArray, entropy: IntArray, device: torch.device, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._wants_top, self._wants_entropy = top_logprobs > 0, entropy > 0
        num_pairs, k = len(top_logprobs), int(top_logprobs.max(initial=0))
        self.entropy = torch.zeros(num_pairs, dtype=torch.float32, device=device)
        self.top_ids = torch.zeros((num_pairs, k), dtype=torch.int32, device=device)
        self.top_logprobs = torch.zeros((num_pairs, k), dtype=torch.float32, device=device)

    def take(self, chunk: _Chunk) -> None:
        if local := self._wanted(self._wants_entropy, chunk):
            self.entropy[[chunk.start + row for row in local]] = entropy(chunk.logprobs[local], self._vocabulary)
        if local := self._wanted(self._wants_top, chunk):
            places = [chunk.start + row for row in local]
            ids, logprobs = likeliest(chunk.logprobs[local], self.top_ids.shape[1], self._vocabulary)
            self.top_ids[places] = ids.int()
            self.top_logprobs[places] = logprobs

    def _wanted(self, wants: NDArray[np.bool_], chunk: _Chunk) -> list[int]:
        local: list[int] = np.flatnonzero(wants[chunk.start : chunk.end]).tolist()
        return local


def likeliest(logprobs: torch.Tensor, k: int, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids (rows, k) of the k likeliest of the whole vocabulary, and their logprobs."""
    ids = top_ids(logprobs, min(k, logprobs.shape[1]))
    values = logprobs.gather(1, ids)
    if vocabulary.ranks.size == 1:
        return ids, values
    missing = (0, k - ids.shape[1])  # of a part of fewer than k ids
    values = vocabulary.ranks.join(torch.nn.functional.pad(values, missing, value=-torch.inf))
    ids = vocabulary.ranks.join(torch.nn.functional.pad(ids + vocabulary.first, missing))
    best = top_ids(values, k)  # of equals the first, which has the lower id
    return ids.gather(1, best), values.gather(1, best)


def top_ids(logprobs: torch.Tensor, k: int) -> torch.Tensor:
    """The ids (rows, k) of the k largest of each row (rows, vocab_size) of float32; of equals the lower id first.

    `topk` alone leaves open which of equals it takes, and takes others for another k: what one request gets
    would depend on what another one asks. So the rank of a float, which are its bits in the right order, and
    the id are made one integer.
    """
    later = torch.arange(logprobs.shape[1] - 1, -1, -1, device=logprobs.device)
    ids = []
    for rows in logprobs.view(torch.int32).split(max(1, TOP_ENTRIES // logprobs.shape[1])):
        ranks = torch.where(rows < 0, rows ^ 0x7FFFFFFF, rows).long()
        ids.append(ranks.bitwise_left_shift_(32).add_(later).topk(k, dim=-1).indices)
    return torch.cat(ids)


def entropy(logprobs: torch.Tensor, vocabulary: Vocabulary = EVERY_ID) -> torch.Tensor:
    """-sum p log p in nats of each row (rows, own ids) over the whole vocabulary, where 0 log 0 is 0.

    The probabilities come from a softmax, which goes row by row: an elementwise exponential would round
    differently at the ends of the stretches that threads happen to get.
    """
    alone = vocabulary.ranks.size == 1
    probabilities = torch.softmax(logprobs, dim=-1) if alone else logprobs.exp()
    return -vocabulary.ranks.add((probabilities * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(dim=-1))
