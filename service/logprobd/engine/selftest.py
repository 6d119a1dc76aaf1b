"""Chooses the layout that gives a model's own numbers, by measuring, and refuses a model that has none.

Recurrent layers, ALiBi and modeling code that ignores the attention interface give wrong numbers in a
packed row without any error. So at load a small tree of random tokens is scored in both layouts and by
the model's own forward, one sequence at a time.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from logprobd.engine.attention import UnsupportedAttentionError, Windows
from logprobd.engine.budget import SMALLEST_PASS, UNBOUNDED
from logprobd.engine.head import NoBackboneError
from logprobd.engine.model import LoadedModel, ModelRefusedError, text_config
from logprobd.engine.scorer import Scorer
from logprobd.messages import SelfTest
from logprobd.sequences import FloatArray, IntArray, Options, Outcome, Scores, Sequence

# Largest errors in nats that count as the same forward in another order. A missing cap, scale or mask is
# off by far more; in half precision two layouts of one forward differ by a few hundredths on average.
MAX_ERROR_FLOAT32 = 1e-3
MEAN_ERROR_HALF = 0.1

# What modeling code raises when it meets a packed row, an absent mask or padding that it does not know.
CANNOT_RUN = (UnsupportedAttentionError, TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError)

TREE = (  # (prompt, completion) lengths; a negative prompt takes over that much of the sequence before it
    (24, 9),
    (-24, 12),
    (-30, 8),
    (-20, 1),
    (1, 30),
    (40, 16),
)


@dataclass(frozen=True, slots=True)
class Errors:
    """Differences from the model's own forward, in nats; `problem` where a layout cannot run at all."""

    max_logprob: float = float("inf")
    mean_logprob: float = float("inf")
    max_entropy: float = float("inf")
    problem: str | None = None
    outcomes: tuple[Outcome, ...] = ()  # that they were measured on


def choose_scorer(loaded: LoadedModel, *, alone: bool = False) -> tuple[Scorer, SelfTest]:
    """The scorer in the layout that is exact, shared if possible; raises ModelRefusedError if none is.

    `alone`: each sequence in passes of its own.
    """
    sequences = small_tree(loaded.info.vocab_size, loaded.info.max_positions)
    own = [own_forward(loaded, sequence) for sequence in sequences]
    implementation = loaded.model.config._attn_implementation
    scorer = shared_scorer(loaded)
    scorer.alone = alone
    shared = measure(scorer, sequences, own)
    reason = why_not_shared(loaded, shared, scorer.windows)
    layers = describe_layers(loaded.model, scorer.windows)
    if reason is None:
        reason = "every layer attends over the prefix tree"
        return scorer, report(scorer, shared, shared, try_windows(scorer, sequences, own), sequences, reason, layers)
    loaded.model.set_attn_implementation(implementation)
    scorer = Scorer(loaded, "padded")
    scorer.alone = alone
    padded = measure(scorer, sequences, own)
    if not is_exact(padded, loaded):
        raise ModelRefusedError(
            f"{loaded.info.id} ({loaded.info.family}) gives wrong numbers in every layout: shared: {reason}; "
            f"padded: {padded.problem or off_by(padded)}"
        )
    return scorer, report(scorer, padded, shared, try_windows(scorer, sequences, own), sequences, reason, layers)


def small_tree(vocab_size: int, max_positions: int) -> list[Sequence]:
    """Random sequences that branch at several depths, repeat and extend one another."""
    random = np.random.default_rng(0)
    sequences: list[Sequence] = []
    before: IntArray = np.zeros(0, dtype=np.int32)
    for prompt_length, completion_length in TREE:
        kept = before[: max(0, -prompt_length)]
        fresh = random.integers(0, vocab_size, max(0, prompt_length) + completion_length).astype(np.int32)
        before = np.concatenate([kept, fresh])[:max_positions]
        split = max(1, len(before) - completion_length)
        sequences.append(Sequence(before[:split], before[split:], Options(entropy=True)))
    return sequences


@torch.inference_mode()
def own_forward(loaded: LoadedModel, sequence: Sequence) -> tuple[FloatArray, FloatArray]:
    """Logprobs and entropies of a completion by the model's own forward on this one sequence."""
    ids = np.concatenate([sequence.prompt, sequence.completion]).astype(np.int64)
    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=loaded.autocast):
        logits = loaded.model(input_ids=torch.from_numpy(ids).to(loaded.device)[None], use_cache=False).logits[0]
    chosen = torch.from_numpy(sequence.completion.astype(np.int64)).to(loaded.device)
    logprobs, entropies = [], []
    # A few rows at a time: in float64, all of a large vocabulary's would take more than serving ever does.
    for rows, ids in zip(logits[len(sequence.prompt) - 1 : -1].split(4), chosen.split(4), strict=True):
        scored = rows.double().log_softmax(dim=-1)
        logprobs.append(scored.gather(1, ids[:, None])[:, 0])
        entropies.append(torch.special.entr(scored.exp()).sum(dim=-1))
    return torch.cat(logprobs).float().cpu().numpy(), torch.cat(entropies).float().cpu().numpy()


def try_windows(scorer: Scorer, sequences: list[Sequence], own: list[tuple[FloatArray, FloatArray]]) -> Errors:
    """The errors of scoring in windows of a few tokens; where they are too large, no window is ever used.

    Most recurrent layers start afresh with every call of more than one token.
    """
    scorer.laying.in_windows = True
    scorer.budget.allow(SMALLEST_PASS)
    errors = measure(scorer, sequences, own)
    scorer.budget.allow(UNBOUNDED)
    scorer.laying.in_windows = is_exact(errors, scorer.loaded)
    return errors


