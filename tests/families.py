"""A tiny randomly initialised model of every causal family that the installed transformers can build.

The weights are large and the windows short, so that a mask, cap or scale that is left out shows.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 211
GAIN = 1.25
HEAD_GAIN = 2.0

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
}
_UNDECLARED = {"global_head_dim", "num_global_key_value_heads", "is_decoder"}  # read out of **kwargs

_SLIDING, _FULL, _LINEAR, _CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
_WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": [_SLIDING, _FULL, _SLIDING]}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
# So many heads that no score is exactly zero, for how a tie between zeros falls depends on the length.
_INDEX: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_DELTA: dict[str, Any] = {
    "layer_types": [_LINEAR, _FULL, _LINEAR],
    "rms_norm_eps": 1e-3,  # the outputs are normalised, and the first of them may be next to nothing
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_SCALES: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 0.8,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
}

_BLT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def _rope(kind: str, theta: float = 10000.0, **own: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **own}


_LLAMA3 = _rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=32)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[1.0 + 0.7 * i for i in range(8)],
    original_max_position_embeddings=32,
)


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    config: Callable[[], PreTrainedConfig]
    notes: str = ""
    gain: float = GAIN


def _config(model_type: str, own: dict[str, Any]) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    names = {field.name for field in fields(kind)}
    aliases = {name: name if name in names else kind.attribute_map.get(name, name) for name in _BASE}
    base = {aliases[name]: value for name, value in _BASE.items() if aliases[name] in names}
    if unknown := own.keys() - names - _UNDECLARED:
        raise TypeError(f"{kind.__name__} has no {sorted(unknown)}")
    config: PreTrainedConfig = kind(**deepcopy(base | own))
    return config


def _family(name: str, model_type: str, notes: str = "", gain: float = GAIN, **own: Any) -> Family:
    return Family(name, partial(_config, model_type, own), notes, gain)


# fmt: off
_DECODERS: dict[str, str] = {
    "BART": "bart", "BERT": "bert", "BERT generation": "bert-generation",
    "BigBird-Pegasus": "bigbird_pegasus", "Blenderbot": "blenderbot", "Blenderbot small": "blenderbot-small",
    "CamemBERT": "camembert", "data2vec": "data2vec-text", "ELECTRA": "electra", "ERNIE": "ernie",
    "Marian": "marian", "mBART": "mbart", "Megatron-BERT": "megatron-bert", "MVP": "mvp",
    "Pegasus": "pegasus", "PLBart": "plbart", "RoBERTa": "roberta",
    "RoBERTa, pre-norm": "roberta-prelayernorm", "RoFormer": "roformer", "TrOCR": "trocr",
    "Whisper": "whisper", "XLM-RoBERTa": "xlm-roberta", "XLM-RoBERTa XL": "xlm-roberta-xl",
}

FAMILIES: tuple[Family, ...] = (
    _family("A.X K1", "axk1", "MLA, grouped experts", **_MLA, **_GROUPS, **_DENSE_FIRST),
    _family("A.X K2", "axk2", "MLA, sparse attention of 8 keys, gated norms", **_MLA, **_INDEX,
        **_DENSE_FIRST),
    _family("AFMoE", "afmoe", "window 8, dense then sparse layers, muP", route_scale=1.7, mup_enabled=True,
        **_WINDOWS),
    _family("Apertus", "apertus", "xIELU, query and key norms, llama3 rope", rope_parameters=_LLAMA3),
    _family("Apertus 1.5", "apertus1p5_text", "xIELU, query and key norms, llama3 rope",
        rope_parameters=_LLAMA3),
    _family("Arcee", "arcee", "squared ReLU"),
    _family("Aria", "aria_text", "shared experts", moe_num_experts=4),
    _family("Bailing hybrid", "bailing_hybrid", "KDA and MLA, grouped experts", gain=1.0, **_MLA,
        layer_types=[_LINEAR, _FULL, _LINEAR], **_DENSE_FIRST, n_group=2, topk_group=1),
    _family("Bamba", "bamba", "Mamba 2 and attention", attn_layer_indices=[1], **_MAMBA2),
    _family("Beam", "beam", "window 8, logit softcap 5, grouped experts", **_WINDOWS, **_DENSE_FIRST,
        n_group=2, topk_group=1, final_logit_softcapping=5.0),
    _family("BioGPT", "biogpt", "learned positions"),
    _family("BitNet", "bitnet", "squared ReLU, sub-norms"),
    _family("BLOOM", "bloom", "ALiBi"),
    _family("BLT", "blt", "bytes in patches by entropy", encoder_hash_byte_group_size=[2, 3],
        encoder_hash_byte_group_vocab=64, patcher_config=_BLT, encoder_config={**_BLT,
        "hidden_size_global": 64}, decoder_config={**_BLT, "hidden_size_global": 64}, global_config={**_BLT,
        "hidden_size": 64}),
    _family("CodeGen", "codegen", "half the head rotates", rotary_dim=8),
    _family("Cohere", "cohere", "logit scale 1.6, query and key norms", logit_scale=1.6, use_qk_norm=True),
    _family("Cohere 2", "cohere2", "logit scale 1.6, window 8, full layers without rope", logit_scale=1.6,
        **_WINDOWS),
    _family("Cohere 2 MoE", "cohere2_moe", "logit scale 1.6, window 8, a shared expert", logit_scale=1.6,
        num_shared_experts=1, **_WINDOWS),
    _family("Cohere Compass", "cohere_compass_text",
        "logit scale 1.6, window 8, mrope, full layers without rope", logit_scale=1.6, **_WINDOWS,
        rope_parameters={_SLIDING: _rope("default", mrope_section=[4, 2, 2]), _FULL: None}),
    _family("CTRL", "ctrl", "sinusoidal positions", dff=96, bos_token_id=1, eos_token_id=2),
    _family("CWM", "cwm", "window 8, llama3 rope", **_WINDOWS, rope_parameters=_LLAMA3),
    _family("DBRX", "dbrx", "QKV clipped at 2, experts", d_model=64, max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}),
    _family("DeepSeek V2", "deepseek_v2", "MLA, groups of experts, dense then sparse", **_MLA,
        n_routed_experts=8, n_group=4, topk_group=1, topk_method="group_limited_greedy",
        first_k_dense_replace=1, routed_scaling_factor=1.5),
    _family("DeepSeek V3", "deepseek_v3", "MLA, YaRN with mscale, groups of experts with a bias", **_MLA,
        **_GROUPS, first_k_dense_replace=1, rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}),
    _family("DeepSeek V3.2", "deepseek_v32", "MLA, sparse attention of 8 keys", **_MLA, **_GROUPS,
        **_DENSE_FIRST, **_INDEX),
    _family("DeepSeek V4", "deepseek_v4",
        "window 8 with sinks, compressed keys, hyper-connections, hashed experts", num_key_value_heads=1,
        q_lora_rank=24, o_groups=2, o_lora_rank=16, index_n_heads=16, index_head_dim=16, index_topk=4,
        sliding_window=8, partial_rotary_factor=0.5, hc_mult=2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=[_SLIDING, "heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"]),
    _family("DiffLlama", "diffllama", "differential attention"),
    _family("Doge", "doge", "dynamic mask"),
    _family("Dory", "dory", "nGPT on the unit sphere, window 8, recurrent layers", gain=6.0,
        num_hidden_layers=4, n_input_layers=1, n_output_layers=1, sliding_window=8, layer_types=[_SLIDING,
        _FULL, _SLIDING, _FULL]),
    _family("Dots 1", "dots1", "window 8, dense then sparse", first_k_dense_replace=1,
        routed_scaling_factor=1.7, norm_topk_prob=True, **_WINDOWS),
    _family("Dots 3 Note", "dots3_note_text", "MLA, window 8", **_MLA, **_DENSE_FIRST, **_INDEX,
        shared_experts_intermediate_size=48, sliding_window=8, layer_types=[_SLIDING, _FULL, _SLIDING]),
    _family("Emu3", "emu3", "text only", text_config={k: v for k, v in _BASE.items() if k != "head_dim"}),
    _family("ERNIE 4.5", "ernie4_5", "interleaved rope"),
    _family("ERNIE 4.5 MoE", "ernie4_5_moe", "expert bias, a shared expert, dense then sparse",
        moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    _family("EXAONE 3", "exaone", "a Llama"),
    _family("EXAONE 4", "exaone4", "window 8, full layers without rope", **_WINDOWS),
    _family("EXAONE MoE", "exaone_moe", "window 8, groups of experts", **_WINDOWS, n_group=2),
    _family("Falcon", "falcon", "one key head, parallel"),
    _family("Falcon Mamba", "falcon_mamba", "Mamba 1 with norms", state_size=8),
    _family("Falcon, ALiBi", "falcon", "ALiBi, sequential, biases", alibi=True, multi_query=False,
        parallel_attn=False, bias=True),
    _family("Falcon, new decoder", "falcon", "grouped keys, two norms", new_decoder_architecture=True,
        num_kv_heads=2),
    _family("Falcon-H1", "falcon_h1", "Mamba 2 beside attention, all multipliers", mamba_d_ssm=64,
        mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16,
        mamba_rms_norm=True, lm_head_multiplier=1.5, embedding_multiplier=2.0, mlp_multipliers=[0.7, 1.4],
        key_multiplier=0.6, attention_out_multiplier=1.3, attention_in_multiplier=0.8, ssm_multipliers=[0.7,
        1.2, 0.8, 1.3, 0.9], ssm_in_multiplier=1.2, ssm_out_multiplier=0.8),
    _family("FlexOlmo", "flex_olmo", "query and key norms, experts"),
    _family("Flint", "flint", "window 8, dense then sparse", **_WINDOWS, mlp_only_layers=[0]),
    _family("Gemma 1", "gemma", "head_dim 32", head_dim=32),
    _family("Gemma 2", "gemma2", "window 8, softcap 3, logit softcap 5", head_dim=32,
        query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, **_WINDOWS),
    _family("Gemma 3", "gemma3_text", "window 8, two ropes, one linear", head_dim=32,
        query_pre_attn_scalar=24, **_WINDOWS, rope_parameters={_SLIDING: _rope("default"),
        _FULL: _rope("linear", 1e6, factor=8.0)}),
    _family("Gemma 3n", "gemma3n_text", "window 8, logit softcap 5, shared keys, AltUp, sparse activations",
        num_hidden_layers=4, sliding_window=8, layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=8,
        laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        final_logit_softcapping=5.0),
    _family("Gemma 4", "gemma4_text",
        "window 8, logit softcap 5, shared keys, wider full heads, per-layer inputs", num_hidden_layers=4,
        sliding_window=8, layer_types=[_SLIDING, _FULL, _SLIDING, _FULL], global_head_dim=32,
        num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=8,
        final_logit_softcapping=5.0),
    _family("Gemma 4 MoE", "gemma4_text", "window 8, logit softcap 5, keys as values, experts",
        num_hidden_layers=2, sliding_window=8, layer_types=[_SLIDING, _FULL], global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        final_logit_softcapping=5.0, enable_moe_block=True, top_k_experts=2),
    _family("Gemma 4 unified", "gemma4_unified_text", "window 8, logit softcap 5, wider full heads",
        num_hidden_layers=2, sliding_window=8, layer_types=[_SLIDING, _FULL], global_head_dim=32,
        final_logit_softcapping=5.0),
    _family("GLM", "glm", "interleaved half rope"),
    _family("GLM MoE DSA", "glm_moe_dsa", "MLA, sparse attention of 8 keys", **_MLA, **_DENSE_FIRST,
        **_INDEX),
    _family("GLM-4", "glm4", "interleaved half rope, sandwich norms"),
    _family("GLM-4 MoE", "glm4_moe", "half rope, query and key norms, expert bias", first_k_dense_replace=1,
        use_qk_norm=True, routed_scaling_factor=1.5),
    _family("GLM-4 MoE Lite", "glm4_moe_lite", "MLA, dense then sparse", **_MLA, **_DENSE_FIRST),
    _family("GPT-1", "openai-gpt", "learned positions, post-norm"),
    _family("GPT-2", "gpt2", "learned positions, scores over the layer's number",
        scale_attn_by_inverse_layer_idx=True),
    _family("GPT-J", "gptj", "interleaved half rope, parallel", rotary_dim=8),
    _family("GPT-Neo", "gpt_neo", "local window 8, unscaled scores", window_size=8, num_layers=2,
        attention_types=[[["global", "local"], 1]]),
    _family("GPT-NeoX", "gpt_neox", "a quarter rotates, parallel", rope_parameters=_rope("default",
        partial_rotary_factor=0.25)),
    _family("GPT-NeoX Japanese", "gpt_neox_japanese", "half rope, parallel"),
    _family("gpt-oss", "gpt_oss", "sinks, window 8, YaRN", **_WINDOWS, rope_parameters=_YARN),
    _family("GPTBigCode", "gpt_bigcode", "one key head"),
    _family("Granite", "granite", "all multipliers", **_SCALES),
    _family("Granite hybrid", "granitemoehybrid", "all multipliers, Mamba 2 and attention", gain=1.0,
        **_SCALES, **_MAMBA2, shared_intermediate_size=48, layer_types=[_LINEAR, _FULL, _LINEAR],
        position_embedding_type="rope"),
    _family("Granite MoE", "granitemoe", "all multipliers", **_SCALES),
    _family("Granite MoE shared", "granitemoeshared", "all multipliers, a shared expert", **_SCALES,
        shared_intermediate_size=48),
    _family("Granite MoE SWA", "granitemoe_swa", "all multipliers, window 8 with sinks", **_SCALES,
        **_WINDOWS),
    _family("Granite SWA", "granite_swa", "all multipliers, window 8 with sinks", **_SCALES, **_WINDOWS),
    _family("Helium", "helium", "interleaved rope"),
    _family("HRM", "hrm_text", "layers repeated in cycles", num_layers_per_stack=1),
    _family("Hunyuan dense", "hunyuan_v1_dense", "query and key norms after rope"),
    _family("Hunyuan MoE", "hunyuan_v1_moe", "query and key norms after rope", moe_topk=2),
    _family("HY V3", "hy_v3", "expert bias, dense then sparse"),
    _family("HY V4", "hy_v4", "MLA, sparse attention of 8 keys, sinks, hyper-connections", **_MLA, **_INDEX,
        hc_mult=2),
    _family("HyperCLOVA X", "hyperclovax", "all multipliers, sandwich norms",
        **_SCALES | {"logits_scaling": 1.5}),
    _family("Inkling", "inkling_text", "window 8, relative positions, convolutions, logit multiplier",
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=8, d_rel=4,
        rel_extent=32, logits_mup_width_multiplier=0.8, layer_types=["hybrid_sliding", "hybrid",
        "hybrid_sliding"], **_DENSE_FIRST),
    _family("Inkling 2", "inkling2_text", "window 8, relative positions, logit softcap, log scaling",
        unpadded_vocab_size=VOCAB_SIZE, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=8, d_rel=4, rel_extent=32, log_scaling_n_floor=8, layer_types=["hybrid_sliding",
        "hybrid", "hybrid_sliding"], n_layers_per_attn_res_block=2),
    _family("Inkling 2 loop", "inkling2_loop_text", "window 8, a looped layer",
        unpadded_vocab_size=VOCAB_SIZE, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=8, d_rel=4, rel_extent=32, log_scaling_n_floor=8, layer_types=["hybrid_sliding",
        "hybrid", "hybrid_sliding"], n_layers_per_attn_res_block=1, loop_layer_index_start=1,
        loop_layer_index_end=2, loop_num_passes=2, loop_gate_rank=8),
    _family("InternLM 3", "internlm3", "a Llama"),
    _family("IQuestCoder", "iquestcoder", "a Llama"),
    _family("Jais 2", "jais2", "LayerNorm, squared ReLU, biases"),
    _family("Jamba", "jamba", "Mamba 1 and attention without rope, experts", gain=1.0, num_hidden_layers=4,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    _family("JetMoe", "jetmoe", "attention of experts", kv_channels=16),
    _family("Kimi Linear", "kimi_linear", "KDA and MLA", **_MLA, **_DENSE_FIRST, layer_types=[_LINEAR, _FULL,
        _LINEAR], linear_head_dim=16, linear_num_heads=4),
    _family("Kolibri 1", "kolibri1", "window 8, a shared expert", **_WINDOWS),
    _family("Laguna", "laguna", "window 8, 4, 2, 4 heads, two ropes, gates", **_WINDOWS,
        num_attention_heads_per_layer=[4, 2, 4], moe_routed_scaling_factor=1.5),
    _family("Lara mini", "lara_mini", "gated delta net, window 8 and full", gain=1.0,
        **_DELTA | {"layer_types": [_LINEAR, _SLIDING, _FULL]}, sliding_window=8),
    _family("LFM2", "lfm2", "convolutions and attention", layer_types=[_CONV, _FULL, _CONV]),
    _family("LFM2 MoE", "lfm2_moe", "convolutions and attention, expert bias", layer_types=[_CONV, _FULL,
        _CONV], num_dense_layers=1),
    _family("LFM3", "lfm3", "convolutions, window 8 and full", layer_types=[_CONV, _SLIDING, _FULL],
        sliding_window=8),
    _family("Llama 2", "llama", "grouped keys"),
    _family("Llama 3", "llama", "llama3 rope", rope_parameters=_LLAMA3),
    _family("Llama 4", "llama4_text", "chunks of 8, layers without rope, attention temperature, experts",
        num_hidden_layers=4, intermediate_size_mlp=96, num_experts_per_tok=1, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 0], attention_chunk_size=8, floor_scale=4, attn_scale=0.5),
    _family("Llama, dynamic rope", "llama", "rope that depends on the length above 32",
        max_position_embeddings=32, rope_parameters=_rope("dynamic", factor=4.0)),
    _family("LongCat Flash", "longcat_flash", "MLA twice a layer, experts that do nothing", **_MLA,
        head_dim=8, num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=32, moe_topk=2,
        zero_expert_num=2),
    _family("Mamba 1", "mamba", "no attention", state_size=8),
    _family("Mamba 2", "mamba2", "no attention, chunks of 16", num_heads=8, head_dim=16, state_size=16,
        n_groups=2, chunk_size=16),
    _family("Mellum", "mellum", "window 8, experts", **_WINDOWS),
    _family("MiMo V2 Flash", "mimo_v2_flash", "window 8 with sinks, values of another size, value scale",
        v_head_dim=12, **_WINDOWS, **_DENSE_FIRST),
    _family("MiniCPM3", "minicpm3", "MLA, embedding, depth and logit scales", **_MLA, dim_model_base=96),
    _family("MiniMax", "minimax", "lightning attention in blocks of 16, residual factors",
        layer_types=[_LINEAR, _FULL, _LINEAR], block_size=16, full_attn_alpha_factor=1.2,
        full_attn_beta_factor=0.8, linear_attn_alpha_factor=1.3, linear_attn_beta_factor=0.7,
        mlp_alpha_factor=0.9, mlp_beta_factor=1.1),
    _family("MiniMax M2", "minimax_m2", "half rope, query and key norms, expert bias",
        rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    _family("MiniMax M3", "minimax_m3_vl_text", "sparse attention of blocks of 8, half rope",
        dense_intermediate_size=96, shared_intermediate_size=48, rotary_dim=8, index_n_heads=2,
        index_head_dim=16, index_block_size=8, index_topk_blocks=2, **_DENSE_FIRST,
        layer_types=[_FULL, "minimax_m3_sparse", "minimax_m3_sparse"]),
    _family("Ministral", "ministral", "window 8 and full", **_WINDOWS),
    _family("Ministral 3", "ministral3", "YaRN, attention temperature",
        rope_parameters=_YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}),
    _family("Mistral", "mistral", "window 8", sliding_window=8),
    _family("Mixtral", "mixtral", "experts"),
    _family("ModernBERT decoder", "modernbert-decoder", "window 8 and full", local_attention=8,
        cls_token_id=1, sep_token_id=2,
        layer_types=[_SLIDING, _FULL, _SLIDING]),
    _family("MPT", "mpt", "ALiBi, scale 0.4, QKV clipped at 2", max_seq_len=256, attn_config={"clip_qkv": 2.0,
        "softmax_scale": 0.4}),
    _family("nanochat", "nanochat", "logit softcap 5, norms without weights", final_logit_softcapping=5.0),
    _family("Nemotron", "nemotron", "half rope, squared ReLU, norms of 1 + w", gain=0.8),
    _family("Nemotron-H", "nemotron_h", "Mamba 2, experts, attention without rope, MLP",
        layers_block_type=[_LINEAR, "moe", _FULL, "mlp"], ssm_state_size=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, chunk_size=16, moe_shared_expert_intermediate_size=48),
    _family("OLMo", "olmo", "QKV clipped at 2, norms without weights", clip_qkv=2.0),
    _family("OLMo 2", "olmo2", "post-norm, query and key norms"),
    _family("OLMo 3", "olmo3", "window 8, post-norm", **_WINDOWS),
    _family("OLMo hybrid", "olmo_hybrid", "gated delta net with negative eigenvalues", **_DELTA),
    _family("OLMoE", "olmoe", "QKV clipped at 2", clip_qkv=2.0),
    _family("OPT", "opt", "learned positions with an offset", ffn_dim=96),
    _family("OPT, post-norm", "opt", "post-norm, projected embeddings", ffn_dim=96,
        do_layer_norm_before=False, word_embed_proj_dim=32),
    _family("Persimmon", "persimmon", "half rope, query and key norms", rope_parameters=_rope("default",
        partial_rotary_factor=0.5)),
    _family("Phi", "phi", "half rope, parallel, query and key norms", qk_layernorm=True,
        rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    _family("Phi-3", "phi3", "window 8", sliding_window=8),
    _family("Phi-3, longrope", "phi3", "longrope that switches at 32", max_position_embeddings=128,
        original_max_position_embeddings=32, rope_parameters=_LONGROPE),
    _family("Phi-4 multimodal", "phi4_multimodal", "text only, longrope that switches at 32",
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "crop_size": 28}, audio_config={"hidden_size": 32,
        "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 32,
        "nemo_conv_channels": 32, "conv_chunk_size": -1}, original_max_position_embeddings=32,
        max_position_embeddings=128, rope_parameters=_LONGROPE),
    _family("PhiMoE", "phimoe", "sparse mixer, biases", lm_head_bias=True, attention_bias=True),
    _family("Qwen2", "qwen2", "QKV biases"),
    _family("Qwen2 MoE", "qwen2_moe", "a gated shared expert, dense then sparse", mlp_only_layers=[0]),
    _family("Qwen2, sliding", "qwen2", "window 8 from layer 1", use_sliding_window=True, sliding_window=8,
        max_window_layers=1),
    _family("Qwen3", "qwen3", "query and key norms, YaRN", rope_parameters=_YARN),
    _family("Qwen3 MoE", "qwen3_moe", "query and key norms, dense then sparse", mlp_only_layers=[0],
        norm_topk_prob=True),
    _family("Qwen3-Next", "qwen3_next", "gated delta net and gated attention, experts", gain=1.0, **_DELTA),
    _family("Qwen3.5", "qwen3_5_text", "gated delta net and gated attention, mrope", gain=1.0, **_DELTA),
    _family("Qwen3.5 MoE", "qwen3_5_moe_text", "gated delta net and gated attention, experts", gain=1.0,
        **_DELTA),
    _family("Qwen4 exp", "qwen4_exp_text",
        "gated delta net, sparse attention by blocks of 4, hyper-connections", gain=1.0,
        **_DELTA | {"layer_types": [_LINEAR, "indexed_attention", _LINEAR]}, hc_count=2, hc_lowrank=8,
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
        indexer_compress_ratio=4),
    _family("RecurrentGemma", "recurrent_gemma", "RG-LRU, window 8, logit softcap 5", attention_window_size=8,
        lru_width=64, logits_soft_cap=5.0),
    _family("RWKV", "rwkv", "RWKV 4", context_length=256, attention_hidden_size=64),
    _family("Sarvam MLA", "sarvam_mla", "a DeepSeek V3 without query compression", **_MLA),
    _family("Sarvam MoE", "sarvam_moe", "a GLM-4 MoE"),
    _family("Seed-OSS", "seed_oss", "biases", attention_out_bias=True),
    _family("SmolLM3", "smollm3", "every second layer without rope", no_rope_layer_interval=2),
    _family("Solar Open", "solar_open", "experts with a bias"),
    _family("StableLM", "stablelm", "quarter rope, parallel, query and key norms", use_qkv_bias=True,
        qk_layernorm=True, use_parallel_residual=True),
    _family("StarCoder2", "starcoder2", "window 8", sliding_window=8),
    _family("VaultGemma", "vaultgemma", "window 8, softcap 3, logit softcap 5", head_dim=32,
        query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, **_WINDOWS),
    _family("XGLM", "xglm", "sinusoidal positions", ffn_dim=96),
    _family("XLM", "xlm", "post-norm", causal=True, emb_dim=64, n_layers=2, n_heads=4),
    _family("XLNet", "xlnet", "relative positions, the permutation mask off", attn_type="uni", d_inner=96),
    _family("xLSTM", "xlstm", "no attention, soft caps", chunk_size=16),
    _family("Youtu", "youtu", "MLA", **_MLA),
    _family("Zamba", "zamba", "Mamba 1, shared attention", gain=1.0, layers_block_type=[_LINEAR, "hybrid",
        _LINEAR, "hybrid"], num_hidden_layers=4, mamba_d_state=8),
    _family("Zamba2", "zamba2", "Mamba 2, shared attention with adapters and rope", gain=1.0,
        num_key_value_heads=4, layers_block_type=[_LINEAR, "hybrid", _LINEAR, "hybrid"], num_hidden_layers=4,
        mamba_d_state=16, mamba_ngroups=2, n_mamba_heads=8, num_mem_blocks=1, use_mem_rope=True,
        use_shared_attention_adapter=True, adapter_rank=8, chunk_size=16),
    _family("Zaya", "zaya", "compressed convolutional attention, window 8", num_experts_per_tok=1,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], sliding_window=8, router_hidden_size=16),
    _family("BigBird", "big_bird", "the decoder alone", is_decoder=True, attention_type="original_full"),
    _family("RemBERT", "rembert", "the decoder alone", is_decoder=True, input_embedding_size=32,
        output_embedding_size=32),
    _family("RoCBert", "roc_bert", "the decoder alone", is_decoder=True, pronunciation_vocab_size=16,
        shape_vocab_size=16, pronunciation_embed_dim=8, shape_embed_dim=8),
    _family("X-MOD", "xmod", "the decoder alone", is_decoder=True, languages=["en"], default_language="en"),
    *(_family(name, kind, "the decoder alone", is_decoder=True) for name, kind in _DECODERS.items()),
)
# fmt: on

# Every other entry of the causal mapping, and why it has no model here.
UNAVAILABLE: dict[str, str] = {
    "CPM-Ant": "It is not causal: its prompt and context attend in both directions.",
    "Doge MoE": "Its router mixes the tokens of a forward, as its own code says, so it is not causal.",
    "Fuyu": "It reads images; its text model is Persimmon.",
    "Gemma 4 assistant": "It drafts for a Gemma 4 and needs the hidden states and keys of that model.",
    "GIT": "It describes images; without them it is a BERT decoder.",
    "GOT-OCR 2": "It reads images; its text model is Qwen2.",
    "GPT-SW3": "It is GPT-2 with another tokenizer: the same configuration and code.",
    "Mllama": "It reads images; without them it is Llama 3, as its cross-attention layers are skipped.",
    "MOSS-Transcribe": "It reads audio.",
    "Moshi": "Its text is half of a dialogue in audio.",
    "MusicGen": "It predicts audio codebooks, not text.",
    "ProphetNet": "A token's logits change with the number of the tokens that come after it.",
    "Reformer": "Its hashes are random, and a token's logits change with the number of the tokens after it.",
}

# Decays, steps and mixing weights, whose own initial values are what keeps the recurrence stable.
_STABLE = re.compile(r"A_log|dt_proj|time_(decay|first|mix)|recurrent_param|altup|norm[^.]*(\.weight)?$")
_BUFFERS = re.compile(r"(correction_bias|expert_bias|balancing_biases|layer_scalar)$")


def build(family: Family, seed: int = 0) -> PreTrainedModel:
    """The family's tiny model in float32, ready for inference; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(family.config())
    _reinitialise(model, family.gain, torch.Generator().manual_seed(seed))
    model.float().eval().requires_grad_(False)
    return model


@torch.no_grad()
def _reinitialise(model: PreTrainedModel, gain: float, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.sub_(weight.max())  # decays of at most 1, or sums of them over a chunk lose their digits
        if name.endswith("sinks"):
            weight.copy_(noise)
        elif weight.ndim < 2 or _STABLE.search(name):
            weight.add_(0.1 * (weight.abs().mean() or 1.0) * noise)
        else:
            weight.copy_(gain / weight.shape[-1] ** 0.5 * noise)
    model.get_output_embeddings().weight.mul_(HEAD_GAIN)
    for name, buffer in model.named_buffers():
        if _BUFFERS.search(name):
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
