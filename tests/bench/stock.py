"""How others score: methods on a stock transformers model, float32 results, one array a sequence."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from logprobd.engine.packing import pack
from logprobd.sequences import FloatArray, IntArray, Sequence

BATCH = 8  # rows of the padded methods
CHUNK = 128  # rows of logits at a time, where a method has its own head
TILE_ROWS, TILE_COLUMNS = 4096, 32768  # of TRL 1.16's fused head

Scored = list[FloatArray]


def one_by_one(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """The model's own forward on each sequence, log-softmax in float64: the reference for all others."""
    scored = []
    for sequence in sequences:
        logits = model(input_ids=ids_of(model, sequence)[None], use_cache=False).logits[0]
        rows = logits[len(sequence.prompt) - 1 : -1].double().log_softmax(dim=-1)
        scored.append(gathered(rows, sequence.completion))
    return scored


def padded_full(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Right-padded batches, a log-softmax of all logits."""
    scored = []
    for batch, ids, mask in padded(model, sequences):
        logprobs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(dim=-1)
        scored += [
            gathered(row[len(s.prompt) - 1 : s.num_tokens - 1], s.completion)
            for row, s in zip(logprobs, batch, strict=True)
        ]
    return scored


def padded_selective(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Right-padded batches, and the seed's way: gather, and a logsumexp row by row."""
    scored = []
    for batch, ids, mask in padded(model, sequences):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, s in zip(logits, batch, strict=True):
            own = row[len(s.prompt) - 1 : s.num_tokens - 1]
            chosen = torch.from_numpy(s.completion.astype(np.int64)).to(own.device)
            scored.append((own.gather(1, chosen[:, None])[:, 0] - own.logsumexp(dim=-1)).float().cpu().numpy())
    return scored


def padded_fused(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Right-padded batches, and a head in tiles with an online logsumexp, of the tiles that TRL 1.16 takes."""
    scored = []
    for batch, ids, mask in padded(model, sequences):
        hidden = backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :-1].flatten(0, 1)
        logprobs = in_tiles(model, hidden, ids[:, 1:].flatten()).reshape(len(batch), -1)
        scored += [
            row[len(s.prompt) - 1 : s.num_tokens - 1].cpu().numpy() for row, s in zip(logprobs, batch, strict=True)
        ]
    return scored


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
    for _, members in groupby(sequences, key=lambda sequence: sequence.prompt.tobytes()):
        group = list(members)
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
    """The least work: one forward of the distinct tokens, each sequence's own as a plain causal row, and the head.

    Its numbers are wrong where something is shared (own tokens do not see what others brought): it is a measure of
    time, and a generous one, since attention to shared tokens is not even counted.
    """
    inputs = [np.concatenate([s.prompt, s.completion[:-1]]) for s in sequences]
    contributed = pack(inputs).contributed.tolist()
    scored = []
    for ids, own, sequence in zip(inputs, contributed, sequences, strict=True):
        row = torch.from_numpy(ids[len(ids) - own :].astype(np.int64)).to(model.device)[None]
        states = backbone(model)(input_ids=row, use_cache=False)[0][0] if own else None
        scored.append(least_of_head(model, states, sequence.completion))
    return scored


def least_of_head(model: PreTrainedModel, states: torch.Tensor | None, completion: IntArray) -> FloatArray:
    """Every scored row goes through the head once; rows that a sequence shares stand in for by its last ones."""
    if states is None:
        return np.zeros(len(completion), dtype=np.float32)
    missing = max(0, len(completion) - len(states))
    rows = torch.cat([states[-len(completion) :], states[-1:].expand(missing, -1)])
    return selective_rows(model, rows, completion)


def selective_rows(model: PreTrainedModel, hidden: torch.Tensor, completion: IntArray) -> FloatArray:
    """Head, logsumexp and gather for the given rows only, a chunk at a time."""
    targets = torch.from_numpy(completion.astype(np.int64)).to(hidden.device)
    parts = []
    for rows, ids in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        logits = (rows @ head_weight(model).T).float()
        parts.append(logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1))
    return torch.cat(parts).cpu().numpy()


def padded(
    model: PreTrainedModel, sequences: list[Sequence]
) -> Iterator[tuple[list[Sequence], torch.Tensor, torch.Tensor]]:
    for start in range(0, len(sequences), BATCH):
        batch = sequences[start : start + BATCH]
        longest = max(s.num_tokens for s in batch)
        ids, mask = np.zeros((2, len(batch), longest), dtype=np.int64)
        for row, seen, s in zip(ids, mask, batch, strict=True):
            row[: s.num_tokens] = np.concatenate([s.prompt, s.completion])
            seen[: s.num_tokens] = 1
        yield batch, torch.from_numpy(ids).to(model.device), torch.from_numpy(mask).to(model.device)


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


METHODS = {
    "padded, full log-softmax": padded_full,
    "padded, selective": padded_selective,
    "padded, fused head as TRL 1.16": padded_fused,
    "one by one": one_by_one,
    "prompt's cache expanded": expanded_cache,
    "least work": least,
}
