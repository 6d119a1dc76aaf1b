"""Text and ids: special tokens once, completions as they follow their prompt, every token with a string."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from logprobd.messages import TokenizerInfo
from logprobd.sequences import IntArray
from logprobd.tokenizer import Tokenizer

WORDS = ["<s>", "<unk>", "▁the", "▁cat", "▁sat", "▁", "s", "at", "▁cats", "▁s"]


def word_tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    """A tokenizer in the manner of Llama 2: a space before any text, and a BOS before any sequence."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    for character in "thecaiou":
        vocabulary.setdefault(character, len(vocabulary))
    merges = [
        ("a", "t"),
        ("▁", "s"),
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("c", "at"),
        ("▁", "cat"),
        ("▁s", "at"),
        ("▁cat", "s"),
    ]
    for merge in merges:
        vocabulary.setdefault("".join(merge), len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "<unk>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(TokenizerInfo(backend.to_str(), 0))


def words(tokenizer: Tokenizer, ids: IntArray) -> list[str]:
    vocabulary = json.loads(tokenizer._tokenizer.to_str())["model"]["vocab"]
    names = {index: word for word, index in vocabulary.items()}
    return [names[token] for token in ids.tolist()]


def test_special_tokens_are_added_as_the_tokenizer_does() -> None:
    tokenizer = word_tokenizer()

    assert words(tokenizer, tokenizer.encode_prompt("the cat")) == ["<s>", "▁the", "▁cat"]
    assert words(tokenizer, tokenizer.encode_prompt("the cat", add_special_tokens=False)) == ["▁the", "▁cat"]


def test_there_is_never_a_second_bos() -> None:
    tokenizer = word_tokenizer()

    assert words(tokenizer, tokenizer.encode_prompt("<s>the cat"))[:2] == ["<s>", "▁the"]
    assert words(tokenizer, tokenizer.encode_prompt("<s>"))[:2] == ["<s>"]


def test_a_completion_is_encoded_as_it_follows_its_prompt() -> None:
    tokenizer = word_tokenizer()

    assert words(tokenizer, tokenizer.encode_completion("the cat", " sat")) == ["▁sat"]
    assert words(tokenizer, tokenizer.encode_completion(None, "sat")) == ["▁sat"]
    assert len(tokenizer.encode_completion("the cat", "")) == 0


def test_a_completion_that_would_change_its_prompts_tokens_is_encoded_alone() -> None:
    tokenizer = word_tokenizer()

    assert words(tokenizer, tokenizer.encode_prompt("the cats")) == ["<s>", "▁the", "▁cats"]
    assert words(tokenizer, tokenizer.encode_completion("the cat", "s")) == ["▁s"]


@pytest.mark.parametrize("ids", [[], [0], [2, 3, 4]])
def test_every_token_has_a_string(ids: list[int]) -> None:
    assert len(word_tokenizer().token_strings(np.array(ids, dtype=np.int32))) == len(ids)
