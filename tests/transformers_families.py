"""Tiny random models of the families of transformers whose attention has windows, chunks or chosen keys."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 512, "sliding_window": 8, "attention_chunk_size": 8, "local_attention": 16,
    "use_sliding_window": True, "max_window_layers": 2, "global_attn_every_n_layers": 2, "num_kv_shared_layers": 0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "query_pre_attn_scalar": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""Given to every configuration that knows the name."""

_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_ZAYA = {"layer_types": ["hybrid", "hybrid_sliding"] * 2}
_MLA = {
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "q_lora_rank": 16, "kv_lora_rank": 12,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "n_shared_experts": 1,
    "num_hidden_layers": 2,
}  # fmt: skip
_REUSING = {**_MLA, "indexer_types": ["full", "shared"]}
_LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_M_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_M_ROPES = {"rope_parameters": dict.fromkeys(_MIXED["layer_types"], _M_ROPE["rope_parameters"])}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", "AfmoeForCausalLM", {"num_dense_layers": 1}),
    "beam": ("BeamConfig", "BeamForCausalLM", {}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {}),
    "cohere2_moe": ("Cohere2MoeConfig", "Cohere2MoeForCausalLM", {}),
    "cohere_compass": ("CohereCompassTextConfig", "CohereCompassForCausalLM", {**_MIXED, **_M_ROPES}),
    "cwm": ("CwmConfig", "CwmForCausalLM", {}),
    "dory": ("DoryConfig", "DoryForCausalLM", {"n_input_layers": 1, "n_output_layers": 1}),
    "diffusion_gemma": ("DiffusionGemmaTextConfig", "DiffusionGemmaEncoderTextModel", {"top_k_experts": 2}),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", {"n_shared_experts": 1, "routed_scaling_factor": 1.0}),
    "embedding_gemma2": ("EmbeddingGemma2TextConfig", "EmbeddingGemma2TextModel", {}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {}),
    "exaone_moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM", {}),
    "flint": ("FlintConfig", "FlintForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _MIXED),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", _MIXED),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", {}),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {}),
    "granite_swa": ("GraniteSWAConfig", "GraniteSWAForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM", {}),
    "kolibri1": ("Kolibri1Config", "Kolibri1ForCausalLM", _MIXED),
    "inkling": ("InklingTextConfig", "InklingForCausalLM", {}),
    "laguna": ("LagunaConfig", "LagunaForCausalLM", _MIXED),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM", _LINEAR),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {}),
    "mellum": ("MellumConfig", "MellumForCausalLM", _MIXED),
    "mimo_v2_flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", {}),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {}),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", {}),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {}),
    "modernbert": ("ModernBertConfig", "ModernBertModel", {}),
    "modernbert_decoder": ("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", {}),
    "muse_glimmer": ("MuseGlimmerTextConfig", "MuseGlimmerTextModel", {}),
    "muse_spark": ("MuseSparkTextConfig", "MuseSparkTextModel", {}),
    "neomme": ("NeoMMEConfig", "NeoMMEModel", {"head_dim": 16}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2_5_omni": ("Qwen2_5OmniTextConfig", "Qwen2_5OmniThinkerTextModel", _M_ROPE),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLTextModel", _M_ROPE),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {}),
    "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLTextModel", _M_ROPE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {}),
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {"attention_window_size": 8}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "step3p7": ("Step3p7TextConfig", "Step3p7TextModel", _MIXED),
    "ultrabert": ("UltrabertConfig", "UltrabertModel", {}),
    "vaultgemma": ("VaultGemmaConfig", "VaultGemmaForCausalLM", {}),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", {"num_experts_per_tok": 1, **_ZAYA}),
    "unlimited_ocr": ("UnlimitedOcrTextConfig", "UnlimitedOcrTextModel", {"num_key_value_heads": 4}),
}
"""Configuration, model, and what the configuration needs besides."""

