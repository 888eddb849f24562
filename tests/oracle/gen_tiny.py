#!/usr/bin/env python3
"""Makes the tiny random models of tests/fixtures and their reference logits.

    gen_tiny.py [--predict] [NAME ...]      no name: all of them; --predict: see below

Each fixture is a checkpoint in the form of a public release (config.json, safetensors in one of the dialects
the converter reads, tokenizer) plus what Hugging Face transformers computes for it in float32 on the
dequantised weights: ids.i32, logits.f32, greedy.json, and predict.f32 where the checkpoint has a layer for
multi-token prediction (MTP).  tests/fixtures/README.md describes them; check_tiny.py recomputes the logits without
transformers.

The same versions of numpy and torch give the same bytes: every tensor is drawn from a generator seeded by
fixture and tensor name, so the order of drawing does not matter, and torch runs on one thread.  Another torch or
another CPU changes the last digits of the logits.  --predict therefore makes predict.f32 alone, for the ids that are
there, and leaves the other files as they are once it has found the same tensors in the checkpoint.
Needs torch, transformers >= 5.23, safetensors, numpy, and the demo model beside the repository (tokenizer).
"""
import copy
import json
import math
import re
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import MtpLayer, MtpModel

REPO = Path(__file__).resolve().parents[2]
FIXTURES = REPO / "tests" / "fixtures"
DEMO = REPO.parent / "shared" / "demo-model"

VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]  # the last ids
EOT, IM_END = VOCAB - 5, VOCAB - 3
POSITIONS, GREEDY_FROM, GREEDY_LEN = 48, 17, 24
DRAFTS = 4  # chained drafts behind a position in drafts.f32
PROMPTS_TRIED = 48
INDEX_GAP, GREEDY_INDEX_GAP = 3e-3, 5e-4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

# ---- what the fixtures are ---------------------------------------------------------------------------------


COMMON = {"attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 4096,
          "rms_norm_eps": 1e-6, "rope_scaling": None, "tie_word_embeddings": False, "bos_token_id": EOT,
          "eos_token_id": IM_END, "pad_token_id": EOT, "torch_dtype": "bfloat16"}


def yarn(factor, original, beta_fast=32, beta_slow=1):
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": beta_fast, "beta_slow": beta_slow}


def mla_yarn(*args):
    """DeepSeek's form: sharpens the scores by mscale squared, leaves cos and sin alone."""
    return {**yarn(*args), "mscale": 1.0, "mscale_all_dim": 1.0}


def qwen(**changes):
    """config.json in the words of the Qwen3 MoE releases."""
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB,
            "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "intermediate_size": 192, "moe_intermediate_size": 192, "num_experts": 8,
            "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, **COMMON, **changes}


