"""All dialects' parsers by name, and what the process that parses large bodies is told."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from logprobd.dialects import binary, completions, native, sglang, vllm
from logprobd.dialects.plans import Plan, ServedModel
from logprobd.messages import TokenizerInfo
from logprobd.tokenizer import tokenizer_of

PARSERS: dict[str, Callable[[bytes, ServedModel], Plan]] = {
    "native": native.plan,
    "binary": binary.plan,
    "completions": completions.plan,
    "vllm": vllm.plan,
    "sglang": sglang.plan,
}


@dataclass(frozen=True, slots=True)
class ParseFirst:
    """What requests are held against, with the tokenizer as it travels."""

    served: ServedModel
    tokenizer: TokenizerInfo

    def served_model(self) -> ServedModel:
        return replace(self.served, tokenizer=tokenizer_of(self.tokenizer))