CHOOSING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axk2": ("AXK2Config", "AXK2ForCausalLM", {**_MLA, "gated_norm_rank": 4}),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _MLA),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM", {}),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {
            **_MLA,
            "shared_experts_intermediate_size": 16,
            "layer_types": ["sliding_attention", "indexed_attention"],
        },
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        {
            **_MLA,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "qk_nope_head_dim": 12,
            "indexer_types": ["full", "full"],
            "layer_types": ["indexed_attention", "linear_attention"],
            "index_kpool": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _REUSING),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", {**_REUSING, "hc_mult": 2}),
    "minimax_m3_vl": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            "rotary_dim": 4,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
        },
    ),
    "mistral_large4": (
        "MistralLarge4TextConfig",
        "MistralLarge4TextModel",
        {**_REUSING, "kv_source_layers": [0, 0], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **_LINEAR,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
}
"""Families that choose the keys of each query: the same as above."""

FULL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}),
    "bert": ("BertConfig", "BertLMHeadModel", {"is_decoder": True}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_MLA, "num_hidden_layers": 2}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
}
"""Families whose layers all see every key before a query: the same as above."""

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BIASED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mt5": ("MT5Config", "MT5EncoderModel", _T5),
    "t5": ("T5Config", "T5EncoderModel", _T5),
    "umt5": ("UMT5Config", "UMT5EncoderModel", {**_T5, "is_encoder_decoder": False}),
}
"""Encoders that add a bias by the difference of positions to their scores: the same as above."""

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "doge": ("DogeConfig", "DogeForCausalLM", {}, "computes with its mask"),
    "inkling2": ("Inkling2TextConfig", "Inkling2ForCausalLM", {}, "sinks: a sink for each query .*eager"),
    "inkling2_loop": ("Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", {}, "sinks: a sink for each query .*eager"),
}
"""The same, and words of the error."""


def _known(config: type[PreTrainedConfig]) -> set[str]:
    names: set[str] = set()
    for base in config.__mro__:
        names |= set(vars(base).get("__annotations__", {})) | set(inspect.signature(base.__init__).parameters)
    return names


def build(family: str, implementation: str, **changes: Any) -> PreTrainedModel:
    """Return a model in evaluation mode, with the same weights for every implementation. changes: of its options."""
    config_name, model_name, options = {**FAMILIES, **CHOOSING, **FULL, **BIASED, **REFUSED}[family][:3]
    pytest.importorskip(f"transformers.models.{family}", reason=f"this version of transformers has no {family}")
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config_class = getattr(module, config_name)
    known = _known(config_class)
    config = config_class(**{**{name: x for name, x in SMALL.items() if name in known}, **options, **changes})
    config._attn_implementation = implementation
    model_class = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), model_name)
    torch.manual_seed(0)
    return model_class(config).eval()


def _text(**changes: Any) -> dict[str, Any]:
    known = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**{name: SMALL[name] for name in known}, "vocab_size": 97, "sliding_window": 8, **changes}


def _t5gemma() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import T5GemmaConfig, T5GemmaModuleConfig

    text = _text(head_dim=8)
    decoder = T5GemmaModuleConfig(**text, cross_attention_hidden_size=text["hidden_size"])
    config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**text), decoder=decoder, vocab_size=97)
    return config, {"input_ids": _random_tokens(43), "decoder_input_ids": _random_tokens(21)}


def _mimi() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import MimiConfig

    config = MimiConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, sliding_window=8,
        num_filters=4, codebook_size=16, codebook_dim=8, num_quantizers=2, vector_quantization_hidden_dimension=8,
        upsample_groups=32,
    )  # fmt: skip
    return config, {"input_values": torch.randn(1, 1, 48000, generator=torch.Generator().manual_seed(1))}