def dense(kind, **changes):
    """config.json in the words of the dense releases of Qwen, Llama and Mistral: transformers' class and model type."""
    return {"architectures": [kind + "ForCausalLM"], "model_type": kind.lower(), "vocab_size": VOCAB,
            "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 192, "rope_theta": 1000000.0, **COMMON, **changes}


def glm4_dense(**changes):
    """config.json in the words of GLM-4-0414."""
    return dense("Glm4", **{"head_dim": 64, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                            **changes})


def gemma4(kinds, **changes):
    """The text part of Gemma 4's configuration.  kinds: S for a layer with a window, F for one without."""
    rope = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
    return {"attention_bias": False, "attention_k_eq_v": True, "bos_token_id": EOT, "enable_moe_block": False,
            "eos_token_id": IM_END, "final_logit_softcapping": 30.0, "global_head_dim": 128, "head_dim": 64,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "hidden_size_per_layer_input": 0,
            "intermediate_size": 192, "layer_types": [{"S": "sliding", "F": "full"}[k] + "_attention" for k in kinds],
            "max_position_embeddings": 4096, "model_type": "gemma4_text", "moe_intermediate_size": None,
            "num_attention_heads": 4, "num_experts": None, "num_global_key_value_heads": 1,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "num_kv_shared_layers": 0, "pad_token_id": EOT,
            "rms_norm_eps": 1e-6, "rope_parameters": rope, "sliding_window": 8, "tie_word_embeddings": True,
            "top_k_experts": None, "use_bidirectional_attention": None, "use_double_wide_mlp": False,
            "vocab_size": VOCAB, **changes}


def per_layer(text, **full):
    """The same as transformers 5 writes it: what differs in layers without a window, by their numbers."""
    text = {k: v for k, v in text.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    return {**text, "per_layer_config": {
        str(i): full for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"}}


def gemma4_whole(text):
    """config.json in the words of the releases, which read pictures and sound besides; here they do not."""
    return {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "dtype": "bfloat16",
            "model_type": "gemma4", "text_config": text, "tie_word_embeddings": True, "vision_config": None}


def ministral3(rope, **changes):
    """The text part of Ministral 3's configuration."""
    config = dense("Ministral3", **{"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": None,
                                    "rope_parameters": rope, **changes})
    return {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}


def growing(factor, original, beta, **more):
    """RoPE parameters of Mistral's models whose queries grow with their position; YaRN leaves cos and sin alone."""
    return {"type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": factor,
            "original_max_position_embeddings": original, "max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta, **more}


def mistral4(**changes):
    """The text part of Mistral Small 4's configuration."""
    config = {"model_type": "mistral4", "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
              "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 192,
              "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
              "routed_scaling_factor": 1.0, "rope_interleave": True, **COMMON, **changes}
    return {k: v for k, v in config.items() if k != "rope_scaling"}


def mistral3(text):
    """config.json in the words of Mistral Small 3.1, Ministral 3 and later ones: the text model beside a vision
    tower."""
    text = {k: v for k, v in text.items() if k != "architectures"}
    tied = text.pop("tie_word_embeddings")
    vision = {"head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "image_size": 16, "intermediate_size": 32,
              "model_type": "pixtral", "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 1,
              "patch_size": 8, "rope_theta": 10000.0}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": text, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "vision_config": vision,
            "vision_feature_layer": -1}


def deepseek(**changes):
    """config.json in the words of the DeepSeek-V3 releases."""
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB,
            "hidden_size": 64, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 192,
            "moe_intermediate_size": 192, "n_routed_experts": 8, "n_shared_experts": 1,
            "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0, "rope_theta": 10000, **COMMON, **changes}


def hy3(**changes):
    """config.json in the words of the Hy3 releases."""
    common = {k: v for k, v in COMMON.items() if k not in ("rope_scaling", "torch_dtype")}
    return {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": VOCAB, "hidden_size": 64,
            "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 192, "moe_intermediate_size": 128,
            "num_experts": 8, "num_shared_experts": 2, "num_experts_per_tok": 3, "router_scaling_factor": 2.826,
            "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}, "dtype": "bfloat16",
            "num_nextn_predict_layers": 0, **common, **changes}


def glm(**changes):
    """What config.json of the GLM-4.5 to 4.7 releases has in common, in their words."""
    return {"attention_dropout": 0.0, "eos_token_id": [EOT, IM_END], "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192, "max_position_embeddings": 4096,
            "moe_intermediate_size": 64, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 4, "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
            "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
            "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "vocab_size": VOCAB, **changes}


def glm4(**changes):
    """config.json in the words of the GLM-4.5, 4.6 and 4.7 releases."""
    return glm(architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", attention_bias=True,
               num_key_value_heads=2, num_experts_per_tok=3, partial_rotary_factor=0.5, torch_dtype="bfloat16",
               **changes)


def glm4_lite(**changes):
    """config.json in the words of GLM-4.7-Flash.  eps is not that of the release, see README.md."""
    config = glm(architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", attention_bias=False,
                 num_key_value_heads=4, num_experts_per_tok=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=48,
                 qk_rope_head_dim=16, v_head_dim=64, topk_method="noaux_tc", routed_scaling_factor=1.8,
                 partial_rotary_factor=1.0, rms_norm_eps=1e-6, dtype="bfloat16")
    return {**config, **changes}


def dots1(**changes):
    """config.json in the words of the dots.llm1 releases: n_group and topk_group are not among them."""
    return {"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": EOT, "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
            "initializer_range": 0.02, "intermediate_size": 192, "max_position_embeddings": 4096,
            "model_type": "dots1", "moe_intermediate_size": 64, "moe_layer_freq": 1, "n_routed_experts": 8,
            "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 3,
            "num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes}


def hunyuan(alpha, **changes):
    """config.json in the words of the Hunyuan-A13B releases, with lists of one number for all layers."""
    config = {"architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 64,
              "cla_share_factor": 2, "dtype": "bfloat16", "eod_token_id": EOT, "eos_token_id": IM_END,
              "group_limited_greedy": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
              "intermediate_size": 64, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "hunyuan_v1_moe",
              "moe_layer_num_skipped": 0, "norm_topk_prob": True, "norm_type": "rms", "num_attention_heads": 4,
              "num_experts": 8, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": EOT,
              "rms_norm_eps": 1e-5, "rope_scaling": {
                  "alpha": alpha, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "type": "dynamic"},
              "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "use_cla": False,
              "use_mixed_mlp_moe": True, "use_qk_norm": True, "vocab_size": VOCAB, **changes}
    layers = config["num_hidden_layers"]
    return {**config, "moe_intermediate_size": [config["intermediate_size"]] * layers, "moe_topk": [3] * layers,
            "num_shared_expert": [1] * layers}


def granite(shared, **changes):
    """config.json in the words of Granite's mixtures.  shared: the width of the shared expert; None: there is none."""
    own = {"model_type": "granitemoe"} if shared is None else {
        "model_type": "granitemoeshared", "shared_intermediate_size": shared}
    kind = "GraniteMoeForCausalLM" if shared is None else "GraniteMoeSharedForCausalLM"
    return {"architectures": [kind], "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 6,
            "num_experts_per_tok": 2, "attention_multiplier": 0.09375, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7, "logits_scaling": 1.5, "rope_theta": 1500000.0, **COMMON, **own, **changes}


def granite_swa(kinds, **changes):
    """config.json in the words of Granite's mixtures with windows; kinds: S for a layer with a window, F for one without;
    a small letter for one that is not rotated."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    config = granite(None, architectures=["GraniteMoeSWAForCausalLM"], model_type="granitemoe_swa",
                     num_hidden_layers=len(kinds), layer_types=[names[k.upper()] for k in kinds],
                     **{"shared_intermediate_size": 0, "sliding_window": 8, "dtype": "bfloat16", **changes})
    theta = config.pop("rope_theta")
    config = {k: v for k, v in config.items() if k not in ("rope_scaling", "torch_dtype")}
    return {**config, "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "layer_rope_theta": [theta if k.isupper() else 0 for k in kinds]}


def granite4(kinds, **changes):
    """config.json in the words of the Granite 4 releases; kinds: M for a layer of Mamba-2, * for one of attention."""
    return {"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.09375, "bos_token_id": EOT, "embedding_multiplier": 2.0, "eos_token_id": IM_END,
            "hidden_act": "silu", "hidden_size": 64, "init_method": "mup", "initializer_range": 0.1,
            "intermediate_size": 64, "layer_types": [{"M": "mamba", "*": "attention"}[k] for k in kinds],
            "logits_scaling": 1.5, "mamba_chunk_size": 64, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16,
            "mamba_d_state": 32, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False,
            "max_position_embeddings": 4096, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
            "num_attention_heads": 2, "num_experts_per_tok": 2, "num_hidden_layers": len(kinds),
            "num_key_value_heads": 1, "num_local_experts": 6, "output_router_logits": False, "pad_token_id": EOT,
            "position_embedding_type": "nope", "residual_multiplier": 0.75, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 128,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes}


def granite4_saved(kinds, **changes):
    """The same as transformers writes it."""
    config = granite4(kinds, **changes)
    dropped = ("init_method", "normalization_function", "rope_scaling", "rope_theta", "torch_dtype")
    return {**{k: v for k, v in config.items() if k not in dropped}, "dtype": "bfloat16",
            "layer_types": [{"M": "linear_attention", "*": "full_attention"}[k] for k in kinds],
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "time_step_limit": [0.0, {"__float__": "Infinity"}]}


def ling2(kind, **changes):
    """config.json in the words of Ling 2 and Ring 2 (bailing_moe_v2), or of Sarvam (sarvam_moe)."""
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "partial_rotary_factor": 0.5} if kind == "bailing_moe_v2" else {
        "architectures": ["SarvamMoEForCausalLM"]}
    return {**own, "model_type": kind, "attention_dropout": 0.0, "eos_token_id": IM_END, "first_k_dense_replace": 1,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192,
            "max_position_embeddings": 4096, "moe_intermediate_size": 64, "moe_router_enable_expert_bias": True,
            "n_group": 1, "norm_head": False, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 8,
            "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_shared_experts": 1,
            "pad_token_id": EOT, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 600000,
            "routed_scaling_factor": 2.5, "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
            "torch_dtype": "bfloat16", "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
            "vocab_size": VOCAB, **changes}


def deepseek_v2(lora, **changes):
    """config.json in the words of DeepSeek-V2, or of V2-Lite.  lora: the rank of queries, None in Lite."""
    scaling = {**yarn(40, 256), "mscale": 0.707, "mscale_all_dim": 0.707}
    config = deepseek(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", aux_loss_alpha=0.001,
                      norm_topk_prob=False, q_lora_rank=lora, rope_scaling=scaling, scoring_func="softmax",
                      moe_intermediate_size=64, seq_aux=True, num_hidden_layers=3, n_group=1 if lora is None else 4,
                      topk_group=1 if lora is None else 2, routed_scaling_factor=1.0 if lora is None else 4.0,
                      topk_method="greedy" if lora is None else "group_limited_greedy", max_position_embeddings=10240)
    return {**{k: v for k, v in config.items() if k != "num_nextn_predict_layers"}, **changes}


def deepseek_moe(**changes):
    """config.json in the words of DeepSeek-MoE."""
    return {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "attention_dropout": 0.0,
            "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 128, "initializer_range": 0.02,
            "intermediate_size": 192, "moe_intermediate_size": 64, "moe_layer_freq": 1, "n_routed_experts": 6,
            "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 2, "num_experts_per_tok": 2,
            "num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1, "rope_theta": 10000,
            "scoring_func": "softmax", "seq_aux": True, "use_cache": True, "vocab_size": VOCAB, **COMMON, **changes}


def ling1(**changes):
    """config.json in the words of Ling-lite and Ling-plus."""
    return {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "attention_dropout": 0.0,
            "embedding_dropout": 0.0, "eos_token_id": IM_END, "first_k_dense_replace": 0, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.006, "intermediate_size": 192,
            "max_position_embeddings": 4096, "moe_intermediate_size": 64, "multi_gate": False, "norm_head": True,
            "norm_softmax": False, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 6,
            "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_shared_experts": 2,
            "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": EOT, "rms_norm_eps": 1e-6,
            "rope_scaling": None, "rope_theta": 600000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "use_bias": False, "use_cache": True, "use_qkv_bias": False, "vocab_size": VOCAB, **changes}


def solar(**changes):
    """config.json in the words of Solar Open."""
    return {"architectures": ["SolarOpenForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "dtype": "bfloat16", "eos_token_id": IM_END, "first_k_dense_replace": 0, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192,
            "max_position_embeddings": 4096, "model_type": "solar_open", "moe_intermediate_size": 64, "n_group": 1,
            "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
            "num_experts_per_tok": 3, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": EOT,
            "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
            "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True,
            "use_qk_norm": False, "vocab_size": VOCAB, **changes}


def exaone(kinds, **changes):
    """config.json in the words of K-EXAONE.  kinds: L for a layer with a window, G for one without."""
    return {"architectures": ["ExaoneMoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": EOT,
            "dtype": "bfloat16", "eos_token_id": IM_END, "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192,
            "is_moe_layer": [i > 0 for i in range(len(kinds))],
            "layer_types": [{"L": "sliding", "G": "full"}[k] + "_attention" for k in kinds],
            "max_position_embeddings": 4096, "model_type": "exaone_moe", "moe_intermediate_size": 64, "n_group": 1,
            "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "num_shared_experts": 1, "pad_token_id": EOT,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 8,
            "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
            "vocab_size": VOCAB, **changes}


def afmoe(kinds, **changes):
    """config.json in the words of the Trinity releases.  kinds: L for a layer with a window, G for one without."""
    return {"architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16",
            "eos_token_id": IM_END, "global_attn_every_n_layers": 4, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192,
            "layer_types": [{"L": "sliding", "G": "full"}[k] + "_attention" for k in kinds],
            "load_balance_coeff": 0.001, "max_position_embeddings": 4096, "model_type": "afmoe",
            "moe_intermediate_size": 64, "mup_enabled": True, "n_group": 1, "num_attention_heads": 4,
            "num_dense_layers": 1, "num_expert_groups": 1, "num_experts": 8, "num_experts_per_tok": 3,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "num_limited_groups": 1, "num_shared_experts": 1,
            "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
            "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 8, "tie_word_embeddings": False,
            "topk_group": 1, "vocab_size": VOCAB, **changes}


def cohere2(kinds, **changes):
    """config.json of Command A+ and its kin.  kinds: L for a layer with a window, G for one without."""
    return {"architectures": ["Cohere2MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "dtype": "bfloat16", "eos_token_id": IM_END, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 64,
            "layer_norm_eps": 1e-5, "layer_types": [{"L": "sliding", "G": "full"}[k] + "_attention" for k in kinds],
            "logit_scale": 0.625, "max_position_embeddings": 4096, "model_type": "cohere2_moe", "norm_topk_prob": True,
            "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": len(kinds),
            "num_key_value_heads": 2, "num_shared_experts": 1, "pad_token_id": EOT,
            "prefix_dense_intermediate_size": 192, "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": None,
            "rope_scaling": None, "rope_theta": 50000, "shared_expert_combination_strategy": "average",
            "sliding_window": 8, "sliding_window_pattern": 4, "tie_word_embeddings": True, "vocab_size": VOCAB,
            **changes}


def dbrx(attention, ffn, **changes):
    """config.json of DBRX.  attention, ffn: changes of its two objects."""
    return {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "emb_pdrop": 0.0,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500000, **attention},
            "eos_token_id": IM_END, "ffn_config": {
                "ffn_hidden_size": 64, "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 8,
                "moe_top_k": 3, **ffn},
            "initializer_range": 0.02, "max_seq_len": 4096, "n_heads": 4, "n_layers": 2, "output_router_logits": False,
            "pad_token_id": EOT, "resid_pdrop": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "vocab_size": VOCAB, **changes}


def smallthinker(kinds, **changes):
    """config.json in the words of SmallThinker.  kinds: L for a layer with a window, G for one without."""
    windows = [int(k == "L") for k in kinds]
    return {"architectures": ["SmallThinkerForCausalLM"], "attention_dropout": 0.0, "bos_token_id": EOT,
            "eos_token_id": [IM_END, EOT], "head_dim": 64, "hidden_size": 64, "initializer_range": 0.02,
            "max_position_embeddings": 4096, "model_name": "smallthinker_tiny", "model_type": "smallthinker",
            "moe_ffn_hidden_size": 64, "moe_num_active_primary_experts": 3, "moe_num_primary_experts": 8,
            "moe_primary_router_apply_softmax": False, "norm_topk_prob": True, "num_attention_heads": 4,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "pad_token_id": EOT, "rms_norm_eps": 1e-6,
            "rope_layout": windows if any(windows) else [1] * len(kinds), "rope_scaling": None, "rope_theta": 1500000.0,
            "sliding_window_layout": windows, "sliding_window_size": 8, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "vocab_size": VOCAB, **changes}


def arctic(**changes):
    """config.json in the words of Snowflake Arctic."""
    return {"architectures": ["ArcticForCausalLM"], "attention_bias": False, "attention_dropout": 0, "bos_token_id": EOT,
            "enable_expert_tensor_parallelism": True, "enc_index": None, "eos_token_id": IM_END, "hidden_act": "silu",
            "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 4096,
            "max_sequence_length": 4096, "model_type": "arctic", "moe_eval_capacity_factor": 1,
            "moe_layer_frequency": 1, "moe_min_capacity": 0, "moe_token_dropping": False,
            "moe_train_capacity_factor": 1, "num_attention_heads": 4, "num_experts_per_tok": 3,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 8, "pad_token_id": EOT,
            "parallel_attn_mlp_res": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": True, "use_residual": True, "vocab_size": VOCAB, **changes}


def maple(kinds, **changes):
    """config.json in the words of Maple.  kinds: L for a layer with a window, G for one without."""
    return {"architectures": ["MapleForCausalLM"], "attention_dropout": 0.0, "bos_token_id": EOT, "dtype": "bfloat16",
            "eos_token_id": IM_END, "first_k_dense_replace": 0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
            "initializer_range": 0.02, "intermediate_size": 192,
            "layer_types": [{"L": "sliding", "G": "full"}[k] + "_attention" for k in kinds],
            "max_position_embeddings": 4096, "model_type": "maple", "moe_intermediate_size": 64,
            "moe_router_enable_expert_bias": False, "nope_on_global_attention": True, "norm_topk_prob": True,
            "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": len(kinds),
            "num_key_value_heads": 2, "num_shared_experts": 0, "pad_token_id": EOT, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000, "router_dtype": "fp32",
            "sliding_window": 8, "tie_word_embeddings": False, "use_bias": False, "use_qk_norm": True,
            "vocab_size": VOCAB, **changes}


def llama4(**changes):
    """The text part of Llama 4's configuration."""
    return {"attention_bias": False, "attention_chunk_size": 16, "attention_dropout": 0.0, "attn_scale": 0.1,
            "attn_temperature_tuning": True, "bos_token_id": EOT, "dtype": "bfloat16", "eos_token_id": [IM_END, EOT],
            "floor_scale": 8, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
            "interleave_moe_layer_step": 1, "intermediate_size": 64, "intermediate_size_mlp": 192,
            "max_position_embeddings": 4096, "model_type": "llama4_text", "num_attention_heads": 4,
            "num_experts_per_tok": 1, "num_hidden_layers": 5, "num_key_value_heads": 2, "num_local_experts": 6,
            "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0,
            "tie_word_embeddings": False, "use_qk_norm": True, "vocab_size": VOCAB, **changes}


def lfm2(kinds, **changes):
    """config.json in the words of LFM2-8B-A1B.  kinds: C for a layer with a gated convolution, A for one with
    attention."""
    return {"architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": EOT, "conv_L_cache": 3, "conv_bias": False,
            "dtype": "bfloat16", "eos_token_id": IM_END, "hidden_size": 128, "initializer_range": 0.02,
            "intermediate_size": 192, "layer_types": [{"C": "conv", "A": "full_attention"}[k] for k in kinds],
            "max_position_embeddings": 4096, "model_type": "lfm2_moe", "moe_intermediate_size": 64, "norm_eps": 1e-5,
            "norm_topk_prob": True, "num_attention_heads": 2, "num_dense_layers": 1, "num_experts": 8,
            "num_experts_per_tok": 3, "num_hidden_layers": len(kinds), "num_key_value_heads": 1, "pad_token_id": EOT,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True, "use_expert_bias": True, "vocab_size": VOCAB, **changes}


def phimoe(original, **changes):
    """config.json of Phi-3.5-MoE.  original: positions of the context that its frequencies were made for."""
    half = changes.get("hidden_size", 64) // changes.get("num_attention_heads", 4) // 2
    rope = {"type": "longrope", "short_factor": [round(1 + 0.05 * i, 3) for i in range(half)],
            "long_factor": [round(1.2 + 0.5 * i, 3) for i in range(half)], "short_mscale": 1.25, "long_mscale": 1.25,
            "original_max_position_embeddings": original}
    return {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": IM_END, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
            "input_jitter_noise": 0.01, "intermediate_size": 64, "lm_head_bias": True, "max_position_embeddings": 4096,
            "model_type": "phimoe", "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "num_local_experts": 8, "original_max_position_embeddings": original,
            "output_router_logits": False, "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": rope,
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": VOCAB, **changes}


def deepseek_v32(**changes):
    """config.json in the words of the DeepSeek-V3.2 releases."""
    return {**deepseek(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", attention_dropout=0.0,
                       ep_size=1, index_head_dim=64, index_n_heads=4, index_topk=16, num_nextn_predict_layers=1,
                       use_cache=True), **changes}


def glm_dsa(**changes):
    """config.json in the words of GLM-5 and 5.1.  Nothing is to be read from head_dim.  eps is not that of the release,
    see README.md."""
    config = glm(architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", attention_bias=False,
                 dtype="bfloat16", ep_size=1, head_dim=16, index_head_dim=64, index_n_heads=4, index_topk=32,
                 indexer_rope_interleave=True, kv_lora_rank=64, moe_layer_freq=1, num_experts_per_tok=3,
                 num_key_value_heads=4, pretraining_tp=1, q_lora_rank=96, qk_head_dim=64, qk_nope_head_dim=48,
                 qk_rope_head_dim=16, rms_norm_eps=1e-6, rope_interleave=True, routed_scaling_factor=2.5,
                 scoring_func="sigmoid", topk_method="noaux_tc", v_head_dim=64)
    return {**new_rope(config, rope_theta=1000000, rope_type="default"), **changes}


def glm_dsa_types(types, freq, offset, **changes):
    """config.json in the words of GLM-5.2, as ModelOpt writes it; types has an F for a layer with an indexer, an S for
    one that shares the choice of the last such layer."""
    n = len(types)
    config = glm_dsa(num_hidden_layers=n, bos_token_id=0, head_dim=48, index_share_for_mtp_iteration=True,
                     index_skip_topk_offset=offset, index_topk_freq=freq, index_topk_pattern=None,
                     indexer_types=[{"F": "full", "S": "shared"}[t] for t in types],
                     layer_types=["deepseek_sparse_attention"] * n, mlp_bias=False,
                     mlp_layer_types=["dense"] + ["sparse"] * (n - 1),
                     rope_parameters={"rope_theta": 8000000, "rope_type": "default"})
    config = {**config, **changes}
    return {**config, "num_experts": config["n_routed_experts"],
            "qk_head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}


def deepseek_v4(**changes):
    """config.json in the words of the DeepSeek-V4 releases.  The limit is not that of the release: it clips some values
    here."""
    return {"architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "compress_rope_theta": 160000, "eos_token_id": IM_END, "expert_dtype": "fp4",
            "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 128, "index_head_dim": 64, "index_n_heads": 16, "index_topk": 8, "initializer_range": 0.02,
            "max_position_embeddings": 2048, "model_type": "deepseek_v4", "moe_intermediate_size": 64,
            "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
            "num_experts_per_tok": 3, "num_hidden_layers": 5, "num_hash_layers": 3, "num_key_value_heads": 1,
            "num_nextn_predict_layers": 1, "o_groups": 2, "o_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16,
            "rms_norm_eps": 1e-6, "rope_scaling": yarn(16, 128), "rope_theta": 10000, "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus", "sliding_window": 16, "swiglu_limit": 1.5, "tie_word_embeddings": False,
            "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes}


def deepseek_v4_saved(ratios, **changes):
    """The same as transformers writes it."""
    config = deepseek_v4(**changes)
    dropped = ("compress_ratios", "expert_dtype", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "topk_method",
               "torch_dtype")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    part = config["qk_rope_head_dim"] / config["head_dim"]
    scaling = {"rope_type": "yarn", "attention_factor": 1.0, "partial_rotary_factor": part,
               "rope_theta": config["compress_rope_theta"], **config["rope_scaling"]}
    hashed = config["num_hash_layers"]
    return {**{k: v for k, v in config.items() if k not in dropped}, "compress_rates": {names[r]: r for r in (4, 128)},
            "dtype": "bfloat16", "layer_types": [names[r] for r in ratios], "mlp_bias": False,
            "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (len(ratios) - hashed), "partial_rotary_factor": part,
            "rope_parameters": {"compress": scaling, "main": {"partial_rotary_factor": part, "rope_type": "default",
                                                              "rope_theta": config["rope_theta"]}}}


def gpt_oss(**changes):
    """config.json in the words of the gpt-oss releases."""
    layers = changes["num_hidden_layers"]
    return {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": IM_END, "experts_per_token": changes["num_experts_per_tok"], "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 64, "initial_context_length": 1024, "initializer_range": 0.02,
            "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
            "max_position_embeddings": 32768, "model_type": "gpt_oss", "output_router_logits": False,
            "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": VOCAB, **changes}


def minimax(**changes):
    """config.json in the words of the MiniMax-M2 releases, whose MTP modules have no tensors."""
    return {"architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0,
            "attn_type_list": [1] * changes["num_hidden_layers"], "bos_token_id": None, "eos_token_id": IM_END,
            "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096,
            "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_mtp_modules": 3,
            "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
            "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True,
            "use_qk_norm": True, "use_routing_bias": True, "vocab_size": VOCAB, **changes}


M3_VISION = {"hidden_size": 16, "image_size": 8, "intermediate_size": 32, "num_attention_heads": 2, "num_channels": 3,
             "num_hidden_layers": 1, "patch_size": 4, "rope_theta": 10000.0}


def minimax_m3(kinds, index, **changes):
    """config.json in the words of MiniMax-M3: the text model, without a model_type, beside a vision tower.  kinds has
    an S for a layer with an indexer and experts, an F for one without both.  The MTP layers have no tensors."""
    sparse = [int(kind == "S") for kind in kinds]
    text = {"architectures": ["MiniMaxM3SparseForCausalLM"], "attention_dropout": 0.0, "attention_output_gate": False,
            "bos_token_id": EOT, "eos_token_id": IM_END, "head_dim": 64, "hidden_act": "swigluoai", "hidden_size": 64,
            "initializer_range": 0.02, "max_position_embeddings": 4096, "moe_layer_freq": sparse,
            "n_shared_experts": 1, "num_hidden_layers": len(kinds), "num_mtp_modules": 7,
            "num_nextn_predict_layers": 1, "output_router_logits": False, "qk_norm_type": "per_head",
            "rms_norm_eps": 1e-6, "rope_theta": 5000000, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid",
            "sparse_attention_config": {
                "sparse_attention_freq": sparse, "sparse_disable_index_value": sparse, "sparse_init_block": 0,
                "sparse_score_type": "max", "use_sparse_attention": True, **index},
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_gemma_norm": True,
            "use_qk_norm": True, "use_routing_bias": True, "vocab_size": VOCAB, **changes}
    text["partial_rotary_factor"] = text["rotary_dim"] / text["head_dim"]
    return {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "image_token_index": 200025,
            "model_type": "minimax_m3_vl", "projector_hidden_size": 16, "text_config": text,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "video_token_index": 200026,
            "vision_config": {**M3_VISION, "model_type": "clip_vision_model", "spatial_merge_size": 2,
                              "temporal_patch_size": 2}}


def minimax_m3_saved(kinds, index, **changes):
    """The same as transformers writes it."""
    config = minimax_m3(kinds, {}, **changes)
    text = config["text_config"]
    dropped = ("architectures", "attention_output_gate", "moe_layer_freq", "num_mtp_modules", "partial_rotary_factor",
               "qk_norm_type", "rope_theta", "scoring_func", "sparse_attention_config", "use_gemma_norm", "use_qk_norm",
               "use_routing_bias")
    rope = {"partial_rotary_factor": text["partial_rotary_factor"], "rope_theta": text["rope_theta"],
            "rope_type": "default"}
    config["text_config"] = {
        **{k: v for k, v in text.items() if k not in dropped}, **index, "hidden_act": "silu",
        "layer_types": [{"F": "full_attention", "S": "minimax_m3_sparse"}[kind] for kind in kinds],
        "mlp_layer_types": [{"F": "dense", "S": "sparse"}[kind] for kind in kinds],
        "model_type": "minimax_m3_vl_text", "rope_parameters": rope}
    config["vision_config"] |= {"model_type": "minimax_m3_vl_vision"}
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": "bfloat16"}


def mellum(kinds, rope, **changes):
    """config.json in the words of Mellum 2; kinds: S for a layer with a window, F for one without; rope: YaRN of the
    latter."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    ropes = {"full_attention": {"rope_theta": 500000.0, **rope},
             "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
    return {"architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "dtype": "bfloat16", "eos_token_id": IM_END, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192,
            "layer_types": [names[k] for k in kinds], "max_position_embeddings": 4096,
            "mlp_layer_types": ["sparse"] * len(kinds), "model_type": "mellum", "moe_intermediate_size": 64,
            "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "output_router_logits": False, "pad_token_id": EOT,
            "rms_norm_eps": 1e-6, "rope_parameters": ropes, "router_aux_loss_coef": 0.001, "sliding_window": 8,
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": VOCAB, **changes}


def mixtral(**changes):
    """config.json in the words of the Mixtral releases."""
    return {"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": EOT,
            "eos_token_id": IM_END, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096,
            "model_type": "mixtral", "num_experts_per_tok": 2, "num_hidden_layers": 2, "output_router_logits": False,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes}


def olmoe(**changes):
    """config.json in the words of the OLMoE releases."""
    return {"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": EOT, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02,
            "intermediate_size": 64, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "output_router_logits": False, "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes}


def qwen2_moe(**changes):
    """config.json in the words of the Qwen1.5-MoE and Qwen2-57B-A14B releases, which do not mention qkv_bias."""
    return {"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": EOT,
            "decoder_sparse_step": 1, "eos_token_id": IM_END, "hidden_act": "silu", "hidden_size": 128,
            "initializer_range": 0.02, "intermediate_size": 128, "max_position_embeddings": 4096,
            "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 64, "norm_topk_prob": False,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "output_router_logits": False,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": 32768,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
            "vocab_size": VOCAB, **changes}


def ernie(**changes):
    """config.json in the words of the ERNIE-4.5 releases for transformers."""
    return {"architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": EOT, "eos_token_id": IM_END,
            "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096,
            "model_type": "ernie4_5_moe", "moe_intermediate_size": 64, "moe_layer_end_index": -1, "moe_norm_min": 1e-12,
            "pad_token_id": EOT, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False,
            "use_cache": True, "vocab_size": VOCAB, **changes}


def step_text(layers, heads, swa_heads, groups, mtp=0, **changes):
    """config.json in the words of Step-3.5-Flash; layers has an F for full attention, an S for a window.  The MTP
    layers, all windowed, come last in its lists."""
    full = [t == "F" for t in layers + "S" * mtp]
    per_layer = lambda yes, no: [yes if f else no for f in full]
    n = len(layers)
    return {"architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA", "attention_other_setting": {
                "attention_type": "sliding_attention", "head_dim": 64, "num_attention_groups": groups,
                "num_attention_heads": swa_heads, "true_head_dim": 64},
            "bos_token_id": EOT, "eos_token_id": [EOT, IM_END], "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 64, "intermediate_size": 128,
            "layer_types": per_layer("full_attention", "sliding_attention"), "max_position_embeddings": 128,
            "max_seq_len": 128, "model_type": "step3p5", "moe_every_n_layer": 1, "moe_intermediate_size": 64,
            "moe_layers_enum": ",".join(str(i) for i in range(1, n)), "moe_num_experts": 4,
            "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 2,
            "need_fp32_gate": True, "norm_expert_weight": True, "num_attention_groups": groups,
            "num_attention_heads": heads, "num_hidden_layers": n, "num_nextn_predict_layers": mtp,
            "partial_rotary_factors": per_layer(0.5, 1.0), "rms_norm_eps": 1e-5,
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                             "original_max_position_embeddings": 64},
            "rope_theta": per_layer(5000000.0, 10000.0), "share_expert_dim": 128, "sink": False, "sliding_window": 4,
            "swiglu_limits": [0.0] * len(full), "swiglu_limits_shared": [0.0] * len(full),
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_head_wise_attn_gate": True, "use_moe": True,
            "use_moe_router_bias": True, "use_qk_norm": True, "use_rope_layers": [], "vocab_size": VOCAB,
            "yarn_only_types": ["full_attention"], "zero_centered": True, **changes}


STEP_VISION = {"model_type": "perception_encoder", "heads": 2, "image_size": 28, "layers": 1, "ls_init_value": 0.1,
               "mlp_ratio": 2.0, "patch_size": 14, "width": 16}


def step3p7(*args, **changes):
    """config.json in the words of Step-3.7-Flash: the text model beside a vision tower."""
    return {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "image_token_id": 128001,
            "projector_bias": False, "text_config": step_text(*args, **changes), "tie_word_embeddings": False,
            "vision_config": STEP_VISION}


def laguna(full, heads, **changes):
    """config.json in the words of the Laguna releases.  full: rope_parameters of full layers."""
    types, rope = changes["layer_types"], {"full_attention": full}
    if "sliding_attention" in types:
        rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    return {"architectures": ["LagunaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": [EOT, IM_END],
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
            "intermediate_size": 128,
            "max_position_embeddings": int(full["factor"] * full["original_max_position_embeddings"]),
            "mlp_layer_types": ["dense"] + ["sparse"] * (len(types) - 1), "mlp_only_layers": [0],
            "model_type": "laguna", "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 64,
            "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True,
            "num_attention_heads": heads[0], "num_attention_heads_per_layer": heads, "num_hidden_layers": len(types),
            "num_key_value_heads": 2, "output_router_logits": False, "pad_token_id": EOT, "rms_norm_eps": 1e-6,
            "rope_parameters": rope, "router_aux_loss_coef": 0.0, "tie_word_embeddings": False,
            "use_cache": True, "vocab_size": VOCAB, **changes}


def laguna_yarn(factor, original, beta_fast):
    return {"rope_type": "yarn", "rope_theta": 500000.0, "factor": factor,
            "original_max_position_embeddings": original, "beta_slow": 1.0, "beta_fast": beta_fast,
            "attention_factor": 0.1 * math.log(factor) + 1, "partial_rotary_factor": 0.5}


def mimo(layers, heads, **changes):
    """config.json in the words of MiMo-V2-Flash, which does not mention its MTP layers.  layers has an F for full
    attention, an S for a window."""
    window = changes.pop("window")
    return {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
            "architectures": ["MiMoV2FlashForCausalLM"], "attention_bias": False, "attention_chunk_size": window,
            "attention_dropout": 0.0, "attention_value_scale": 0.707, "eos_token_id": IM_END, "head_dim": 192,
            "hidden_act": "silu", "hidden_size": 64, "hybrid_layer_pattern": [int(t == "S") for t in layers],
            "initializer_range": 0.02, "intermediate_size": 128, "layernorm_epsilon": 1e-5,
            "max_position_embeddings": 4096, "model_type": "mimo_v2_flash", "moe_intermediate_size": 64,
            "moe_layer_freq": [0] + [1] * (len(layers) - 1), "n_group": 1, "n_routed_experts": 4,
            "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": heads, "num_experts_per_tok": 2,
            "num_hidden_layers": len(layers), "num_key_value_heads": 1, "pad_token_id": EOT,
            "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None,
            "scoring_func": "sigmoid", "sliding_window": window, "sliding_window_size": window, "swa_head_dim": 192,
            "swa_num_attention_heads": heads, "swa_num_key_value_heads": 2, "swa_rope_theta": 10000,
            "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": VOCAB, **changes}


def exact_yarn(factor, original, *betas):
    """gpt-oss' form: the bounds of the ramp are not rounded."""
    scaling = yarn(factor, original, *betas)
    return {"rope_type": scaling.pop("type"), **scaling, "truncate": False}


QWEN_TEXT = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64,
             "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
             "linear_num_key_heads": 2, "linear_value_head_dim": 64, "max_position_embeddings": 4096,
             "mlp_only_layers": [], "moe_intermediate_size": 64, "num_attention_heads": 2, "head_dim": 64,
             "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
             "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 64, "use_cache": True,
             "vocab_size": VOCAB}


def qwen3_5_text(layers, **changes):
    """The text part of a Qwen3.5 MoE configuration; layers has an F for full attention, an L for linear."""
    names = {"F": "full_attention", "L": "linear_attention"}
    config = {**QWEN_TEXT, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": EOT,
              "full_attention_interval": 4, "layer_types": [names[t] for t in layers], "mamba_ssm_dtype": "float32",
              "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
              "num_hidden_layers": len(layers), **changes}
    section = {16: [3, 3, 2], 32: [6, 5, 5]}[config["head_dim"] // 4]  # interleaved; adds up to the rotated pairs
    config["rope_parameters"] = {"mrope_interleaved": True, "mrope_section": section, "rope_type": "default",
                                 "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    return config


def qwen3_5(layers, **changes):
    """config.json in the words of the Qwen3.5 MoE releases: the text model beside a vision tower."""
    vision = {"depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 16, "in_channels": 3,
              "intermediate_size": 32, "model_type": "qwen3_5_moe", "num_heads": 2, "num_position_embeddings": 16,
              "out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
            "model_type": "qwen3_5_moe", "text_config": qwen3_5_text(layers, **changes),
            "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": vision,
            "vision_end_token_id": 248054, "vision_start_token_id": 248053}


def qwen3_vl(**changes):
    """config.json in the words of the Qwen3-VL MoE releases: the text model beside a vision tower, some of whose layers
    add to the first ones of the text model."""
    dropped = ("architectures", "bos_token_id", "pad_token_id", "rope_scaling", "sliding_window", "tie_word_embeddings",
               "torch_dtype", "use_sliding_window")
    text = {**qwen(**{"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 64, "num_hidden_layers": 2,
                      "rope_theta": 5000000, **changes}), "attention_dropout": 0.0, "dtype": "bfloat16",
            "initializer_range": 0.02, "use_cache": True}
    text = {k: v for k, v in text.items() if k not in dropped}
    section = {64: [12, 10, 10], 128: [24, 20, 20]}[text["head_dim"]]
    text["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": section, "rope_type": "default"}
    vision = {**qwen3_5("F")["vision_config"], "deepstack_visual_indexes": [0], "initializer_range": 0.02,
              "model_type": "qwen3_vl_moe", "out_hidden_size": text["hidden_size"]}
    return {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
            "model_type": "qwen3_vl_moe", "text_config": text, "tie_word_embeddings": False, "video_token_id": 151656,
            "vision_config": vision, "vision_end_token_id": 151653, "vision_start_token_id": 151652}


def qwen3_5_dense(layers, **changes):
    """The same of the dense Qwen3.5, 3.6 and 3.8."""
    moe = qwen3_5(layers, **changes)
    text = {k: v for k, v in moe["text_config"].items() if "expert" not in k and k not in (
        "mlp_only_layers", "moe_intermediate_size", "router_aux_loss_coef")}
    return {**moe, "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": {"intermediate_size": 192, **text, "model_type": "qwen3_5_text"},
            "vision_config": {**moe["vision_config"], "model_type": "qwen3_5"}}


def qwen4_text(layers, **changes):
    """The text part of a Qwen4-Exp configuration; layers as of qwen3_5_text().  full_attention has an indexer."""
    dropped = ("attn_output_gate", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    text = {k: v for k, v in qwen3_5_text(layers, head_dim=changes.get("head_dim", 64)).items() if k not in dropped}
    return {**text, "hc_count": 4, "hc_lowrank": 32, "heads_per_ngram": 4, "indexer_budget": 32,
            "indexer_compress_ratio": 4, "indexer_head_dim": 32, "indexer_kv_heads": 1, "indexer_n_heads": 16,
            "linear_num_value_heads": 4, "make_ngram_vocab_size_divisible_by": 128, "model_type": "qwen4_exp_text",
            "ngram_size": 3, "ngram_vocab_size_base": 100, "norm_topk_prob": True, "output_gate_type": "sigmoid",
            "ple_conv_kernel_size": 4, "ple_embed_dim": 64, "ple_layer_ids": [2], "seed": 1234, "split_ngram_parts": 16,
            **changes}


def qwen4(layers, **changes):
    """config.json in the words of Qwen3.8-Flash-Next: the text model beside a vision tower."""
    moe = qwen3_5(layers)
    vision = {**moe["vision_config"], "model_type": "qwen4_exp", "rope_parameters": {"rope_type": "axial",
                                                                                     "rope_theta": 10000.0}}
    return {**moe, "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
            "text_config": qwen4_text(layers, **changes), "vision_config": vision}


def qwen3_next(**changes):
    """config.json in the words of the Qwen3-Next releases: flat, and without a word on the MTP layer."""
    return {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **QWEN_TEXT,
            "bos_token_id": EOT, "decoder_sparse_step": 1, "eos_token_id": IM_END, "full_attention_interval": 4,
            "intermediate_size": 192, "linear_num_value_heads": 4, "norm_topk_prob": True, "num_hidden_layers": 4,
            "output_router_logits": False, "partial_rotary_factor": 0.25, "rope_scaling": None,
            "rope_theta": 10000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "use_sliding_window": False, **changes}


def nemotron(pattern, **changes):
    """config.json in the words of the Nemotron-3 releases; pattern has a letter for each layer."""
    return {"architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": IM_END, "expand": 2, "head_dim": 64,
            "hidden_dropout": 0.0, "hidden_size": 64, "hybrid_override_pattern": pattern, "initializer_range": 0.02,
            "intermediate_size": 192, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 16, "mamba_hidden_act": "silu",
            "mamba_num_heads": 8, "mamba_proj_bias": False, "max_position_embeddings": 4096, "mlp_bias": False,
            "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 128, "n_group": 1, "n_groups": 2, "n_routed_experts": 8,
            "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 4,
            "num_experts_per_tok": 3, "num_hidden_layers": len(pattern), "num_key_value_heads": 2,
            "num_logits_to_keep": 1, "pad_token_id": EOT, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
            "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
            "ssm_state_size": 32, "tie_word_embeddings": False, "time_step_floor": 1e-4,
            "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1,
            "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
            "use_mamba_kernels": True, "vocab_size": VOCAB, **changes}


def nemotron_saved(pattern, **changes):
    """The same as transformers writes it."""
    dropped = ("hybrid_override_pattern", "norm_eps", "num_hidden_layers", "partial_rotary_factor", "rope_theta",
               "torch_dtype")
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    return {**{k: v for k, v in nemotron(pattern, **changes).items() if k not in dropped}, "dtype": "bfloat16",
            "layers_block_type": [names[t] for t in pattern], "moe_latent_size": None,
            "time_step_limit": [0.0, {"__float__": "Infinity"}]}


def kimi_linear(full, head_dim, **changes):
    """config.json in the words of Kimi-Linear-48B-A3B, which counts layers from 1.  full: those with latent
    attention."""
    n, heads = changes["num_hidden_layers"], changes["num_attention_heads"]
    linear = {"full_attn_layers": full, "head_dim": head_dim, "kda_layers": [i for i in range(1, n + 1) if i not in full],
              "num_heads": heads, "short_conv_kernel_size": 4}
    return {"architectures": ["KimiLinearForCausalLM"], "bos_token_id": EOT, "dtype": "bfloat16",
            "eos_token_id": IM_END, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
            "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192, "kv_lora_rank": 64,
            "linear_attn_config": linear, "mla_use_nope": True, "model_max_length": 4096, "model_type": "kimi_linear",
            "moe_intermediate_size": 64, "moe_layer_freq": 1, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 8,
            "num_experts_per_token": 3, "num_key_value_heads": heads, "num_nextn_predict_layers": 0,
            "num_shared_experts": 1, "pad_token_id": EOT, "q_lora_rank": None, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True,
            "use_grouped_topk": True, "v_head_dim": 32, "vocab_size": VOCAB, **changes}


def kimi_linear_saved(full, head_dim, **changes):
    """The same as transformers writes it: lists of all layers, which it counts from 0."""
    config = kimi_linear(full, head_dim, **changes)
    dropped = ("first_k_dense_replace", "head_dim", "linear_attn_config", "mla_use_nope", "moe_layer_freq",
               "moe_router_activation_func", "num_nextn_predict_layers", "rope_scaling", "rope_theta",
               "use_grouped_topk")
    n = config["num_hidden_layers"]
    kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(n)]
    return {**{k: v for k, v in config.items() if k not in dropped}, "attention_bias": False, "layer_types": kinds,
            "linear_conv_kernel_dim": 4, "linear_head_dim": head_dim, "linear_num_heads": config["num_attention_heads"],
            "mlp_layer_types": ["dense"] + ["sparse"] * (n - 1)}


def kimi_k3(full, head_dim, **changes):
    """config.json in the words of Kimi-K3, whose text model is one of kimi_linear; full: as in kimi_linear()."""
    text = kimi_linear(full, head_dim, **{"activation_situ_beta": 4.0, "activation_situ_linear_beta": 3.0,
                                          "attn_res_block_size": 2, "hidden_act": "situ", "latent_moe_use_norm": True,
                                          "q_lora_rank": 96, "routed_expert_hidden_size": 64, **changes})
    text["linear_attn_config"]["gate_lower_bound"] = -5.0
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text,
            "tie_word_embeddings": False}


def bailing(**changes):
    """config.json in the words of the Ling-3.0 releases.  Nothing is to be read from the keys that they keep of other
    models, such as partial_rotary_factor: a part of head_dim, not of the part that is rotated."""
    heads = changes["num_attention_heads"]
    config = {"architectures": ["BailingMoeV3ForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16",
              "embedding_dropout": 0.0, "eos_token_id": IM_END, "expert_swiglu_limit_list": None,
              "first_k_dense_replace": 1, "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1,
              "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
              "intermediate_size": 192, "kda_lower_bound": -5, "kda_safe_gate": True, "kv_lora_rank": 64,
              "linear_silu": True, "max_position_embeddings": 4096, "max_window_layers": 20,
              "model_type": "bailing_hybrid", "moe_intermediate_size": 64, "moe_router_enable_expert_bias": True,
              "mtp_loss_scaling_factor": 0, "mtp_use_kda": False, "n_group": 4, "no_kda_lora": True,
              "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": heads,
              "num_kv_heads_for_linear_attn": 0, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
              "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": EOT, "q_lora_rank": None,
              "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-6, "rope_interleave": True,
              "rope_theta": 6000000, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
              "scoring_func": "sigmoid", "seq_aux": True, "share_expert_swiglu_limit_list": None,
              "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 2, "topk_method": "noaux_tc",
              "up_proj_norm": False, "use_bias": False, "use_cache": True, "use_kda_lora": False,
              "use_mla_nope": False, "use_nGPT": False, "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 32,
              "value_norm": False, "vocab_size": VOCAB, **changes}
    share = config["qk_rope_head_dim"] / config["head_dim"]
    return {"moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
            "partial_rotary_factor": share, "qk_head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "rope_parameters": {"partial_rotary_factor": share, "rope_theta": config["rope_theta"],
                                "rope_type": "default"},
            "rotary_dim": config["qk_rope_head_dim"], **config}


def inkling2(kinds, **changes):
    """config.json of the text model in the words of the Inkling 2 releases; kinds: S for a layer with a window, F for one
    without."""
    loop = "loop_num_passes" in changes
    return {"architectures": [f"Inkling2{'Loop' * loop}ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None,
            "conv_kernel_size": 4, "d_rel": 16, "dtype": "bfloat16", "eos_token_id": IM_END,
            "final_logit_softcapping": 12.0, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
            "initializer_range": 0.02, "layer_types": [{"S": "hybrid_sliding", "F": "hybrid"}[k] for k in kinds],
            "log_scaling_alpha": 0.1, "log_scaling_n_floor": 24, "max_position_embeddings": 4096, "mlp_gate_softcap": 2.0,
            "mlp_up_softcap": 3.0, "model_type": f"inkling2{'_loop' * loop}_text", "moe_intermediate_size": 64,
            "n_layers_per_attn_res_block": 2, "n_routed_experts": 6, "num_attention_heads": 4, "num_experts_per_tok": 2,
            "num_hidden_layers": len(kinds), "num_key_value_heads": 2, "pad_token_id": EOT, "qk_l2_clip_threshold": 5.5,
            "rel_extent": 24, "rel_l2_clip_threshold": 4.0, "rms_norm_eps": 1e-6, "route_scale": 2.0,
            "scoring_func": "sigmoid", "sliding_window_size": 16, "swa_head_dim": changes.get("head_dim", 32),
            "swa_num_attention_heads": changes.get("num_attention_heads", 4),
            "swa_num_key_value_heads": changes.get("num_key_value_heads", 2), "tie_word_embeddings": False,
            "unpadded_vocab_size": VOCAB, "use_cache": True, "vocab_size": VOCAB, **changes}


def glm5_next(layers, **changes):
    """config.json in the words of GLM-5.3-Flash: the text model beside a vision tower.  layers has an L for Kimi delta
    attention, an F for latent attention with an indexer, an S for one that takes the choice of the layer before.  The
    limit is not that of the release: it clips some values here."""
    text = {"attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": IM_END,
            "first_k_dense_replace": 3, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 0,
            "hidden_act": "silu", "hidden_size": 64, "index_head_dim": 64, "index_kpool": 4,
            "index_kpool_always_select_tail": True, "index_n_heads": 16, "index_topk": 32,
            "indexer_types": ["shared" if t == "S" else "full" for t in layers], "initializer_range": 0.02,
            "intermediate_size": 192, "kv_lora_rank": 64,
            "layer_types": ["linear_attention" if t == "L" else "indexed_attention" for t in layers],
            "linear_attn_config": {"gate_lower_bound": -5.0, "head_dim": 32, "num_heads": 4,
                                   "short_conv_kernel_size": 4},
            "max_position_embeddings": 4096, "mhc": True, "mla_use_nope": True, "model_type": "glm5_next_text",
            "moe_intermediate_size": 64, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 3,
            "num_hidden_layers": len(layers), "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
            "pad_token_id": EOT, "q_lora_rank": 64, "qk_head_dim": 48, "qk_nope_head_dim": 48, "qk_rope_head_dim": 0,
            "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "swiglu_limit": 1.5,
            "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 32, "vocab_size": VOCAB,
            **changes}
    vision = {"attention_bias": True, "depth": 1, "hidden_act": "silu", "hidden_size": 16, "image_size": 8,
              "in_channels": 3, "intermediate_size": 32, "model_type": "glm5_next_vision", "num_heads": 2,
              "out_hidden_size": 16, "patch_size": 4, "projection_intermediate_size": 32, "spatial_merge_size": 2,
              "temporal_patch_size": 2}
    return {"architectures": ["Glm5NextForConditionalGeneration"], "image_token_id": 248056, "model_type": "glm5_next",
            "text_config": text, "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": vision}


def glm5_next_saved(layers, head_dim, bound, **changes):
    """The same as transformers writes it."""
    dropped = ("first_k_dense_replace", "linear_attn_config", "mhc", "mla_use_nope", "moe_layer_freq",
               "num_nextn_predict_layers", "scoring_func", "topk_method")
    config = glm5_next(layers, **changes)
    text = {k: v for k, v in config["text_config"].items() if k not in dropped}
    return {**config, "text_config": {
        **text, "linear_conv_kernel_dim": 4, "linear_head_dim": head_dim, "linear_lower_bound": bound,
        "linear_num_heads": text["num_attention_heads"], "mlp_layer_types": ["dense"] + ["sparse"] * (len(layers) - 1),
        "qk_head_dim": text["qk_nope_head_dim"]}}


def hy4(types, **changes):
    """config.json in the words of Hy4-preview; types: as in glm_dsa_types().  The limit is not that of the release: it
    clips some values here."""
    n = len(types)
    return {"architectures": ["HYV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": EOT, "dtype": "bfloat16", "enable_lm_head_fp32": True, "eos_token_id": IM_END,
            "first_k_dense_replace": 1, "hc_eps": 1e-6, "hc_magnitude": 2.0, "hc_mult": 4, "head_dim": 16,
            "hidden_act": "silu", "hidden_size": 64, "index_head_dim": 64, "index_n_heads": 16, "index_topk": 32,
            "indexer_types": [{"F": "full", "S": "shared"}[t] for t in types], "initializer_range": 0.006,
            "intermediate_size": 192, "kv_lora_rank": 64, "learnable_sink_init": 0.0, "max_position_embeddings": 4096,
            "mlp_layer_types": ["dense"] + ["sparse"] * (n - 1), "model_type": "hy_v4", "moe_intermediate_size": 64,
            "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": n, "num_key_value_heads": 2,
            "num_nextn_predict_layers": 1, "pad_token_id": EOT, "q_lora_rank": 96, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"}, "routed_scaling_factor": 2.827,
            "swiglu_limit": 1.5, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "v_head_dim": 48,
            "vocab_size": VOCAB, **changes}


def dots3(kinds, **changes):
    """config.json in the words of dots3-note-prev, whose text model stands at the top; kinds: F for a layer that sees the
    keys that its indexer chooses, S for one with a window."""
    n = len(kinds)
    return {"apply_mla_qkv_lora_rescale": True, "architectures": ["Dots3NoteForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attention_gate_type": "headwise", "bos_token_id": EOT, "dtype": "bfloat16",
            "eos_token_id": IM_END, "first_k_dense_replace": 1, "head_dim": 96, "hidden_act": "silu", "hidden_size": 64,
            "index_head_dim": 64, "index_n_heads": 16, "index_topk": 32, "initializer_range": 0.02,
            "intermediate_size": 192, "k_rope_only_layernorm": True, "kv_lora_rank": 128,
            "layer_types": [{"F": "full_attention", "S": "sliding_attention"}[k] for k in kinds],
            "max_position_embeddings": 4096, "model_type": "dots3_note", "moe_intermediate_size": 64,
            "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": changes.get("moe_intermediate_size", 64),
            "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
            "num_experts_per_tok": 3, "num_hidden_layers": n, "num_key_value_heads": changes.get("num_attention_heads", 4),
            "pad_token_id": EOT, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 80000000, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
            "sliding_window_size": 16, "swa_attention_gate_type": "headwise", "swa_head_dim": 112, "swa_kv_lora_rank": 1024,
            "swa_num_attention_heads": 2, "swa_num_key_value_heads": changes.get("swa_num_attention_heads", 2),
            "swa_q_lora_rank": changes.get("q_lora_rank", 96), "swa_qk_nope_head_dim": 48, "swa_qk_rope_head_dim": 64,
            "swa_rope_theta": 50000, "swa_v_head_dim": 48, "tie_word_embeddings": False, "topk_group": 1,
            "topk_method": "noaux_tc", "use_cache": True, "use_dsa": True, "use_sliding_window": True, "v_head_dim": 32,
            "vocab_size": VOCAB, **changes}


def longcat(**changes):
    """config.json in the words of LongCat-Flash-Chat."""
    return {"architectures": ["LongcatFlashForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_method": "MLA", "bos_token_id": EOT, "eos_token_id": IM_END, "expert_ffn_hidden_size": 64,
            "ffn_hidden_size": 192, "hidden_size": 128, "kv_lora_rank": 64, "max_position_embeddings": 4096,
            "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "model_type": "longcat_flash", "moe_topk": 4,
            "n_routed_experts": 8, "num_attention_heads": 4, "num_layers": 2, "q_lora_rank": 96, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "routed_scaling_factor": 3.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 32,
            "vocab_size": VOCAB, "zero_expert_num": 4, "zero_expert_type": "identity", **changes}


# Words of single families -> those of the others
ALIASES = {"num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
           "moe_renormalize": "norm_topk_prob"}


def text_config(config):
    """The part of a configuration that describes the language model, in the words of most families too."""
    outer = {k: config[k] for k in ("model_type", "tie_word_embeddings")}
    text = {**outer, **config.get("text_config", config)}
    if text["model_type"] == "dbrx":
        text |= {"hidden_size": text["d_model"], "num_experts_per_tok": text["ffn_config"]["moe_top_k"]}
    return {**text, **{other: text[k] for k, other in ALIASES.items() if k in text}}


LING = [(r"\.self_attn\.o_proj\.", ".attention.dense."), (r"\.self_attn\.q_norm", ".attention.query_layernorm"),
        (r"\.self_attn\.k_norm", ".attention.key_layernorm"), (r"\.self_attn\.", ".attention."),
        (r"\.embed_tokens\.", ".word_embeddings."), (r"\.gate\.e_score_correction_bias", ".gate.expert_bias")]
GRANITE = [(r"\.router\.weight", ".router.layer.weight")]
W123 = [(r"\.mlp\.", ".block_sparse_moe."), (r"\.gate_proj\.", ".w1."), (r"\.up_proj\.", ".w3."),
        (r"\.down_proj\.", ".w2.")]
STEP = [(r"^model\.language_model\.", "model."), (r"\.mlp\.gate\.weight", ".moe.gate.weight"),
        (r"\.mlp\.gate\.e_score_correction_bias", ".moe.router_bias"), (r"\.mlp\.experts\.", ".moe."),
        (r"\.mlp\.shared_experts\.", ".share_expert.")]
V4 = [(r"\.input_layernorm", ".attn_norm"), (r"\.post_attention_layernorm", ".ffn_norm"), (r"\.self_attn\.", ".attn."),
      (r"\.mlp\.", ".ffn."), (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.compressor\.indexer\.scorer\.", ".indexer."),
      (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"), (r"\.compressor\.indexer\.", ".indexer.compressor."),
      (r"compressor\.kv_norm", "compressor.norm"), (r"\.kv_proj", ".wkv"), (r"compressor\.gate_proj", "compressor.wgate"),
      (r"\.position_bias$", ".ape"), (r"\.([qo]_[ab])_proj", r".w\1"), (r"\.q_a_norm", ".q_norm"),
      (r"\.sinks$", ".attn_sink"), (r"\.e_score_correction_bias$", ".bias"), (r"experts\.(.*)gate_proj", r"experts.\1w1"),
      (r"experts\.(.*)up_proj", r"experts.\1w3"), (r"experts\.(.*)down_proj", r"experts.\1w2"), (r"^lm_head", "head")]
# model_type -> what transformers calls otherwise than the hub (conversion_mapping.py): regular expressions, in turn
HUB_NAMES = {
    "phimoe": [(r"\.router\.", ".gate."), *W123],
    "hy_v3": [(r"\.mlp\.gate\.", ".mlp.router.gate."), (r"\.mlp\.e_score_correction_bias", ".mlp.expert_bias"),
              (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp.")],
    "hy_v4": [(r"\.attn_hc\.", ".hc_attn_layer.hc_pre.hc_"), (r"\.ffn_hc\.", ".hc_mlp_layer.hc_pre.hc_"),
              (r"\.hc_head\.hc_", ".hc_head.hc_head_"), (r"\.sinks$", ".learnable_sink_param"),
              (r"\.self_attn\.gate_proj", ".self_attn.linear_gate")],
    "exaone_moe": [(r"\.gate\.e_score_correction_bias", ".e_score_correction_bias")],
    "bailing_moe": LING, "bailing_moe_v2": LING, "sarvam_moe": LING, "minimax_m2": W123, "mixtral": W123, "granitemoe": GRANITE, "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
    "minimax_m3_vl": [
        (r"^lm_head", "language_model.lm_head"), (r"^model\.language_model\.", "language_model.model."),
        (r"\.self_attn\.indexer\.", ".self_attn.index_"), (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
        (r"\.mlp\.(gate|experts|shared_experts)\.", r".block_sparse_moe.\1."),
        (r"(\.experts\.\d+)\.gate_proj", r"\1.w1"), (r"(\.experts\.\d+)\.up_proj", r"\1.w3"),
        (r"(\.experts\.\d+)\.down_proj", r"\1.w2"),
        (r"^model\.vision_tower\.embeddings\.proj", "model.vision_tower.embeddings.patch_embedding"),
        (r"^model\.vision_tower\.layers", "model.vision_tower.encoder.layers"),
        (r"^model\.vision_tower", "vision_tower.vision_model"),
        (r"^model\.multi_modal_projector\.merge_", "patch_merge_mlp."), (r"^model\.multi", "multi")],
    "mistral3": [(r"^lm_head", "language_model.lm_head"), (r"^model\.language_model\.", "language_model.model."),
                 (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1.")],
    "ernie4_5_moe": [(r"\.gate\.moe_statics\.", ".moe_statics.")], "step3p5": STEP, "step3p7": STEP,
    "laguna": [(r"\.mlp\.gate\.e_score", ".mlp.experts.e_score"), (r"\.shared_experts\.", ".shared_expert.")],
    "mimo_v2_flash": [(r"self_attn\.sinks$", "self_attn.attention_sink_bias")],
    "kimi_linear": [
        (r"\.forget_gate\.", "."), (r"\.mlp\.(gate|experts|shared_experts)\.", r".block_sparse_moe.\1."),
        (r"(\.experts\.\d+)\.gate_proj", r"\1.w1"), (r"(\.experts\.\d+)\.up_proj", r"\1.w3"),
        (r"(\.experts\.\d+)\.down_proj", r"\1.w2")],
    "kimi_k3": [
        (r"^", "language_model."), (r"\.forget_gate\.", "."), (r"\.g_b_proj", ".g_proj"),
        (r"_res\.norm$", "_res_norm.weight"), (r"_res\.proj\.", "_res_proj."),
        (r"\.mlp\.(gate|experts|shared_experts|routed_expert_\w+)\.", r".block_sparse_moe.\1."),
        (r"(\.experts\.\d+)\.gate_proj", r"\1.w1"), (r"(\.experts\.\d+)\.up_proj", r"\1.w3"),
        (r"(\.experts\.\d+)\.down_proj", r"\1.w2")],
    "bailing_hybrid": [
        (r"\.forget_gate\.", "."), (r"\.self_attn\.o_proj\.", ".self_attn.dense."), (r"\.self_attn\.", ".attention."),
        (r"\.embed_tokens\.", ".word_embeddings."), (r"\.gate\.e_score_correction_bias", ".gate.expert_bias")],
    "glm5_next": [(r"\.forget_gate\.", "."), (r"\.(attn|ffn)_hc\.", r".hc_\1_")],
    "deepseek_v4": [*V4, (r"^model\.", ""), (r"^embed_tokens", "embed"), (r"^hc_head\.hc", "hc_head")],
    "deepseek_v4 saved": [*V4, (r"\.attn\.kv_norm", ".attn.norm")],
    "inkling2": [
        (r"^lm_head", "model.unembed"), (r"^model\.", "model.llm."), (r"embed_tokens\.weight", "embed.weight"),
        (r"embed_tokens\.embed_norm", "embed_norm"), (r"\.gate\.e_score_correction_bias", ".gate.bias"),
        (r"\.self_attn\.", ".attn."), (r"\.q_proj\.linear", ".wq_du"), (r"\.k_proj\.linear", ".wk_dv"),
        (r"\.v_proj\.linear", ".wv_dv"), (r"\.([kv])_proj\.sconv\.", r".\1_sconv."),
        (r"\.relative_position_bias\.linear", ".wr_du"), (r"\.relative_position_bias\.norm", ".rel_l2_clip"),
        (r"\.relative_position_bias\.", ".rel_logits_proj."), (r"\.q_proj\.norm", ".q_l2_clip"),
        (r"\.o_proj\.linear", ".wo_ud"), (r"\.o_proj\.gate_proj", ".gate_attn"), (r"\.sink_proj", ".attn_sink_proj"),
        (r"post_attention_convolution", "attn_sconv"), (r"post_mlp_convolution", "mlp_sconv"),
        (r"sconv\.conv1d\.", "sconv."), (r"\.static_weight", ".static_w"), (r"\.weight_proj\.weight", ".weight_proj"),
        (r"([qkv])_input_layernorm", r"\1_input_norm"), (r"post_attention_layernorm", "mlp_norm"),
        (r"input_layernorm", "attn_norm"), (r"layers\.(\d+)\.mlp_input\.query", r"attn_res.mlp_queries.\1"),
        (r"final_input\.query", "attn_res.output_query"), (r"\.q_message_gate\.", ".controllers.attn."),
        (r"\.(\w+)_message_gate\.", r".controllers.\1."), (r"\.down_proj\.weight", ".down_weight"),
        (r"\.forget_gate_proj\.weight", ".forget_weight"), (r"\.message_gate_proj\.weight", ".gain_weight")],
    "nemotron_h": [(r"^model\.", "backbone.")], "nemotron_h saved": [],
    "arctic": [*W123, (r"\.residual_mlp\.gate_proj", ".residual_mlp.w1"), (r"\.residual_mlp\.up_proj", ".residual_mlp.w3"),
               (r"\.residual_mlp\.down_proj", ".residual_mlp.w2")],
    "maple": [(r"\.embed_tokens\.", ".word_embeddings.")],
    "smallthinker": [(r"\.block_sparse_moe\.gate\.", ".block_sparse_moe.primary_router."),
                     (r"(\.experts\.\d+\.\w+)_proj", r"\1")],
    "lfm2_moe": [(r"(\.experts\.\d+)\.gate_proj", r"\1.w1"), (r"(\.experts\.\d+)\.up_proj", r"\1.w3"),
                 (r"(\.experts\.\d+)\.down_proj", r"\1.w2")],
}


def hub_name(config, name):
    saved = bool({"compress_rates", "layers_block_type"} & config.keys())
    kind = "inkling2" if config["model_type"].startswith("inkling2") else config["model_type"]
    for old, new in HUB_NAMES.get(kind + " saved" * saved, []):
        name = re.sub(old, new, name)
    return re.sub(r"layers\.(\d+)\.attention_input\.query", lambda m: f"attn_res.attn_queries.{int(m[1]) - 1}", name)


def new_rope(config, **rope):
    """The same configuration as transformers 5 writes it: rope_parameters instead of two keys, dtype."""
    config = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    return {**config, "rope_parameters": rope, "dtype": "bfloat16"}


INDEX_FP8 = r"_proj(_with_mqa)?\.weight$|indexer\.w(q_b|k)\.weight$"
LINEAR = r"_proj(_with_mqa)?\.weight$"
TEXT_LINEAR = r"^language_model\..*_proj\.weight$"
EXPERTS = r"\.mlp\.experts\..*weight$"
QWEN_LINEAR = r"^(model|mtp)\..*(self_attn|shared_expert|experts\.\d+)\..*_proj\.weight$"
G_PROJ = r"g_proj\.weight$"
MIMO_FP8 = r"(\.[qkv]_proj|\.mlp\..*_proj)\.weight$"
STEP_STACK = r"\.moe\.(\d+)\.", ".moe."
STEP_TOWER = {"conv1.weight": (16, 3, 14, 14), "positional_embedding": (4, 16), "ln_pre.weight": (16,),
              "ln_pre.bias": (16,), **{"transformer.resblocks.0." + name: shape for name, shape in {
                  "attn.in_proj_weight": (48, 16), "attn.in_proj_bias": (48,), "attn.out_proj.weight": (16, 16),
                  "attn.out_proj.bias": (16,), "ln_1.weight": (16,), "ln_1.bias": (16,), "ln_2.weight": (16,),
                  "ln_2.bias": (16,), "ls_1.gamma": (16,), "ls_2.gamma": (16,), "mlp.c_fc.weight": (32, 16),
                  "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (16, 32), "mlp.c_proj.bias": (16,)}.items()},
              "vit_downsampler1.weight": (32, 16, 3, 3), "vit_downsampler1.bias": (32,),
              "vit_downsampler2.weight": (64, 32, 3, 3), "vit_downsampler2.bias": (64,)}
V_BIAS = r"v_proj\.bias$"
M3_LOUD = r"layers.*(\.w[13]|gate_proj|up_proj|o_proj)\.weight$"
M3_LINEAR = r"^language_model\.model\.layers.*_proj\.weight$"
W123_EXPERTS = r"\.experts\.\d+\.w[123]\.weight$"
V4_F32 = r"(^|[._])hc_|attn_sink$|\.ape$"
V4_FP8 = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|shared_experts\.w\d\.weight$|\.[eh]_proj\.weight$"
POOL_F32 = r"\.index_kpool_compress_\w+$"
HY4_F32 = r"\.hc_\w+$|\.learnable_sink_param$|\.k_norm\.|\.weights_proj\."
KDA_F32 = r"\.(A_log|dt_bias|[qkv]_conv1d\.weight)$"
INKLING_F32 = r"sconv|gate\.weight$|forget_weight|gain_weight|attn_res|cross_pass"
V4_EXPERTS = r"\.experts\.\d+\.w\d\.weight$"
GPT_OSS_EXPERTS = r"\.experts\.\d+\."
GPT_OSS_STACK = r"\.experts\.(\d+)\.(\w+)\.weight(\w*)$", r".experts.\2\3"
DELTA_LINEAR = r"^model\..*linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj)\.weight$"

GRANITE_SWA_STACKS = r"model\.", ".experts.gate_up_proj", ".experts.down_proj"
GRANITE_STACKS = r"model\.", ".input_linear.weight", ".output_linear.weight"

# name -> config and
#   store    the first regular expression found in a tensor's name decides its storage; none: BF16
#   declare  how config.json and hf_quant_config.json announce the quantisation
#   shards   number of safetensors files
#   apart    the tensors whose names match lie in a file of their own, mtp.safetensors
#   kept     experts that survive pruning, per layer
#   positions  length of the prompt, if not POSITIONS
#   gap      the smallest gap of routers and indexers, if not INDEX_GAP
#   mtp_prompt  the prompt is chosen for the routing of the MTP layer too
#   mtp      the tensors of one multi-token-prediction layer under Qwen's names
#   mtp_draw which draw of these tensors: with that one no choice of the layer is close for the prompt of the trunk
#   tables   False: the MTP layer has no embeddings and no head of its own
#   fused    experts whose names match are stored as one gate_up_proj and one down_proj, without ".weight"; or the pattern
#            and two other names in place of these
#   turned   those are stored as [experts, hidden, 2 x width] and [experts, width, hidden]
#   quiet    the tensors whose names match are drawn a quarter as large, lest all tokens be alike
#   loud     the tensors whose names match are drawn three times as large, so that limits clip some values
#   common   the embeddings have so much of one vector in common; some scores of an indexer are then negative throughout
#   columns  experts are stored as one gate_up_proj and one down_proj, (experts, in, out)
#   chain    the number of layers for multi-token prediction that take each other's rows, windowed and dense
#   aside    tensors that no text model reads, with their shapes
#   flat     taps are stored as [values, taps] in place of [values, 1, taps], A_log without sizes of 1
#   ends     positions of the prompt with the token that ends a text, beyond which no n-gram goes
#   joined   queries, keys and values are stored as one matrix, query_key_value
#   stack    tensors of single experts are stored as one: their names with the number as group 1, that of the whole
SPECS = {
    "inkling2_loop": dict(
        config=inkling2("SFSFSSF", loop_gate_rank=24, loop_layer_index_end=6, loop_layer_index_start=2, loop_num_passes=3),
        positions=96, store=[(INKLING_F32, "f32")]),
    "inkling2_nvfp4": dict(
        config={"architectures": ["Inkling2ForConditionalGeneration"], "dtype": "bfloat16", "image_token_id": 5,
                "model_type": "inkling2", "tie_word_embeddings": False, "vision_config": {"model_type": "inkling2_vision"},
                "text_config": inkling2("FSSFS", conv_kernel_size=3, d_rel=8, head_dim=64, hidden_size=128,
                                        n_layers_per_attn_res_block=3, n_routed_experts=4, num_attention_heads=3,
                                        num_key_value_heads=1, qk_l2_clip_threshold=8.0, rel_extent=32,
                                        rel_l2_clip_threshold=3.0, sliding_window_size=20)},
        aside={"model.visual.backbone.ln_pre.weight": (16,)}, positions=72, shards=2,
        store=[(r"layers\.4\.mlp\.experts", "mxfp8"), (r"mlp\.experts", "nvfp4"), (INKLING_F32, "f32")]),
    "qwen3": dict(config=dense("Qwen3", head_dim=64, use_sliding_window=False, sliding_window=None)),
    "qwen3_nvfp4": dict(
        config=new_rope(dense("Qwen3", head_dim=128, num_hidden_layers=2, hidden_size=128, num_attention_heads=3,
                              num_key_value_heads=1, tie_word_embeddings=True), rope_type="default", rope_theta=5e5),
        declare="modelopt", store=[(LINEAR, "nvfp4")]),
    "qwen3_5": dict(
        config=qwen3_5_dense("LF", linear_num_value_heads=6), positions=160, mtp=True,
        store=[(r"\.A_log$|linear_attn\.norm\.weight$", "f32")]),
    "qwen3_5_nvfp4": dict(
        config=qwen3_5_dense("LFL", linear_num_value_heads=4, head_dim=128, intermediate_size=128),
        declare="modelopt_mixed_qwen", positions=72, mtp=True, shards=2,
        store=[(r"^mtp\.", "bf16"), (r"mlp\..*_proj\.weight$", "nvfp4"), (QWEN_LINEAR + "|" + DELTA_LINEAR, "fp8")]),
    "llama": dict(
        config=dense("Llama", hidden_size=128, num_attention_heads=2, num_key_value_heads=1, mlp_bias=False,
                     rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=8192,
                     rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "mistral": dict(
        config=mistral3(dense("Mistral", num_hidden_layers=2, head_dim=64, rms_norm_eps=1e-5, sliding_window=None)),
        declare="compressed_tensors_text", store=[(TEXT_LINEAR, "ct_nvfp4")]),
    "ministral3": dict(
        config={"architectures": ["Ministral3ForCausalLM"], **ministral3(growing(16.0, 8, 0.1))}),
    "ministral3_nvfp4": dict(
        config=mistral3(ministral3(growing(4.0, 16, 0.5), num_hidden_layers=2, hidden_size=128, head_dim=128,
                                   num_attention_heads=3, num_key_value_heads=1)),
        declare="compressed_tensors_text", store=[(TEXT_LINEAR, "ct_nvfp4")]),
    "mistral4": dict(config=mistral3(mistral4(rope_parameters=growing(32.0, 8, 0.1, partial_rotary_factor=1 / 3)))),
    "mistral4_nvfp4": dict(
        config=mistral3(mistral4(rope_parameters=growing(8.0, 16, 0.4, partial_rotary_factor=0.5), hidden_size=128,
                                 first_k_dense_replace=1, num_attention_heads=3, num_key_value_heads=3,
                                 qk_nope_head_dim=16, v_head_dim=64, n_routed_experts=6, num_experts_per_tok=2)),
        declare="compressed_tensors_text", store=[(r"^language_model\..*experts\..*_proj\.weight$", "ct_nvfp4")]),
    "qwen2": dict(
        config=dense("Qwen2", hidden_size=128, num_attention_heads=2, num_key_value_heads=1, use_sliding_window=False,
                     sliding_window=None), quiet=V_BIAS),
    "qwen2_nvfp4": dict(
        config=dense("Qwen2", hidden_size=256, num_hidden_layers=2, intermediate_size=128, tie_word_embeddings=True),
        declare="modelopt", store=[(LINEAR, "nvfp4")], quiet=V_BIAS),
    "glm4": dict(config=glm4_dense(attention_bias=True), quiet=V_BIAS),
    "glm4_nvfp4": dict(
        config=new_rope(glm4_dense(hidden_size=128, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                                   head_dim=128, intermediate_size=128, tie_word_embeddings=True),
                        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        declare="modelopt", store=[(LINEAR, "nvfp4")]),
    "gemma4": dict(config=gemma4_whole(gemma4(
        "SSF", enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=64,
        final_logit_softcapping=6.0)), fused=r"model\."),
    "gemma4_nvfp4": dict(
        config=gemma4_whole(per_layer(gemma4(
            "SF", hidden_size=128, num_attention_heads=6, num_key_value_heads=3, attention_k_eq_v=False,
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=128, intermediate_size=64,
            sliding_window=20, rms_norm_eps=1e-5, final_logit_softcapping=None),
            head_dim=128, num_key_value_heads=2)),
        declare="modelopt", store=[(r"(self_attn|mlp|experts).*_proj\.weight$", "nvfp4")]),
    "gemma4_dense": dict(config={"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16", **gemma4(
        "SFSF", hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=32, global_head_dim=64,
        attention_k_eq_v=False, intermediate_size=128, sliding_window=16)}),
    "qwen3_vl_moe": dict(config=qwen3_vl(num_hidden_layers=3), fused=r"model\.", turned=True),
    "qwen3_vl_moe_nvfp4": dict(
        config=qwen3_vl(hidden_size=128, num_attention_heads=3, num_key_value_heads=1, head_dim=128, num_experts=6,
                        num_experts_per_tok=2, moe_intermediate_size=128, mlp_only_layers=[0]),
        declare="modelopt", store=[(r"language_model\.layers.*\.experts\..*_proj\.weight$", "nvfp4")]),
    "qwen3moe": dict(config=qwen(num_hidden_layers=2, mlp_only_layers=[1])),
    "qwen3moe_nonorm": dict(
        config=qwen(num_hidden_layers=2, num_key_value_heads=1, num_experts=4,
                    norm_topk_prob=False, tie_word_embeddings=True, rms_norm_eps=1e-5, torch_dtype="float16",
                    rope_scaling=yarn(4.0, 64), max_position_embeddings=256),
        store=[(LINEAR, "f16"), ("", "f32")]),
    "qwen3moe_nvfp4": dict(
        config=qwen(num_hidden_layers=2), declare="modelopt_mixed", shards=2,
        store=[(EXPERTS, "nvfp4"), (r"self_attn\..*" + LINEAR, "fp8")]),
    "qwen3moe_ct": dict(
        config=qwen(hidden_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
                    num_experts=4, moe_intermediate_size=256, tie_word_embeddings=True),
        declare="compressed_tensors", store=[(LINEAR, "ct_nvfp4")]),
    "qwen3moe_reap": dict(
        config=new_rope(qwen(), rope_type="default", rope_theta=1000000.0), declare="modelopt_experts",
        store=[(EXPERTS, "nvfp4")], kept=[[0, 1, 3, 4, 6, 7], [1, 2, 4, 5, 7], [0, 1, 2, 3, 5, 6, 7]]),
    "deepseek_v3": dict(
        config=deepseek(rope_scaling=mla_yarn(40, 64), max_position_embeddings=2560)),
    "deepseek_v3_plain": dict(
        config=deepseek(num_hidden_layers=2, q_lora_rank=None, n_group=1, topk_group=1, n_routed_experts=4,
                        moe_intermediate_size=128, num_experts_per_tok=2, norm_topk_prob=False,
                        routed_scaling_factor=1.5, num_nextn_predict_layers=1)),
    "deepseek_v3_mtp": dict(
        config=deepseek(num_hidden_layers=2, moe_intermediate_size=128, rope_scaling=mla_yarn(40, 64),
                        max_position_embeddings=2560, num_nextn_predict_layers=1)),
    "deepseek_v3_fp8": dict(
        config=deepseek(hidden_size=192, num_hidden_layers=2, n_routed_experts=6, n_group=2, topk_group=1,
                        num_experts_per_tok=2, tie_word_embeddings=True, rope_scaling=mla_yarn(40, 4096),
                        max_position_embeddings=163840),
        declare="fp8_block", store=[(LINEAR, "fp8_block")]),
    "deepseek_v3_nvfp4": dict(
        config=new_rope(deepseek(hidden_size=128, num_hidden_layers=2, tie_word_embeddings=True),
                        rope_type="default", rope_theta=1000000.0),
        declare="modelopt", store=[(LINEAR, "nvfp4")]),
    "kimi_k2": dict(
        config=deepseek(model_type="kimi_k2", num_hidden_layers=2, n_group=1, topk_group=1,
                        routed_scaling_factor=2.827, rope_theta=50000.0,
                        rope_scaling=mla_yarn(64.0, 64, 1.0, 1.0)),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "deepseek_v3_reap": dict(
        config=deepseek(n_routed_experts=16, rope_scaling=mla_yarn(40, 64), max_position_embeddings=2560),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")],
        kept=[None, [0, 1, 3, 4, 6, 7, 8, 9, 11, 13, 14, 15], [1, 2, 4, 7, 8, 10, 13, 14]]),
    "hy_v3": dict(config=hy3(num_nextn_predict_layers=1)),
    "hy_v3_nvfp4": dict(
        config=hy3(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"], hidden_size=128, num_attention_heads=6,
                   num_key_value_heads=1, num_experts=6, num_shared_experts=1, num_experts_per_tok=2,
                   moe_intermediate_size=64, router_scaling_factor=1.5),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "glm4_moe": dict(
        config=glm4(head_dim=128, use_qk_norm=True, routed_scaling_factor=2.5), shards=2, tables=False,
        mtp_prompt=True, apart=r"model\.layers\.3\."),
    "glm4_moe_air": dict(
        config=glm4(head_dim=64, num_attention_heads=6, use_qk_norm=False, routed_scaling_factor=1.0,
                    intermediate_size=128, moe_intermediate_size=128),
        declare="modelopt_experts", mtp_prompt=True, store=[(r"\.layers\.3\.", "bf16"), (EXPERTS, "nvfp4")]),
    "glm4_moe_lite": dict(config=glm4_lite(), mtp_prompt=True),
    "glm4_moe_lite_nvfp4": dict(
        config=glm4_lite(num_hidden_layers=2, num_nextn_predict_layers=0, hidden_size=128, num_attention_heads=3,
                         num_key_value_heads=3, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
                         q_lora_rank=64, qk_nope_head_dim=64, v_head_dim=32, routed_scaling_factor=1.25),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "dots1": dict(config=dots1()),
    "dots1_nvfp4": dict(
        config=new_rope(dots1(num_hidden_layers=2, hidden_size=128, num_attention_heads=6, num_key_value_heads=2,
                              n_routed_experts=12, n_group=4, topk_group=2, norm_topk_prob=False,
                              routed_scaling_factor=1.25, n_shared_experts=1, tie_word_embeddings=True,
                              layer_types=["full_attention"] * 2, max_window_layers=2, sliding_window=4),
                        rope_type="default", rope_theta=1000000.0),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "dots3_note": dict(
        config=dots3("FFSF"), positions=96,
        aside={"model.mtp.embed_tokens.weight": (VOCAB, 64), "model.layers.4.enorm.weight": (64,)}),
    "dots3_note_nvfp4": dict(
        config=dots3("FSS", hidden_size=128, num_attention_heads=2, q_lora_rank=64, v_head_dim=64, index_head_dim=128,
                     index_n_heads=12, index_topk=24, sliding_window_size=24, swa_num_attention_heads=4,
                     swa_head_dim=96, swa_qk_nope_head_dim=32, swa_v_head_dim=32, rms_norm_eps=0.01,
                     moe_intermediate_size=128, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
                     routed_scaling_factor=1.5),
        declare="modelopt_experts", positions=72, store=[(EXPERTS, "nvfp4")]),
    "longcat_flash": dict(
        config=longcat(), positions=72,
        aside={"model.mtp.embed_tokens.weight": (VOCAB, 128), "model.mtp.layers.0.enorm.m.weight": (128,)}),
    "longcat_flash_nvfp4": dict(
        config=longcat(hidden_size=192, num_attention_heads=3, q_lora_rank=64, kv_lora_rank=128,
                       qk_nope_head_dim=48, qk_rope_head_dim=64, v_head_dim=64, ffn_hidden_size=256,
                       expert_ffn_hidden_size=128, moe_topk=3, n_routed_experts=6, zero_expert_num=3,
                       rms_norm_eps=0.01, rope_theta=50000.0, routed_scaling_factor=1.5, tie_word_embeddings=True),
        declare="modelopt_experts", positions=72, store=[(EXPERTS, "nvfp4")]),
    "hy_v4": dict(
        config=hy4("FSFS"), positions=96, mtp_prompt=True, fused=r"model\.", store=[(HY4_F32, "full")]),
    "hy_v4_nvfp4": dict(
        config=hy4("FFS", hidden_size=128, num_attention_heads=6, q_lora_rank=64, kv_lora_rank=128, qk_nope_head_dim=48,
                   qk_rope_head_dim=64, v_head_dim=32, index_head_dim=128, index_n_heads=12, index_topk=24, hc_eps=0.02,
                   hc_magnitude=1.5, rms_norm_eps=0.01, moe_intermediate_size=128, n_routed_experts=6, num_experts_per_tok=2,
                   n_shared_experts=2, routed_scaling_factor=1.5, swiglu_limit=1.0, num_nextn_predict_layers=0),
        declare="modelopt_hy4", positions=72, shards=2,
        store=[(HY4_F32, "full"), (EXPERTS + r"|\.layers\.0\.mlp\.\w+_proj\.weight$", "nvfp4")]),
    "hunyuan_v1_moe": dict(config=hunyuan(1000.0, num_hidden_layers=2, num_experts=5)),
    "hunyuan_v1_moe_nvfp4": dict(
        config={**{k: v for k, v in new_rope(
            hunyuan(50.0, hidden_size=128, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, num_experts=4,
                    head_dim=128, intermediate_size=128),
            rope_type="dynamic", rope_theta=10000.0, alpha=50.0, factor=1.0).items()
            if k not in ("moe_intermediate_size", "num_shared_expert", "attention_head_dim")}, "moe_topk": 2},
        declare="modelopt", store=[(r"wg\.weight$", "f32"), (LINEAR, "nvfp4")]),
    "granitemoe": dict(
        config=granite(None, tie_word_embeddings=True, embedding_multiplier=1.25, residual_multiplier=1.5),
        fused=GRANITE_STACKS),
    "granitemoeshared_nvfp4": dict(
        config=new_rope(granite(128, num_attention_heads=6, num_key_value_heads=2, num_local_experts=4, head_dim=64,
                                attention_multiplier=0.1875, embedding_multiplier=2.0, residual_multiplier=0.5,
                                logits_scaling=0.75, intermediate_size=128),
                        rope_type="default", rope_theta=10000.0),
        declare="compressed_tensors", fused=GRANITE_STACKS,
        store=[(r"(self_attn|shared_mlp)\..*(_proj|_linear)\.weight$", "ct_nvfp4")]),
    "bailing_moe_v2": dict(
        config=ling2("bailing_moe_v2", n_group=4, topk_group=2, num_nextn_predict_layers=1, head_dim=32,
                     num_attention_heads=2, num_key_value_heads=1), mtp_prompt=True,
        tables=False, joined=True),
    "sarvam_moe_nvfp4": dict(
        config=ling2("sarvam_moe", hidden_size=128, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                     num_experts=6, num_experts_per_tok=2, routed_scaling_factor=1.25, rope_theta=8000000.0,
                     norm_topk_prob=False, num_shared_experts=2),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")], joined=True),
    "exaone_moe": dict(config=exaone("LLG")),
    "exaone_moe_nvfp4": dict(
        config={**exaone("GLL", hidden_size=128, num_attention_heads=3, num_key_value_heads=1, sliding_window=20,
                         num_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2, norm_topk_prob=False,
                         routed_scaling_factor=1.25, num_shared_experts=2, rope_parameters={
                             "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
                "mlp_layer_types": ["dense", "sparse", "sparse"]},
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "afmoe": dict(config=afmoe("LLLG"), quiet="embed_tokens"),
    "afmoe_nvfp4": dict(
        config=new_rope(afmoe("GL", hidden_size=128, num_attention_heads=3, num_key_value_heads=1, sliding_window=20,
                              num_dense_layers=0, num_experts=6, num_experts_per_tok=2, route_scale=1.5,
                              num_shared_experts=2),
                        rope_type="default", rope_theta=10000.0),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")], quiet="embed_tokens"),
    "granitemoe_swa": dict(
        config=granite_swa("fSs", embedding_multiplier=1.25, residual_multiplier=1.5, tie_word_embeddings=True),
        fused=GRANITE_SWA_STACKS),
    "granitemoe_swa_nvfp4": dict(
        config=granite_swa("sF", num_attention_heads=6, num_key_value_heads=2, num_local_experts=4, head_dim=64,
                           attention_multiplier=0.1875, residual_multiplier=0.5, intermediate_size=128, sliding_window=20),
        declare="compressed_tensors", fused=GRANITE_SWA_STACKS, store=[(r"self_attn\..*_proj\.weight$", "ct_nvfp4")]),
    "granitemoehybrid": dict(config=granite4("M*M"), fused=GRANITE_STACKS, positions=160),
    "granitemoehybrid_nvfp4": dict(
        config=granite4_saved("*MM", hidden_size=128, num_attention_heads=3, head_dim=64, num_key_value_heads=3,
                              mamba_n_heads=4, mamba_d_head=64, mamba_d_state=64, num_local_experts=4,
                              intermediate_size=128, shared_intermediate_size=64, tie_word_embeddings=False),
        declare="compressed_tensors", fused=GRANITE_STACKS, positions=72,
        store=[(r"(self_attn|shared_mlp|mamba)\..*(_proj|_linear)\.weight$", "ct_nvfp4")]),
    "granitemoehybrid_dense": dict(
        config=granite4("M*", num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=4, mamba_d_head=32), positions=72),
    "granitemoehybrid_rope": dict(
        config=granite4("**", num_local_experts=0, num_experts_per_tok=0, hidden_size=128, position_embedding_type="rope",
                        rope_theta=1000000, num_key_value_heads=2, mamba_d_head=32)),
    "deepseek_v2": dict(config=deepseek_v2(64), quiet=r"mlp\.gate\.weight$"),
    "deepseek_v2_nvfp4": dict(
        config=deepseek_v2(None, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=6,
                           num_experts_per_tok=2, n_shared_experts=2, qk_nope_head_dim=16, v_head_dim=64),
        declare="modelopt", store=[(EXPERTS, "nvfp4")]),
    "deepseek_moe": dict(config=deepseek_moe()),
    "deepseek_moe_nvfp4": dict(
        config=deepseek_moe(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                            n_shared_experts=1, n_routed_experts=4, moe_intermediate_size=128),
        declare="modelopt", store=[(EXPERTS, "nvfp4")]),
    "bailing_moe": dict(config=ling1(), joined=True),
    "bailing_moe_nvfp4": dict(
        config=ling1(norm_head=False, hidden_size=128, num_attention_heads=4, num_key_value_heads=1, num_experts=5,
                     norm_topk_prob=False, num_shared_experts=1, first_k_dense_replace=1, num_hidden_layers=3),
        declare="modelopt", joined=True, store=[(EXPERTS, "nvfp4")]),
    "solar_open": dict(config=solar(rope_scaling={
        "rope_type": "yarn", **{k: v for k, v in yarn(16.0, 16).items() if k != "type"}})),
    "solar_open_nvfp4": dict(
        config=new_rope(solar(hidden_size=128, num_attention_heads=3, num_key_value_heads=1, n_routed_experts=6,
                              num_experts_per_tok=2, moe_intermediate_size=128, routed_scaling_factor=1.5),
                        rope_type="default", rope_theta=500000.0),
        declare="modelopt", store=[(EXPERTS, "nvfp4")]),
    "cohere2_moe": dict(config=cohere2("GLG", logit_scale=4.5), quiet="embed_tokens"),
    "cohere2_moe_nvfp4": dict(
        config=new_rope(cohere2("LG", hidden_size=128, num_attention_heads=3, num_key_value_heads=1, sliding_window=20,
                                num_experts=6, num_experts_per_tok=2, expert_selection_fn="softmax", rms_norm_eps=1e-6,
                                first_k_dense_replace=0, num_shared_experts=2, logit_scale=1.5,
                                tie_word_embeddings=False),
                        rope_type="default", rope_theta=10000.0),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")]),
    "dbrx": dict(config=dbrx({}, {}, d_model=128, n_heads=2), loud=r"mlp\.w2$"),
    "dbrx_nvfp4": dict(
        config=new_rope(dbrx({"clip_qkv": 1.25, "kv_n_heads": 1, "rope_theta": 10000},
                             {"ffn_hidden_size": 128, "moe_num_experts": 6, "moe_top_k": 2}, d_model=192, n_heads=3),
                        rope_type="default", rope_theta=10000.0),
        declare="modelopt_experts", store=[(r"_linear\.", "nvfp4")], loud="w2_linear"),
    "llama4": dict(
        config={"architectures": ["Llama4ForCausalLM"], **llama4(rope_scaling={
            "factor": 8.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3"})}, positions=72, columns=True),
    "llama4_nvfp4": dict(
        config={"architectures": ["Llama4ForCausalLM"], **llama4(
            attention_chunk_size=64, hidden_size=128, interleave_moe_layer_step=2, intermediate_size=128,
            num_attention_heads=3, num_experts_per_tok=2, num_hidden_layers=4, num_key_value_heads=1, num_local_experts=4,
            use_qk_norm=False)},
        declare="modelopt_experts", positions=136, store=[(r"\.experts\.\d+\.", "nvfp4")]),
    "smallthinker": dict(config=smallthinker("GLLLG"), positions=72),
    "smallthinker_nvfp4": dict(
        config=smallthinker("GG", hidden_size=128, moe_ffn_hidden_size=128, moe_num_active_primary_experts=2,
                            moe_num_primary_experts=6, moe_primary_router_apply_softmax=True, num_attention_heads=3,
                            num_key_value_heads=1, sliding_window_size=4096, tie_word_embeddings=True),
        declare="modelopt_experts", store=[(r"\.experts\.\d+\.", "nvfp4")]),
    "arctic": dict(config=arctic(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)),
    "arctic_nvfp4": dict(
        config=arctic(hidden_size=192, intermediate_size=128, num_attention_heads=3, num_experts_per_tok=2,
                      num_key_value_heads=3, num_local_experts=6, rms_norm_eps=1e-6, rope_theta=500000,
                      tie_word_embeddings=True),
        declare="modelopt_experts", store=[(r"\.experts\.\d+\.", "nvfp4")]),
    "maple": dict(config=maple("LLLG"), positions=72, loud=r"(gate|up)_proj\.weight$", quiet=r"down_proj\.weight$"),
    "maple_nvfp4": dict(
        config=maple("GL", hidden_size=128, moe_intermediate_size=128, num_attention_heads=3, num_experts=6,
                     num_experts_per_tok=2, num_key_value_heads=1, partial_rotary_factor=1.0, rms_norm_eps=1e-5,
                     sliding_window=20, rope_theta=500000),
        declare="modelopt_experts", store=[(EXPERTS, "nvfp4")], loud=r"(gate|up)_proj\.weight$", quiet=r"down_proj\.weight$"),
    "lfm2_moe": dict(config=lfm2("CAC"), positions=72),
    "lfm2_moe_nvfp4": dict(
        config=lfm2("CCAC", conv_L_cache=4, hidden_size=192, moe_intermediate_size=128, norm_topk_prob=False,
                    num_attention_heads=3, num_dense_layers=2, num_experts=6, num_experts_per_tok=2,
                    routed_scaling_factor=1.5, tie_word_embeddings=False,
                    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
        declare="modelopt", positions=72,
        store=[(r"_proj\.weight$|\.w[123]\.weight$", "nvfp4")]),
    "phimoe": dict(config=phimoe(16, hidden_size=128, num_attention_heads=2, num_local_experts=7),
                   quiet=r"o_proj|v_proj\.bias"),
    "phimoe_nvfp4": dict(
        config=phimoe(4096, hidden_size=192, num_attention_heads=3, num_key_value_heads=1, num_local_experts=6,
                      intermediate_size=128, sliding_window=None),
        declare="modelopt_experts", store=[(r"\.block_sparse_moe\.experts\..*weight$", "nvfp4")],
        quiet=r"[vo]_proj\.bias"),
    "deepseek_v32": dict(
        config=deepseek_v32(moe_intermediate_size=64, rope_scaling=mla_yarn(40, 64), max_position_embeddings=2560),
        positions=128, mtp_prompt=True),
    "deepseek_v32_fp8": dict(
        config=deepseek_v32(hidden_size=192, num_hidden_layers=2, n_routed_experts=6, n_group=2, topk_group=1,
                            num_experts_per_tok=2, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=160,
                            index_head_dim=128, index_n_heads=5, index_topk=8, moe_intermediate_size=128,
                            rope_scaling=mla_yarn(40, 4096), max_position_embeddings=163840),
        declare="fp8_block_ue8m0", positions=96, mtp_prompt=True,
        store=[(r"k_norm", "f32"), (r"eh_proj|weights_proj", "bf16"), (INDEX_FP8, "fp8_block_ue8m0")]),
    "glm_moe_dsa": dict(config=glm_dsa(), positions=160, mtp_prompt=True, tables=False),
    "glm_moe_dsa_types": dict(
        config=glm_dsa_types("FSSFS", 3, 1, hidden_size=128, index_topk=16, index_n_heads=6, index_head_dim=64,
                             num_attention_heads=3, num_key_value_heads=3, q_lora_rank=64, qk_nope_head_dim=32,
                             v_head_dim=32, n_routed_experts=6, num_experts_per_tok=2),
        declare="modelopt_glm_dsa", positions=96, mtp_prompt=True, tables=False,
        store=[(r"\.layers\.5\.", "bf16"), (EXPERTS, "nvfp4")]),
    "deepseek_v4": dict(
        config=deepseek_v4(compress_ratios=[0, 0, 4, 128, 4, 0]), declare="fp8_block_ue8m0", positions=300,
        store=[(V4_F32, "full"), (V4_FP8, "fp8_powers"), (V4_EXPERTS, "fp4")],
        tables=False),
    "deepseek_v4_pro": dict(
        config=deepseek_v4_saved([128, 128, 4, 128, 4], num_hash_layers=1, num_attention_heads=8, o_groups=4,
                                 o_lora_rank=32, q_lora_rank=64, hidden_size=128, sliding_window=128, index_topk=12,
                                 routed_scaling_factor=2.5, hc_sinkhorn_iters=3, hc_eps=0.02, rms_norm_eps=0.01,
                                 num_nextn_predict_layers=0, moe_intermediate_size=128, n_routed_experts=6,
                                 num_experts_per_tok=2),
        declare="modelopt_v4", positions=300, shards=2, store=[(V4_F32, "full"), (V4_EXPERTS, "nvfp4")]),
    "qwen3_5_moe": dict(
        config=qwen3_5("LF", linear_num_value_heads=8), positions=160, mtp=True, fused=r"model\.",
        store=[(r"\.A_log$|linear_attn\.norm\.weight$", "f32")]),
    "qwen3_5_moe_text": dict(
        config={"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": True,
                **qwen3_5_text("FLF", head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128,
                               linear_num_value_heads=4)}, positions=72),
    "qwen3_5_moe_nvfp4": dict(
        config=qwen3_5("LFL", linear_num_value_heads=8, num_experts=6, num_experts_per_tok=3),
        declare="modelopt_mixed_qwen", positions=72, mtp=True, fused=r"mtp\.", shards=2,
        store=[(r"^mtp\.", "bf16"), (r"experts?\..*_proj\.weight$|^lm_head", "nvfp4"),
               (r"layers\.2\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$", "nvfp4"),
               (QWEN_LINEAR + "|" + DELTA_LINEAR, "fp8")]),
    "qwen4_exp": dict(
        config=qwen4("LLF"), positions=160, ends=[9, 40, 41, 100], mtp=True, mtp_draw=40, fused=r"model\.",
        store=[(r"\.A_log$|linear_attn\.norm\.weight$", "f32")]),
    "qwen4_exp_nvfp4": dict(
        config={"architectures": ["Qwen4ExpForCausalLM"], "tie_word_embeddings": False,
                **qwen4_text("LF", head_dim=128, hidden_size=128, num_attention_heads=2, num_experts=6,
                             num_experts_per_tok=3, norm_topk_prob=False, linear_num_key_heads=1,
                             linear_num_value_heads=3, linear_conv_kernel_dim=3, hc_count=2, hc_lowrank=64,
                             indexer_budget=18, indexer_compress_ratio=3, indexer_head_dim=48, indexer_n_heads=12,
                             ple_layer_ids=[1], ple_embed_dim=96, ngram_size=4, heads_per_ngram=2,
                             ple_conv_kernel_size=3, ngram_vocab_size_base=200, split_ngram_parts=12, seed=99,
                             make_ngram_vocab_size_divisible_by=12, shared_expert_intermediate_size=128,
                             layer_types=["linear_attention", "indexed_attention"],
                             eos_token_id=[IM_END, EOT])},
        declare="modelopt_mixed", positions=72, ends=[5, 30], mtp=True, mtp_draw=351, shards=2,
        store=[(r"^mtp\.", "bf16"), (r"\.experts\.\d+\.", "nvfp4"), (r"ngram_embedding", "fp8")]),
    "qwen3_next": dict(config=qwen3_next(), positions=160, mtp=True),
    "qwen3_next_fp8": dict(
        config=qwen3_next(num_hidden_layers=2, full_attention_interval=2, num_experts=6, tie_word_embeddings=True),
        declare="fp8_block_qwen", positions=72, mtp=True, store=[(QWEN_LINEAR + "|" + DELTA_LINEAR, "fp8_block")]),
    "gpt_oss": dict(
        config=gpt_oss(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
                       num_local_experts=8, num_experts_per_tok=4, sliding_window=8,
                       rope_scaling=exact_yarn(32.0, 1024, 32.0, 1.0)),
        declare="mxfp4", stack=GPT_OSS_STACK, store=[(GPT_OSS_EXPERTS, "mxfp4")]),
    "gpt_oss_bf16": dict(
        config=gpt_oss(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, intermediate_size=128,
                       num_local_experts=4, num_experts_per_tok=2, sliding_window=4, dtype="bfloat16",
                       initial_context_length=64, max_position_embeddings=512,
                       rope_scaling=exact_yarn(8.0, 64, 4.0, 1.0)),
        stack=GPT_OSS_STACK, store=[(GPT_OSS_EXPERTS, "bf16_columns")]),
    "minimax_m2": dict(
        config=minimax(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                       rotary_dim=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=3,
                       torch_dtype="bfloat16"),
        store=[(r"\.gate\.weight$", "f32")]),
    "minimax_m2_fp8": dict(
        config=minimax(num_hidden_layers=2, hidden_size=64, num_attention_heads=6, num_key_value_heads=3, head_dim=64,
                       rotary_dim=16, intermediate_size=192, num_local_experts=4, num_experts_per_tok=2,
                       dtype="bfloat16"),
        declare="fp8_block_minimax", store=[(r"\.gate\.weight$", "f32"), (LINEAR + "|" + W123_EXPERTS, "fp8_block")]),
    "minimax_m3": dict(
        config=minimax_m3("FSS", {"sparse_block_size": 16, "sparse_index_dim": 64, "sparse_local_block": 1,
                                  "sparse_num_index_heads": 2, "sparse_topk_blocks": 3},
                          num_attention_heads=4, num_key_value_heads=2, rotary_dim=32, intermediate_size=64,
                          dense_intermediate_size=128, shared_intermediate_size=64, num_local_experts=8,
                          num_experts_per_tok=3),
        positions=160, gap=5e-3, loud=M3_LOUD, common=0.5, store=[(r"\.gate\.weight$", "f32")]),
    "minimax_m3_nvfp4": dict(
        config=minimax_m3_saved("FSS", {"index_block_size": 32, "index_head_dim": 128, "index_local_blocks": 2,
                                        "index_n_heads": 3, "index_topk_blocks": 3},
                                hidden_size=128, num_attention_heads=6, num_key_value_heads=3, rotary_dim=16,
                                intermediate_size=128, dense_intermediate_size=192, shared_intermediate_size=64,
                                num_local_experts=6, num_experts_per_tok=2, routed_scaling_factor=1.5),
        declare="modelopt_mixed_m3", positions=192, gap=5e-3, loud=M3_LOUD, common=0.7, shards=2,
        store=[(r"\.gate\.weight$", "f32"), (W123_EXPERTS, "nvfp4"), (M3_LINEAR, "mxfp8")]),
    "mixtral": dict(
        config=mixtral(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
                       num_local_experts=4)),
    "mixtral_nvfp4": dict(
        config=mixtral(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                       intermediate_size=128, num_local_experts=8, num_hidden_layers=3, tie_word_embeddings=True),
        declare="modelopt_w123", store=[(LINEAR + "|" + W123_EXPERTS, "nvfp4")]),
    "olmoe": dict(config=olmoe(num_experts=4, num_experts_per_tok=2)),
    "olmoe_norm": dict(
        config=olmoe(num_experts=8, num_experts_per_tok=3, norm_topk_prob=True), declare="modelopt",
        store=[(LINEAR, "nvfp4")]),
    "qwen2_moe": dict(
        config=qwen2_moe(num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=128), quiet=V_BIAS),
    "qwen2_moe_dense": dict(
        config=qwen2_moe(num_key_value_heads=2, num_hidden_layers=4, num_experts=6, num_experts_per_tok=3,
                         shared_expert_intermediate_size=192, decoder_sparse_step=2, mlp_only_layers=[3],
                         norm_topk_prob=True),
        declare="modelopt", store=[(LINEAR, "nvfp4")], quiet=V_BIAS),
    "ernie4_5_moe": dict(
        config=ernie(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=192,
                     num_hidden_layers=4, moe_num_experts=6, moe_k=2, moe_num_shared_experts=1,
                     moe_layer_start_index=1, moe_layer_interval=2),
        declare="modelopt", store=[(r"\.gate\.weight$", "f32"), (LINEAR, "nvfp4")]),
    "ernie4_5_moe_each": dict(
        config=ernie(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
                     num_hidden_layers=2, moe_num_experts=4, moe_k=2, moe_num_shared_experts=2,
                     moe_layer_start_index=1, moe_layer_interval=1),
        store=[(r"\.gate\.weight$", "f32")]),
    "step3p5": dict(
        config=step_text("FSF", 2, 4, 2, swiglu_limits=[0.0, 0.75, 0.5], swiglu_limits_shared=[0.0, 0.0, 1.25]),
        stack=STEP_STACK, store=[(r"\.gate\.weight$", "f32")]),
    "step3p7": dict(
        config=step3p7("FS", 4, 6, 2, 2, sliding_window=8, moe_num_experts=6, moe_top_k=3, share_expert_dim=64,
                       swiglu_limits=[0.0, 0.5, 0.0, 0.0], swiglu_limits_shared=[0.0, 0.75, 0.0, 0.0]),
        declare="modelopt_step", chain=2, stack=STEP_STACK, store=[(r"\.moe\.\d+\.", "nvfp4")],
        aside={**{"vision_model." + name: shape for name, shape in STEP_TOWER.items()},
               "vit_large_projector.weight": (64, 64)}),
    "laguna": dict(
        config=laguna(laguna_yarn(32.0, 4096, 64.0), [2, 4, 4], num_experts=4, num_experts_per_tok=2,
                      layer_types=["full_attention"] + ["sliding_attention"] * 2, sliding_window=4, gating=True,
                      shared_expert_intermediate_size=64)),
    "laguna_element": dict(
        config=laguna(laguna_yarn(8.0, 256, 32.0), [6] * 3, num_experts=6, num_experts_per_tok=3,
                      layer_types=["full_attention"] * 3, gating="per-element", gating_types=["per_element"] * 3,
                      shared_expert_intermediate_size=128),
        declare="compressed_tensors", store=[(G_PROJ, "bf16"), (LINEAR, "ct_nvfp4")]),
    "nemotron_h": dict(
        config=nemotron("ME*-ME", moe_latent_size=32, n_group=2, topk_group=1, num_nextn_predict_layers=1,
                        mtp_hybrid_override_pattern="*E"), positions=160),
    "nemotron_h_nvfp4": dict(
        config=nemotron_saved("MEM*E", hidden_size=128, mamba_num_heads=8, mamba_head_dim=32, n_groups=4,
                              ssm_state_size=16, num_key_value_heads=1, n_routed_experts=6, num_experts_per_tok=2,
                              moe_intermediate_size=128, moe_shared_expert_intermediate_size=64,
                              routed_scaling_factor=1.25),
        declare="modelopt_mixed", positions=72, shards=2,
        store=[(r"\.experts\.\d+\.", "nvfp4"), (r"(in_proj|out_proj|shared_experts\..*_proj)\.weight$", "fp8")]),
    "nemotron_h_dense": dict(
        config=nemotron("M-*M-", n_groups=1, mamba_num_heads=6, mamba_head_dim=32, ssm_state_size=24,
                        intermediate_size=128, layer_norm_epsilon=1e-6), positions=72),
    "mellum": dict(config=mellum("SSSF", num_experts=5, rope={"rope_type": "yarn", **{
        k: v for k, v in yarn(16.0, 16).items() if k != "type"}})),
    "mellum_nvfp4": dict(
        config=mellum("FS", {"rope_type": "default"}, hidden_size=128, num_attention_heads=3, num_key_value_heads=1,
                      head_dim=128, num_experts=6, sliding_window=20, moe_intermediate_size=128,
                      mlp_layer_types=["dense", "sparse"]),
        declare="modelopt", store=[(EXPERTS, "nvfp4")]),
    "mimo_v2_flash": dict(config=mimo("FS", 4, window=4)),
    "mimo_v2_flash_fp8": dict(
        config=mimo("FSF", 2, window=8, n_routed_experts=6, num_experts_per_tok=3), declare="fp8_block_mimo", chain=3,
        store=[(r"\.gate\.weight$", "f32"), (MIMO_FP8, "fp8_block")]),
    "kimi_linear": dict(
        config=kimi_linear([3], 32, num_hidden_layers=4, num_attention_heads=4), positions=160,
        store=[(KDA_F32, "f32")]),
    "kimi_linear_nvfp4": dict(
        config=kimi_linear_saved([2], 64, num_hidden_layers=3, num_attention_heads=6, hidden_size=128, q_lora_rank=96,
                                 kv_lora_rank=128, qk_rope_head_dim=64, num_expert_group=2, topk_group=1,
                                 num_experts_per_token=2, num_shared_experts=2, routed_scaling_factor=1.5),
        declare="modelopt_kimi_linear", positions=96, flat=True, shards=2, store=[(W123_EXPERTS, "nvfp4")]),
    "kimi_k3": dict(
        config=kimi_k3([3], 32, num_hidden_layers=5, num_attention_heads=4), positions=160,
        store=[(KDA_F32, "f32")]),
    "kimi_k3_nvfp4": dict(
        config=kimi_k3([2], 64, num_hidden_layers=3, num_attention_heads=6, hidden_size=128, q_lora_rank=64,
                       v_head_dim=48, attn_res_block_size=3, activation_situ_beta=2.0, activation_situ_linear_beta=5.0,
                       moe_intermediate_size=128, num_experts=6, num_experts_per_token=2, num_shared_experts=2,
                       rms_norm_eps=0.01, routed_expert_hidden_size=128, routed_scaling_factor=1.5),
        declare="modelopt_kimi_linear", positions=96, store=[(W123_EXPERTS, "nvfp4"), (KDA_F32, "f32")]),
    "bailing_hybrid": dict(
        config=bailing(layer_group_size=2, num_hidden_layers=4, num_attention_heads=4, head_dim=64,
                       num_nextn_predict_layers=1),
        mtp_prompt=True, tables=False, store=[(KDA_F32, "f32")]),
    "bailing_hybrid_ct": dict(
        config=bailing(layer_group_size=3, num_hidden_layers=3, num_attention_heads=6, hidden_size=128, q_lora_rank=96,
                       kda_lower_bound=-3, n_group=2, topk_group=1, num_experts=6, num_experts_per_tok=2,
                       num_shared_experts=2, moe_intermediate_size=128, routed_scaling_factor=1.25,
                       expert_swiglu_limit_list=[0.0] * 3, share_expert_swiglu_limit_list=[None] * 3),
        declare="compressed_tensors_experts", positions=160, store=[(EXPERTS, "ct_nvfp4")]),
    "glm5_next": dict(
        config=glm5_next("LFLF", num_nextn_predict_layers=1), positions=160, mtp_prompt=True,
        store=[(V4_F32, "full"), (KDA_F32 + "|" + POOL_F32, "f32")]),
    "glm5_next_nvfp4": dict(
        config=glm5_next_saved(
            "FSL", 64, -3.0, hidden_size=128, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=96,
            kv_lora_rank=128, qk_nope_head_dim=32, v_head_dim=64, index_kpool=8, index_topk=24, index_head_dim=128,
            index_n_heads=12, hc_sinkhorn_iters=3, hc_eps=0.02, rms_norm_eps=0.01, moe_intermediate_size=128,
            n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, routed_scaling_factor=1.5, swiglu_limit=1.0),
        declare="modelopt_glm5_next", positions=96, flat=True, shards=2,
        store=[(V4_F32, "full"), (EXPERTS + r"|\.layers\.0\.mlp\.\w+_proj\.weight$", "nvfp4")]),
}

# ---- values ------------------------------------------------------------------------------------------------


BIAS = ("e_score_correction_bias", "expert_bias", "router_bias", "ffn.gate.bias", "mlp.gate.bias")


def draw(fixture, name, shape, tied, centred):
    """The random tensor `name`, float32 numpy.  Spreads are chosen so that attention is selective, every
    layer moves the residual stream and the logits have a standard deviation of 2 to 3.
    centred: the model multiplies by 1 + w where others multiply by w, except after the delta rule."""
    rng = np.random.default_rng([zlib.crc32(fixture.encode()), zlib.crc32(name.encode())])
    if name.endswith("mlp.router.e_score_correction_bias"):  # beside a softmax of more
        return rng.uniform(0.02, 0.12, shape).astype(np.float32)
    if "moe_statics" in name:  # beside a softmax
        return rng.uniform(0.1, 0.3, shape).astype(np.float32)
    if name.endswith(BIAS):  # above -sigmoid: masking with 0.0 and with -inf then agree
        return rng.uniform(0.1, 0.5, shape).astype(np.float32)
    if name.endswith(".A_log"):  # some heads forget within a token or two, some remember the whole prompt
        bounded = name.endswith(".attention.A_log") or (
            "language_model" in name and ".self_attn." in name)  # there it makes the gate steeper
        return rng.uniform(*((0, 2) if bounded else (-5, 1.5)), shape).astype(np.float32)
    x = rng.standard_normal(shape)
    if "hc_" in name and name.endswith(("scale", "base")):
        return (1 + 0.3 * x if name.endswith("scale") else 0.7 * x).astype(np.float32)
    # These are the same for all tokens: a larger spread would hide what tokens differ in
    if name.endswith(("norm.bias", "lm_head.bias")) and "vis" not in name:
        return (0.3 * x).astype(np.float32)
    if "attn_res." in name or "cross_pass" in name or ".rel_logits_proj." in name:
        return ((0.3 if "logits" in name else 0.5) * x).astype(np.float32)
    if name.endswith(("layer_scalar", "per_expert_scale")):
        return rng.uniform(0.6, 1.6, shape).astype(np.float32)
    if name.endswith("router.scale"):
        return (1 + 0.3 * x).astype(np.float32)
    if name.endswith("router.proj.weight"):  # what it reads has the length 1
        return (2 * x).astype(np.float32)
    if fixture.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):  # scores are not scaled
        return ((1 + 0.2 * x) * math.sqrt(2) / shape[0] ** 0.25).astype(np.float32)
    if fixture.startswith("gemma4") and name.endswith(("model.norm.weight", "language_model.norm.weight")):
        return (10 + 2 * x).astype(np.float32)
    if fixture == "bailing_moe" and name == "model.norm.weight":  # the head has columns of length 1
        return (8 + 1.6 * x).astype(np.float32)
    if fixture.startswith("gemma4") and "embed_tokens" in name:  # it is the head, too, and grows by sqrt(hidden_size)
        return (0.2 / math.sqrt(shape[1]) * x).astype(np.float32)
    if "l2_clip.scale" in name:
        return (1 + 0.2 * x).astype(np.float32)
    if "norm" in name.replace("norm_attn_norm.attn", ""):
        less = 1.0 if centred and "linear_attn.norm" not in name else 0.0
        return ((1.5 if "q_norm" in name else 1.0) - less + 0.2 * x).astype(np.float32)
    if len(shape) == 1 or name.endswith(("_bias", "ape")):
        return x.astype(np.float32)
    if "embed_tokens" in name or ".wte." in name or name == "embed.weight" or name.endswith((
            ".embeddings.weight", "word_embeddings.weight", "ngram_embedding.weight")):
        return ((2 / math.sqrt(shape[1]) if tied else 1.0) * x).astype(np.float32)
    gain = {"lm_head": 3, "head": 3, "output": 3, "gate": 2, "down_proj": 2, "o_proj": 1.5, "q_b_proj": 1.5,
            "conv1d": 1.5, "out_proj": 2, "router": 2, "classifier": 2, "wg": 1.5, "gate_up_proj": 3, "w2": 2, "wo_b": 1.5, "dense": 1.5, "Wqkv": 1.25,
            "q_conv1d": 1.5, "k_conv1d": 1.5, "v_conv1d": 1.5, "unembed": 3, "input_mix_weight_down": 8,
            "primary_router": 1.5, "down": 2, "input_linear": 1.5, "output_linear": 2, "layer": 2, "input_mix_weight_up": 4, "block_inject_weight": 5}
    gain = gain.get(f".{name}".split(".")[-2], 1)
    return (gain / math.sqrt(math.prod(shape[1:])) * x).astype(np.float32)


def bf16(x):
    return x.to(torch.bfloat16).float()


def nvfp4_encode(x, scale_2):
    """x [out, in] -> codes U8 [out, in/2] (low nibble = even column), scales E4M3 [out, in/16], and what they
    stand for before scale_2, exactly."""
    blocks = x.reshape(x.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 / scale_2).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    ratio = blocks / (scale.float() * scale_2)[..., None]
    code = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    exact = (E2M1[code] * ratio.sign() * scale.float()[..., None]).reshape(x.shape)
    code = (code + 8 * (ratio < 0)).reshape(x.shape).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, scale, exact


def mxfp4_encode(x):
    """x [out, in] -> codes U8 [out, in/32, 16] (low nibble = even column), exponents U8 [out, in/32], and what they
    stand for, exactly.  The largest of a block may saturate at 6."""
    blocks = x.reshape(x.shape[0], -1, 32)
    exponent = blocks.abs().amax(-1).log2().floor() - 2
    ratio = blocks / torch.exp2(exponent)[..., None]
    code = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    exact = (E2M1[code] * ratio.sign() * torch.exp2(exponent)[..., None]).reshape(x.shape)
    code = (code + 8 * (ratio < 0)).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8), exact


def fp8_encode(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def mxfp8_encode(x):
    """x [out, in] -> E4M3 [out, in], exponents U8 [out, in/32], and what they stand for, exactly."""
    blocks = x.reshape(x.shape[0], -1, 32)
    exponent = blocks.abs().amax(-1).log2().floor() - 8
    unit = torch.exp2(exponent)[..., None]
    codes = fp8_encode(blocks, unit)
    return codes.reshape(x.shape), (exponent + 127).to(torch.uint8), (codes.float() * unit).reshape(x.shape)


class Checkpoint:
    """The stored tensors of one fixture.  put() draws a tensor, stores it in its dialect and returns what a
    reader gets back, which is what the reference model is given; `values` keeps it."""

    def __init__(self, fixture, spec):
        self.fixture, self.rules, self.quiet = fixture, spec.get("store", []), spec.get("quiet")
        self.loud, self.common = spec.get("loud"), spec.get("common")
        self.tied = spec["config"]["tie_word_embeddings"]
        self.centred = bool({"linear_num_key_heads", "zero_centered", "dense_intermediate_size"}
                            & text_config(spec["config"]).keys())
        self.shapes, self.tensors, self.values = {}, {}, {}

    def draw(self, name, shape):
        x = torch.from_numpy(draw(self.fixture, name, shape, self.tied, self.centred))
        if self.common and "embed_tokens" in name:
            x += self.common * torch.from_numpy(draw(self.fixture, "common", shape[1:], self.tied, self.centred))
        if self.loud and re.search(self.loud, name):
            x *= 3
        return x / 4 if self.quiet and re.search(self.quiet, name) else x

    def amax(self, source, shape):
        """ModelOpt gives gate_proj and up_proj of one FFN a common scale, because kernels fuse them."""
        both = {source, source.replace("gate_proj", "up_proj"), source.replace("up_proj", "gate_proj"),
                source.replace(".w1.", ".w3."), source.replace(".w3.", ".w1.")}
        return max(self.draw(s, shape).abs().max() for s in both)

    def put(self, name, shape, source=None, rows=None):
        """source: the name to draw under, if the expert was renumbered; rows: the rows that are kept."""
        source, shape = source or name, tuple(shape)
        if name.endswith("tid2eid"):
            return self.put_ids(name, shape)
        x = self.draw(source, shape)
        if rows is not None:
            x = x[rows]
        self.shapes[name] = shape
        form = "f32" if name.endswith(BIAS) else next(
            (f for pattern, f in self.rules if re.search(pattern, name)), "bf16")
        self.values[name] = getattr(self, "put_" + form)(name, source, x)
        return self.values[name]

    def put_bf16(self, name, _, x):
        self.tensors[name] = x.to(torch.bfloat16)
        return bf16(x)

    def put_bf16_columns(self, name, _, x):
        """[in, out]: x @ W without a transposition."""
        self.tensors[name] = x.T.to(torch.bfloat16)
        return bf16(x)

    def put_f16(self, name, _, x):
        x = bf16(x.half())  # exact in both types, subnormals of F16 included
        self.tensors[name] = x.half()
        return x

    def put_f32(self, name, _, x):
        self.tensors[name] = x if "bias" in name or "A_log" in name else bf16(x)
        return self.tensors[name]

    def put_full(self, name, _, x):
        self.tensors[name] = x
        return x

    def put_ids(self, name, shape):
        """Different experts for every token id."""
        rng = np.random.default_rng([zlib.crc32(self.fixture.encode()), zlib.crc32(name.encode())])
        experts = text_config(SPECS[self.fixture]["config"])["n_routed_experts"]
        self.tensors[name] = torch.from_numpy(rng.permuted(np.tile(np.arange(experts), (shape[0], 1)), axis=1)[:, :shape[1]])
        return self.tensors[name]

    def put_fp8_powers(self, name, _, x):
        """As put_fp8_block, with scales of 8 bits under DeepSeek-V4's name; the product is exact in BF16."""
        exact = self.put_fp8_block(name, None, x, power_of_two=True)
        scale = self.tensors.pop(name + "_scale_inv")
        self.tensors[name.replace("weight", "scale")] = scale.to(torch.float8_e8m0fnu)
        return exact

    def put_fp4(self, name, _, x):
        """DeepSeek-V4's MXFP4: codes I8 [out, in/2], scales E8M0 [out, in/32]."""
        codes, exponents, exact = mxfp4_encode(x)
        self.tensors[name] = codes.reshape(len(x), -1).view(torch.int8)
        self.tensors[name.replace("weight", "scale")] = exponents.view(torch.float8_e8m0fnu)
        return exact

    def fuse(self, pattern, both=".experts.gate_up_proj", down=".experts.down_proj", turned=False):
        """Stores the experts of a layer as releases in BF16 do: gate_up_proj [experts, 2 x width, hidden] and
        down_proj [experts, hidden, width], or, turned, with rows and columns exchanged."""
        for name in [n for n in self.tensors if n.endswith(".experts.0.gate_proj.weight") and re.match(pattern, n)]:
            path = name.removesuffix(".0.gate_proj.weight")
            count = sum(n.startswith(path + ".") and n.endswith(".gate_proj.weight") for n in self.tensors)
            take = lambda i, part: self.tensors.pop(f"{path}.{i}.{part}_proj.weight")
            own, turn = path.removesuffix(".experts"), (lambda t: t.mT.contiguous()) if turned else lambda t: t
            self.tensors[own + both] = turn(torch.stack(
                [torch.cat([take(i, "gate"), take(i, "up")]) for i in range(count)]))
            self.tensors[own + down] = turn(torch.stack([take(i, "down") for i in range(count)]))

    def stack(self, pattern, whole):
        """Stores what match `pattern` as one tensor, in the order of the numbers."""
        parts = {}
        for name in self.tensors:
            if number := re.search(pattern, name):
                parts.setdefault(re.sub(pattern, whole, name), {})[int(number[1])] = name
        for name, part in parts.items():
            self.tensors[name] = torch.stack([self.tensors.pop(part[i]) for i in range(len(part))])

    def join(self):
        """Stores the matrices of queries, keys and values as one, in this order."""
        for q in [n for n in self.tensors if n.endswith(".q_proj.weight")]:
            parts = [self.tensors.pop(q.replace(".q_proj", f".{c}_proj")) for c in "qkv"]
            self.tensors[q.replace(".q_proj", ".query_key_value")] = torch.cat(parts)

    def put_w(self, name, count, shape, parts):
        """Experts as Inkling 2 stores them: one tensor, where rows of gate and up alternate.  Returns [experts, out, in],
        in transformers' order."""
        form = next((f for pattern, f in self.rules if re.search(pattern, name)), "bf16")
        drawn = torch.stack([torch.stack([self.draw(f"{name}.{i}.{p}", shape) for p in parts], 1).reshape(-1, shape[1])
                             for i in range(count)])
        if form == "nvfp4":
            amax = drawn.abs().amax((1, 2))
            coded = [nvfp4_encode(x, m / (6 * 448)) for x, m in zip(drawn, amax)]
            self.tensors[name] = torch.stack([c[0] for c in coded])
            self.tensors[name + "_scale"] = torch.stack([c[1] for c in coded])
            self.tensors[name + "_amax"], self.tensors[name + "_outer_scale_denominator"] = amax, torch.tensor([6 * 448.0])
            exact = torch.stack([c[2] * (m / (6 * 448)) for c, m in zip(coded, amax)])
        elif form == "mxfp8":
            coded = [mxfp8_encode(x) for x in drawn]
            self.tensors[name] = torch.stack([c[0] for c in coded])
            self.tensors[name + "_scale"] = torch.stack([c[1] for c in coded])
            exact = torch.stack([c[2] for c in coded])
        else:
            exact = bf16(drawn)
            self.tensors[name] = drawn.to(torch.bfloat16)
        self.values[name] = exact
        return torch.cat([exact[:, i::len(parts)] for i in range(len(parts))], 1)

    def split_tables(self, parts):
        """Stores tables of n-grams as releases do: `parts` tensors of consecutive rows, and one scale for all."""
        for name in [n for n in self.tensors if n.endswith(".ngram_embedding.weight")]:
            path = name.removesuffix("weight")
            for i, part in enumerate(self.tensors.pop(name).tensor_split(parts)):
                self.tensors[f"{path}shard_{i}.weight"] = part
            if name + "_scale" in self.tensors:
                self.tensors[name + "_scale"] = self.tensors[name + "_scale"].reshape(1).to(torch.bfloat16)
                del self.tensors[path + "input_scale"]

    def put_fp8(self, name, _, x):
        """One scale per tensor, of four significant bits: E4M3 x scale is then exact in BF16."""
        fraction, exponent = math.frexp(x.abs().max().item() / 448)
        scale = torch.tensor(math.ldexp(math.ceil(fraction * 16) / 16, exponent))
        self.tensors[name] = fp8_encode(x, scale)
        self.tensors[name + "_scale"] = scale
        self.tensors[name.replace("weight", "input_scale")] = torch.tensor(5.0 / 448)
        for kv in "kv":  # scales of an FP8 cache lie beside, for readers to skip
            if name.endswith(f"{kv}_proj.weight"):
                self.tensors[name.replace("weight", f"{kv}_scale")] = torch.tensor(6.0 / 448)
        return self.tensors[name].float() * scale

    def put_fp8_block(self, name, _, x, power_of_two=False):
        """128 x 128 blocks, ragged at the edges; a reader makes BF16 of the float32 product.
        power_of_two: of the scales."""
        block = lambda s: s.repeat_interleave(128, 0)[:x.shape[0]].repeat_interleave(128, 1)[:, :x.shape[1]]
        corner = [-(-n // 128) for n in x.shape]
        scale = torch.stack([x[r * 128:r * 128 + 128, c * 128:c * 128 + 128].abs().max() / 448
                             for r in range(corner[0]) for c in range(corner[1])]).reshape(corner)
        scale = scale.log2().ceil().exp2() if power_of_two else scale
        self.tensors[name] = fp8_encode(x, block(scale))
        self.tensors[name + "_scale_inv"] = scale
        return bf16(self.tensors[name].float() * block(scale))

    def put_fp8_block_ue8m0(self, name, source, x):
        return self.put_fp8_block(name, source, x, power_of_two=True)

    def put_mxfp8(self, name, _, x):
        """A power of two for each 32 weights of a row; the product is exact in BF16."""
        self.tensors[name], self.tensors[name + "_scale"], exact = mxfp8_encode(x)
        return exact

    def put_nvfp4(self, name, source, x):
        scale_2 = self.amax(source, x.shape) / (6 * 448)
        self.tensors[name], self.tensors[name + "_scale"], exact = nvfp4_encode(x, scale_2)
        self.tensors[name + "_scale_2"] = scale_2
        self.tensors[name.replace("weight", "input_scale")] = torch.tensor(5.0 / (6 * 448))
        return exact * scale_2

    def put_mxfp4(self, name, _, x):
        self.tensors[name + "_blocks"], self.tensors[name + "_scales"], exact = mxfp4_encode(x)
        return exact

    def put_ct_nvfp4(self, name, _, x):
        """compressed-tensors: the global scale divides, and gate and up have each their own here."""
        scale = (6 * 448 / x.abs().max()).reshape(1)
        packed, scales, exact = nvfp4_encode(x, 1 / scale)
        self.tensors[name + "_packed"], self.tensors[name + "_scale"] = packed, scales
        self.tensors[name + "_global_scale"] = scale
        self.tensors[name.replace("weight", "input_global_scale")] = torch.tensor([6 * 448 / 5.0])
        return exact / scale


# ---- the reference model -----------------------------------------------------------------------------------


def reference_config(config):
    """The configuration as transformers wants it: Step-3.5 is the text model of Step-3.7, and few of MiMo's words are
    known.  Its files write infinity as an object."""
    kind = config["model_type"]
    if kind == "step3p5":
        config = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": config,
                  "vision_config": STEP_VISION, "tie_word_embeddings": config["tie_word_embeddings"]}
    if kind == "mimo_v2_flash":
        kinds = ["full_attention", "sliding_attention"]
        config = {**config, "layer_types": [kinds[windowed] for windowed in config["hybrid_layer_pattern"]],
                  "mlp_layer_types": [["dense", "sparse"][freq] for freq in config["moe_layer_freq"]],
                  "rms_norm_eps": config["layernorm_epsilon"], "rope_parameters": {
                      kind: {"rope_type": "default", "rope_theta": config[theta],
                             "partial_rotary_factor": config["partial_rotary_factor"]}
                      for kind, theta in zip(kinds, ["rope_theta", "swa_rope_theta"])}}
        assert config["swa_num_key_value_heads"] == 2 * config["num_key_value_heads"]
    if "vision_config" in config and kind.startswith("inkling2"):  # pictures are left out
        config = {**config["text_config"], "tie_word_embeddings": False}
    if kind in ("bailing_moe_v2", "sarvam_moe"):  # the implementation of Sarvam
        config = {"partial_rotary_factor": 1.0, **config, "architectures": ["Glm4MoeForCausalLM"],
                  "n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    if kind == "longcat_flash":  # there the rotation is made for head_dim values, which releases have 64 of as well
        config = {**config, "head_dim": config["qk_rope_head_dim"]}
    if kind == "phimoe":
        rope = {k: v for k, v in config["rope_scaling"].items() if k != "type"}
        config = {**config, "architectures": ["PhimoeForCausalLM"],
                  "rope_parameters": {**rope, "rope_type": "longrope", "rope_theta": config["rope_theta"]}}
    if kind == "dbrx":  # transformers has the base elsewhere
        rope = {"rope_type": "default", "rope_theta": config["attn_config"]["rope_theta"]}
        config = {**config, "rope_parameters": rope}
    if kind == "bailing_hybrid":  # the releases' own code rotates the whole of the part
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        config = {**config, "architectures": ["BailingHybridForCausalLM"], "rope_parameters": rope,
                  "kda_lower_bound": float(config["kda_lower_bound"])}
        del config["partial_rotary_factor"]
    return {k: v for k, v in config.items() if k not in ("quantization_config", "reap", "model_type", "time_step_limit")}


def make_composed(config):
    """A model of the families that transformers has no class for: Llama's layers with DeepSeek-V2's experts, as the
    releases' own code has them.  Ling 1 divides weights of experts by their sum."""
    v2 = transformers.models.deepseek_v2.modeling_deepseek_v2

    class Router(v2.DeepseekV2TopkRouter):
        def forward(self, x):
            logits, weight, chosen = super().forward(x)
            return logits, weight / weight.sum(-1, keepdim=True) if self.norm_topk_prob else weight, chosen

    known = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(known))
    parts = {"n_routed_experts": config.get("num_experts", config.get("n_routed_experts")), "topk_method": "greedy",
             "n_shared_experts": config.get("num_shared_experts", config.get("n_shared_experts")), "rope_scaling": None}
    own = transformers.DeepseekV2Config.from_dict({**known, **parts})
    own._experts_implementation = "eager"
    for layer in model.model.layers[config["first_k_dense_replace"]:]:
        layer.mlp = v2.DeepseekV2Moe(own)
        layer.mlp.gate = Router(own)
        layer.mlp.gate.norm_topk_prob = config["norm_topk_prob"]
    model.set_attn_implementation("eager")
    return model.float().eval()


def make_kimi_k3(config):
    """Kimi-K3, which transformers does not have: layers of its Kimi Linear, changed as SGLang's kimi_k3.py has them."""
    kinds = transformers.models.kimi_linear.modeling_kimi_linear
    linear = lambda rows, cols: torch.nn.Linear(cols, rows, bias=False)
    hidden, eps, beta = config["hidden_size"], config["rms_norm_eps"], config["activation_situ_beta"]
    cap = lambda x, c: c * torch.tanh(x / c)
    situ = lambda gate, up: cap(gate, beta) * gate.sigmoid() * cap(up, config["activation_situ_linear_beta"])

    class Forget(kinds.KimiLinearForgetGate):
        def forward(self, x):
            g = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).reshape(*x.shape[:2], -1, self.head_dim)
            return config["linear_attn_config"]["gate_lower_bound"] * torch.sigmoid(self.A_log.exp() * g)

    class Mlp(kinds.KimiLinearMLP):
        def forward(self, x):
            return self.down_proj(situ(self.gate_proj(x), self.up_proj(x)))

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            n, latent, width = (config[k] for k in ("num_experts", "routed_expert_hidden_size", "moe_intermediate_size"))
            self.gate_up_proj = torch.nn.Parameter(torch.empty(n, 2 * width, latent))
            self.down_proj = torch.nn.Parameter(torch.empty(n, latent, width))

        def forward(self, x, chosen, weight):
            out = torch.zeros_like(x)
            for e in chosen.unique():
                token, place = torch.where(chosen == e)
                gate, up = (x[token] @ self.gate_up_proj[e].T).chunk(2, -1)
                out.index_add_(0, token, weight[token, place, None] * (situ(gate, up) @ self.down_proj[e].T))
            return out

    class Moe(torch.nn.Module):
        def __init__(self, known):
            super().__init__()
            latent = config["routed_expert_hidden_size"]
            self.gate, self.experts = kinds.KimiLinearTopkRouter(known), Experts()
            self.routed_expert_down_proj, self.routed_expert_up_proj = linear(latent, hidden), linear(hidden, latent)
            self.routed_expert_norm = Rms(latent, eps)
            self.shared_experts = Mlp(known, config["moe_intermediate_size"] * config["num_shared_experts"])

        def forward(self, x):
            rows = x.reshape(-1, hidden)
            _, weight, chosen = self.gate(rows)
            latent = self.experts(self.routed_expert_down_proj(rows), chosen, weight)
            return self.routed_expert_up_proj(self.routed_expert_norm(latent)).reshape(x.shape) + self.shared_experts(x)

    class Model(kinds.KimiLinearModel):
        def read(self, blocks, half):
            rows = torch.stack(blocks)
            normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
            score = half.proj(half.norm * normed).softmax(0)
            return (score * rows).sum(0)

        def forward(self, input_ids, **_):
            blocks, n = [self.embed_tokens(input_ids)], input_ids.shape[1]
            mask = torch.full((n, n), -math.inf).triu(1)[None, None]
            for i, layer in enumerate(self.layers):
                x = layer.input_layernorm(self.read(blocks, layer.self_attention_res))
                y = layer.self_attn(x, attention_mask=None) if layer.block_type == "linear_attention" else (
                    layer.self_attn(x, attention_mask=mask)[0])
                blocks = [*blocks, y] if i % config["attn_res_block_size"] == 0 else [*blocks[:-1], blocks[-1] + y]
                x = layer.post_attention_layernorm(self.read(blocks, layer.mlp_res))
                blocks = [*blocks[:-1], blocks[-1] + layer.mlp(x)]
            return types.SimpleNamespace(last_hidden_state=self.norm(self.read(blocks, self.output_attn_res)),
                                         **dict.fromkeys(("cache", "hidden_states", "attentions", "router_logits")))

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.proj = torch.nn.Parameter(torch.empty(hidden)), linear(1, hidden)

    known = {k: v for k, v in config.items() if k not in ("model_type", "architectures")} | {"hidden_act": "silu"}
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig.from_dict(json.loads(json.dumps(known))))
    model.model.__class__ = Model
    for layer in model.model.layers:
        layer.self_attention_res, layer.mlp_res = Reading(), Reading()
        own = layer.self_attn
        if layer.block_type == "linear_attention":
            own.forget_gate.__class__ = Forget
            own.g_a_proj, own.g_b_proj = torch.nn.Identity(), linear(own.qkv_dim, hidden)
        else:
            own.g_proj = linear(own.num_heads * own.v_head_dim, hidden)
            own.register_forward_pre_hook(lambda own, args: setattr(own, "read", args[0]))
            own.o_proj.register_forward_pre_hook(lambda _, args, own=own: args[0] * own.g_proj(own.read).sigmoid())
            for norm in (own.q_a_layernorm, own.kv_a_layernorm):
                norm.variance_epsilon = eps
        if hasattr(layer.mlp, "experts"):
            layer.mlp = Moe(model.config)
        else:
            layer.mlp.__class__ = Mlp
    model.model.output_attn_res = Reading()
    model.set_attn_implementation("eager")
    return model.float().eval()


class Rms(torch.nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def traits(config):
    """What a model does that transformers does not have, by its release's own code.
    windows, turned: keys that the layers' tokens see, None for all, and values of a head that they rotate
    weigh, join      weights of the chosen experts by their logits; gate and up
    early            the router reads what comes into the layer, without a norm
    residual         a dense feed-forward stands where others have experts, which read a norm of what comes into the layer"""
    silu = torch.nn.functional.silu
    t = types.SimpleNamespace(at="mlp", head=config.get("head_dim"), head_norm=False, early=False, residual=False,
                              weigh=lambda best: best.softmax(-1))
    if config["model_type"] == "arctic":
        t.at, t.residual, t.join = "block_sparse_moe", True, lambda gate, up: silu(gate) * up
        t.head = config["hidden_size"] // config["num_attention_heads"]
        t.n, t.k, t.width = (config[k] for k in ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
        t.windows, t.turned = ([v] * config["num_hidden_layers"] for v in (None, t.head))
    if config["model_type"] == "smallthinker":
        normed = lambda best: best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
        t.at, t.early, t.join = "block_sparse_moe", True, lambda gate, up: gate.relu() * up
        t.weigh = t.weigh if config["moe_primary_router_apply_softmax"] else normed
        t.n, t.k, t.width = (config[k] for k in (
            "moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size"))
        t.windows = [config["sliding_window_size"] if w else None for w in config["sliding_window_layout"]]
        t.turned = [t.head * turns for turns in config["rope_layout"]]
    if config["model_type"] == "maple":
        t.head_norm, t.join = True, lambda gate, up: silu(gate.clamp(max=7)) * up.clamp(-7, 7)
        t.n, t.k, t.width = (config[k] for k in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
        t.windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in config["layer_types"]]
        t.turned = [int(t.head * config["partial_rotary_factor"]) if w else 0 for w in t.windows]
    return t


class OwnRouter(torch.nn.Module):
    """A router that chooses the experts with the best logits."""

    def __init__(self, config, t):
        super().__init__()
        self.weight, self.t = torch.nn.Parameter(torch.empty(t.n, config["hidden_size"])), t

    def forward(self, x):
        logits = x @ self.weight.T
        best = logits.topk(self.t.k)
        return logits, self.t.weigh(best.values), best.indices


class OwnExperts(torch.nn.Module):
    def __init__(self, config, t):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(t.n, 2 * t.width, config["hidden_size"]))
        self.down_proj, self.t = torch.nn.Parameter(torch.empty(t.n, config["hidden_size"], t.width)), t

    def forward(self, x, weight, chosen):
        out = torch.zeros_like(x)
        for e in chosen.unique():
            token, place = torch.where(chosen == e)
            joined = self.t.join(*(x[token] @ self.gate_up_proj[e].T).chunk(2, -1))
            out.index_add_(0, token, weight[token, place, None] * (joined @ self.down_proj[e].T))
        return out


class OwnLayer(torch.nn.Module):
    def __init__(self, config, t, layer):
        super().__init__()
        linear = lambda rows, cols: torch.nn.Linear(cols, rows, bias=False)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        q, kv = (t.head * config[k] for k in ("num_attention_heads", "num_key_value_heads"))
        self.window, self.turned, self.t = t.windows[layer], t.turned[layer], t
        self.self_attn, mixture = torch.nn.Module(), torch.nn.Module()
        self.self_attn.q_proj, self.self_attn.o_proj = linear(q, hidden), linear(hidden, q)
        self.self_attn.k_proj, self.self_attn.v_proj = linear(kv, hidden), linear(kv, hidden)
        if t.head_norm:
            self.self_attn.q_norm, self.self_attn.k_norm = Rms(t.head, eps), Rms(t.head, eps)
        self.self_attn.scaling = t.head**-0.5
        mixture.gate, mixture.experts = OwnRouter(config, t), OwnExperts(config, t)
        setattr(self, t.at, mixture)
        self.input_layernorm, self.post_attention_layernorm = Rms(hidden, eps), Rms(hidden, eps)
        if t.residual:
            self.residual_layernorm, self.residual_mlp = Rms(hidden, eps), torch.nn.Module()
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(self.residual_mlp, name, linear(hidden, hidden))

    def attention(self, x, angle):
        n, own, half = len(x), self.self_attn, self.turned // 2
        q, k, v = (p(x).reshape(n, -1, self.t.head).transpose(0, 1) for p in (own.q_proj, own.k_proj, own.v_proj))
        if self.t.head_norm:
            q, k = own.q_norm(q), own.k_norm(k)
        if half:
            cos, sin = angle.cos(), angle.sin()
            q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin, t[..., 2 * half:]], -1)
                    for t, a, b in ((t, t[..., :half], t[..., half:2 * half]) for t in (q, k)))
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        distance = torch.arange(n)[:, None] - torch.arange(n)
        unseen = (distance < 0) | (distance >= (self.window or n))
        score = (q @ k.mT * own.scaling).masked_fill(unseen, -math.inf)
        return own.o_proj((score.softmax(-1) @ v).transpose(0, 1).reshape(n, -1))

    def forward(self, x, angle):
        mixture, read = getattr(self, self.t.at), x
        x = x + self.attention(self.input_layernorm(x), angle)
        if self.t.residual:
            h, own = self.residual_layernorm(x), self.residual_mlp
            x = x + own.down_proj(self.t.join(own.gate_proj(h), own.up_proj(h)))
        h = self.post_attention_layernorm(read if self.t.residual else x)
        _, weight, chosen = mixture.gate(read if self.t.early else h)
        return x + mixture.experts(h, weight, chosen)


class OwnModel(torch.nn.Module):
    """A model that transformers does not have."""

    def __init__(self, config):
        super().__init__()
        hidden, vocab, self.model, t = config["hidden_size"], config["vocab_size"], torch.nn.Module(), traits(config)
        self.model.embed_tokens = torch.nn.Embedding(vocab, hidden)
        self.model.layers = torch.nn.ModuleList(OwnLayer(config, t, i) for i in range(config["num_hidden_layers"]))
        self.model.norm = Rms(hidden, config["rms_norm_eps"])
        self.lm_head = torch.nn.Linear(hidden, vocab, bias=False)
        self.tied, self.config = config["tie_word_embeddings"], types.SimpleNamespace(**config)
        inverse = config["rope_theta"] ** (-torch.arange(0, max(t.turned), 2, dtype=torch.float) / max(t.turned))
        self.model.rotary_emb = types.SimpleNamespace(inv_freq=inverse, attention_scaling=1.0)

    def tie_weights(self):
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, **_):
        angle = torch.outer(torch.arange(input_ids.shape[1]).float(), self.model.rotary_emb.inv_freq)
        rows = []
        for ids in input_ids:
            x = self.model.embed_tokens(ids)
            for layer in self.model.layers:
                x = layer(x, angle)
            rows.append(self.lm_head(self.model.norm(x)))
        return types.SimpleNamespace(logits=torch.stack(rows))


def make_model(config):
    """The transformers model of a configuration in hub form."""
    if config["model_type"] in ("deepseek", "bailing_moe"):
        return make_composed(config)
    if config["model_type"] in ("smallthinker", "maple", "arctic"):
        return OwnModel(config).eval()
    if config["model_type"] == "kimi_k3":
        return make_kimi_k3(config["text_config"])
    known = reference_config(config)
    cls = getattr(transformers, known["architectures"][0])
    model = cls(cls.config_class.from_dict(json.loads(json.dumps(known)))).float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    if config["model_type"] == "hy_v4":  # transformers rotates halves, vLLM, SGLang and llama.cpp rotate neighbors
        kinds = transformers.models
        kinds.hy_v4.modeling_hy_v4.apply_rotary_pos_emb = (
            kinds.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave)
    if config["model_type"] in ("hy_v4", "longcat_flash"):  # transformers norms latents with 1e-6, whatever config.json says
        latents = [m for name, m in model.named_modules() if name.endswith(("q_a_layernorm", "kv_a_layernorm"))]
        for norm in latents:
            norm.variance_epsilon = config["rms_norm_eps"]
    if config["model_type"] == "phimoe":  # transformers always takes the short factors, the release's code by the length
        rotary, longer = model.model.rotary_emb, config["rope_scaling"]["original_max_position_embeddings"] < GREEDY_FROM
        init = rotary.rope_init_fn
        rotary.rope_init_fn = lambda c: init(c, seq_len=config["max_position_embeddings"] if longer else None)
    return model


def decoder(model):
    """The stack of layers, in the models that have a vision tower too."""
    if hasattr(model, "transformer"):
        return model.transformer
    return getattr(model.model, "language_model", model.model)


def layers_of(model):
    """Its layers."""
    stack = decoder(model)
    return stack.blocks if hasattr(stack, "blocks") else stack.layers


def give(module, leaf, value):
    """Sets a parameter or buffer."""
    setattr(module, leaf, torch.nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value)


def put_taps(checkpoint, name, shape, flat):
    """The taps of the convolutions of queries, keys and values, which are three tensors."""
    values, _, taps = shape
    own = (values // 3, taps) if flat else (values // 3, 1, taps)
    return torch.cat([checkpoint.put(name.replace(".conv1d.", f".{c}_conv1d."), own).reshape(-1, 1, taps)
                      for c in "qkv"])


def fill(model, config, checkpoint, kept, flat=False):
    """Gives every parameter and buffer a value and stores it under its hub name, fused experts one by one.
    kept: per layer the original numbers of the experts that stay, or None; the order renumbers them.  flat: as in
    SPECS."""
    for name, value in list(model.state_dict().items()):
        path, _, leaf = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        rows = kept[int(layer[1])] if kept and layer else None
        module = model.get_submodule(path)
        if path == "lm_head" and checkpoint.tied or name.startswith(("model.vision_model.",
                                                                     "model.multi_modal_projector.")):
            continue
        if path.endswith(".ple_embedding"):  # how rows are found
            checkpoint.tensors[name] = value
            continue
        if path.endswith(".experts") and config["model_type"] == "gpt_oss":  # [experts, in, out]
            new = checkpoint.put(name, value.shape) if leaf.endswith("_bias") else torch.stack([
                checkpoint.put(f"{path}.{i}.{leaf}.weight", value.shape[:0:-1]) for i in range(len(value))]).mT
        elif path.endswith(".experts") and "n_layers_per_attn_res_block" in text_config(config):
            parts, which = (["gate", "up"], "w13") if leaf == "gate_up_proj" else (["down"], "w2")
            new = checkpoint.put_w(f"{hub_name(config, path)}.{which}_weight", len(value),
                                   (value.shape[1] // len(parts), value.shape[2]), parts)
        elif path == "model.message_input":  # [layers, 4, hidden]: of queries, keys, values and feed-forwards
            own, kv = (checkpoint.put(f"model.llm.middle_cycle_cross_pass_{n}queries", (2 * len(value), value.shape[2]))
                       .reshape(-1, 2, value.shape[2]) for n in ("", "kv_"))
            new = torch.cat([own[:, :1], kv, own[:, 1:]], 1)
        elif path.endswith(".experts"):  # [experts, out, in]; gate_up_proj has the rows of gate_proj first
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            value = value[:config["n_routed_experts"]] if "zero_expert_num" in config else value  # the others have no weights
            value = value.mT if config["model_type"] == "llama4_text" else value
            shape = value.shape[1] // len(parts), value.shape[2]
            names = lambda expert: [hub_name(config, f"{path}.{expert}.{p}.weight") for p in parts]
            new = torch.stack([
                torch.cat([checkpoint.put(n, shape, old) for n, old in zip(names(i), names(original))])
                for i, original in enumerate(rows or range(len(value)))])
            new = new.mT if config["model_type"] == "llama4_text" else new
            module.num_experts = len(new)
        elif path.endswith(".ffn.experts.mlp") and checkpoint.rules:  # of quantized releases: each a linear layer
            experts = config["ffn_config"]["moe_num_experts"]
            shape = value.shape[0] // experts, value.shape[1]
            each = [checkpoint.put(f"{path}.{leaf}_linear.{i}.weight", shape[::-1] if leaf == "w2" else shape)
                    for i in range(experts)]
            new = torch.cat([x.T if leaf == "w2" else x for x in each])
        elif path.endswith(".self_attn.conv1d"):
            new = put_taps(checkpoint, hub_name(config, name), value.shape, flat)
        elif leaf == "A_log" and flat:
            new = checkpoint.put(hub_name(config, name), (value.numel(),)).reshape(value.shape)
        elif path.endswith(".gate_up_proj") and config["model_type"] != "glm4":
            part = lambda old: hub_name(config, name.replace("gate_up_proj", old))
            shape = value.shape[0] // 2, value.shape[1]
            new = torch.cat([checkpoint.put(part(old), shape) for old in ("gate_proj", "up_proj")])
        elif path.endswith((".mlp.gate", ".feed_forward.gate")):
            new = checkpoint.put(hub_name(config, name), value.shape, rows=rows)
            if leaf != "tid2eid":
                module.num_experts = len(new)
        else:
            new = checkpoint.put(hub_name(config, name), value.shape)
        give(module, leaf, new)
    model.tie_weights()
    if config.get("norm_head"):
        head = model.lm_head.weight
        give(model.lm_head, "weight", head / (head.norm(dim=0, keepdim=True) + 1e-7))


FINAL_NORM = ("hy_v3", "bailing_hybrid", "bailing_moe_v2")  # how these call the last norm of the layer for multi-token prediction


def put_mtp(checkpoint, config, tables):
    """The tensors of one multi-token-prediction layer, shaped as the last one.  Most releases store embeddings and a
    head in it that are copies of the model's; here they differ, so that the logits tell which were used.
    tables: False for releases without those copies."""
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{n - 1}."
    for name, shape in list(checkpoint.shapes.items()):
        if name.startswith((last, "model.layers.0.self_attn.indexer.")):  # the last layer may share another's choice
            checkpoint.put(re.sub(r"^model\.layers\.\d+\.", f"model.layers.{n}.", name), shape)
    own = {"final_layernorm" if config["model_type"] in FINAL_NORM else "shared_head.norm": (hidden,)}
    if tables and config["model_type"] != "hy_v3":
        own |= {"embed_tokens": (VOCAB, hidden), "shared_head.head": (VOCAB, hidden)}
    for leaf, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), **own}.items():
        checkpoint.put(f"model.layers.{n}.{leaf}.weight", shape)


def put_qwen_mtp(checkpoint):
    """Qwen's names: a full-attention layer beside the others, and no embeddings or head of its own."""
    full = next(n for n in checkpoint.shapes if n.endswith("self_attn.q_proj.weight")).split("self_attn")[0]
    for name, shape in list(checkpoint.shapes.items()):
        if name.startswith(full):
            checkpoint.put(name.replace(full, "mtp.layers.0."), shape)
    hidden, = checkpoint.shapes[full + "input_layernorm.weight"]
    for leaf, shape in {"fc": (hidden, 2 * hidden), "norm": (hidden,), "pre_fc_norm_embedding": (hidden,),
                        "pre_fc_norm_hidden": (hidden,)}.items():
        checkpoint.put(f"mtp.{leaf}.weight", shape)


def put_v4_mtp(checkpoint, config):
    """DeepSeek-V4's names: a layer with a window alone below mtp.0, with a head that joins the streams of its own."""
    hidden, streams = config["hidden_size"], config["hc_mult"]
    for name, shape in list(checkpoint.shapes.items()):
        if re.match(r"layers\.0\.", name) and not name.endswith("tid2eid"):
            checkpoint.put(name.replace("layers.0.", "mtp.0.", 1), shape)
    own = {"ffn.gate.bias": (config["n_routed_experts"],), "norm.weight": (hidden,), "enorm.weight": (hidden,),
           "hnorm.weight": (hidden,), "e_proj.weight": (hidden, hidden), "h_proj.weight": (hidden, hidden),
           "hc_head_fn": (streams, streams * hidden), "hc_head_base": (streams,), "hc_head_scale": (1,)}
    for leaf, shape in own.items():
        checkpoint.put("mtp.0." + leaf, shape)


def single_names(config):
    """What begins the names of the layers of GLM-5.3-Flash or Hunyuan 4 and those of the layer for multi-token
    prediction, and the name of its last norm."""
    if config["model_type"] == "hy_v4":
        return "model.layers.", "model.mtp_layers.0.", "final_layernorm"
    body = "model.language_model.layers."
    return body, f"{body}{config['text_config']['num_hidden_layers']}.", "shared_head.norm"


def put_single_mtp(checkpoint, config):
    """The layer for multi-token prediction of GLM-5.3-Flash and of Hunyuan 4: latent attention with an indexer, and
    experts, without hyper-connections."""
    text, (body, own, norm) = text_config(config), single_names(config)
    kinds = text["indexer_types"] if config["model_type"] == "hy_v4" else text["layer_types"]
    hidden, last = text["hidden_size"], max(i for i, kind in enumerate(kinds) if kind in ("full", "indexed_attention"))
    for name, shape in list(checkpoint.shapes.items()):
        if name.startswith(f"{body}{last}.") and ".hc_" not in name:
            checkpoint.put(name.replace(f"{body}{last}.", own), shape)
    for leaf, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden),
                        norm: (hidden,)}.items():
        checkpoint.put(f"{own}{leaf}.weight", shape)


def predict_single(model, config, checkpoint, ids):
    """As predict(), for these: DeepSeek-V3's layer for multi-token prediction around their own attention and experts.
    The trunk's rows are those after the final norm."""
    trunk, text, ids = decoder(model), copy.deepcopy(decoder(model).config), torch.tensor([ids])
    own, last = single_names(config)[1:]
    text.indexer_types, hy4 = ["full"], config["model_type"] == "hy_v4"
    if hy4:
        kinds = transformers.models.hy_v4.modeling_hy_v4
        layer = types.SimpleNamespace(self_attn=kinds.HYV4Attention(text, 0), mlp=kinds.HYV4MoE(text))
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = text.rms_norm_eps
    else:
        kinds = transformers.models.glm5_next.modeling_glm5_next
        layer = types.SimpleNamespace(self_attn=kinds.Glm5NextTextAttention(text, 0), mlp=kinds.Glm5NextTextMoE(text))
    for part in ("self_attn", "mlp"):
        module = getattr(layer, part).float().eval()
        for name, old in list(module.state_dict().items()):
            path, _, leaf = name.rpartition(".")
            if path == "experts":
                parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
                new = torch.stack([torch.cat([checkpoint.values[f"{own}{part}.experts.{i}.{p}.weight"] for p in parts])
                                   for i in range(len(old))])
            else:
                new = checkpoint.values[hub_name(config, own + part + "." + name) if hy4 else own + part + "." + name]
            assert new.shape == old.shape, name
            give(module.get_submodule(path), leaf, new)
    gaps = []
    hook = layer.mlp.gate.register_forward_hook(
        lambda _, __, output: gaps.append(checked_route(layer.mlp, text_config(config), output)[1]))
    indexer_gaps, unhook = watch_indexers([layer])
    rms = lambda x, name: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + text.rms_norm_eps) * checkpoint.values[
        own + name + ".weight"]
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    both = torch.cat([rms(trunk.embed_tokens(ids[:, 1:]), "enorm"), rms(hidden, "hnorm")], -1)
    x = both @ checkpoint.values[own + "eh_proj.weight"].T
    seen = {"attention_mask": torch.ones(x.shape[:2], dtype=torch.bool)}
    if hy4:
        where = torch.arange(x.shape[1])[None]
        seen = {"position_embeddings": trunk.rotary_emb(x, position_ids=where), "attention_mask": create_causal_mask(
            config=text, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=where)}
    x = x + layer.self_attn(rms(x, "input_layernorm"), **seen)[0]
    x = x + layer.mlp(rms(x, "post_attention_layernorm"))
    hook.remove()
    unhook()
    return model.lm_head(rms(x, last))[0], torch.stack([gaps[0], indexer_gaps[0]]).amin(0)


def put_nemotron_mtp(checkpoint, config, model):
    """Nemotron-3's names: an attention layer and one with experts, mtp.layers.0 and 1, and what joins them."""
    hidden, kinds = config["hidden_size"], decoder(model).config.layers_block_type
    for i, kind in enumerate(("full_attention", "moe")):
        own = hub_name(config, f"model.layers.{kinds.index(kind)}.")
        for name, shape in list(checkpoint.shapes.items()):
            if name.startswith(own):
                checkpoint.put(name.replace(own, f"mtp.layers.{i}.", 1), shape)
    for leaf, shape in {"0.enorm": (hidden,), "0.hnorm": (hidden,), "0.eh_proj": (hidden, 2 * hidden),
                        "1.final_layernorm": (hidden,)}.items():
        checkpoint.put(f"mtp.layers.{leaf}.weight", shape)


def predict_nemotron(model, config, checkpoint, ids):
    """As predict(), for Nemotron-3, of which transformers has the layers alone.  The last norm is RMS, as in vLLM and
    SGLang."""
    trunk, ids, values, gaps = decoder(model), torch.tensor([ids]), checkpoint.values, []
    text = copy.deepcopy(trunk.config)
    text.layers_block_type = ["full_attention", "moe"]
    blocks = [type(trunk.layers[0])(text, i).float().eval() for i in range(2)]
    norms = {leaf: type(trunk.norm_f)(text.hidden_size, text.layer_norm_epsilon) for leaf in (
        "0.enorm", "0.hnorm", "1.final_layernorm")}
    for leaf, norm in norms.items():
        give(norm, "weight", values[f"mtp.layers.{leaf}.weight"])
    for i, block in enumerate(blocks):
        for name, old in list(block.state_dict().items()):
            path, _, leaf = name.rpartition(".")
            own = f"mtp.layers.{i}."
            new = (torch.stack([values[f"{own}{path}.{e}.{leaf}.weight"] for e in range(len(old))])
                   if path.endswith(".experts") else values[own + name])
            assert new.shape == old.shape, name
            give(block.get_submodule(path), leaf, new)
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    after = trunk.embeddings(ids[:, 1:])
    mask = create_causal_mask(config=text, inputs_embeds=after, attention_mask=None, past_key_values=None,
                              position_ids=torch.arange(after.shape[1])[None])
    hook = blocks[1].mixer.gate.register_forward_hook(
        lambda _, __, output: gaps.append(checked_route(blocks[1].mixer, config, output)[1]))
    x = torch.cat([norms["0.enorm"](after), norms["0.hnorm"](hidden)], -1) @ values["mtp.layers.0.eh_proj.weight"].T
    x = norms["1.final_layernorm"](blocks[1](blocks[0](x, attention_mask=mask)))
    hook.remove()
    return model.lm_head(x)[0], gaps[0]


class V4Mtp:
    """DeepSeek-V4's layer for multi-token prediction.  transformers has the layer and the head, but not what joins them:
    each of the streams that leave the trunk's last layer is normed by itself and joined with the token's embedding."""

    def __init__(self, model, config, checkpoint):
        v4, values = transformers.models.deepseek_v4.modeling_deepseek_v4, checkpoint.values
        self.trunk, self.output, self.values, self.eps = decoder(model), model.lm_head, values, config["rms_norm_eps"]
        self.text = copy.deepcopy(self.trunk.config)
        self.text.layer_types, self.text.mlp_layer_types, self.text.num_hidden_layers = ["sliding_attention"], ["moe"], 1
        self.layer = v4.DeepseekV4DecoderLayer(self.text, 0).float().eval()
        self.head = v4.DeepseekV4HyperHead(self.text).float().eval()
        hub = lambda name: hub_name(config, "model.layers.0." + name).replace("layers.0.", "mtp.0.", 1)
        for name, old in list(self.layer.state_dict().items()):
            path, _, leaf = name.rpartition(".")
            if path.endswith(".experts"):
                parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
                new = torch.stack([torch.cat([values[hub(f"{path}.{i}.{part}.weight")] for part in parts])
                                   for i in range(len(old))])
            else:
                new = values[hub(name)]
            assert new.shape == old.shape, name
            give(self.layer.get_submodule(path), leaf, new)
        for leaf in ("fn", "base", "scale"):
            assert getattr(self.head, "hc_" + leaf).shape == values["mtp.0.hc_head_" + leaf].shape
            give(self.head, "hc_" + leaf, values["mtp.0.hc_head_" + leaf])

    def rms(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.values[f"mtp.0.{name}.weight"]

    def join(self, after, rows):
        """after: tokens [1, n]; rows: the streams of the positions before these [1, n, hc, hidden]."""
        token = self.rms(self.trunk.embed_tokens(after), "enorm") @ self.values["mtp.0.e_proj.weight"].T
        return token[:, :, None] + self.rms(rows, "hnorm") @ self.values["mtp.0.h_proj.weight"].T

    def run(self, joined, after):
        """The streams that leave the layer, and logits [n, vocab]."""
        where, flat = torch.arange(after.shape[1])[None], joined[:, :, 0]
        mask = create_sliding_window_causal_mask(config=self.text, inputs_embeds=flat, attention_mask=None,
                                                 past_key_values=None, position_ids=where)
        rope = {"main": self.trunk.rotary_emb(flat, position_ids=where, layer_type="main")}
        out = self.layer(joined, input_ids=after, position_embeddings=rope, position_ids=where, attention_mask=mask,
                         past_key_values=None)
        return out, (self.rms(self.head(out), "norm") @ self.output.weight.T)[0]


def drafts_from(n):
    """Positions of n tokens with chained drafts in drafts.f32."""
    return 5, 40, min(200, n - 12)


def predict_v4(model, config, checkpoint, ids):
    """As predict(), for DeepSeek-V4.  Then chained drafts behind each position t of drafts_from(), [positions, drafts,
    vocab]: the first from the trunk's rows up to t, each other one from the streams that the one before it left."""
    mtp, ids, streams, gaps, drafts = V4Mtp(model, config, checkpoint), torch.tensor([ids]), [], [], []
    hook = mtp.trunk.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    model(input_ids=ids, use_cache=False)
    hook.remove()
    hook = mtp.layer.mlp.gate.register_forward_hook(
        lambda _, __, output: gaps.append(checked_route(mtp.layer.mlp, config, output)[1]))
    logits = mtp.run(mtp.join(ids[:, 1:], streams[0][:, :-1]), ids[:, 1:])[1]
    hook.remove()
    for t in drafts_from(len(ids[0])):
        joined = mtp.join(ids[:, 1:t + 2], streams[0][:, :t + 1])
        for end in range(t + 2, t + 2 + DRAFTS):
            out, rows = mtp.run(joined, ids[:, 1:end])
            drafts.append(rows[-1])
            joined = torch.cat([joined, mtp.join(ids[:, end:end + 1], out[:, -1:])], 1)
    return logits, gaps[0], torch.stack(drafts).reshape(
        -1, DRAFTS, logits.shape[-1])


def put_qwen4_mtp(checkpoint, config, draw):
    """Qwen3.8-Flash-Next's names: a full-attention layer beside the others, what makes its streams of those of the
    trunk and of a token, and what joins its streams for the head.  draw: mtp_draw of SPECS."""
    put = lambda name, shape: checkpoint.put(name, shape, f"{draw}.{name}")
    full = next(n for n in checkpoint.shapes if n.endswith("self_attn.q_proj.weight")).split("self_attn")[0]
    for name, shape in list(checkpoint.shapes.items()):
        if name.startswith(full):
            put(name.replace(full, "mtp.layers.0."), shape)
    hidden, wide, low = config["hidden_size"], config["hc_count"] * config["hidden_size"], config["hc_lowrank"]
    for leaf, shape in {"fc_embedding": (hidden, hidden), "fc_hidden": (hidden, hidden),
                        "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (wide,),
                        "hyper_connection_mixer.hc_norm": (wide,),
                        "hyper_connection_mixer.input_mix_weight_down": (low, wide),
                        "hyper_connection_mixer.input_mix_weight_up": (wide, low)}.items():
        put(f"mtp.{leaf}.weight", shape)


class Qwen4Mtp:
    """Qwen3.8-Flash-Next's layer for multi-token prediction.  transformers has the layer and what joins its streams,
    but not what makes them.  As in SGLang the streams that leave the trunk's last layer are normed as one row, and each
    is joined with the token's embedding."""

    def __init__(self, model, config, checkpoint):
        kinds = transformers.models.qwen4_exp.modeling_qwen4_exp
        self.trunk, self.output, self.values = decoder(model), model.lm_head, checkpoint.values
        self.text = copy.deepcopy(self.trunk.config)
        self.text.layer_types, self.text.ple_layer_ids, self.text.num_hidden_layers = ["indexed_attention"], [], 1
        self.layer = kinds.Qwen4ExpTextDecoderLayer(self.text, 0).float().eval()
        self.mixer = kinds.Qwen4ExpTextGatedResidual(self.text, use_combine=False).float().eval()
        for module, own in ((self.layer, "mtp.layers.0."), (self.mixer, "mtp.hyper_connection_mixer.")):
            for name, old in list(module.state_dict().items()):
                path, _, leaf = name.rpartition(".")
                if path.endswith(".experts"):
                    parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
                    new = torch.stack([torch.cat([self.values[f"{own}{path}.{i}.{part}.weight"] for part in parts])
                                       for i in range(len(old))])
                else:
                    new = self.values[own + name]
                assert new.shape == old.shape, name
                give(module.get_submodule(path), leaf, new)

    def rms(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.text.rms_norm_eps) * (
            1 + self.values[f"mtp.{name}.weight"])

    def join(self, after, rows):
        """after: tokens [1, n]; rows: the streams of the positions before these [1, n, streams * hidden]."""
        token = self.rms(self.trunk.embed_tokens(after), "pre_fc_norm_embedding") @ self.values[
            "mtp.fc_embedding.weight"].T
        rows = self.rms(rows, "pre_fc_norm_hidden").unflatten(-1, (self.text.hc_count, -1))
        return (token[:, :, None] + rows @ self.values["mtp.fc_hidden.weight"].T).flatten(-2)

    def run(self, joined):
        """The streams that leave the layer, and logits [n, vocab]."""
        where, flat = torch.arange(joined.shape[1])[None], joined[..., :self.text.hidden_size]
        mask = create_causal_mask(config=self.text, inputs_embeds=flat, attention_mask=None, cache=None,
                                  position_ids=where, allow_is_causal_skip=False)
        rope = self.trunk.rotary_emb(flat, where[None].expand(3, -1, -1))
        out = self.layer(joined, position_embeddings=rope, attention_mask=mask)
        return out, self.output(self.mixer(out))[0]


def predict_qwen4(model, config, checkpoint, ids):
    """As predict_v4(), for Qwen3.8-Flash-Next."""
    mtp, ids, streams, gaps = Qwen4Mtp(model, config, checkpoint), torch.tensor([ids]), [], []
    hook = mtp.trunk.hyper_connection_mixer.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    model(input_ids=ids, use_cache=False)
    hook.remove()
    hook = mtp.layer.mlp.gate.register_forward_hook(
        lambda _, __, output: gaps.append(checked_route(mtp.layer.mlp, text_config(config), output)[1]))
    indexer_gaps, unhook = watch_indexers([mtp.layer])
    logits, drafts = mtp.run(mtp.join(ids[:, 1:], streams[0][:, :-1]))[1], []
    for t in drafts_from(len(ids[0])):
        joined = mtp.join(ids[:, 1:t + 2], streams[0][:, :t + 1])
        for end in range(t + 2, t + 2 + DRAFTS):
            out, rows = mtp.run(joined)
            drafts.append(rows[-1])
            joined = torch.cat([joined, mtp.join(ids[:, end:end + 1], out[:, -1:])], 1)
    hook.remove()
    unhook()
    own = torch.stack([g[-1] for pair in zip(gaps[1:], indexer_gaps[1:]) for g in pair]).min()
    return logits, torch.stack([gaps[0], indexer_gaps[0]]).amin(0).minimum(own), torch.stack(drafts).reshape(
        -1, DRAFTS, logits.shape[-1])


def chain_layer(config, i):
    """What the names of a chained layer begin with, and those of its last norm and its head (None: the model's)."""
    if config["model_type"] == "mimo_v2_flash":
        return f"model.mtp.layers.{i}.", "final_layernorm", None
    own = f"model.layers.{text_config(config)['num_hidden_layers'] + i}."
    return own, "transformer.shared_head.norm", "transformer.shared_head.output"


def chain_name(config, name):
    """Within a chained layer."""
    return name.replace("post_attention_", "pre_mlp_") if config["model_type"] == "mimo_v2_flash" else name


def put_chain(checkpoint, model, config, count):
    """Several layers for multi-token prediction: attention as in a windowed layer, a feed-forward part as in layer 0."""
    hidden, layer = text_config(config)["hidden_size"], "model.layers.{}.".format
    window = layer(decoder(model).config.layer_types.index("sliding_attention"))
    shapes = {name.removeprefix(window): shape for name, shape in checkpoint.shapes.items()
              if name.startswith((window + "self_attn.", window + "input_", window + "post_"))}
    shapes |= {name.removeprefix(layer(0)): shape for name, shape in checkpoint.shapes.items()
               if name.startswith(layer(0) + "mlp.")}
    shapes |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
    for i in range(count):
        own, last, head = chain_layer(config, i)
        outer = {last + ".weight": (hidden,), **({head + ".weight": (VOCAB, hidden)} if head else {})}
        for name, shape in {**shapes, **outer}.items():
            checkpoint.put(own + chain_name(config, name), shape)


def chain_config(config, trunk, count):
    """transformers' configuration of the layers of put_chain."""
    text, own = copy.deepcopy(trunk.config), text_config(config)
    text.num_mtp_layers, text.mtp_layer_types = count, ["sliding_attention"] * count
    text.mtp_mlp_layer_types = ["dense"] * count
    if "attention_other_setting" in own:
        assert own["layer_types"][-count:] == text.mtp_layer_types
        assert own["swiglu_limits"][-count:] == own["swiglu_limits_shared"][-count:] == [0.0] * count
        text.swiglu_limits = text.swiglu_limits_shared = None
        text.mtp_per_layer_config = {
            i: {"num_attention_heads": own["attention_other_setting"]["num_attention_heads"]} for i in range(count)}
    return text.get_mtp_config()


def predict_chain(model, config, checkpoint, ids, count):
    """What the layers of put_chain predict: the logits of the first [n - 1, vocab], those of the second [n - 2, vocab]
    and so on, one after the other, and no routing gap.  Row t of layer i is made of token t + 1 + i and of the row that
    layer i - 1 has at t, before its norm; for the first of the trunk's, before the final norm."""
    trunk, ids, rows, out = decoder(model), torch.tensor([ids]), [], []
    hook = trunk.norm.register_forward_pre_hook(lambda _, args: rows.append(args[0]))
    model(input_ids=ids, use_cache=False)
    hook.remove()
    hidden, text = rows[0], chain_config(config, trunk, count)
    for i in range(count):
        layer = MtpLayer(text, type(trunk.layers[-1]), type(trunk.norm), i).float().eval()
        own, last, head = chain_layer(config, i)
        for name, old in list(layer.state_dict().items()):
            path, _, leaf = name.rpartition(".")
            value = checkpoint.values[own + chain_name(config, hub_name(
                config, name.removeprefix("mtp_block.").replace("post_norm", last)))]
            assert value.shape == old.shape, name
            give(layer.get_submodule(path), leaf, value)
        hidden, after = hidden[:, :-1], trunk.embed_tokens(ids[:, i + 1:])
        where = torch.arange(hidden.shape[1])[None]
        mask = create_sliding_window_causal_mask(
            config=text, inputs_embeds=after, attention_mask=None, past_key_values=None, position_ids=where)
        both = torch.cat([layer.enorm(after), layer.hnorm(hidden)], -1)
        hidden = layer.mtp_block(layer.eh_proj(both), attention_mask=mask, position_ids=where, past_key_values=None,
                                 position_embeddings=trunk.rotary_emb(after, where, "sliding_attention"))
        output = checkpoint.values[f"{own}{head}.weight"] if head else model.lm_head.weight
        out.append(layer.post_norm(hidden)[0] @ output.T)
    return torch.cat(out), torch.full((1,), math.inf)


def has_mtp(checkpoint):
    return any(name.endswith((".eh_proj.weight", "mtp.fc.weight", "mtp.fc_hidden.weight", "mtp.0.e_proj.weight"))
               for name in checkpoint.values)


def mtp_name(config, name):
    """The hub's name of a tensor of transformers' MtpLayer."""
    if "linear_num_key_heads" in text_config(config):
        for old, new in [("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden"), ("eh_proj", "fc"),
                         ("post_norm", "norm"), ("mtp_block", "layers.0")]:
            if name.startswith(old + "."):
                return "mtp." + new + name.removeprefix(old)
    post = "final_layernorm." if config["model_type"] in FINAL_NORM else "shared_head.norm."
    name = name.removeprefix("mtp_block.").replace("post_norm.", post)
    return hub_name(config, f"model.layers.{config['num_hidden_layers']}.{name}")


def row_layer(kind):
    """The kind of layer that returns its rows alone; GLM's layers return their indexer's choice beside them."""
    if kind is not transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaDecoderLayer:
        return kind

    class RowLayer(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)[0]

    return RowLayer


def make_mtp(model, config, checkpoint):
    """transformers' MtpLayer around a full-attention layer, with experts if the model has some, with the values of the
    checkpoint."""
    text = copy.deepcopy(decoder(model).config)
    text.num_mtp_layers, text.mtp_layer_types, text.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    if hasattr(text, "indexer_types"):
        text.indexer_types = ["full"]
    text = text.get_mtp_config()
    kinds = row_layer(type(decoder(model).layers[-1])), type(decoder(model).norm)
    layer, values = MtpLayer(text, *kinds, 0).float().eval(), checkpoint.values
    assert layer.config._attn_implementation == layer.config._experts_implementation == "eager"
    for name, old in list(layer.state_dict().items()):
        path, _, leaf = name.rpartition(".")
        if path.endswith(".experts"):
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            new = torch.stack([torch.cat([values[mtp_name(config, f"{path}.{i}.{part}.weight")] for part in parts])
                               for i in range(len(old))])
        else:
            new = values[mtp_name(config, name)]
        assert new.shape == old.shape, name
        give(layer.get_submodule(path), leaf, new)
    return layer


def predict(model, config, checkpoint, ids):
    """What the MTP layer predicts: logits [n - 1, vocab], and each row's smallest gap of routing and of the layer's
    indexer.  Row t is made of the trunk's row t after the final norm and of token t + 1, and stands at position t."""
    layer, trunk = make_mtp(model, config, checkpoint), decoder(model)
    ids = torch.tensor([ids])
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(model.lm_head(hidden), model(input_ids=ids, use_cache=False).logits)
    own = f"model.layers.{text_config(config)['num_hidden_layers']}."
    table = checkpoint.values.get(own + "embed_tokens.weight", trunk.embed_tokens.weight)
    head = checkpoint.values.get(own + "shared_head.head.weight", model.lm_head.weight)
    after, hidden, gaps = torch.nn.functional.embedding(ids[:, 1:], table), hidden[:, :-1], []
    where = torch.arange(hidden.shape[1])[None]
    mask = create_causal_mask(config=layer.config, inputs_embeds=after, attention_mask=None, past_key_values=None,
                              position_ids=where)
    mlp = layer.mtp_block.mlp
    hooks = [gate.register_forward_hook(
        lambda _, __, output: gaps.append(checked_route(mlp, text_config(config), output)[1]))
        for gate in [router(mlp)] if gate]
    indexer_gaps, unhook = watch_indexers([layer.mtp_block])
    rows = [layer(after, hidden, trunk.rotary_emb(after, position_ids=where + shift), mask, where + shift, None)
            for shift in (0, 1)]
    for hook in hooks:
        hook.remove()
    unhook()
    # RoPE depends on differences of positions: that of the trunk's row and that of the token give the same.
    assert (rows[1] - rows[0]).square().mean() < 1e-10 * rows[0].square().mean()
    if config["model_type"] in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "bailing_moe_v2"):  # transformers has the rest as well
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]  # the last lacks both
        whole = MtpModel(model, 1).float().eval()
        whole.layers[0].load_state_dict(layer.state_dict())
        whole.embed_tokens = torch.nn.Embedding.from_pretrained(table)
        whole.shared_head = torch.nn.Linear(*head.T.shape, bias=False)
        give(whole.shared_head, "weight", head)
        theirs = whole.forward_layer(0, hidden, where, None, input_ids=ids[:, 1:])
        assert torch.equal(theirs, rows[0]) and torch.equal(whole._project_to_logits(theirs), rows[0] @ head.T)
    no_choice = torch.full(rows[0].shape[1:2], math.inf)
    return (rows[0] @ head.T)[0], torch.stack([no_choice, *gaps[:1], *indexer_gaps[:1]]).amin(0)


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def assert_rope(model, config):
    """transformers took theta, YaRN and its attention factors from the configuration.  Not of models whose layers
    differ in these: check_tiny.py shows those."""
    if isinstance(config.get("rope_theta"), list) or config["model_type"] in (
            "dbrx", "phimoe", "laguna", "mellum", "mimo_v2_flash", "deepseek_v4", "kimi_linear", "nemotron_h", "glm5_next_text", "gemma4_text", "dots3_note", "longcat_flash") or (
            "d_rel" in config):
        return
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    mla = "kv_lora_rank" in config
    dim = config["qk_rope_head_dim"] if mla else head_dim(config)
    head, part = dim, rope.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1)
    part = config["rotary_dim"] / head if "rotary_dim" in config else part
    dim = dim if mla else int(dim * part)
    assert sum(rope.get("mrope_section", [dim // 2])) == dim // 2
    i = torch.arange(dim // 2, dtype=torch.float64)
    inv, cos_factor, score_factor = theta ** (-2 * i / dim), 1.0, 1.0
    if rope.get("type", rope.get("rope_type")) == "yarn":
        correction = lambda turns: dim * math.log(
            rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = correction(rope["beta_fast"]), correction(rope["beta_slow"])
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low = max(low, 0)
        ramp = ((i - low) / (high - low)).clamp(0, 1)
        inv = inv * (1 - ramp) + inv / rope["factor"] * ramp
        mscale = 0.1 * math.log(rope["factor"]) + 1
        sharper = 0.1 * rope.get("mscale_all_dim", 1) * math.log(rope["factor"]) + 1
        cos_factor, score_factor = (1.0 if "mscale" in rope else mscale), (sharper**2 if mla else 1.0)
        assert 0 < ramp.sum() < dim // 2, "YaRN neither keeps nor stretches everything"
    if "alpha" in rope:
        inv = (theta * rope["alpha"] ** (dim / (dim - 2))) ** (-2 * i / dim)
    if rope.get("rope_type") == "llama3":
        turns = inv * rope["original_max_position_embeddings"] / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        inv = inv * kept + inv / rope["factor"] * (1 - kept)
        assert 0 < kept.sum() < dim // 2, "llama3 neither keeps nor stretches everything"
    rotary = getattr(decoder(model), "pos_emb" if config["model_type"] == "lfm2_moe" else "rotary_emb")
    if rotary is None:
        return
    attention = next(layer.self_attn for layer in decoder(model).layers
                     if hasattr(layer, "self_attn") and hasattr(layer.self_attn, "scaling"))
    assert torch.allclose(rotary.inv_freq.double(), inv, rtol=1e-6), (rotary.inv_freq, inv)
    assert math.isclose(rotary.attention_scaling, cos_factor, rel_tol=1e-9)
    query = dim + config["qk_nope_head_dim"] if mla else head
    assert math.isclose(attention.scaling, config.get("attention_multiplier", query**-0.5 * score_factor), rel_tol=1e-9)
    assert not mla or getattr(model.config, "rope_interleave", True)


def router(mlp):
    """The router of a layer, or None."""
    return getattr(mlp, "gate", getattr(mlp, "router", None))


def feed_forward(layer):
    """That of a layer; of Nemotron-3 whatever the layer is."""
    for name in ("block_sparse_moe", "ffn", "feed_forward"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer.mixer if hasattr(layer, "mixer") else layer if hasattr(layer, "router") else layer.mlp


def moe_layers(model):
    return [layer for layer in layers_of(model) if router(feed_forward(layer))]


def assert_layer_types(model, config):
    """Full attention stands where layer_types says, or else at every full_attention_interval-th layer."""
    if "linear_num_key_heads" in config:
        kinds = config.get("layer_types") or [
            "linear_attention" if (i + 1) % config["full_attention_interval"] else "full_attention"
            for i in range(config["num_hidden_layers"])]
        kinds = [kind.replace("indexed", "full") for kind in kinds]
        assert kinds == ["full_attention" if hasattr(layer, "self_attn") else "linear_attention"
                         for layer in decoder(model).layers]


def limit_groups(config, score, count):
    """Scores without those of groups that are left out, and the gap to these.  count: the best experts of a group whose
    sum rates it."""
    groups = score.reshape(len(score), config["n_group"], -1)
    best, keep = groups.topk(count).values.sum(-1).sort(descending=True), config["topk_group"]
    out = best.indices[:, keep:, None].expand(-1, -1, groups.shape[2])
    return (groups.scatter(1, out, -math.inf).reshape(score.shape),
            best.values[:, keep - 1] - best.values[:, keep])


def route(config, bias, logits, use_bias=True, use_groups=True):
    """Experts [tokens, k] by the rules of the paper, and each token's gap to one (or a group) not chosen.
    bias: of the choice, or None, which means softmax.  gpt-oss takes the softmax of the chosen alone, so its gap is
    one of logits."""
    k = next(config[name] for name in ("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts", "moe_topk",
                                          "moe_num_active_primary_experts")
             if name in config)
    k = k[0] if isinstance(k, list) else k
    gap = torch.full((len(logits),), math.inf)
    if config["model_type"].startswith("granitemoe") or config["model_type"] in (
            "gpt_oss", "gemma4_text", "cohere2_moe", "dbrx", "phimoe"):  # some give the softmax
        score = logits
        for i in range(k if config["model_type"] == "phimoe" else 0):  # no logit is at the distance that ends the sum
            best = logits.sort(descending=True).values[:, i:i + 1]
            far = (best - logits) / logits.abs().maximum(best) - 2 * config["router_jitter_noise"]
            gap = gap.minimum(far.abs().amin(-1))
    elif bias is None:
        score = logits.softmax(-1)
        if use_groups and config.get("topk_method") == "group_limited_greedy":
            score, gap = limit_groups(config, score, 1)
    else:
        softplus = torch.nn.functional.softplus
        score = {"ernie4_5_moe": lambda t: t.softmax(-1), "longcat_flash": lambda t: t.softmax(-1), "deepseek_v4": lambda t: softplus(t).sqrt()}.get(
            config["model_type"], torch.sigmoid)(logits)
        score = score + (bias.reshape(-1) if use_bias else 0)
        if use_groups and config.get("n_group", 1) > 1:
            score, gap = limit_groups(config, score, 2)
    best = score.sort(descending=True)
    gap = gap.minimum(best.values[:, k - 1] - best.values[:, k])
    return best.indices[:, :k].sort().values, gap


def checked_route(mlp, config, output):
    """What route() says of the router's logits, and those and the bias.  Asserts that transformers chose the same."""
    if config["model_type"] == "llama4_text":  # all scores, 0 but for the chosen ones
        output = output[1], None, output[0].topk(config["num_experts_per_tok"]).indices
    logits, _, chosen = (output, *mlp.route_tokens_to_experts(output)) if config["model_type"] == "dbrx" else output
    bias = next((b for name, b in (*mlp.named_buffers(), *mlp.named_parameters())
                 if name.endswith(("e_score_correction_bias", "expert_bias"))), None)
    mine, gap = route(config, bias, logits)
    assert torch.equal(chosen.sort().values, mine), "transformers routes otherwise"
    return mine, gap, logits, bias


def indexer(layer):
    """That of a layer, or None."""
    attention = getattr(layer, "self_attn", None)
    return getattr(getattr(attention, "compressor", None) or attention, "indexer", None)


def index(layer, interleaved, x, latent, cos, sin, last):
    """What an indexer thinks of each token [n, n], by the rules of the releases.  x [n, hidden]: the rows of the layer
    after its norm; latent: those of the query after theirs; last: the last values of a head are rotated."""
    n, half = len(x), cos.shape[-1] // 2
    q, k = layer.wq_b(latent).reshape(n, layer.n_heads, -1), layer.k_norm(layer.wk(x))[:, None]
    cos, sin = cos[:, None, :half], sin[:, None, :half]

    def turn(t):  # the first values of a head, or the last
        part = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
            slice(0, half), slice(half, 2 * half))
        t = t.clone()
        turned = t[..., t.shape[-1] - 2 * half if last else 0:]
        a, b = turned[..., part[0]].clone(), turned[..., part[1]].clone()
        turned[..., part[0]], turned[..., part[1]] = a * cos - b * sin, b * cos + a * sin
        return t

    match = torch.einsum("qhd,kd->qhk", turn(q), turn(k)[:, 0]).relu() * q.shape[-1] ** -0.5
    score = torch.einsum("qh,qhk->qk", layer.weights_proj(x), match) * layer.n_heads ** -0.5
    return score + torch.full((n, n), -math.inf).triu(1)


def index_blocks(layer, x, cos, sin):
    """What MiniMax-M3's indexer thinks of each block of keys [heads, n, blocks], by the rules of the releases: infinity
    of the last ones, which are always seen.  x, cos, sin: as of index()."""
    n, half, size = len(x), cos.shape[-1] // 2, layer.block_size
    q, k = layer.q_norm(layer.q_proj(x).reshape(n, layer.num_heads, -1)), layer.k_norm(layer.k_proj(x))[:, None]
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin, t[..., 2 * half:]], -1)
            for t, a, b in ((t, t[..., :half], t[..., half:2 * half]) for t in (q, k)))
    score = torch.einsum("qhd,kd->hqk", q, k[:, 0]) + torch.full((n, n), -math.inf).triu(1)
    score = torch.nn.functional.pad(score, (0, -n % size), value=-math.inf).reshape(*score.shape[:2], -1, size).amax(-1)
    for t in range(n):
        score[:, t, max(t // size + 1 - layer.local_blocks, 0):t // size + 1] = math.inf
    return score


def watch_blocks(layer, args, gaps):
    """As the hook of watch_indexers(), for MiniMax-M3."""
    x, (cos, sin), output = args[0][0], args[1], args[-1]
    score, k = index_blocks(layer, x, cos[0], sin[0]), layer.topk_blocks
    gap = torch.full((len(x),), math.inf)
    for t in range(k * layer.block_size, len(x)):
        for head in range(layer.num_heads):
            row = score[head, t, :t // layer.block_size + 1]
            best = row.sort(descending=True)
            lead = (best.values[k - 1] - best.values[k]) / row[row < math.inf].abs().max()
            same = set(best.indices[:k].tolist()) == set(output[0, head, t].tolist())
            assert same or lead < 1e-5, "transformers chooses other blocks"
            gap[t] = min(gap[t], lead)
    gaps.append(gap)


def index_compressed(layer, x, latent):
    """What DeepSeek-V4's indexer thinks of each compressed key [n, keys], by the rules of the releases: each of them is
    made of the second half of its own tokens' values and the first half of those of the key before.  x, latent: as of
    index()."""
    ratio, width, n = layer.compress_rate, layer.head_dim, len(x)
    freq = layer.rotary_emb.compress_inv_freq

    def turn(t, at):  # the last values of a head
        angle = at[:, None].float() * freq
        cos, sin = (f[(slice(None), *(None,) * (t.ndim - 2))] for f in (angle.cos(), angle.sin()))
        a, b = t[..., -2 * len(freq)::2], t[..., 1 - 2 * len(freq)::2]
        t = t.clone()
        t[..., -2 * len(freq)::2], t[..., 1 - 2 * len(freq)::2] = a * cos - b * sin, b * cos + a * sin
        return t

    rows = []
    value, gate = layer.kv_proj(x), layer.gate_proj(x)
    for key in range(n // ratio):
        mine, before = range(key * ratio, key * ratio + ratio), range(max(key - 1, 0) * ratio, key * ratio)
        gates = torch.stack([gate[t, :width] + layer.position_bias[t % ratio, :width] for t in before]
                            + [gate[t, width:] + layer.position_bias[t % ratio, width:] for t in mine])
        values = torch.stack([value[t, :width] for t in before] + [value[t, width:] for t in mine])
        rows.append((gates.softmax(0) * values).sum(0))
    keys = turn(layer.kv_norm(torch.stack(rows)), torch.arange(len(rows)) * ratio)
    q = turn(layer.q_b_proj(latent).reshape(n, layer.num_heads, width), torch.arange(n))
    match = torch.einsum("qhd,kd->qhk", q, keys).relu() * (width * layer.num_heads) ** -0.5
    return torch.einsum("qh,qhk->qk", layer.scorer.weights_proj(x), match)


def watch_compressed(layer, x, latent, chosen, gaps):
    """As the hook of watch_indexers(), for DeepSeek-V4."""
    k, gap = layer.index_topk, torch.full((len(x),), math.inf)
    score = index_compressed(layer, x, latent)
    for t in range(len(x)):
        row = score[t, :(t + 1) // layer.compress_rate]
        if len(row) > k:
            best = row.sort(descending=True)
            gap[t] = (best.values[k - 1] - best.values[k]) / row.abs().max()
            same = set(best.indices[:k].tolist()) == set(chosen[t].tolist())
            assert same or gap[t] < 1e-5, "transformers chooses other keys"
    gaps.append(gap)


def index_pools(layer, x, latent):
    """What GLM-5.3-Flash's indexer thinks of each pool of tokens that is complete at the end [n, pools], by the rules of
    the reference.  x, latent: as of index()."""
    n, size = len(x), layer.index_kpool
    key, gate = layer.k_norm(layer.wk(x)), x @ layer.index_kpool_compress_gate.T
    pools = n // size * size
    parts = lambda t: t[:pools].reshape(-1, size, t.shape[-1])
    keys = ((parts(gate) + layer.index_kpool_compress_ape).softmax(1) * parts(key)).sum(1)
    q = layer.wq_b(latent).reshape(n, layer.n_heads, -1)
    match = torch.einsum("qhd,kd->qhk", q, keys).relu() * (q.shape[-1] * layer.n_heads) ** -0.5
    return torch.einsum("qh,qhk->qk", layer.weights_proj(x), match)


def watch_pools(layer, x, latent, chosen, gaps):
    """As the hook of watch_indexers(), for GLM-5.3-Flash."""
    size, gap = layer.index_kpool, torch.full((len(x),), math.inf)
    score, k = index_pools(layer, x, latent), layer.index_topk // layer.index_kpool
    for t in range(len(x)):
        row, tail = score[t, :(t + 1) // size], range((t + 1) // size * size, t + 1)
        best = row.sort(descending=True)
        if len(row) > k:
            gap[t] = (best.values[k - 1] - best.values[k]) / row.abs().max()
        seen = {i.item() * size + j for i in best.indices[:k] for j in range(size)} | set(tail)
        same = seen == set(chosen[t].tolist()) - {-1}
        assert same or gap[t] < 1e-5, "transformers chooses other pools"
    gaps.append(gap)


def index_means(layer, x, cos, sin):
    """What Qwen4-Exp's indexer thinks of each block of keys [n, blocks], by the rules of the releases.  x, cos, sin: as
    of index()."""
    n, half, size, width = len(x), cos.shape[-1] // 2, layer.compress_ratio, layer.index_head_dim
    q, k = layer.index_qk_proj(x).split([layer.index_n_heads * width, width], -1)
    blocks = n // size
    k = layer.k_layernorm(k[:blocks * size].reshape(blocks, size, width).mean(1))
    q = layer.q_layernorm(q.reshape(n, layer.index_n_heads, width))

    def turn(t, at):
        c, s = (f[at][(slice(None), *(None,) * (t.ndim - 2), slice(0, half))] for f in (cos, sin))
        a, b = t[..., :half], t[..., half:2 * half]
        return torch.cat([a * c - b * s, b * c + a * s, t[..., 2 * half:]], -1)

    q, k = turn(q, torch.arange(n)), turn(k, torch.arange(blocks) * size)
    return torch.einsum("qhd,kd->qhk", q, k).relu().sum(1)


def watch_means(layer, x, position, output, gaps):
    """As the hook of watch_indexers(), for Qwen4-Exp, which says of every key whether it is seen."""
    k, size, gap = layer.block_topk, layer.compress_ratio, torch.full((len(x),), math.inf)
    score = index_means(layer, x, *(f[0] for f in position))
    for t in range(len(x)):
        complete = (t + 1) // size
        best = score[t, :complete].sort(descending=True)
        seen = {b * size + i for b in best.indices[:k].tolist() for i in range(size)} | set(range(complete * size, t + 1))
        if complete > k:
            gap[t] = (best.values[k - 1] - best.values[k]) / score[t, :complete].max()
        same = seen == set(output[0, 0, t].nonzero().flatten().tolist())
        assert same or gap[t] < 1e-5, "transformers chooses other blocks"
    gaps.append(gap)


def watch_indexers(layers):
    """The gaps [tokens] of each choice that the indexers of the layers will make: by how much the last token chosen
    leads the first one rejected, in units of the row's largest score.  It is infinite where there is nothing to reject
    and 0 between equals.  And a function that ends it.  Asserts that transformers chooses the same."""
    gaps = []

    def hook(layer, args, named, output):
        if hasattr(layer, "index_kpool"):
            return watch_pools(layer, named["hidden_states"][0], named["q_resid"][0], output[0], gaps)
        if hasattr(layer, "block_topk"):
            return watch_means(layer, args[0][0], args[1], output, gaps)
        if hasattr(layer, "topk_blocks"):
            return watch_blocks(layer, (*args, output), gaps)
        if hasattr(layer, "scorer"):
            return watch_compressed(layer, args[0][0], args[1][0], output[0], gaps)
        x, latent, (cos, sin) = args[0][0], args[1][0], args[2]
        last, k = layer.config.model_type == "hy_v4", layer.index_topk
        interleaved = last or layer.config.model_type in ("glm_moe_dsa", "dots3_note_text")
        score = index(layer, interleaved, x, latent, cos[0], sin[0], last)
        gap = torch.full((len(x),), math.inf)
        for t in range(k, len(x)):
            best = score[t, :t + 1].sort(descending=True)
            gap[t] = (best.values[k - 1] - best.values[k]) / score[t, :t + 1].abs().max()
            same = set(best.indices[:k].tolist()) == set(output[0, t].tolist())
            assert same or gap[t] < 1e-5, "transformers chooses other tokens"
        gaps.append(gap)

    hooks = [indexer(layer).register_forward_hook(hook, with_kwargs=True) for layer in layers if indexer(layer)]
    return gaps, lambda: [h.remove() for h in hooks]


def run(model, config, ids, whole=True):
    """Logits [n, vocab] and each token's smallest gap of routing and indexers, which is 0 if bias or groups change no
    choice at all, unless the prompt is but a part.  Asserts that transformers routes by the rules."""
    gaps, biased, told = [], [], {"groups": config.get("n_group", 1) == 1}

    def hook(mlp, output):
        if hasattr(router(mlp), "tid2eid"):
            assert torch.equal(output[2], router(mlp).tid2eid[torch.tensor(ids)]), "transformers routes otherwise"
            return
        mine, gap, logits, bias = checked_route(mlp, config, output)
        gaps.append(gap)
        told["groups"] |= not torch.equal(mine, route(config, bias, logits, use_groups=False)[0])
        if bias is not None:
            biased.append(not torch.equal(mine, route(config, bias, logits, use_bias=False)[0]))

    hooks = [router(mlp).register_forward_hook(lambda _, __, output, mlp=mlp: hook(mlp, output))
             for mlp in map(feed_forward, moe_layers(model))]
    indexer_gaps, unhook = watch_indexers(layers_of(model))
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for h in hooks:
        h.remove()
    unhook()
    told["bias"] = any(biased) or not biased
    no_choice = torch.full((len(ids),), math.inf)
    return logits, torch.stack([no_choice, *gaps, *indexer_gaps]).amin(0) * (all(told.values()) or not whole)


def greedy(model, config, ids):
    """Greedy continuation, recomputed without a cache, and the smallest gap between best and second logit."""
    ids, gaps = list(ids), []
    for _ in range(GREEDY_LEN):
        top = run(model, config, ids)[0][-1].topk(2)
        gaps.append((top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[-GREEDY_LEN:], min(gaps)


def choose_indexed_prompt(model, config, positions, mtp, least, ends):
    """A random prompt in which each decision is clear, with a gap of at least `least`: a token that makes a close one
    is drawn anew.  The tokens that greedy decoding appends cannot be, so a prompt is dropped whose continuation has a
    close one.  mtp, ends: as in choose_prompt()."""
    for seed in range(4 * PROMPTS_TRIED):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, VOCAB, positions).tolist()
        for at in ends:
            ids[at] = np.atleast_1d(config["eos_token_id"])[0].item()
        for n in (GREEDY_FROM, positions):
            while True:
                logits, gaps = run(model, config, ids[:n], whole=False)
                if mtp:
                    gaps[1:] = gaps[1:].minimum(mtp(ids[:n]))
                if gaps.min() >= least:
                    break
                first = (gaps < least).nonzero()[0].item()
                ids[max(i for i in range(first + 1) if i not in ends)] = int(rng.integers(0, VOCAB))
            if n == GREEDY_FROM:
                tail, margin = greedy(model, config, ids[:n])
                close = run(model, config, ids[:n] + tail, whole=False)[1].min().item()
                if close < GREEDY_INDEX_GAP or margin < 0.02 or len(set(tail)) < GREEDY_LEN // 3:
                    break
        else:
            gap = run(model, config, ids)[1].minimum(gaps).min().item()
            if gap >= least:
                print(f"smallest gap in the greedy continuation {close:.1e}")
                return ids, logits, gap, tail, margin
    raise AssertionError("no prompt is good enough")


def choose_prompt(model, config, positions, mtp, least, ends):
    """The random prompt whose closest routing decision is the widest, so that rounding flips no expert, and
    whose greedy continuation is neither monotonous nor a near-tie.  In a long prompt some decision is always
    close; there the token that makes it is drawn anew.  mtp: gives the gaps of the MTP layer for a prompt, which
    then count as well, or None.  least: the gap of choose_indexed_prompt().  ends: as in SPECS."""
    if any(indexer(layer) for layer in layers_of(model)):
        return choose_indexed_prompt(model, config, positions, mtp, least, ends)
    ranked = []
    for seed in range(PROMPTS_TRIED if positions <= POSITIONS else 6):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, VOCAB, positions).tolist()
        logits, gaps = run(model, config, ids)
        while positions > POSITIONS and gaps.min() < 2e-3:
            ids[(gaps < 2e-3).nonzero()[0].item()] = int(rng.integers(0, VOCAB))
            logits, gaps = run(model, config, ids)
        ranked.append((logits, min([gaps.min().item()] + ([mtp(ids).min().item()] if mtp else [])), ids))
    for logits, gap, ids in sorted(ranked, key=lambda r: -r[1]):
        tail, margin = greedy(model, config, ids[:GREEDY_FROM])
        if gap > 1e-3 and margin > 0.02 and len(set(tail)) >= GREEDY_LEN // 3:
            return ids, logits, gap, tail, margin
    raise AssertionError("no prompt is good enough")


# ---- files -------------------------------------------------------------------------------------------------


def modelopt_json(algo, kv_cache=None, **more):
    return {"producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {"quant_algo": algo, "kv_cache_quant_algo": kv_cache, **more}}


def declare(kind, names):
    """What exporters write as quantization_config of config.json and as hf_quant_config.json, or None."""
    fp4 = {"num_bits": 4, "type": "float", "group_size": 16}
    if kind == "modelopt_mixed":
        modules = sorted(n.removesuffix(".weight_scale") for n in names if n.endswith(".weight_scale"))
        layers = {m: {"quant_algo": "NVFP4", "group_size": 16} if ".experts." in m else {"quant_algo": "FP8"}
                  for m in modules}
        return None, modelopt_json("MIXED_PRECISION", "FP8", quantized_layers=layers,
                                   exclude_modules=["lm_head", "*mlp.gate"])
    if kind == "modelopt_mixed_qwen":  # the experts of a layer have one entry; config.json has the list as well
        layers = {}
        for n in sorted(n for n in names if n.endswith(".weight_scale")):
            nvfp4 = n + "_2" in names
            layers[re.sub(r"\.experts\..*", ".experts", n.removesuffix(".weight_scale"))] = (
                {"quant_algo": "W4A16_NVFP4" if n.startswith("lm_head") else "NVFP4", "group_size": 16} if nvfp4
                else {"quant_algo": "FP8"})
        ignore = ["model.visual*", "mtp*"]
        return ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
                 "ignore": ignore, "producer": {"name": "modelopt", "version": "0.43.0"}},
                modelopt_json("MIXED_PRECISION", "FP8", quantized_layers=layers, exclude_modules=ignore))
    if kind == "modelopt_experts":  # an MTP layer is left as it was
        mtp = [n.removesuffix(".eh_proj.weight") + "*" for n in names if n.endswith(".eh_proj.weight")]
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "lm_head", "*mlp.gate", "*self_attn*", "*shared_experts*", "model.layers.*.mlp.*_proj", *mtp])
    if kind == "modelopt_glm_dsa":  # the same list in both files, but for the names; the MTP layer is left as it was
        layers = 1 + max(int(m[1]) for n in names if (m := re.match(r"model\.layers\.(\d+)\.", n)))
        sparse = [f"model.layers.{i}" for i in range(1, layers - 1)]
        exclude = ["lm_head", "model.embed_tokens", "model.layers.0*", *(n + ".mlp.shared_experts*" for n in sparse),
                   *(n + ".self_attn*" for n in sparse), f"model.layers.{layers - 1}*"]
        group = {"weights": {"dynamic": False, **fp4}, "input_activations": {"dynamic": False, **fp4},
                 "targets": ["Linear"]}
        return ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group},
                 "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "ignore": exclude,
                 "producer": {"name": "modelopt", "version": "0.46.0"}},
                modelopt_json("NVFP4", "FP8", group_size=16, exclude_modules=exclude))
    if kind == "modelopt_mixed_m3":  # the experts of a layer have one entry; config.json has the list as well
        layers = {}
        for n in sorted(n for n in names if n.endswith(".weight_scale")):
            layers[re.sub(r"\.experts\..*", ".experts", n.removesuffix(".weight_scale"))] = (
                {"quant_algo": "NVFP4", "group_size": 16} if n + "_2" in names
                else {"quant_algo": "MXFP8", "group_size": 32})
        ignore = ["language_model.lm_head", "language_model.model.embed_tokens", "*block_sparse_moe.gate",
                  "vision_tower*", "multi_modal_projector*", "patch_merge_mlp*"]
        return ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
                 "ignore": ignore, "producer": {"name": "modelopt", "version": "0.46.0"}},
                modelopt_json("MIXED_PRECISION", quantized_layers=layers, exclude_modules=ignore))
    if kind == "modelopt_v4":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"])
    if kind == "modelopt_step":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "lm_head", "*self_attn*", "*moe.gate", "*share_expert*", "*mlp*", "vision_model*"])
    if kind == "modelopt_hy4":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "lm_head", "*self_attn*", "*mlp.gate", "*shared_experts*"])
    if kind == "modelopt_kimi_linear":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "lm_head", "*self_attn*", "*block_sparse_moe.gate", "*shared_experts*", "model.layers.0.mlp*"])
    if kind == "modelopt_glm5_next":
        return None, modelopt_json("NVFP4", "FP8", group_size=16, exclude_modules=[
            "lm_head", "*self_attn*", "*mlp.gate", "*shared_experts*", "model.visual*"])
    if kind == "modelopt_w123":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=["lm_head", "*block_sparse_moe.gate"])
    if kind == "modelopt":
        exclude = ["lm_head", "model.embed_tokens", "*mlp.gate"]
        group = {"weights": {"dynamic": False, **fp4}, "input_activations": {"dynamic": False, **fp4},
                 "targets": ["Linear"]}
        return ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group},
                 "ignore": exclude}, modelopt_json("NVFP4", group_size=16, exclude_modules=exclude))
    if kind in ("compressed_tensors", "compressed_tensors_experts"):
        other = ["re:.*attention.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj$"]
        both = {**fp4, "strategy": "tensor_group", "symmetric": True}
        group = {"targets": ["Linear"], "weights": {"dynamic": False, **both},
                 "input_activations": {"dynamic": "local", **both}}
        return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "quantization_status": "compressed", "kv_cache_scheme": None,
                "config_groups": {"group_0": group},
                "ignore": ["lm_head", "re:.*mlp.gate$", *other * (kind == "compressed_tensors_experts")]}, None
    if kind == "compressed_tensors_text":
        quantization = declare("compressed_tensors", names)[0]
        return {**quantization, "ignore": ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]}, None
    if kind == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}, None
    if kind == "fp8_block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}, None
    if kind == "fp8_block_ue8m0":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128]}, None
    if kind == "fp8_block_mimo":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "ignored_layers": sorted(n.removesuffix(".weight") for n in names if ".o_proj." in n)}, None
    if kind == "fp8_block_minimax":
        return {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}, None
    if kind == "fp8_block_qwen":
        kept = [n.removesuffix(".weight") for n in sorted(names)
                if n.endswith(".weight") and n + "_scale_inv" not in names and "norm" not in n]
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": kept}, None
    return None, None


def write_json(path, value, indent=2):
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(folder, tensors, shards, apart):
    """One file, or `shards` files with an index.  A tensor and its scales may part.  The tensors whose names match
    `apart` lie in mtp.safetensors, which the index names as well."""
    tensors = {name: tensors[name].contiguous() for name in sorted(tensors)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [n for n in tensors if not apart or not re.match(apart, n)]
    files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i * len(names) // shards:
                                                                   (i + 1) * len(names) // shards]
             for i in range(shards)}
    if apart:
        files["mtp.safetensors"] = [n for n in tensors if re.match(apart, n)]
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    where = {n: file for file, part in files.items() for n in part}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": where})


def write_tokenizer(folder):
    """The first merges of the demo model's byte-level BPE, its pre-tokenizer, template and added tokens."""
    tok = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    conf = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    tok["model"]["vocab"] = {t: i for t, i in tok["model"]["vocab"].items() if i < EOT}
    tok["model"]["merges"] = tok["model"]["merges"][:EOT - 256]
    assert all(a + b in tok["model"]["vocab"] for a, b in tok["model"]["merges"])
    assert [t["content"] for t in tok["added_tokens"]] == SPECIAL
    for i, token in enumerate(tok["added_tokens"]):
        token["id"] = EOT + i
    added = conf["added_tokens_decoder"].values()
    conf["added_tokens_decoder"] = {str(EOT + i): token for i, token in enumerate(added)}
    conf["model_max_length"] = 4096
    write_json(folder / "tokenizer.json", tok, indent=None)
    write_json(folder / "tokenizer_config.json", conf)


def write_predict(folder, model, config, checkpoint, ids):
    chain = SPECS[folder.name].get("chain")
    if chain:
        logits, gaps = predict_chain(model, config, checkpoint, ids, chain)
    elif config["model_type"] == "deepseek_v4" or "hc_lowrank" in text_config(config):
        own = predict_v4 if config["model_type"] == "deepseek_v4" else predict_qwen4
        logits, gaps, drafts = own(model, config, checkpoint, ids)
        np.ascontiguousarray(drafts.numpy(), "<f4").tofile(folder / "drafts.f32")
    elif config["model_type"] == "nemotron_h":
        logits, gaps = predict_nemotron(model, config, checkpoint, ids)
    elif config["model_type"] in ("glm5_next", "hy_v4"):
        logits, gaps = predict_single(model, config, checkpoint, ids)
    else:
        logits, gaps = predict(model, config, checkpoint, ids)
    np.ascontiguousarray(logits.numpy(), "<f4").tofile(folder / "predict.f32")
    print(f"{folder.name:20} predict {list(logits.shape)}  logits sd {logits.std():.2f}  "
          f"routing gap {gaps.min():.1e}", flush=True)


def make(name):
    """The model of a fixture and its tensors."""
    spec = SPECS[name]
    config, kept = spec["config"], spec.get("kept")
    model, checkpoint, text = make_model(config), Checkpoint(name, spec), text_config(config)
    assert_rope(model, text)
    assert_layer_types(model, text)
    assert all(getattr(router(feed_forward(layer)), "norm_topk_prob", text["model_type"] != "deepseek_v2")
               == text["norm_topk_prob"] for layer in moe_layers(model) if "norm_topk_prob" in text)
    fill(model, config, checkpoint, kept, spec.get("flat", False))
    for extra, shape in spec.get("aside", {}).items():
        checkpoint.put(extra, shape)
    if spec.get("chain"):
        put_chain(checkpoint, model, config, spec["chain"])
    elif config.get("num_nextn_predict_layers") and config["model_type"] == "deepseek_v4":
        put_v4_mtp(checkpoint, config)
    elif config.get("num_nextn_predict_layers") and config["model_type"] == "nemotron_h":
        put_nemotron_mtp(checkpoint, config, model)
    elif text.get("num_nextn_predict_layers") and config["model_type"] in ("glm5_next", "hy_v4"):
        put_single_mtp(checkpoint, config)
    elif config.get("num_nextn_predict_layers") and "aside" not in spec:
        put_mtp(checkpoint, config, spec.get("tables", True))
    if spec.get("mtp") and "hc_lowrank" in text:
        put_qwen4_mtp(checkpoint, text, spec["mtp_draw"])
    elif spec.get("mtp"):
        put_qwen_mtp(checkpoint)
    if spec.get("fused"):
        checkpoint.fuse(*np.atleast_1d(spec["fused"]), turned=spec.get("turned", False))
    if spec.get("columns"):
        checkpoint.fuse(r"model\.")
        for stored, own in checkpoint.tensors.items():
            if ".experts." in stored:
                checkpoint.tensors[stored] = own.mT.contiguous()
    if spec.get("joined"):
        checkpoint.join()
    if spec.get("stack"):
        checkpoint.stack(*spec["stack"])
    checkpoint.split_tables(text.get("split_ngram_parts"))
    return model, checkpoint


def build_predict(name):
    """Only predict.f32, beside the files that are there."""
    folder, (model, checkpoint) = FIXTURES / name, make(name)
    if has_mtp(checkpoint):
        stored = {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}
        same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        assert stored.keys() == checkpoint.tensors.keys() and all(
            same(t, checkpoint.tensors[k]) for k, t in stored.items()), "the checkpoint has other tensors"
        ids = np.fromfile(folder / "ids.i32", "<i4").tolist()
        write_predict(folder, model, SPECS[name]["config"], checkpoint, ids)


def finish(folder, ids, logits, tail):
    """Writes the ids, their logits and the greedy continuation beside a checkpoint.  Returns the bytes of all files."""
    np.array(ids, "<i4").tofile(folder / "ids.i32")
    logits.numpy().astype("<f4").tofile(folder / "logits.f32")
    write_json(folder / "greedy.json", {f"greedy_from_{GREEDY_FROM}": tail}, indent=None)
    for file in folder.iterdir():
        file.chmod(0o644)
    return sum(f.stat().st_size for f in folder.iterdir())


def build(name):
    spec = SPECS[name]
    config, kept, folder = dict(spec["config"]), spec.get("kept"), FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model, checkpoint = make(name)
    guess = predict_single if config["model_type"] in ("glm5_next", "hy_v4") else predict
    mtp = (lambda prompt: guess(model, config, checkpoint, prompt)[1]) if spec.get("mtp_prompt") else None
    ids, logits, gap, tail, margin = choose_prompt(model, text_config(config), spec.get("positions", POSITIONS), mtp,
                                                   spec.get("gap", INDEX_GAP), spec.get("ends", []))

    if kept:
        original = config.get("num_experts") or config["n_routed_experts"]
        config["reap"] = {"original_experts": original, "kept": kept}
    in_config, beside = declare(spec.get("declare"), checkpoint.tensors)
    if in_config:
        config["quantization_config"] = in_config
    if beside:
        write_json(folder / "hf_quant_config.json", beside)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [IM_END, EOT], "pad_token_id": EOT})
    write_tokenizer(folder)
    write_tensors(folder, checkpoint.tensors, spec.get("shards", 1), spec.get("apart"))
    if has_mtp(checkpoint):
        write_predict(folder, model, spec["config"], checkpoint, ids)
    size = finish(folder, ids, logits, tail)
    print(f"{name:20} {size / 1e6:5.2f} MB  logits sd {logits.std():.2f}  routing gap {gap:.1e}  "
          f"greedy gap {margin:.3f} ({len(set(tail))} distinct)", flush=True)


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    only_predict = sys.argv[1:2] == ["--predict"]
    names = sys.argv[1 + only_predict:]
    unknown = set(names) - set(SPECS)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SPECS)}")
    for name in names or SPECS:
        (build_predict if only_predict else build)(name)


if __name__ == "__main__":
    main()
