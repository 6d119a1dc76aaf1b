"""The processes that compute one model together, tensor parallel, as one of them sees them.

All of them run the same code on the same batches, and whatever steers it must come out the same everywhere: so
numbers that are measured locally (free memory) are agreed on here. Alone, nothing is exchanged.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number among `size` of them, and the collectives that the engine needs."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # where what is exchanged has to be

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's tensor, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of everybody's tensor, element by element, in place; a NaN may be lost."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Everybody's tensor (rows, columns), side by side in the order of ranks: (rows, size * columns)."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=1)

    def most(self, number: int) -> int:
        """The largest of everybody's number."""
        return int(self.maximum(torch.tensor([number], dtype=torch.int64, device=self.device)))

    def least(self, number: int) -> int:
        """The smallest of everybody's number."""
        return -self.most(-number)


ALONE = Ranks()


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded; everybody has to ask."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The stretch of the vocabulary whose logits this process has, from id `first` on; all of it if it is alone."""

    first: int = 0
    ranks: Ranks = ALONE

    def normalize(self, logits: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
        """Logprobs (rows, own ids) of float32 logits, divided by (rows,) divisors, over everybody's ids; in place.

        The logits are exchanged nowhere: a maximum and a sum of each row are.
        """
        logits.sub_(self.ranks.maximum(logits.amax(dim=-1, keepdim=True))).div_(divisors[:, None])
        return logits.sub_(self.ranks.add(logits.exp().sum(dim=-1, keepdim=True)).log_())

    def pick(self, logprobs: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The logprobs of some (row, id) pairs, 0 where another process has the id: to be added up."""
        if self.ranks.size == 1:
            return logprobs[rows, ids]
        local = ids - self.first
        own = (local >= 0) & (local < logprobs.shape[1])
        return torch.where(own, logprobs[rows, local.clamp(0, logprobs.shape[1] - 1)], 0.0)


EVERY_ID = Vocabulary()


def vocabulary_of(weight: Any, ranks: Ranks) -> Vocabulary:
    """The ids that this process has of a head's weight (vocab_size, hidden_size), which may be sharded by rows."""
    if not isinstance(weight, DTensor) or not any(placement.is_shard(0) for placement in weight.placements):
        return EVERY_ID
    # As torch cuts a dimension: equal stretches, of which the last may be shorter.
    return Vocabulary(ranks.rank * -(-weight.shape[0] // ranks.size), ranks)
