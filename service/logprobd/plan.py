"""`logprobd plan`: how many devices a training run needs, from a model's configuration alone.

All of it is arithmetic over the shape of the model and of a group; docs/tuning.md explains each line that is printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from logprobd.plan_settings import PlanSettings
from logprobd.settings import ServeSettings
from logprobd.shape import CONFIG_FILE, ITEM_BYTES, Shape, UnknownShapeError, read_shape

# As the engine plans its memory on CUDA, where it measures what is estimated here (engine/memory.py).
SHARE_OF_AVAILABLE = 0.8
HEAD_CHUNK_BYTES = 256 << 20
CHUNK_SHARE = 16
LARGEST_PASS = 32_768

ACTIVATIONS = 6
"""How often the widest states of a layer are held at once; measured at start as six times for the embedded model."""
USEFUL_PASS = 2_048  # tokens; smaller passes read the weights too often to keep a GPU busy

LOGPROB_CHARACTERS = 12.5  # of a float32 and its comma in JSON
DEFAULT_QUEUE = ServeSettings.model_fields["max_queued_tokens"].default
BINARY_BYTES = 4  # of an int32 id, and of a float32


class TooLargeError(ValueError):
    """No number of the given devices holds the model, or no position the group; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """What one group asks of the model: tokens, and floating point operations."""

    sequence_tokens: int
    computed_tokens: int
    scored_tokens: int
    layers: float
    attention: float
    head: float

    @property
    def flops(self) -> float:
        return self.layers + self.attention + self.head

    @property
    def saving(self) -> float:
        """The share of all sequences' tokens that nobody computes, since they are shared or predict nothing."""
        return 1 - self.computed_tokens / self.sequence_tokens


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker on `devices` devices: bytes on each of them, and the tokens of a pass that leaves."""

    devices: int
    weights: float
    head_chunk: float
    per_token: float
    pass_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a group on the wire."""

    json_in: float
    json_out: float
    binary_in: float
    binary_out: float


def plan_lines(settings: PlanSettings) -> Iterator[tuple[str, str]]:
    """What is printed, as names and values; raises UnknownShapeError or TooLargeError."""
    shape = read_shape(find_model(settings), settings.parameters, settings.active_parameters)
    work = work_of_group(shape, settings)
    replica = smallest_replica(shape, settings)
    replicas = settings.num_devices // replica.devices
    groups = groups_per_second(work, replica, settings)
    yield (
        "model",
        f"{shape.family}, {billions(shape.parameters)} parameters, {billions(shape.active)} of layers a token",
    )
    yield from group_lines(work)
    yield "replicas", replicas_line(replica, replicas, settings.num_devices)
    yield "memory", memory_line(replica, settings)
    yield "rate", rate_line(work, groups, replica, settings)
    yield "speed", speed_line(work, groups, replicas)
    yield from demand_lines(work, groups, replicas, settings)
    yield "network", network_line(traffic_of_group(shape, settings), settings)


def find_model(settings: PlanSettings) -> Path:
    """The folder or file that --model names; of a Hub model only its config.json is fetched."""
    assert settings.model is not None, "the settings ask for a model. This is a bug."
    path = Path(settings.model).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or settings.model.startswith((".", "~")):
        raise UnknownShapeError(f"--model {path} does not exist")
    try:
        return Path(hf_hub_download(settings.model, CONFIG_FILE, revision=settings.revision))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        first = str(error).strip().splitlines()[0]
        raise UnknownShapeError(f"--model {settings.model} is no folder here, and no Hub model: {first}") from None


def work_of_group(shape: Shape, settings: PlanSettings) -> GroupWork:
    """A prompt goes through the model once; each completion but for its last token, which predicts nothing.

    Two operations for each parameter that a token meets; four for each query number and key that it attends to. The
    head is for rows that predict a completion token: one for all first tokens, then one for each token but the last.
    """
    prompt, completion, group = settings.prompt, settings.completion, settings.group
    if prompt + completion > shape.max_positions:
        raise TooLargeError(
            f"--prompt {prompt} and --completion {completion} are {prompt + completion} tokens; the model has "
            f"{shape.max_positions} positions"
        )
    computed = prompt + group * (completion - 1)
    keys = sum(
        attended(0, prompt, window) + group * attended(prompt, prompt + completion - 1, window)
        for window in shape.windows
    )
    return GroupWork(
        sequence_tokens=group * (prompt + completion),
        computed_tokens=computed,
        scored_tokens=group * completion,
        layers=2.0 * shape.active * computed,
        attention=4.0 * shape.query_size * keys,
        head=2.0 * shape.head * (1 + group * (completion - 1)),
    )


def attended(start: int, end: int, window: int | None) -> int:
    """The keys that the tokens at depths `start` to `end` (left out) attend to: each to itself and all before it,
    the last `window` of them at most.
    """
    full = min(max(start, window or end), end)  # from here on, the window is full
    growing = (full - start) * (start + 1 + full) // 2
    return growing + (end - full) * (window or 0)


def smallest_replica(shape: Shape, settings: PlanSettings) -> Replica:
    """The fewest devices, a power of two that divides the heads, that leave room for passes of useful size."""
    sizes = [2**power for power in range(settings.num_devices.bit_length())]
    replicas = [replica_on(devices, shape, settings) for devices in sizes if shape.num_heads % devices == 0]
    for replica in replicas:
        if replica.pass_tokens >= USEFUL_PASS:
            return replica
    most = replicas[-1]
    needed = most.weights + (CHUNK_SHARE / (CHUNK_SHARE - 1)) * USEFUL_PASS * most.per_token / SHARE_OF_AVAILABLE
    raise TooLargeError(
        f"the model does not fit: on {devices_of(most.devices)} of {gib(settings.device_memory)} its weights take "
        f"{gib(most.weights)} of each, and a pass of {USEFUL_PASS} tokens makes that {gib(needed)}"
    )


