"""What each precision costs in accuracy: ours against the float32 truth and two policies that trainers run.

    .venv/bin/python tests/bench precision [--tokens 200] [--device auto]

Prose and completions sampled from the embedded model itself. `k3` is John Schulman's estimator of the divergence,
exp(r) - 1 - r with r = reference - policy, a token's mean: what a trainer would log as KL though both models are the
same. The truth is the stock float32 forward; `trl` is TRL's default policy, float32 weights under bfloat16 autocast;
`bfloat16` is a policy whose weights are bfloat16, with a float32 log-softmax.
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.models import stock_model
from bench.report import Row, report
from bench.stock import one_by_one
from bench.workloads import scored_tokens
from logprobd.engine.model import find_device, load
from logprobd.engine.scorer import Scorer
from logprobd.sequences import FloatArray, IntArray, Options, Scores, Sequence
from logprobd.settings import HeadPrecision, ModelSettings, Precision
from logprobd.tokenizer import Tokenizer

PRECISIONS: tuple[Precision, ...] = ("float32", "autocast", "bfloat16", "float16")
HEADS: tuple[HeadPrecision, ...] = ("model", "float32")
PROSE = (
    "The harbour lay quiet that morning, and the boats that had gone out before dawn were only specks on the grey "
    "line of the sea. Anna counted them twice, as her father had taught her, and wrote the number in the book.",
    "To measure the height of a tower with a barometer, a student may read the pressure at its foot and at its top, "
    "and compute the difference in altitude from the two readings, since air thins out regularly with height.",
    "Whether a small town needs a library is a question that is asked whenever money is short. Those who ask it "
    "seldom remember how many of them learnt to read in one, or where they went when the shops were closed.",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=200, help="at most so many scored tokens of each kind of text")
    parser.add_argument("--device", default="auto")


def run(options: argparse.Namespace) -> None:
    device = find_device(options.device)
    model = stock_model(of_precision("float32", device))
    texts = {"prose": prose(options.tokens), "sampled": sampled(model, options.tokens)}
    policies = {
        kind: {
            "float32": stock(model, sequences),
            "trl": under_autocast(model, sequences),
            "bfloat16": stock(stock_model(of_precision("bfloat16", device)), sequences),
        }
        for kind, sequences in texts.items()
    }
    rows: list[Row] = []
    for precision, head in itertools.product(PRECISIONS, HEADS):
        if precision == "float32" and head == "float32":
            continue  # the same
        scorer = Scorer(load(of_precision(precision, device, head), device, tell=lambda _: None), "shared")
        for kind, sequences in texts.items():
            scored = np.concatenate([o.logprobs for o in scorer.score(sequences) if isinstance(o, Scores)])
            rows.append({"precision": precision, "head": head, "text": kind} | against(scored, policies[kind]))
    counts = ", ".join(f"{scored_tokens(sequences)} of {kind}" for kind, sequences in texts.items())
    report("precision", rows, options.out, f"Scored tokens: {counts}. Differences and k3 in nats.")


def of_precision(precision: Precision, device: torch.device, head: HeadPrecision = "model") -> ModelSettings:
    return ModelSettings(devices=str(device), precision=precision, head_precision=head)


def against(scored: FloatArray, policies: dict[str, FloatArray]) -> Row:
    row: Row = {}
    for name, policy in policies.items():
        ratio = scored.astype(np.float64) - policy
        row[f"mean error, {name}"] = float(np.abs(ratio).mean())
        row[f"max error, {name}"] = float(np.abs(ratio).max())
        row[f"k3, {name}"] = float((np.exp(ratio) - 1 - ratio).mean())
    return row


def prose(tokens: int) -> list[Sequence]:
    """The first words of each text as the prompt, the rest as the completion."""
    cpu = torch.device("cpu")
    tokenizer = Tokenizer(load(of_precision("float32", cpu), cpu, tell=lambda _: None).tokenizer)
    ids = [tokenizer.encode_prompt(text) for text in PROSE]
    return [Sequence(one[:10], one[10 : 10 + tokens // len(ids)], Options()) for one in ids]


@torch.inference_mode()
def sampled(model: PreTrainedModel, tokens: int) -> list[Sequence]:
    """Completions drawn from the model itself at a temperature of 1."""
    torch.manual_seed(0)
    prompts = [sequence.prompt for sequence in prose(tokens)]
    return [Sequence(prompt, sample(model, prompt, tokens // len(prompts)), Options()) for prompt in prompts]


def sample(model: PreTrainedModel, prompt: IntArray, count: int) -> IntArray:
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    given = torch.from_numpy(prompt.astype(np.int64)).to(model.device)[None]
    ids = generate(given, do_sample=True, top_k=0, max_new_tokens=count, min_new_tokens=count, use_cache=True)
    return ids[0, len(prompt) :].cpu().numpy().astype(np.int32)


@torch.inference_mode()
def stock(model: PreTrainedModel, sequences: list[Sequence]) -> FloatArray:
    """The model's own forward on each sequence, with a float32 log-softmax."""
    return np.concatenate(one_by_one(model, sequences))


def under_autocast(model: PreTrainedModel, sequences: list[Sequence]) -> FloatArray:
    with torch.autocast(model.device.type, torch.bfloat16):
        return stock(model, sequences)
