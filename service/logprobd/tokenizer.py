"""Text to token ids and back, with the `tokenizers` library alone: no torch, no transformers."""

import numpy as np
import tokenizers

from logprobd.messages import TokenizerInfo
from logprobd.sequences import IntArray


def tokenizer_of(info: TokenizerInfo) -> "Tokenizer | None":
    """The tokenizer, or None for a model without one."""
    return None if info.json is None else Tokenizer(info)


class Tokenizer:
    """The served model's tokenizer."""

    def __init__(self, info: TokenizerInfo) -> None:
        assert info.json is not None, "a model without a tokenizer has no Tokenizer. This is a bug."
        self._tokenizer = tokenizers.Tokenizer.from_str(info.json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bos_token_id = info.bos_token_id

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """The ids of a prompt, with the special tokens that the tokenizer adds, but never a second BOS."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if ids[:2] == [self._bos_token_id] * 2:
            ids = ids[1:]
        return np.array(ids, dtype=np.int32)

    def encode_completion(self, prompt: str | None, completion: str) -> IntArray:
        """The ids of a completion as they follow its prompt's text.

        Tokenizers that mark word beginnings put a space before any text; so the two are encoded together
        and the prompt's ids cut off, wherever the prompt's ids do not change by what follows.
        """
        if prompt is not None:
            alone = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            together = self._tokenizer.encode(prompt + completion, add_special_tokens=False).ids
            if together[: len(alone)] == alone:
                return np.array(together[len(alone) :], dtype=np.int32)
        ids = self._tokenizer.encode(completion, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def token_strings(self, ids: IntArray) -> list[str]:
        """Each token's text; bytes that are no character of their own appear as U+FFFD."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids.tolist()]