def replica_on(devices: int, shape: Shape, settings: PlanSettings) -> Replica:
    """The memory of each device of a replica: its part of the weights, a chunk of logits, and passes."""
    item = ITEM_BYTES.get(settings.precision, 4 if settings.precision == "autocast" else shape.item_bytes)
    weights = shape.parameters * item / devices
    free = max(0.0, (settings.device_memory - weights) * SHARE_OF_AVAILABLE)
    chunk = min(HEAD_CHUNK_BYTES, free / CHUNK_SHARE)
    widest = 2 * shape.hidden_size + 3 * shape.intermediate_size + 2 * shape.query_size
    per_token = float(ACTIVATIONS * item * widest)
    return Replica(devices, weights, chunk, per_token, min(LARGEST_PASS, int((free - chunk) / per_token)))


def groups_per_second(work: GroupWork, replica: Replica, settings: PlanSettings) -> float:
    """What one replica does, from what was measured or from the rate of its devices."""
    if settings.measured is not None:
        return settings.measured / work.computed_tokens
    return settings.flops * replica.devices / work.flops


def traffic_of_group(shape: Shape, settings: PlanSettings) -> Traffic:
    """A prompt once and every completion in, a number for each completion token out."""
    scored = settings.group * settings.completion
    ids = settings.prompt + scored
    return Traffic(
        ids * id_characters(shape.vocab_size), scored * LOGPROB_CHARACTERS, ids * BINARY_BYTES, scored * BINARY_BYTES
    )


def id_characters(vocab_size: int) -> float:
    """The characters of a token id in JSON, its comma among them, on average over the vocabulary."""
    digits: int = sum(vocab_size - 10**power for power in range(1, len(str(vocab_size - 1)))) + vocab_size
    return digits / vocab_size + 1


def group_lines(work: GroupWork) -> Iterator[tuple[str, str]]:
    tokens = f"{work.computed_tokens} tokens computed of {work.sequence_tokens} ({work.saving:.1%} saved)"
    yield "a group", f"{tokens}, {work.scored_tokens} scored"
    parts = {"layers": work.layers, "attention": work.attention, "head": work.head}
    shares = ", ".join(f"{name} {part / work.flops:.0%}" for name, part in parts.items())
    yield "work", f"{work.flops / 1e12:.4g} TFLOP a group ({shares}), {work.flops / work.computed_tokens:.4g} a token"


def replicas_line(replica: Replica, replicas: int, num_devices: int) -> str:
    groups = [
        "+".join(f"cuda:{first + index}" for index in range(replica.devices))
        for first in range(0, replicas * replica.devices, replica.devices)
    ]
    unused = num_devices - replicas * replica.devices
    rest = f", {unused} left over" if unused else ""
    return f"{replicas} of {devices_of(replica.devices)} each{rest}: --devices {','.join(groups)}"


def memory_line(replica: Replica, settings: PlanSettings) -> str:
    used = replica.weights + replica.head_chunk + replica.per_token * replica.pass_tokens
    return (
        f"{gib(used)} of {gib(settings.device_memory)} a device: weights {gib(replica.weights)}, logits "
        f"{gib(replica.head_chunk)}, passes of {replica.pass_tokens} tokens at about {replica.per_token / 1024:.0f} KiB"
    )


def rate_line(work: GroupWork, groups: float, replica: Replica, settings: PlanSettings) -> str:
    reached = f"{groups * work.flops / replica.devices / 1e12:.4g} TFLOP/s a device"
    if settings.measured is not None:
        return f"{reached}, from {settings.measured:.4g} computed tokens/s measured"
    given = "rate" in settings.model_fields_set
    return f"{reached}, {'as given' if given else 'assumed: measure it, see docs/tuning.md'}"


def speed_line(work: GroupWork, groups: float, replicas: int) -> str:
    scored, computed = groups * work.scored_tokens, groups * work.computed_tokens
    return f"{replicas} x {scored:.0f} = {replicas * scored:.0f} scored tokens/s ({replicas * computed:.0f} computed)"


def demand_lines(work: GroupWork, groups: float, replicas: int, settings: PlanSettings) -> Iterator[tuple[str, str]]:
    """What the trainers ask for, beside what the replicas can do."""
    asked = settings.trainers * settings.groups
    needed = asked / settings.step
    load = needed / groups
    scored = needed * work.scored_tokens
    yield (
        "demand",
        f"{asked} groups every {settings.step:g} s = {scored:.0f} scored tokens/s: load {load / replicas:.0%}",
    )
    yield "enough", f"{math.ceil(load)} replicas; all groups at once are answered in {asked / groups / replicas:.1f} s"
    queued = asked * work.sequence_tokens
    yield "queue", f"--max-queued-tokens {queued} holds all of them; the default is {DEFAULT_QUEUE}"


def network_line(traffic: Traffic, settings: PlanSettings) -> str:
    groups = settings.trainers * settings.groups / settings.step
    return (
        f"JSON {megabits(traffic.json_in * groups)} in, {megabits(traffic.json_out * groups)} out; "
        f"binary {megabits(traffic.binary_in * groups)} in, {megabits(traffic.binary_out * groups)} out"
    )


def billions(number: float) -> str:
    return f"{number / 1e9:.4g}B"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def megabits(num_bytes: float) -> str:
    return f"{num_bytes * 8 / 1e6:.3g} Mbit/s"


def devices_of(number: int) -> str:
    return f"{number} device" + ("s" if number > 1 else "")
