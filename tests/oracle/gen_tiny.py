#!/usr/bin/env python3
"""Makes the tiny random models of tests/fixtures and their reference logits.

    gen_tiny.py [NAME ...]      no name: all of them

Each fixture is a checkpoint in the form of a public release (config.json, safetensors in one of the dialects
the converter reads, tokenizer) plus what Hugging Face transformers computes for it in float32 on the
dequantised weights: ids.i32, logits.f32, greedy.json.  tests/fixtures/README.md describes them; check_tiny.py
recomputes the logits without transformers.

The same versions of numpy and torch give the same bytes: every tensor is drawn from a generator seeded by
fixture and tensor name, so the order of drawing does not matter, and torch runs on one thread.
Needs torch, transformers >= 5.5, safetensors, numpy, and the demo model beside the repository (tokenizer).
"""
import json
import math
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

REPO = Path(__file__).resolve().parents[2]
FIXTURES = REPO / "tests" / "fixtures"
DEMO = REPO.parent / "shared" / "demo-model"

VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]  # the last ids
EOT, IM_END = VOCAB - 5, VOCAB - 3
POSITIONS, GREEDY_FROM, GREEDY_LEN = 48, 17, 24
PROMPTS_TRIED = 48
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


# Hy3's names on the hub that transformers changes when it loads a checkpoint (conversion_mapping.py).
HY3_NAMES = [(".mlp.gate.", ".mlp.router.gate."), (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
             (".mlp.shared_experts.", ".mlp.shared_mlp.")]


def hub_name(config, name):
    for old, new in HY3_NAMES if config["model_type"] == "hy_v3" else []:
        name = name.replace(old, new)
    return name


def new_rope(config, **rope):
    """The same configuration as transformers 5 writes it: rope_parameters instead of two keys, dtype."""
    config = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    return {**config, "rope_parameters": rope, "dtype": "bfloat16"}


LINEAR = r"_proj(_with_mqa)?\.weight$"
EXPERTS = r"\.mlp\.experts\..*weight$"

# name -> config and
#   store    the first regular expression found in a tensor's name decides its storage; none: BF16
#   declare  how config.json and hf_quant_config.json announce the quantisation
#   shards   number of safetensors files
#   kept     experts that survive pruning, per layer
SPECS = {
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
}

# ---- values ------------------------------------------------------------------------------------------------


BIAS = ("e_score_correction_bias", "expert_bias")


def draw(fixture, name, shape, tied):
    """The random tensor `name`, float32 numpy.  Spreads are chosen so that attention is selective, every
    layer moves the residual stream and the logits have a standard deviation of 2 to 3."""
    rng = np.random.default_rng([zlib.crc32(fixture.encode()), zlib.crc32(name.encode())])
    if name.endswith(BIAS):  # above -sigmoid: masking with 0.0 and with -inf then agree
        return rng.uniform(0.1, 0.5, shape).astype(np.float32)
    x = rng.standard_normal(shape)
    if "norm" in name:
        return ((1.5 if "q_norm" in name else 1.0) + 0.2 * x).astype(np.float32)
    if "embed_tokens" in name:
        return ((2 / math.sqrt(shape[1]) if tied else 1.0) * x).astype(np.float32)
    gain = {"lm_head": 3, "head": 3, "gate": 2, "down_proj": 2, "o_proj": 1.5, "q_b_proj": 1.5}
    gain = gain.get(name.split(".")[-2], 1)
    return (gain / math.sqrt(shape[1]) * x).astype(np.float32)


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


def fp8_encode(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class Checkpoint:
    """The stored tensors of one fixture.  put() draws a tensor, stores it in its dialect and returns what a
    reader gets back, which is what the reference model is given."""

    def __init__(self, fixture, spec):
        self.fixture, self.rules = fixture, spec.get("store", [])
        self.tied = spec["config"]["tie_word_embeddings"]
        self.shapes, self.tensors = {}, {}

    def draw(self, name, shape):
        return torch.from_numpy(draw(self.fixture, name, shape, self.tied))

    def amax(self, source, shape):
        """ModelOpt gives gate_proj and up_proj of one FFN a common scale, because kernels fuse them."""
        both = {source, source.replace("gate_proj", "up_proj"), source.replace("up_proj", "gate_proj")}
        return max(self.draw(s, shape).abs().max() for s in both)

    def put(self, name, shape, source=None, rows=None):
        """source: the name to draw under, if the expert was renumbered; rows: the rows that are kept."""
        source, shape = source or name, tuple(shape)
        x = self.draw(source, shape)
        if rows is not None:
            x = x[rows]
        self.shapes[name] = shape
        form = "f32" if name.endswith(BIAS) else next(
            (f for pattern, f in self.rules if re.search(pattern, name)), "bf16")
        return getattr(self, "put_" + form)(name, source, x)

    def put_bf16(self, name, _, x):
        self.tensors[name] = x.to(torch.bfloat16)
        return bf16(x)

    def put_f16(self, name, _, x):
        x = bf16(x.half())  # exact in both types, subnormals of F16 included
        self.tensors[name] = x.half()
        return x

    def put_f32(self, name, _, x):
        self.tensors[name] = x if "bias" in name else bf16(x)
        return self.tensors[name]

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

    def put_fp8_block(self, name, _, x):
        """128 x 128 blocks, ragged at the edges; a reader makes BF16 of the float32 product."""
        block = lambda s: s.repeat_interleave(128, 0)[:x.shape[0]].repeat_interleave(128, 1)[:, :x.shape[1]]
        corner = [-(-n // 128) for n in x.shape]
        scale = torch.stack([x[r * 128:r * 128 + 128, c * 128:c * 128 + 128].abs().max() / 448
                             for r in range(corner[0]) for c in range(corner[1])]).reshape(corner)
        self.tensors[name] = fp8_encode(x, block(scale))
        self.tensors[name + "_scale_inv"] = scale
        return bf16(self.tensors[name].float() * block(scale))

    def put_nvfp4(self, name, source, x):
        scale_2 = self.amax(source, x.shape) / (6 * 448)
        self.tensors[name], self.tensors[name + "_scale"], exact = nvfp4_encode(x, scale_2)
        self.tensors[name + "_scale_2"] = scale_2
        self.tensors[name.replace("weight", "input_scale")] = torch.tensor(5.0 / (6 * 448))
        return exact * scale_2

    def put_ct_nvfp4(self, name, _, x):
        """compressed-tensors: the global scale divides, and gate and up have each their own here."""
        scale = (6 * 448 / x.abs().max()).reshape(1)
        packed, scales, exact = nvfp4_encode(x, 1 / scale)
        self.tensors[name + "_packed"], self.tensors[name + "_scale"] = packed, scales
        self.tensors[name + "_global_scale"] = scale
        self.tensors[name.replace("weight", "input_global_scale")] = torch.tensor([6 * 448 / 5.0])
        return exact / scale


# ---- the reference model -----------------------------------------------------------------------------------


def make_model(config):
    """The transformers model of a configuration in hub form."""
    cls = getattr(transformers, config["architectures"][0])
    known = {k: v for k, v in config.items() if k not in ("quantization_config", "reap", "model_type")}
    model = cls(cls.config_class.from_dict(json.loads(json.dumps(known)))).float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def fill(model, config, checkpoint, kept):
    """Gives every parameter and buffer a value and stores it under its hub name, fused experts one by one.
    kept: per layer the original numbers of the experts that stay, or None; the order renumbers them."""
    for name, value in list(model.state_dict().items()):
        path, _, leaf = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        rows = kept[int(layer[1])] if kept and layer else None
        module = model.get_submodule(path)
        if path == "lm_head" and checkpoint.tied:
            continue
        if path.endswith(".experts"):  # [experts, out, in]; gate_up_proj has the rows of gate_proj first
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            shape = value.shape[1] // len(parts), value.shape[2]
            names = lambda expert: [f"{path}.{expert}.{p}.weight" for p in parts]
            new = torch.stack([
                torch.cat([checkpoint.put(n, shape, old) for n, old in zip(names(i), names(original))])
                for i, original in enumerate(rows or range(len(value)))])
            module.num_experts = len(new)
        elif path.endswith(".mlp.gate"):
            new = checkpoint.put(hub_name(config, name), value.shape, rows=rows)
            module.num_experts = len(new)
        else:
            new = checkpoint.put(hub_name(config, name), value.shape)
        if leaf in module._parameters:
            new = torch.nn.Parameter(new, requires_grad=False)
        setattr(module, leaf, new)
    model.tie_weights()


def put_mtp(checkpoint, config):
    """The tensors of one multi-token-prediction layer, shaped as the last one; the reference ignores them."""
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{n - 1}."
    for name, shape in list(checkpoint.shapes.items()):
        if name.startswith(last):
            checkpoint.put(name.replace(last, f"model.layers.{n}."), shape)
    own = ({"final_layernorm": (hidden,)} if config["model_type"] == "hy_v3" else
           {"embed_tokens": (VOCAB, hidden), "shared_head.norm": (hidden,), "shared_head.head": (VOCAB, hidden)})
    for leaf, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), **own}.items():
        checkpoint.put(f"model.layers.{n}.{leaf}.weight", shape)


def assert_rope(model, config):
    """transformers took theta, YaRN and its attention factors from the configuration."""
    rope = config.get("rope_parameters") or config["rope_scaling"] or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    mla = "kv_lora_rank" in config
    dim = config["qk_rope_head_dim"] if mla else config["head_dim"]
    i = torch.arange(dim // 2, dtype=torch.float64)
    inv, cos_factor, score_factor = theta ** (-2 * i / dim), 1.0, 1.0
    if rope.get("type") == "yarn":
        correction = lambda turns: dim * math.log(
            rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low = max(math.floor(correction(rope["beta_fast"])), 0)
        high = math.ceil(correction(rope["beta_slow"]))
        ramp = ((i - low) / (high - low)).clamp(0, 1)
        inv = inv * (1 - ramp) + inv / rope["factor"] * ramp
        mscale = 0.1 * math.log(rope["factor"]) + 1
        cos_factor, score_factor = (1.0, mscale**2) if mla else (mscale, 1.0)
        assert 0 < ramp.sum() < dim // 2, "YaRN neither keeps nor stretches everything"
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    assert torch.allclose(rotary.inv_freq.double(), inv, rtol=1e-6), (rotary.inv_freq, inv)
    assert math.isclose(rotary.attention_scaling, cos_factor, rel_tol=1e-9)
    query = dim + config["qk_nope_head_dim"] if mla else dim
    assert math.isclose(attention.scaling, query**-0.5 * score_factor, rel_tol=1e-9)
    assert not mla or model.config.rope_interleave


def moe_layers(model):
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def route(config, bias, logits, use_bias=True, use_groups=True):
    """Experts [tokens, k] by the rules of the paper, and the smallest gap to one (or a group) not chosen.
    bias: of the choice, or None, which means softmax."""
    k, gap = config["num_experts_per_tok"], math.inf
    if bias is None:
        score = logits.softmax(-1)
    else:
        score = logits.sigmoid() + (bias if use_bias else 0)
        if use_groups and config.get("n_group", 1) > 1:
            groups = score.reshape(len(score), config["n_group"], -1)
            best = groups.topk(2).values.sum(-1).sort(descending=True)
            keep = config["topk_group"]
            gap = (best.values[:, keep - 1] - best.values[:, keep]).min().item()
            out = best.indices[:, keep:, None].expand(-1, -1, groups.shape[2])
            score = groups.scatter(1, out, -math.inf).reshape(score.shape)
    best = score.sort(descending=True)
    gap = min(gap, (best.values[:, k - 1] - best.values[:, k]).min().item())
    return best.indices[:, :k].sort().values, gap


def run(model, config, ids):
    """Logits [n, vocab] and the smallest routing gap, which is 0 if bias or groups change no choice at all.
    Asserts that transformers routes by the rules."""
    gaps, biased, told = [], [], {"groups": config.get("n_group", 1) == 1}

    def hook(mlp, output):
        logits, _, chosen = output
        bias = getattr(mlp, "e_score_correction_bias", getattr(mlp.gate, "e_score_correction_bias", None))
        mine, gap = route(config, bias, logits)
        assert torch.equal(chosen.sort().values, mine), "transformers routes otherwise"
        gaps.append(gap)
        if bias is not None:
            choices = route(config, bias, logits, use_bias=False)[0], route(config, bias, logits, use_groups=False)[0]
            biased.append(not torch.equal(mine, choices[0]))
            told["groups"] |= not torch.equal(mine, choices[1])

    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, output, mlp=layer.mlp: hook(mlp, output))
             for layer in moe_layers(model)]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for h in hooks:
        h.remove()
    told["bias"] = any(biased) or not biased
    return logits, min(gaps) if all(told.values()) else 0.0


def greedy(model, config, ids):
    """Greedy continuation, recomputed without a cache, and the smallest gap between best and second logit."""
    ids, gaps = list(ids), []
    for _ in range(GREEDY_LEN):
        top = run(model, config, ids)[0][-1].topk(2)
        gaps.append((top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[-GREEDY_LEN:], min(gaps)


def choose_prompt(model, config):
    """The random prompt whose closest routing decision is the widest, so that rounding flips no expert, and
    whose greedy continuation is neither monotonous nor a near-tie."""
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, POSITIONS).tolist()
               for seed in range(PROMPTS_TRIED)]
    ranked = sorted(((*run(model, config, p), p) for p in prompts), key=lambda r: -r[1])
    for logits, gap, ids in ranked:
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
    if kind == "modelopt_experts":
        return None, modelopt_json("NVFP4", group_size=16, exclude_modules=[
            "lm_head", "*mlp.gate", "*self_attn*", "*shared_experts*", "model.layers.*.mlp.*_proj"])
    if kind == "modelopt":
        exclude = ["lm_head", "model.embed_tokens", "*mlp.gate"]
        group = {"weights": {"dynamic": False, **fp4}, "input_activations": {"dynamic": False, **fp4},
                 "targets": ["Linear"]}
        return ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group},
                 "ignore": exclude}, modelopt_json("NVFP4", group_size=16, exclude_modules=exclude))
    if kind == "compressed_tensors":
        both = {**fp4, "strategy": "tensor_group", "symmetric": True}
        group = {"targets": ["Linear"], "weights": {"dynamic": False, **both},
                 "input_activations": {"dynamic": "local", **both}}
        return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "quantization_status": "compressed", "kv_cache_scheme": None,
                "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp.gate$"]}, None
    if kind == "fp8_block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}, None
    return None, None