def same_bits_alone(scorer: Scorer, sequences: list[Sequence], together: tuple[Outcome, ...]) -> bool:
    """Whether sequences got together exactly the numbers that each gets alone."""
    if not scorer.alone and is_known_to_vary(scorer.loaded):
        return False
    alone = [scorer.score([sequence])[0] for sequence in sequences]
    return all(bits_of(one) == bits_of(other) for one, other in zip(together, alone, strict=True))


def is_known_to_vary(loaded: LoadedModel) -> bool:
    """Where a few sequences may agree by luck: under autocast, and with oneDNN's matrix products in half precision."""
    if loaded.autocast:
        return True
    return loaded.device.type == "cpu" and loaded.info.precision != "float32" and has_half_kernels()


def has_half_kernels() -> bool:
    """Whether oneDNN multiplies half-precision matrices on this CPU; else torch's own kernels do."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.ops.mkldnn._is_mkldnn_fp16_supported())


def bits_of(outcome: Outcome) -> bytes:
    assert isinstance(outcome, Scores), "a layout that failed was chosen. This is a bug."
    assert outcome.entropy is not None, "the self-test asks for entropies. This is a bug."
    return outcome.logprobs.tobytes() + outcome.entropy.tobytes()


def shared_scorer(loaded: LoadedModel) -> Scorer:
    try:
        return Scorer(loaded, "shared")
    except NoBackboneError as error:
        raise ModelRefusedError(f"{loaded.info.id} ({loaded.info.family}): {error}") from error


def measure(scorer: Scorer, sequences: list[Sequence], own: list[tuple[FloatArray, FloatArray]]) -> Errors:
    """The errors of a scorer against the model's own forward, or why old modeling code cannot run this way."""
    try:
        outcomes = scorer.score(sequences)
    except CANNOT_RUN as error:
        return Errors(problem=f"{type(error).__name__}: {error}".splitlines()[0])
    failed = next((outcome for outcome in outcomes if not isinstance(outcome, Scores)), None)
    if failed is not None:
        return Errors(problem=failed.message)
    pairs = list(zip(outcomes, own, strict=True))
    logprobs = np.concatenate([difference(outcome, "logprobs", reference[0]) for outcome, reference in pairs])
    entropies = np.concatenate([difference(outcome, "entropy", reference[1]) for outcome, reference in pairs])
    return Errors(float(logprobs.max()), float(logprobs.mean()), float(entropies.max()), outcomes=tuple(outcomes))


def difference(outcome: Outcome, name: str, reference: FloatArray) -> FloatArray:
    """Absolute differences; where both are the same infinity there is none."""
    got: FloatArray = getattr(outcome, name)
    return np.where(got == reference, 0, np.abs(got - reference)).astype(np.float32)


def is_exact(errors: Errors, loaded: LoadedModel) -> bool:
    if loaded.info.precision == "float32":
        return max(errors.max_logprob, errors.max_entropy) <= MAX_ERROR_FLOAT32
    return errors.mean_logprob <= MEAN_ERROR_HALF


def why_not_shared(loaded: LoadedModel, errors: Errors, windows: Windows) -> str | None:
    """Why the shared layout cannot be served, or None if it can."""
    if errors.problem is not None:
        return errors.problem
    if not is_exact(errors, loaded):
        return off_by(errors)
    return window_problem(loaded, windows)


def window_problem(loaded: LoadedModel, windows: Windows) -> str | None:
    """The small tree is shorter than real windows: compare what the layers asked for with the configuration."""
    config = text_config(loaded.model.config)
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention", "attention"}:
        return f"layers of kind {', '.join(sorted(unknown))}"
    window = getattr(config, "sliding_window", None)
    asked = set(windows.values()) - {None}
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if window is not None and windowed and not asked:
        return f"layers with a window of {window} do not say so to the attention function"
    return None


def describe_layers(model: torch.nn.Module, windows: Windows) -> tuple[str, ...]:
    """What the layers do, as in "0-11: attends over the tree, window 512"; neighbours alike share a line."""
    described = [describe_layer(layer, windows) for layer in decoder_layers(model)]
    lines, first = [], 0
    for description, group in itertools.groupby(described):
        last = first + len(list(group)) - 1
        lines.append(f"{first}: {description}" if first == last else f"{first}-{last}: {description}")
        first = last + 1
    return tuple(lines)


def describe_layer(layer: torch.nn.Module, windows: Windows) -> str:
    asked = [windows[id(module)] for module in layer.modules() if id(module) in windows]
    if asked:
        return "attends over the tree" + (f", window {asked[0]}" if asked[0] else "")
    return f"does not attend through the interface ({', '.join(type(child).__name__ for child in layer.children())})"


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of the model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def off_by(errors: Errors) -> str:
    return f"off by up to {errors.max_logprob:.2g} nats ({errors.mean_logprob:.2g} on average)"


def report(
    scorer: Scorer,
    chosen: Errors,
    shared: Errors,
    in_windows: Errors,
    sequences: list[Sequence],
    reason: str,
    layers: tuple[str, ...],
) -> SelfTest:
    return SelfTest(
        layout=scorer.layout,
        max_error=chosen.max_logprob,
        mean_error=chosen.mean_logprob,
        max_entropy_error=chosen.max_entropy,
        shared_max_error=None if shared.problem else shared.max_logprob,
        windows_max_error=None if in_windows.problem else in_windows.max_logprob,
        batch_invariant=same_bits_alone(scorer, sequences, chosen.outcomes),
        reason=reason,
        layers=layers,
    )
