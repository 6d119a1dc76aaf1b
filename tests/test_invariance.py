"""The same sequence gets the same float32 bits whatever shares its batch, from a worker process on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from running import Running

VOCAB_SIZE = {"embedded_service": 49152, "tiny_service": 211}


def groups_that_share(random: np.random.Generator, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Groups whose prompts and completions take over parts of one another, of 1 to about 300 tokens."""
    stem = random.integers(0, vocab_size, 300).tolist()

    def ids(longest: int) -> list[int]:
        kept = stem[: random.integers(0, longest)] if random.random() < 0.5 else []
        return [*kept, *random.integers(0, vocab_size, random.integers(1, 40)).tolist()]

    return [{"prompt": ids(260), "completions": [ids(20) for _ in range(random.integers(1, 4))]} for _ in range(count)]


def scores(running: Running, groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    reply = running.post({"groups": groups, "entropy": True, "top_logprobs": 2})
    assert reply.status_code == 200, reply.text
    return [group["completions"] for group in reply.json()["groups"]]


@pytest.mark.parametrize(("service", "count"), [("tiny_service", 60), ("embedded_service", 8)])
def test_company_and_order_do_not_change_a_bit(request: pytest.FixtureRequest, service: str, count: int) -> None:
    running: Running = request.getfixturevalue(service)
    random = np.random.default_rng(3)
    groups = groups_that_share(random, VOCAB_SIZE[service], count)
    alone = [scores(running, [group])[0] for group in groups]
    together = scores(running, groups)
    order = random.permutation(count).tolist()
    shuffled = scores(running, [groups[index] for index in order])
    with ThreadPoolExecutor(16) as pool:
        concurrent = list(pool.map(lambda group: scores(running, [group])[0], groups))

    assert together == alone
    assert [shuffled[order.index(index)] for index in range(count)] == alone
    assert concurrent == alone