def _pocket_tts_audio_tokenizer() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import PocketTTSAudioTokenizerConfig

    config = PocketTTSAudioTokenizerConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        sliding_window=8, num_filters=4, upsampling_ratios=[4, 4, 4], upsample_groups=32, latent_dim=8, latent_stride=4,
    )  # fmt: skip
    return config, {"input_values": torch.randn(1, 1, 12000, generator=torch.Generator().manual_seed(1))}


def _qwen3_omni_moe() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

    config = Qwen3OmniMoeCode2WavConfig(**_text(num_key_value_heads=4))
    return config, {"inputs_embeds": torch.randn(2, 43, 32, generator=torch.Generator().manual_seed(1))}


def _phi4_multimodal() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import Phi4MultimodalConfig

    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = Phi4MultimodalConfig(
        **_text(pad_token_id=0, eos_token_id=1, bos_token_id=2),
        vision_config={**tiny, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "crop_size": 28},
        audio_config={**tiny, "num_blocks": 1, "ext_pw_out_channel": 16, "nemo_conv_channels": 16, "input_size": 16},
    )
    return config, {"input_ids": _random_tokens(43)}


def _moonshine_streaming() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import MoonshineStreamingConfig

    sizes = {name: x for name, x in _text(num_key_value_heads=4).items() if name != "sliding_window"}
    encoder = {**sizes, "num_hidden_layers": 3, "sliding_windows": ((9, 4), (9, 0), (9, 9))}
    config = MoonshineStreamingConfig(
        **sizes, encoder_config=encoder, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
    )
    sound = torch.randn(2, 80 * 80, generator=torch.Generator().manual_seed(1))
    heard = torch.ones(2, 80 * 80, dtype=torch.long)
    heard[1, 80 * 50 :] = 0
    tokens = {"decoder_input_ids": _random_tokens(9)}
    return config, {"input_values": sound, "attention_mask": heard, **tokens}


def _voxtral_realtime() -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    from transformers import VoxtralRealtimeConfig

    audio = _text(num_key_value_heads=4, head_dim=8, num_mel_bins=16, max_position_embeddings=256)
    config = VoxtralRealtimeConfig(audio_config=audio, text_config=_text(head_dim=8, pad_token_id=0))
    features = torch.randn(1, 16, 43 * 8, generator=torch.Generator().manual_seed(1))
    return config, {"input_ids": _random_tokens(43)[:1], "input_features": features}


def _random_tokens(count: int) -> Tensor:
    return torch.randint(3, 97, (2, count), generator=torch.Generator().manual_seed(1))


OTHERS: dict[str, tuple[Callable[[], tuple[PreTrainedConfig, dict[str, Tensor]]], str, dict[str, str]]] = {
    "mimi": (_mimi, "MimiModel", {}),
    "moonshine_streaming": (_moonshine_streaming, "MoonshineStreamingForConditionalGeneration", {}),
    "phi4_multimodal": (
        _phi4_multimodal,
        "Phi4MultimodalForCausalLM",
        {"vision_config": "eager", "audio_config": "eager"},
    ),
    "pocket_tts_audio_tokenizer": (_pocket_tts_audio_tokenizer, "PocketTTSAudioTokenizerModel", {}),
    "qwen3_omni_moe": (_qwen3_omni_moe, "Qwen3OmniMoeCode2WavTransformerModel", {}),
    "t5gemma": (_t5gemma, "T5GemmaForConditionalGeneration", {}),
    "voxtral_realtime": (_voxtral_realtime, "VoxtralRealtimeForConditionalGeneration", {}),
}
"""Families with inputs or parts of other kinds: configuration and inputs, model, parts that keep another attention."""


def build_other(family: str, implementation: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a model in evaluation mode, with the same weights for every implementation, and its inputs."""
    make, name, parts = OTHERS[family]
    pytest.importorskip(f"transformers.models.{family}", reason=f"this version of transformers has no {family}")
    config, inputs = make()
    config._attn_implementation = {"": implementation, **parts} if parts else implementation
    model_class = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    torch.manual_seed(0)
    return model_class(config).eval(), inputs
