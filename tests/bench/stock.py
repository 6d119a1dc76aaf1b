"""How others score: methods on a stock transformers model, float32 results, one array a sequence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from bench.side_by_side import Row, hidden_states
from bench.workloads import groups_of
from logprobd.engine.packing import pack
from logprobd.sequences import FloatArray, IntArray, Sequence

BATCH = 8  # rows of the padded methods
PASS_TOKENS = 4096  # of the least work
CHUNK = 128  # rows of logits at a time, where a method has its own head
TILE_ROWS, TILE_COLUMNS = 4096, 32768  # of TRL 1.16's fused head

Scored = list[FloatArray]
Method = Callable[[PreTrainedModel, list[Sequence]], Scored]


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """A batch of rows; all completions begin in column `first`."""

    sequences: list[Sequence]
    first: int
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        return self.ids[:, self.first :]

    def unpadded(self, logprobs: torch.Tensor) -> Scored:
        """Of (rows, longest completion), each row without its padding."""
        rows = zip(logprobs.float().cpu().numpy(), self.sequences, strict=True)
        return [row[: len(sequence.completion)] for row, sequence in rows]


def one_by_one(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """The model's own forward on each sequence and a float32 log-softmax: what all others are compared with."""
    scored = []
    for sequence in sequences:
        logits = model(input_ids=ids_of(model, sequence)[None], use_cache=False).logits[0]
        rows = logits[len(sequence.prompt) - 1 : -1].float().log_softmax(dim=-1)
        scored.append(gathered(rows, sequence.completion))
    return scored


def padded_full(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Padded batches, a log-softmax of all logits, those of prompts and padding too."""
    scored = []
    for batch in padded(model, sequences):
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
        logprobs = logits.float().log_softmax(dim=-1)[:, batch.first - 1 : -1]
        scored += batch.unpadded(logprobs.gather(-1, batch.targets[..., None])[..., 0])
    return scored


def padded_selective(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Padded batches, logits of the completions' columns only, as TRL had it since before the seed, and its way.

    That is: gather, and a logsumexp row by row; below float32 a log-softmax row by row, in the model's dtype.
    """
    scored = []
    for batch in padded(model, sequences):
        kept = batch.targets.shape[1] + 1
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, logits_to_keep=kept).logits
        scored += batch.unpadded(selective(logits[:, :-1], batch.targets))
    return scored


def selective(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if logits.dtype == torch.float32:
        return logits.gather(-1, targets[..., None])[..., 0] - torch.stack([row.logsumexp(dim=-1) for row in logits])
    rows = zip(logits, targets, strict=True)
    return torch.stack([row.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0] for row, ids in rows])


