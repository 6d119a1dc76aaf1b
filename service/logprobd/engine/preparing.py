"""From settings to a scorer that may serve: load, compare with the model's own forward, measure the memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from logprobd.engine.group import devices_of
from logprobd.engine.memory import plan_memory
from logprobd.engine.meter import Meter, meter_of
from logprobd.engine.model import find_device, load
from logprobd.engine.ranks import Ranks
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import choose_scorer
from logprobd.messages import MemoryPlan, SelfTest, Start


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A scorer in the layout that is exact, within its memory."""

    scorer: Scorer
    meter: Meter
    selftest: SelfTest
    plan: MemoryPlan
    device: str  # the names of all devices of the worker, joined by +


def prepare(start: Start, form: Callable[[], Ranks], tell: Callable[[str], None]) -> Prepared:
    """Make a model ready on this process's device; raises ModelRefusedError with a sentence if it cannot be served.

    `form` gives this process's place in its worker; `tell` hears of each step.
    """
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    ranks, settings = form(), start.settings
    names = devices_of(start)
    device = find_device(names[ranks.rank])
    meter = meter_of(device)
    tell("loading the weights")
    loaded = load(settings, device, tell, ranks)
    tell("comparing with the model's own forward")
    scorer, selftest = choose_scorer(loaded, alone=settings.batch_invariant)
    tell("measuring the memory of a pass")
    on_device = settings.all_devices.count(names[ranks.rank])
    plan = plan_memory(scorer, meter, settings.memory_bound, on_device)
    return Prepared(scorer, meter, selftest, plan, "+".join(str(find_device(name)) for name in names))