def write_json(path, value, indent=2):
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(folder, tensors, shards):
    """One file, or `shards` files with an index.  A tensor and its scales may part."""
    tensors = {name: tensors[name].contiguous() for name in sorted(tensors)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = list(tensors), {}
    for i in range(shards):
        part = names[i * len(names) // shards:(i + 1) * len(names) // shards]
        where |= dict.fromkeys(part, f"model-{i + 1:05}-of-{shards:05}.safetensors")
        save_file({n: tensors[n] for n in part}, folder / where[part[0]], metadata={"format": "pt"})
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


def build(name):
    spec = SPECS[name]
    config, kept, folder = dict(spec["config"]), spec.get("kept"), FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()

    model, checkpoint = make_model(config), Checkpoint(name, spec)
    assert_rope(model, config)
    assert all(layer.mlp.gate.norm_topk_prob == config["norm_topk_prob"] for layer in moe_layers(model)
               if "norm_topk_prob" in config)
    fill(model, config, checkpoint, kept)
    if config.get("num_nextn_predict_layers"):
        put_mtp(checkpoint, config)
    ids, logits, gap, tail, margin = choose_prompt(model, config)

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
    write_tensors(folder, checkpoint.tensors, spec.get("shards", 1))
    np.array(ids, "<i4").tofile(folder / "ids.i32")
    logits.numpy().astype("<f4").tofile(folder / "logits.f32")
    write_json(folder / "greedy.json", {f"greedy_from_{GREEDY_FROM}": tail}, indent=None)
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:20} {size / 1e6:5.2f} MB  logits sd {logits.std():.2f}  routing gap {gap:.1e}  "
          f"greedy gap {margin:.3f} ({len(set(tail))} distinct)", flush=True)


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    unknown = set(sys.argv[1:]) - set(SPECS)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SPECS)}")
    for name in sys.argv[1:] or SPECS:
        build(name)


if __name__ == "__main__":
    main()