def padded_fused(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Padded batches, and a head in TRL 1.16's tiles with an online logsumexp.

    Like there, on a CPU all positions go through the head; completion tokens only where Triton is (trl 1.16.0,
    `add_fused_lm_head`: `compact`).
    """
    scored = []
    for batch in padded(model, sequences):
        states = backbone(model)(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)[0][:, :-1]
        labelled = reaching_fused_head(batch)
        logprobs = torch.zeros(labelled.shape, device=states.device)
        logprobs[labelled] = in_tiles(model, states[labelled], batch.ids[:, 1:][labelled])
        scored += batch.unpadded(logprobs[:, batch.first - 1 :])
    return scored


def reaching_fused_head(batch: Padded) -> torch.Tensor:
    """Which positions (rows, columns but the last) TRL's head computes, on the batch's device."""
    labelled = batch.mask[:, 1:].bool()
    if not labelled.is_cuda:
        return torch.ones_like(labelled)
    labelled[:, : batch.first - 1] = False
    return labelled


def in_tiles(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weight = head_weight(model)
    parts = []
    for rows, ids in zip(hidden.split(TILE_ROWS), targets.split(TILE_ROWS), strict=True):
        total, chosen = rows.new_full((len(rows),), -torch.inf, dtype=torch.float32), rows.new_zeros(len(rows)).float()
        for start in range(0, len(weight), TILE_COLUMNS):
            logits = (rows @ weight[start : start + TILE_COLUMNS].T).float()
            total = torch.logaddexp(total, logits.logsumexp(dim=-1))
            here = (ids >= start) & (ids < start + logits.shape[1])
            chosen = torch.where(
                here, logits.gather(1, (ids - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0], chosen
            )
        parts.append(chosen - total)
    return torch.cat(parts)


def expanded_cache(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """The prompt once, its keys and values expanded to all completions of its group, which are padded."""
    scored = []
    for group in groups_of(sequences):
        prompt = torch.from_numpy(group[0].prompt.astype(np.int64)).to(model.device)[None]
        cache = DynamicCache(config=model.config)
        states = [backbone(model)(input_ids=prompt, cache=cache, use_cache=True)[0][:, -1:].expand(len(group), -1, -1)]
        longest = max(len(s.completion) for s in group)
        ids = np.zeros((len(group), longest), dtype=np.int64)
        for row, s in zip(ids, group, strict=True):
            row[: len(s.completion)] = s.completion
        cache.batch_repeat_interleave(len(group))
        if longest > 1:
            states.append(
                backbone(model)(input_ids=torch.from_numpy(ids[:, :-1]).to(model.device), cache=cache, use_cache=True)[
                    0
                ]
            )
        hidden = torch.cat(states, dim=1)
        scored += [
            selective_rows(model, row[: len(s.completion)], s.completion) for row, s in zip(hidden, group, strict=True)
        ]
    return scored


def least(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """The least work: the distinct tokens through the backbone together, each attending to its own sequence.

    The head gets the distinct scored rows only. Where a completion's first row is another's as well, its logprobs
    begin behind it: it is a measure of time. What a pass shares with an earlier one is not attended to.
    """
    inputs = [np.concatenate([s.prompt, s.completion[:-1]]) for s in sequences]
    tree = pack(inputs)
    contributed = tree.contributed.tolist()
    scored = [np.zeros(0, dtype=np.float32)] * len(sequences)
    for indices in in_passes(contributed):
        places, rows = np.full(tree.num_tokens, -1, dtype=np.int32), []
        own = [tree.paths[index][-contributed[index] :] for index in indices]
        places[np.concatenate(own)] = np.arange(sum(map(len, own)))
        for index in indices:
            path = places[tree.paths[index]]
            rows.append(Row.along(path[path >= 0], contributed[index], model.device))
        ids = torch.from_numpy(tree.ids[np.concatenate(own)].astype(np.int64)).to(model.device)
        for index, states in zip(indices, hidden_states(model, ids, rows), strict=True):
            completion = sequences[index].completion
            count = min(len(states), len(completion))
            scored[index] = selective_rows(model, states[len(states) - count :], completion[len(completion) - count :])
    return scored


def in_passes(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of rows that are not empty, as many at a time as a pass has tokens for, in order."""
    indices: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if indices and total + length > PASS_TOKENS:
            yield indices
            indices, total = [], 0
        if length:
            indices.append(index)
            total += length
    if indices:
        yield indices


def selective_rows(model: PreTrainedModel, hidden: torch.Tensor, completion: IntArray) -> FloatArray:
    """Head, logsumexp and gather for the given rows only, a chunk at a time."""
    targets = torch.from_numpy(completion.astype(np.int64)).to(hidden.device)
    parts = []
    for rows, ids in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        logits = (rows @ head_weight(model).T).float()
        parts.append(logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1))
    return torch.cat(parts).cpu().numpy()


def padded(model: PreTrainedModel, sequences: list[Sequence]) -> Iterator[Padded]:
    """Batches as TRL pads them: prompts on the left, completions on the right."""
    for start in range(0, len(sequences), BATCH):
        batch = sequences[start : start + BATCH]
        first = max(len(s.prompt) for s in batch)
        ids, mask = np.zeros((2, len(batch), first + max(len(s.completion) for s in batch)), dtype=np.int64)
        for row, seen, s in zip(ids, mask, batch, strict=True):
            own = slice(first - len(s.prompt), first + len(s.completion))
            row[own], seen[own] = np.concatenate([s.prompt, s.completion]), 1
        yield Padded(batch, first, *(torch.from_numpy(array).to(model.device) for array in (ids, mask)))


def ids_of(model: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([sequence.prompt, sequence.completion]).astype(np.int64)).to(model.device)


def gathered(logprobs: torch.Tensor, completion: IntArray) -> FloatArray:
    chosen = torch.from_numpy(completion.astype(np.int64)).to(logprobs.device)
    return logprobs.gather(1, chosen[:, None])[:, 0].float().cpu().numpy()


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    decoder: torch.nn.Module = model.get_decoder()
    return decoder


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


METHODS: dict[str, Method] = {
    "padded, full log-softmax": padded_full,
    "padded, selective": padded_selective,
    "padded, fused head as TRL 1.16": padded_fused,
    "one by one": one_by_one,
    "prompt's cache expanded": expanded_cache,
    "least work": least,
}
