"""Loads a causal language model and says what was loaded. It knows nothing of batches."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from logprobd.engine.gguf import embedded_gguf, folder_of_gguf
from logprobd.engine.ranks import ALONE, Ranks, held, whole
from logprobd.messages import ModelInfo, TokenizerInfo
from logprobd.settings import ModelSettings

EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
UNBOUNDED_POSITIONS = 131_072  # for families without a longest sequence, such as Mamba
# Parts of a configuration that say where a model came from, not what it computes.
NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "distributed_config")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRefusedError(Exception):
    """The model cannot be served; the message is a sentence for whoever started the service."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in evaluation mode on its device, its identity, and its tokenizer for the HTTP process."""

    model: PreTrainedModel
    device: torch.device
    info: ModelInfo
    tokenizer: TokenizerInfo
    head_dtype: torch.dtype | None
    autocast: bool
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: what transformers loads, and the name it is served under."""

    location: str
    name: str


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU, or the CPU where there is none."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelRefusedError(f"--devices {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def weight_bytes(model: torch.nn.Module) -> int:
    """What this process holds of the weights."""
    return sum(held(parameter).nbytes for parameter in model.parameters())


def load(
    settings: ModelSettings, device: torch.device, tell: Callable[[str], None] = print, ranks: Ranks = ALONE
) -> LoadedModel:
    """Load what the settings name; raises ModelRefusedError with a sentence if it cannot be.

    `tell` hears of steps that take long. Of several ranks each loads its part.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = resolve(settings, tell)
    options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=dtype_for(settings, device),
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **parts_of(ranks, source, options),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        hint = "" if "trust_remote_code" not in str(error) else "; --trust-remote-code runs it, if you trust it"
        raise ModelRefusedError(f"{source.name} cannot be loaded: {one_line(error)}{hint}") from error
    model, loading = read
    refuse_missing(source, loading)
    tokenizer = load_tokenizer(source, settings)
    return describe(prepare(model, device), source, settings, device, tokenizer, ranks)


def parts_of(ranks: Ranks, source: Source, options: dict[str, Any]) -> dict[str, Any]:
    """What has transformers spread a model over ranks, by the plan that it has for the family."""
    if ranks.size == 1:
        return {}
    config = text_config(AutoConfig.from_pretrained(source.location, **options))
    if not config.base_model_tp_plan:
        raise ModelRefusedError(f"transformers has no plan for spreading {config.model_type} over several devices")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None) or 0) % ranks.size:
            raise ModelRefusedError(f"{source.name} has {name} {heads}, which {ranks.size} devices cannot share evenly")
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks.size)}


def resolve(settings: ModelSettings, tell: Callable[[str], None]) -> Source:
    """The embedded default, a GGUF file, a folder or a Hub id, as something transformers can load."""
    if settings.model is None:
        gguf = embedded_gguf()
        if gguf is None:
            return Source(EMBEDDED_HUB_ID, EMBEDDED_HUB_ID)
        return Source(str(folder_of_gguf(gguf, settings.cache_dir, tell)), "SmolLM2-135M-Instruct")
    path = Path(settings.model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelRefusedError(f"--model {path} does not exist")
        return Source(str(folder_of_gguf(path, settings.cache_dir, tell)), path.stem)
    if path.is_dir():
        refuse_pickled(path)
        return Source(str(path.resolve()), path.resolve().name)
    if path.is_absolute() or settings.model.startswith((".", "~")):
        raise ModelRefusedError(f"--model {path} does not exist")
    return Source(settings.model, settings.model)


def refuse_missing(source: Source, loading: dict[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers; those are never served."""
    lacking = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in loading.get(kind) or ())
    if lacking:
        raise ModelRefusedError(f"{source.name} lacks {len(lacking)} weights, {lacking[0]} among them")


def refuse_pickled(folder: Path) -> None:
    """Pickled weights run code when they are loaded: only safetensors are read."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = next((found.name for pattern in PICKLED for found in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ModelRefusedError(
            f"{folder} holds pickled weights ({pickled}), which can run code when loaded; convert them once, where "
            "you trust them: AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False)"
            ".save_pretrained(NEW_FOLDER)"
        )
    raise ModelRefusedError(f"{folder} holds no *.safetensors file")


def dtype_for(settings: ModelSettings, device: torch.device) -> torch.dtype | str:
    """The dtype of the weights: "auto" is float32 on a CPU, and the checkpoint's own elsewhere."""
    if settings.precision == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return torch.float32 if settings.precision == "autocast" else _DTYPES[settings.precision]


def prepare(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Put a model on its device, for inference only."""
    module: torch.nn.Module = model
    module.to(device).eval().requires_grad_(False)
    model.config.use_cache = False
    return model


def describe(
    model: PreTrainedModel,
    source: Source,
    settings: ModelSettings,
    device: torch.device,
    tokenizer: TokenizerInfo,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Say what was loaded, in the words of the wire."""
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    precision = "autocast" if settings.precision == "autocast" else weights
    head_precision = "float32" if settings.head_precision == "float32" else precision
    info = ModelInfo(
        id=source.name,
        path=source.location,
        family=model.config.model_type,
        fingerprint=fingerprint(model),
        precision=precision,
        head_precision=head_precision,
        vocab_size=vocab_size(model),
        max_positions=max_positions(model.config),
    )
    head_dtype = torch.float32 if head_precision != precision else None
    return LoadedModel(model, device, info, tokenizer, head_dtype, precision == "autocast", ranks)


def load_tokenizer(source: Source, settings: ModelSettings) -> TokenizerInfo:
    """The tokenizer as transformers sets it up, in the form that needs no transformers to be used."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer or source.location,
            revision=None if settings.tokenizer else settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
        backend = tokenizer.backend_tokenizer
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        if settings.tokenizer:
            raise ModelRefusedError(f"--tokenizer {settings.tokenizer} cannot be loaded: {one_line(error)}") from error
        return TokenizerInfo(None, None)
    return TokenizerInfo(backend.to_str(), tokenizer.bos_token_id)


def vocab_size(model: PreTrainedModel) -> int:
    """The number of ids that can be both read and predicted."""
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    sizes: list[int] = [module.weight.shape[0] for module in modules if module is not None]
    return min(sizes, default=text_config(model.config).vocab_size)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model inside a multimodal one, or the configuration itself."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


def max_positions(config: PreTrainedConfig) -> int:
    """The longest sequence that the model was made for."""
    text = text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"):
        if isinstance(value := getattr(text, name, None), int):
            return value
    return UNBOUNDED_POSITIONS


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of the configuration and of every weight, as 16 hexadecimal digits.

    Each tensor enters by two sums of its bits (plain, and weighted by position, modulo 2**64): every
    weight counts, and it costs no more than reading them once, on whatever device they are.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_IDENTITY}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8)
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.numel() or held(tensor).data_ptr() in seen:
            continue
        seen.add(held(tensor).data_ptr())
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {bit_sums(whole(tensor))}".encode())
    return digest.hexdigest()


def bit_sums(tensor: torch.Tensor, chunk: int = 1 << 22) -> tuple[int, int]:
    """Sums of a tensor's bytes, taken as integers of its item size: plain and weighted by position."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    weights = torch.arange(1, min(chunk, len(flat)) + 1, device=tensor.device) * 2 + 1
    plain = weighted = 0
    for number, part in enumerate(flat.split(chunk)):
        wide = part.to(torch.int64)
        plain += int(wide.sum())
        weighted += (number + 1) * int((wide * weights[: len(part)]).sum())
    return plain % 2**64, weighted % 2**64


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
