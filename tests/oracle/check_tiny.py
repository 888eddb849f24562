#!/usr/bin/env python3
"""Recomputes the logits of the fixtures, and those of their layers for multi-token prediction, from the files alone
in numpy float64, and compares.

    check_tiny.py [NAME ...]    no name: every directory of tests/fixtures; exit 1 if any NMSE exceeds 1e-10

Two NMSE in a line are those of logits.f32 and predict.f32.

It shares no code with gen_tiny.py or transformers: it reads config.json and the safetensors bytes as a
converter must, so a mistake in how a fixture was stored or declared shows here.  Only numpy is needed.
"""
import json
import math
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
LIMIT = 1e-10
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def e4m3_table():
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    value[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -value, value)


E4M3 = e4m3_table()


def bf16_round(x):
    """float32 -> nearest BF16, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class Weights:
    """The tensors of a checkpoint.  get() dequantises by what is stored, not by what config.json declares."""

    def __init__(self, folder):
        self.folder, self.raw, self.used = folder, {}, set()
        for path in sorted(folder.glob("*.safetensors")):
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, t in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    first, last = t["data_offsets"]
                    self.raw[name] = (t["dtype"], t["shape"], data[start + first:start + last])
        index = folder / "model.safetensors.index.json"
        if index.exists():
            assert set(json.loads(index.read_text())["weight_map"]) == set(self.raw), "index and files differ"

    def plain(self, name):
        self.used.add(name)
        dtype, shape, data = self.raw[name]
        if dtype == "BF16":
            x = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif dtype == "F8_E4M3":
            x = E4M3[np.frombuffer(data, np.uint8)]
        else:
            x = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "u1", "F8_E8M0": "u1",
                                     "I64": "<i8"}[dtype])
        return x.reshape(shape)

    def has(self, name):
        return name in self.raw

    def get(self, name):
        """float64 [out, in] or [n]; of stacked experts [experts, out, in]."""
        if self.has(name + "_blocks"):
            return self.mxfp4(name)
        if self.has(name + "_packed"):  # compressed-tensors
            self.used.add(name.replace("weight", "input_global_scale"))
            divisor = float(self.plain(name + "_global_scale")[0])
            return self.nvfp4(self.plain(name + "_packed"), name) / divisor
        if self.has(name + "_scale_inv"):  # FP8 in blocks; the product becomes BF16
            w, s = self.plain(name), self.plain(name + "_scale_inv")
            s = np.kron(s, np.ones((128, 128), np.float32))[:w.shape[0], :w.shape[1]]
            return bf16_round(w.astype(np.float32) * s).astype(float)
        if name.endswith(".weight") and self.has(name.removesuffix("weight") + "scale"):
            return self.powers(name)
        if self.has(name + "_amax"):  # Inkling 2's NVFP4, a factor for each expert
            factor = self.plain(name + "_amax").astype(float) / self.plain(name + "_outer_scale_denominator")
            return self.nvfp4(self.plain(name), name) * factor[:, None, None]
        if not self.has(name + "_scale"):
            return self.plain(name).astype(float)
        self.used.add(name.replace("weight", "input_scale"))
        if self.has(name + "_scale_2"):  # ModelOpt NVFP4
            packed, scale = self.plain(name), self.plain(name + "_scale_2").astype(float)
            return self.nvfp4(packed, name) * scale.reshape(scale.shape + (1,) * (packed.ndim - 1) * bool(scale.ndim))
        scale = self.plain(name + "_scale")
        if scale.dtype == np.uint8:  # MXFP8
            return np.ldexp(self.plain(name), np.repeat(scale.astype(int) - 127, 32, -1))
        return self.plain(name).astype(float) * float(scale)

    def powers(self, name):
        """DeepSeek-V4's FP8 in blocks of 128 x 128, V4.1's of 32 x 32 or in rows of 32, or FP4 in rows of 32, times
        powers of two."""
        w, exponent = self.plain(name), self.plain(name.removesuffix("weight") + "scale").astype(int) - 127
        if self.raw[name][0] == "F8_E4M3":
            rows, columns = next(b for b in ((128, 128), (32, 32), (1, 32))
                                 if exponent.shape == tuple(-(-n // k) for n, k in zip(w.shape, b)))
            return np.ldexp(w, np.kron(exponent, np.ones((rows, columns), int))[:w.shape[0], :w.shape[1]])
        codes = np.stack([w & 15, w >> 4], -1).reshape(len(w), -1)
        return np.ldexp(E2M1[codes], np.repeat(exponent, 32, -1))

    def mxfp4(self, name):
        packed, exponent = self.plain(name + "_blocks"), self.plain(name + "_scales").astype(int) - 127
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 32)
        return np.ldexp(E2M1[codes], exponent[..., None]).reshape(*packed.shape[:2], -1)

    def nvfp4(self, packed, name):
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
        return E2M1[codes] * np.repeat(self.plain(name + "_scale"), 16, -1)


def centred(config):
    """Weights of norms are stored less 1."""
    return bool({"linear_num_key_heads", "zero_centered", "dense_intermediate_size"} & config.keys())


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope_tables(config, n, dim):
    """cos and sin [n, dim/2] and the factor on the scores; YaRN as in arXiv 2309.00071 and DeepSeek-V3."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    i = np.arange(dim // 2)
    inv, amplitude, sharpen = theta ** (-2.0 * i / dim), 1.0, 1.0
    if (rope.get("rope_type") or rope.get("type", "default")) == "yarn":
        factor, length = rope["factor"], rope["original_max_position_embeddings"]
        bound = [dim * math.log(length / (b * 2 * math.pi)) / (2 * math.log(theta))
                 for b in (rope["beta_fast"], rope["beta_slow"])]
        if rope.get("truncate", True):
            bound = math.floor(bound[0]), math.ceil(bound[1])
        low, high = max(bound[0], 0), min(bound[1], dim - 1)
        ramp = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
        inv = inv / factor * ramp + inv * (1 - ramp)
        mscale = lambda m: 0.1 * m * math.log(factor) + 1
        if rope.get("mscale_all_dim"):
            sharpen = mscale(rope["mscale_all_dim"]) ** 2
            amplitude = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
        else:
            amplitude = mscale(1)
    if "long_factor" in rope:  # of the release's length
        longer = rope["original_max_position_embeddings"] < config.get("max_position_embeddings", n)
        inv, amplitude = inv / rope["long_factor" if longer else "short_factor"], rope["long_mscale"]
    if rope.get("rope_type") == "llama3":
        turns = rope["original_max_position_embeddings"] * inv / (2 * math.pi)  # in the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        inv *= 1 + (1 / rope["factor"] - 1) * np.clip((high - turns) / (high - low), 0, 1)
    angle = np.arange(n)[:, None] * inv
    return np.cos(angle) * amplitude, np.sin(angle) * amplitude, sharpen


def attend(q, k, v, scale, window=None, sinks=None, chosen=None):
    """q [n, heads, d], k [n, kv, d], v [n, kv, dv] -> [n, heads * dv], causal.  window: the number of tokens that one
    sees, itself included; sinks [heads]: scores of nothing; chosen [n, n] or [heads, n, n]: the tokens that each one
    sees."""
    n, heads = q.shape[:2]
    k, v = (np.repeat(t, heads // t.shape[1], 1) for t in (k, v))
    score = np.einsum("qhd,khd->hqk", q, k) * scale + np.triu(np.full((n, n), -np.inf), 1)
    if window:
        score += np.tril(np.full((n, n), -np.inf), -window)
    if chosen is not None:
        score = np.where(chosen, score, -np.inf)
    if sinks is not None:
        score = np.concatenate([score, np.broadcast_to(sinks[:, None, None], (heads, n, 1))], -1)
    return np.einsum("hqk,khd->qhd", softmax(score)[..., :n], v).reshape(n, -1)


def temperature(rope, n):
    """The factors of the queries of n tokens [n, 1, 1], which grow with their position."""
    beta, length = rope.get("llama_4_scaling_beta", 0), rope.get("original_max_position_embeddings", n)
    return (1 + beta * np.log(1 + np.arange(n) // length))[:, None, None]


def gqa(W, config, x, p):
    """Qwen3, Hy3 and GLM: GLM adds a bias to q, k and v, rotates a part of each head and may lack the norms."""
    n, d, eps = len(x), config["head_dim"], config["rms_norm_eps"]
    q, k, v = ((x @ W.get(f"{p}{c}_proj.weight").T + (W.get(f"{p}{c}_proj.bias") if config["attention_bias"] else 0))
               .reshape(n, -1, d) for c in "qkv")
    if config.get("use_qk_norm", True):
        q, k = rms(q, W.get(p + "q_norm.weight"), eps), rms(k, W.get(p + "k_norm.weight"), eps)
    half = int(d * config.get("partial_rotary_factor", 1)) // 2
    cos, sin, sharpen = rope_tables(config, n, 2 * half)
    cos, sin = cos[:, None], sin[:, None]

    def turn(t):  # pairs (i, i + half) of the first 2 * half
        a, b, rest = t[..., :half], t[..., half:2 * half], t[..., 2 * half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    return attend(turn(q), turn(k), v, d ** -0.5 * sharpen) @ W.get(p + "o_proj.weight").T


def qwen_attention(W, config, x, p):
    """Full attention of Qwen3-Next, Qwen3.5 and Qwen4-Exp: a gate on the output, RoPE on the first dimensions of a head,
    in Qwen4-Exp to the keys that an indexer chooses."""
    n, d, eps = len(x), config["head_dim"], config["rms_norm_eps"]
    q, gate = np.split((x @ W.get(p + "q_proj.weight").T).reshape(n, -1, 2 * d), 2, -1)  # per head
    k, v = ((x @ W.get(f"{p}{c}_proj.weight").T).reshape(n, -1, d) for c in "kv")
    q, k = rms(q, 1 + W.get(p + "q_norm.weight"), eps), rms(k, 1 + W.get(p + "k_norm.weight"), eps)
    part = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor", 0.25)
    half = int(d * part) // 2
    cos, sin, sharpen = rope_tables(config, n, 2 * half)
    cos, sin = cos[:, None], sin[:, None]

    def turn(t):  # pairs (i, i + half) of the first 2 * half
        a, b, rest = t[..., :half], t[..., half:2 * half], t[..., 2 * half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    chosen = best_means(W, config, x, p + "indexer.") if config.get("indexer_budget") else None
    y = attend(turn(q), turn(k), v, d ** -0.5 * sharpen, chosen=chosen) * sigmoid(gate.reshape(n, -1))
    return y @ W.get(p + "o_proj.weight").T


def delta_net(W, config, x, p):
    """The gated delta rule, token by token."""
    n, eps = len(x), config["rms_norm_eps"]
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv, each = config["linear_key_head_dim"], config["linear_value_head_dim"], values // keys
    if W.has(p + "in_proj_ba.weight"):  # Qwen3-Next: everything of a key head lies together
        mixed = (x @ W.get(p + "in_proj_qkvz.weight").T).reshape(n, keys, -1)
        q, k, v, z = np.split(mixed, np.cumsum([dk, dk, each * dv]), -1)
        qkv = np.concatenate([t.reshape(n, -1) for t in (q, k, v)], -1)
        ba = (x @ W.get(p + "in_proj_ba.weight").T).reshape(n, keys, 2 * each)
        b, a = ba[..., :each].reshape(n, -1), ba[..., each:].reshape(n, -1)
    else:
        qkv, z, b, a = (x @ W.get(f"{p}in_proj_{t}.weight").T for t in ("qkv", "z", "b", "a"))
    taps = W.get(p + "conv1d.weight")[:, 0]  # the last tap is the token itself
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, qkv.shape[1])), qkv])
    qkv = silu(sum(padded[j:j + n] * taps[:, j] for j in range(taps.shape[1])))
    q, k, v = np.split(qkv, [keys * dk, 2 * keys * dk], -1)
    unit = lambda t: t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6)
    q, k = (np.repeat(unit(t.reshape(n, keys, dk)), each, 1) for t in (q, k))
    q, v = q * dk ** -0.5, v.reshape(n, values, dv)
    beta = sigmoid(b)
    keep = np.exp(-np.exp(W.get(p + "A_log")) * np.logaddexp(0, a + W.get(p + "dt_bias")))
    state, out = np.zeros((values, dk, dv)), np.empty((n, values, dv))
    for t in range(n):
        state *= keep[t, :, None, None]
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state += np.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    act = sigmoid if config.get("output_gate_type") == "sigmoid" else silu
    out = rms(out, W.get(p + "norm.weight"), eps) * act(z.reshape(out.shape))
    return out.reshape(n, -1) @ W.get(p + "out_proj.weight").T


def kda(W, config, x, p):
    """Kimi delta attention, token by token: the gated delta rule with a decay for every value of a key."""
    n, heads, bound = len(x), config["num_attention_heads"], config.get("kda_lower_bound")
    taps = lambda c: W.get(f"{p}{c}_conv1d.weight").reshape(-1, 4)
    low = lambda c: (x @ W.get(f"{p}{c}_a_proj.weight").T @ W.get(f"{p}{c}_b_proj.weight").T
                     if W.has(f"{p}{c}_a_proj.weight") else x @ W.get(f"{p}{c}_proj.weight").T).reshape(n, heads, -1)

    def convolved(c):  # the last tap is the token itself
        y = x @ W.get(f"{p}{c}_proj.weight").T
        padded = np.concatenate([np.zeros((3, y.shape[1])), y])
        return silu(sum(padded[j:j + n] * taps(c)[:, j] for j in range(4))).reshape(n, heads, -1)

    unit = lambda t: t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6)
    q, k, v = unit(convolved("q")), unit(convolved("k")), convolved("v")
    d = q.shape[-1]
    rate, beta = np.exp(W.get(p + "A_log").reshape(heads, 1)), sigmoid(x @ W.get(p + "b_proj.weight").T)
    f = low("f") + W.get(p + "dt_bias").reshape(heads, d)
    keep = np.exp(-rate * np.logaddexp(0, f) if bound is None else bound * sigmoid(rate * f))
    state, out = np.zeros((heads, d, d)), np.empty((n, heads, d))
    for t in range(n):
        state *= keep[t, :, :, None]
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state += np.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
        out[t] = np.einsum("hkv,hk->hv", state, q[t] * d ** -0.5)
    out = rms(out, W.get(p + "o_norm.weight"), config["rms_norm_eps"]) * sigmoid(low("g"))
    return out.reshape(n, -1) @ W.get(p + last_projection(config)).T


def last_projection(config):
    """The name of the matrix after attention."""
    return "dense.weight" if config["model_type"] == "bailing_hybrid" else "o_proj.weight"


def is_kda(config, layer):
    """Whether a layer has Kimi delta attention: those for multi-token prediction do not."""
    if layer is None or config["model_type"] not in ("kimi_linear", "bailing_hybrid", "glm5_next_text"):
        return False
    if "layer_group_size" in config:
        return (layer + 1) % config["layer_group_size"] != 0
    if "kda_layers" in config.get("linear_attn_config", {}):  # layers are counted from 1
        return layer + 1 in config["linear_attn_config"]["kda_layers"]
    return config["layer_types"][layer] == "linear_attention"


def turn_pairs(t, cos, sin):
    """Turns the pairs (2i, 2i + 1)."""
    a, b = t[..., 0::2], t[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(t.shape)


def turn_halves(t, cos, sin):
    """Turns the pairs (i, i + half)."""
    a, b = np.split(t, 2, -1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def layer_norm(x, w, b, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w + b


def index_scores(W, config, x, latent, p):
    """What the indexer thinks of each token [n, n].  latent: the rows of the query after their norm."""
    n, heads, d, rope = len(x), config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    q = (latent @ W.get(p + "wq_b.weight").T).reshape(n, heads, d)
    last = config["model_type"] == "hy_v4"  # the last values of a head are rotated, in other families the first
    k = layer_norm(x @ W.get(p + "wk.weight").T, W.get(p + "k_norm.weight"), W.get(p + "k_norm.bias"),
                   config["rms_norm_eps"] if last else 1e-6)[:, None]
    cos, sin, _ = rope_tables(config, n, rope)
    pairs = last or config["model_type"] == "dots3_note" or config.get("indexer_rope_interleave", False)
    turn = turn_pairs if pairs else turn_halves
    at = d - rope if last else 0
    q, k = (np.concatenate([t[..., :at], turn(t[..., at:at + rope], cos[:, None], sin[:, None]), t[..., at + rope:]], -1)
            for t in (q, k))
    match = np.maximum(np.einsum("qhd,kd->qhk", q, k[:, 0]), 0) * d ** -0.5
    return np.einsum("qh,qhk->qk", x @ W.get(p + "weights_proj.weight").T * heads ** -0.5, match)


def best_tokens(score, k):
    """The k tokens [n, n] of the highest scores, of each token and those before it; of equals the first ones."""
    causal = np.tril(np.ones(score.shape, bool))
    order = np.argsort(-np.where(causal, score, -np.inf), -1, kind="stable")[:, :k]
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, order, True, 1)
    return chosen & causal


def best_pools(W, config, x, latent, p):
    """The tokens [n, n] that each one sees by GLM-5.3-Flash's indexer: those of the best pools that are complete, and of
    the pool that is not.  A pool's key is made of its tokens' keys, column by column."""
    n, heads, d, size = len(x), config["index_n_heads"], config["index_head_dim"], config["index_kpool"]
    key = layer_norm(x @ W.get(p + "wk.weight").T, W.get(p + "k_norm.weight"), W.get(p + "k_norm.bias"), 1e-6)
    gate, place = x @ W.get(p + "index_kpool_compress_gate").T, W.get(p + "index_kpool_compress_ape")
    keys = np.array([(softmax((gate[j:j + size] + place).T).T * key[j:j + size]).sum(0)
                     for j in range(0, n - size + 1, size)])
    match = np.maximum(np.einsum("qhd,kd->qhk", (latent @ W.get(p + "wq_b.weight").T).reshape(n, heads, d), keys), 0)
    score = np.einsum("qh,qhk->qk", x @ W.get(p + "weights_proj.weight").T, match)
    seen = np.zeros((n, n), bool)
    for t in range(n):
        whole = (t + 1) // size
        best = np.argsort(-score[t, :whole], kind="stable")[:config["index_topk"] // size]
        seen[t, whole * size:t + 1] = True
        for j in best:
            seen[t, j * size:j * size + size] = True
    return seen


def index_config(config):
    """Heads, width, block, blocks that are seen, and those of them that are the last ones, of MiniMax-M3's indexer; and
    which layers have one."""
    nested = config.get("sparse_attention_config", {})
    names = (("sparse_num_index_heads", "index_n_heads"), ("sparse_index_dim", "index_head_dim"),
             ("sparse_block_size", "index_block_size"), ("sparse_topk_blocks", "index_topk_blocks"),
             ("sparse_local_block", "index_local_blocks"))
    layers = nested.get("sparse_attention_freq") or [t == "minimax_m3_sparse" for t in config["layer_types"]]
    return [nested[a] if a in nested else config[b] for a, b in names], layers


def best_blocks(W, config, r, x, p):
    """The tokens [heads, n, n] that each one sees, one choice for all query heads of a KV head."""
    (heads, d, block, k, last), _ = index_config(config)
    n, half = len(x), r["turned"] // 2
    q = norm(W, config, linear(W, x, p + "index_q_proj").reshape(n, heads, d), p + "index_q_norm.weight")
    key = norm(W, config, linear(W, x, p + "index_k_proj"), p + "index_k_norm.weight")[:, None]
    cos, sin, _ = rope_tables({"rope_parameters": r["rope"]}, n, 2 * half)
    q, key = (np.concatenate([turn_halves(t[..., :2 * half], cos[:, None], sin[:, None]), t[..., 2 * half:]], -1)
              for t in (q, key))
    score = np.einsum("qhd,kd->hqk", q, key[:, 0])
    seen = np.zeros((heads, n, n), bool)
    for t in range(n):
        for h in range(heads):
            best = [score[h, t, first:min(first + block, t + 1)].max() for first in range(0, t + 1, block)]
            best[max(len(best) - last, 0):] = [np.inf] * min(last, len(best))
            for b in np.argsort(-np.array(best), kind="stable")[:k]:
                seen[h, t, b * block:b * block + block] = True
    return np.repeat(seen, config["num_attention_heads"] // heads, 0)


def best_means(W, config, x, p):
    """Which tokens each one sees [n, n]: those of the complete blocks with the best scores, and those of the incomplete
    one.  Each block has one key, the mean of its tokens' ones, normed and turned as the first of them."""
    n, size, heads, d = len(x), config["indexer_compress_ratio"], config["indexer_n_heads"], config["indexer_head_dim"]
    q, k = np.split(x @ W.get(p + "index_qk_proj.weight").T, [heads * d], -1)
    half = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
    cos, sin, _ = rope_tables(config, n, 2 * half)
    blocks, eps = n // size, config["rms_norm_eps"]
    q = rms(q.reshape(n, heads, d), 1 + W.get(p + "q_layernorm.weight"), eps)
    k = rms(k[:blocks * size].reshape(blocks, size, d).mean(1), 1 + W.get(p + "k_layernorm.weight"), eps)

    def turn(t, c, s):
        a, b, rest = t[..., :half], t[..., half:2 * half], t[..., 2 * half:]
        return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)

    q, k = turn(q, cos[:, None], sin[:, None]), turn(k, cos[:blocks * size:size], sin[:blocks * size:size])
    score = np.maximum(np.einsum("qhd,kd->qhk", q, k), 0).sum(1)
    seen = np.zeros((n, n), bool)
    for t in range(n):
        complete = (t + 1) // size
        seen[t, complete * size:t + 1] = True
        for b in np.argsort(-score[t, :complete], kind="stable")[:config["indexer_budget"] // size]:
            seen[t, b * size:(b + 1) * size] = True
    return seen


def shares_choice(config, layer):
    """The layer sees what the last layer with an indexer chose.  layer: None for one behind the others."""
    if layer is None:
        return False
    if config.get("indexer_types"):
        return config["indexer_types"][layer] == "shared"
    return max(layer - config.get("index_skip_topk_offset", 2) + 1, 0) % config.get("index_topk_freq", 1) != 0


def indexed(W, config, x, latent, p, layer):
    """The tokens that a layer's attention sees [n, n]; None: all."""
    if "index_topk" not in config:
        return None
    if shares_choice(config, layer):
        assert not W.has(p + "wk.weight"), p
    else:
        W.chosen = (best_pools(W, config, x, latent, p) if "index_kpool" in config
                    else best_tokens(index_scores(W, config, x, latent, p), config["index_topk"]))
    return W.chosen


def mla(W, config, x, p, layer):
    dots3 = config["model_type"] == "dots3_note"
    grown = dots3 or config["model_type"] == "longcat_flash"
    if dots3 and config["layer_types"][layer] == "sliding_attention":  # other sizes, and no indexer
        own = {k.removeprefix("swa_"): v for k, v in config.items() if k.startswith("swa_")}
        config = {k: v for k, v in (config | own).items() if k != "index_topk"} | {"window": config["sliding_window_size"]}
    n, heads, eps = len(x), config["num_attention_heads"], config["rms_norm_eps"]
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    unrotated, bailing = not rope or config["model_type"] == "kimi_linear", config["model_type"] == "bailing_hybrid"
    if config["model_type"] == "kimi_linear" and "attn_res_block_size" not in config:  # transformers norms latents so, whatever config.json says
        eps = 1e-6
    if config["q_lora_rank"]:
        low = rms(x @ W.get(p + "q_a_proj.weight").T, W.get(p + "q_a_layernorm.weight"), eps)
        low *= math.sqrt(config["hidden_size"] / config["q_lora_rank"]) if grown else 1
        q = low @ W.get(p + "q_b_proj.weight").T
    else:
        low, q = None, x @ W.get(p + "q_proj.weight").T
    q = q.reshape(n, heads, nope + rope)
    latent = x @ W.get(p + "kv_a_proj_with_mqa.weight").T
    kv = rms(latent[:, :rank], W.get(p + "kv_a_layernorm.weight"), eps) @ W.get(p + "kv_b_proj.weight").T
    if grown:
        kv *= math.sqrt(config["hidden_size"] / rank)
    if dots3:
        latent[:, rank:] = rms(latent[:, rank:], W.get(p + "k_rope_only_layernorm.weight"), eps)
    kv = kv.reshape(n, heads, nope + config["v_head_dim"])
    cos, sin, sharpen = (np.ones((n, rope // 2)), np.zeros((n, rope // 2)), 1) if unrotated else rope_tables(
        config, n, rope)
    cos, sin = cos[:, None], sin[:, None]
    q = np.concatenate([q[..., :nope], turn_pairs(q[..., nope:], cos, sin)], -1)
    q = q * temperature(config.get("rope_parameters") or {}, n)
    k_rope = np.repeat(turn_pairs(latent[:, None, rank:], cos, sin), heads, 1)
    k = np.concatenate([kv[..., :nope], k_rope], -1)
    chosen = indexed(W, config, x, low, p + "indexer.", layer)
    sinks = W.get(p + "learnable_sink_param") if W.has(p + "learnable_sink_param") else None
    y = attend(q, k, kv[..., nope:], (nope + rope) ** -0.5 * sharpen, window=config.get("window"), sinks=sinks,
               chosen=chosen)
    values = p + ("g_proj.weight" if "attn_res_block_size" in config else "linear_gate.weight")
    if W.has(values):
        y = y.reshape(n, -1) * sigmoid(x @ W.get(values).T)
    if bailing or dots3:
        gate = sigmoid(x @ W.get(p + "g_proj.weight").T)
        y = (y.reshape(n, heads, -1) * gate[..., None]).reshape(n, -1)
    return y @ W.get(p + last_projection(config)).T


def rules(config, layer):
    """What a layer does in the families below, which differ in this alone.  None: another family."""
    kind = config["model_type"]
    dense = "qwen3", "qwen2", "llama", "mistral", "ministral3", "glm4"
    if kind not in (*dense, "gpt_oss", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text", "mixtral", "olmoe",
                    "qwen2_moe", "ernie4_5_moe", "step3p5", "laguna", "mimo_v2_flash", "hunyuan_v1_moe", "granitemoe",
                    "granitemoeshared", "granitemoehybrid", "bailing_moe_v2", "sarvam_moe", "exaone_moe", "afmoe", "cohere2_moe", "phimoe", "maple", "qwen3_vl_moe_text", "mellum", "deepseek", "bailing_moe", "granitemoe_swa",
                    "solar_open"):
        return None
    windowed = layer is not None and config.get("layer_types", [])[layer:layer + 1] == ["sliding_attention"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    r = dict(head=head, turned=head, rope=rope,
             pairs=False, norm=None, norms=("q_norm", "k_norm"), norm_last=False, window=config["sliding_window"] if windowed else None, sinks=None, gate=None,
             at="mlp.", sparse=True, router="gate", bias=None, score="softmax", scale=1,
             value_scale=1, renorm=config.get("norm_topk_prob", True), shared=None, shared_gate=None, indexed=False,
             k=config.get("num_experts_per_tok"), names=("gate_proj", "up_proj", "down_proj"),
             activation=swiglu, shared_activation=swiglu, after=None, scaling=head ** -0.5, residual=1, mixer="self_attn.",
             joined=False, out="o_proj", groups=(1, 1), gates="g_proj", before=None, mamba=False, parallel=False, share=1)
    if kind in dense:
        r |= dict(norm="head" if kind == "qwen3" else None, sparse=False,
                  rope={**rope, **config.get("rope_parameters", {})})
    if kind == "qwen3_vl_moe_text":
        r |= dict(norm="head", sparse=layer not in config["mlp_only_layers"], names="turned")
    if kind == "glm4":
        part = r["rope"].get("partial_rotary_factor") or config["partial_rotary_factor"]
        r |= dict(pairs=True, turned=int(head * part), after=("post_self_attn_layernorm", "post_mlp_layernorm"))
    if kind == "hunyuan_v1_moe":
        k = config["moe_topk"]
        rope |= config.get("rope_parameters", {})
        rope["rope_theta"] *= rope["alpha"] ** (head / (head - 2))
        r |= dict(rope=rope, norm="head", norms=("query_layernorm", "key_layernorm"), norm_last=True, router="gate.wg",
                  k=k[0] if isinstance(k, list) else k, shared="mlp.shared_mlp.")
    if kind in ("bailing_moe_v2", "sarvam_moe"):
        r |= dict(turned=int(head * config.get("partial_rotary_factor", 1)), norm="head", mixer="attention.", joined=True,
                  norms=("query_layernorm", "key_layernorm"), out="dense", score="sigmoid", bias="gate.expert_bias",
                  scale=config["routed_scaling_factor"], groups=(config["n_group"], config["topk_group"]),
                  shared="mlp.shared_experts.", sparse=layer is None or layer >= config["first_k_dense_replace"])
    if kind == "deepseek":
        r |= dict(shared="mlp.shared_experts.", sparse=layer >= config["first_k_dense_replace"])
    if kind == "bailing_moe":
        r |= dict(mixer="attention.", joined=True, out="dense", shared="mlp.shared_experts.",
                  sparse=layer >= config["first_k_dense_replace"])
    if kind == "solar_open":
        r |= dict(rope={**rope, **config.get("rope_parameters", {})}, score="sigmoid", bias="gate.e_score_correction_bias",
                  scale=config["routed_scaling_factor"], groups=(config["n_group"], config["topk_group"]),
                  shared="mlp.shared_experts.")
    if kind == "exaone_moe":
        r |= dict(turned=head if windowed else 0, rope=config["rope_parameters"], norm="head", score="sigmoid",
                  bias="e_score_correction_bias", scale=config["routed_scaling_factor"],
                  groups=(config["n_group"], config["topk_group"]), shared="mlp.shared_experts.",
                  sparse=layer >= config["first_k_dense_replace"])
    if kind == "afmoe":
        r |= dict(turned=head if windowed else 0, rope={**rope, **config.get("rope_parameters", {})}, norm="head",
                  score="sigmoid", router="router.gate", bias="expert_bias", scale=config["route_scale"], gate=sigmoid,
                  gates="gate_proj", before="pre_mlp_layernorm", after=("post_attention_layernorm", "post_mlp_layernorm"),
                  shared="mlp.shared_experts.", sparse=layer >= config["num_dense_layers"])
    if kind == "cohere2_moe":
        dense = layer < config["first_k_dense_replace"]
        r |= dict(turned=head if windowed or dense else 0, rope={**rope, **config.get("rope_parameters", {})}, pairs=True,
                  score="sigmoid" if config["expert_selection_fn"] == "sigmoid" else "chosen", sparse=not dense,
                  shared="mlp.shared_experts.", share=0.5, parallel=True)
    if kind == "maple":
        r |= dict(turned=int(head * config["partial_rotary_factor"]) if windowed else 0, norm="head",
                  activation=lambda gate, up: silu(np.minimum(gate, 7)) * np.clip(up, -7, 7))
    if kind == "phimoe":
        r |= dict(at="block_sparse_moe.", names=("w1", "w3", "w2"), score="mixer", renorm=False)
    if kind.startswith("granitemoe"):
        r |= dict(rope={**rope, **config.get("rope_parameters", {})}, at="block_sparse_moe.", router="router.layer",
                  score="chosen", names="linear", scaling=config["attention_multiplier"],
                  residual=config["residual_multiplier"],
                  shared="shared_mlp." if config.get("shared_intermediate_size") else None)
    if kind == "granitemoe_swa":
        r |= dict(turned=head if config["layer_rope_theta"][layer] else 0, sinks="sinks", router="router")
    if kind == "granitemoehybrid":
        r |= dict(turned=head if config["position_embedding_type"] == "rope" else 0,
                  mamba=config["layer_types"][layer] in ("mamba", "linear_attention"),
                  sparse=config["num_local_experts"] > 0, at="block_sparse_moe." if config["num_local_experts"] else "shared_")
    if kind == "gpt_oss":
        r |= dict(sinks="sinks", router="router", score="chosen", names=None,
                  activation=lambda gate, up: oai(gate, up, config["swiglu_limit"]))
    if kind == "minimax_m2":
        r |= dict(norm="row", turned=config["rotary_dim"], at="block_sparse_moe.", score="sigmoid",
                  bias="e_score_correction_bias", names=("w1", "w3", "w2"))
    if kind in ("minimax_m3_vl", "minimax_m3_vl_text"):
        activation = lambda gate, up: oai(gate, up, config["swiglu_limit"], config["swiglu_alpha"])
        types = config.get("mlp_layer_types")
        r |= dict(norm="head", turned=config["rotary_dim"], rope={**rope, **config.get("rope_parameters", {})},
                  indexed=index_config(config)[1][layer], at="block_sparse_moe.", score="sigmoid",
                  sparse=types[layer] == "sparse" if types else config["moe_layer_freq"][layer],
                  bias="e_score_correction_bias", scale=config["routed_scaling_factor"], names=("w1", "w3", "w2"),
                  shared="block_sparse_moe.shared_experts.", activation=activation, shared_activation=activation)
    if kind == "mixtral":
        assert config["sliding_window"] is None
        r |= dict(at="block_sparse_moe.", names=("w1", "w3", "w2"))
    if kind == "olmoe":
        assert config["clip_qkv"] is None
        r |= dict(norm="row")
    if kind == "qwen2_moe":
        r |= dict(shared="mlp.shared_expert.", shared_gate="shared_expert_gate",
                  sparse=(layer + 1) % config["decoder_sparse_step"] == 0
                  and layer not in config.get("mlp_only_layers", []))
    if kind == "ernie4_5_moe":
        assert config["moe_layer_end_index"] == -1
        r |= dict(pairs=True, k=config["moe_k"], bias="moe_statics.e_score_correction_bias",
                  shared="mlp.shared_experts.",
                  sparse=layer >= config["moe_layer_start_index"] and (layer + 1) % config["moe_layer_interval"] == 0)
    if kind == "step3p5":
        part, theta = config["partial_rotary_factors"][layer], config["rope_theta"][layer]
        scaled = config["layer_types"][layer] in config["yarn_only_types"]
        limit, shared_limit = config["swiglu_limits"][layer], config["swiglu_limits_shared"][layer]
        r |= dict(turned=int(head * part), rope={**(config["rope_scaling"] if scaled else {}), "rope_theta": theta},
                  norm="head", gate=sigmoid, at="moe.", bias="router_bias", score="sigmoid", k=config["moe_top_k"],
                  scale=config["moe_router_scaling_factor"], renorm=config["norm_expert_weight"], names="stacked",
                  sparse=str(layer) in config["moe_layers_enum"].split(","), shared="share_expert.",
                  activation=lambda gate, up: swiglu(gate, up, limit),
                  shared_activation=lambda gate, up: swiglu(gate, up, shared_limit))
    if kind == "laguna":
        rope = config["rope_parameters"][config["layer_types"][layer]]
        assert config["moe_router_logit_softcapping"] == 0
        r |= dict(turned=int(head * rope["partial_rotary_factor"]), rope=rope, norm="head",
                  gate=lambda t: np.logaddexp(0, t), bias="experts.e_score_correction_bias", score="sigmoid",
                  scale=config["moe_routed_scaling_factor"], shared="mlp.shared_expert.",
                  sparse=config["mlp_layer_types"][layer] == "sparse")
    if kind == "mellum":
        r |= dict(rope=config["rope_parameters"][config["layer_types"][layer]], norm="head",
                  sparse=config["mlp_layer_types"][layer] == "sparse")
    if kind == "mimo_v2_flash":  # its MTP layers are windowed and dense
        windowed = (config["hybrid_layer_pattern"] + [1] * 3)[layer]
        r |= dict(turned=int(head * config["partial_rotary_factor"]), bias="gate.e_score_correction_bias",
                  rope={"rope_theta": config["swa_rope_theta" if windowed else "rope_theta"]}, score="sigmoid",
                  window=config["sliding_window_size"] + 1 if windowed else None,  # so many tokens and the own one
                  sinks="attention_sink_bias" if windowed else None, value_scale=config["attention_value_scale"],
                  sparse=(config["moe_layer_freq"] + [0] * 3)[layer])
    return r


def swiglu(gate, up, limit=0):
    """The limit, if any, acts after SiLU."""
    limit = limit or math.inf
    return np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)


def oai(gate, up, limit, alpha=1.702):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate * sigmoid(alpha * gate)


def linear(W, x, name):
    return x @ W.get(name + ".weight").T + (W.get(name + ".bias") if W.has(name + ".bias") else 0)


def attention(W, config, r, x, p):
    """By the rules r: biases where there are some, norms of whole rows or heads, RoPE on the first values of a head in
    pairs (i, i + half) or (2i, 2i + 1), a window, sinks, scaled values, a gate of the layer's input on each head or
    each of its values."""
    n, d, half = len(x), r["head"], r["turned"] // 2
    if r["joined"]:
        heads, both = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = np.split(linear(W, x, p + "query_key_value"), [heads * d, (heads + both) * d], -1)
    else:
        q, k, v = (linear(W, x, f"{p}{c}_proj") for c in "qkv")
    normed = lambda *both: (norm(W, config, t, f"{p}{name}.weight") for t, name in zip(both, r["norms"]))
    if r["norm"] == "row":
        q, k = normed(q, k)
    q, k = q.reshape(n, -1, d), k.reshape(n, -1, d)
    v = v.reshape(n, k.shape[1], -1) * r["value_scale"]
    if r["norm"] == "head" and not r["norm_last"]:
        q, k = normed(q, k)
    cos, sin, _ = rope_tables({**config, "rope_parameters": r["rope"]}, n, 2 * half)
    cos, sin = cos[:, None], sin[:, None]

    def turn(t):
        a, b, rest = t[..., :half], t[..., half:2 * half], t[..., 2 * half:]
        if r["pairs"]:
            a, b = t[..., 0:2 * half:2], t[..., 1:2 * half:2]
            return np.concatenate([np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*t.shape[:-1], -1),
                                   rest], -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    sinks = W.get(p + r["sinks"]) if r["sinks"] else None
    chosen = best_blocks(W, config, r, x, p) if r["indexed"] else None
    q, k = turn(q), turn(k)
    if r["norm_last"]:
        q, k = normed(q, k)
    y = attend(q * temperature(r["rope"], n), k, v, r["scaling"], r["window"], sinks, chosen)
    return linear(W, gated(W, r, x, y, p), p + r["out"])


def gated(W, r, x, y, p):
    """The result y of the heads, times one value for each head or for each of its values."""
    if r["gate"] is None:
        return y
    gate = r["gate"](linear(W, x, p + r["gates"]))
    return y * np.repeat(gate, y.shape[1] // gate.shape[1], -1)


def choose(W, r, x, p):
    """The numbers of the chosen experts [n, k] and their weights."""
    logits = linear(W, x, p + r["router"])
    if r["score"] == "mixer":
        return sparsemixer(logits, r["k"])
    score = {"chosen": lambda t: t, "softmax": softmax, "sigmoid": sigmoid}[r["score"]](logits)
    choice = score + (W.get(p + r["bias"]).reshape(-1) if r["bias"] else 0)
    groups = choice.reshape(len(x), r["groups"][0], -1)
    worst = np.argsort(-np.sort(groups, -1)[..., -2:].sum(-1), -1)[:, r["groups"][1]:]
    np.put_along_axis(groups, worst[..., None], -np.inf, 1)
    best = np.argsort(-groups.reshape(choice.shape), -1)[:, :r["k"]]
    weight = np.take_along_axis(score, best, -1)
    if r["score"] == "chosen":
        return best, softmax(weight)
    return best, weight / (weight.sum(-1, keepdims=True) if r["renorm"] else 1) * r["scale"]


def sparsemixer(logits, k):
    """As choose(): each of the best logits among those that are left, and its share of the softmax over these, without
    those that are further away than a fiftieth."""
    left, chosen, weight = logits.copy(), [], []
    for _ in range(k):
        best = left.max(-1, keepdims=True)
        far = (best - logits) / np.maximum(np.abs(logits), best) > 0.02
        share = softmax(np.where(far, -np.inf, left))
        chosen.append(left.argmax(-1))
        weight.append(share.max(-1))
        np.put_along_axis(left, chosen[-1][:, None], -np.inf, -1)
    return np.stack(chosen, -1), np.stack(weight, -1)


def expert_parts(W, r, p, e):
    """Gate, up and down [out, in] of an expert, and the three biases or zeros."""
    if r["names"] == "linear":
        both, down = ("input_linear.weight", "output_linear.weight") if W.has(p + "input_linear.weight") else (
            "experts.gate_up_proj", "experts.down_proj")
        gate, up = np.split(W.get(p + both)[e], 2)
        return gate, up, W.get(p + down)[e], 0, 0, 0
    if r["names"] == "turned" and W.has(p + "experts.gate_up_proj"):  # [in, out], gate first
        gate, up = np.split(W.get(p + "experts.gate_up_proj")[e].T, 2)
        return gate, up, W.get(p + "experts.down_proj")[e].T, 0, 0, 0
    if r["names"] == "turned":
        return *(W.get(f"{p}experts.{e}.{name}_proj.weight") for name in ("gate", "up", "down")), 0, 0, 0
    if r["names"] == "stacked":
        return *(W.get(f"{p}{name}_proj.weight")[e] for name in ("gate", "up", "down")), 0, 0, 0
    if r["names"]:
        return *(W.get(f"{p}experts.{e}.{name}.weight") for name in r["names"]), 0, 0, 0
    gate_up, down = W.get(p + "experts.gate_up_proj")[e], W.get(p + "experts.down_proj")[e]
    if not W.has(p + "experts.down_proj_blocks"):  # [in, out]
        gate_up, down = gate_up.T, down.T
    bias = W.get(p + "experts.gate_up_proj_bias")[e]
    return (gate_up[0::2], gate_up[1::2], down, bias[0::2], bias[1::2], W.get(p + "experts.down_proj_bias")[e])


def feed_forward(W, r, x, p):
    """p: of the layer."""
    if not r["sparse"]:
        return ffn(W, x, p + ("shared_mlp." if r["at"] == "shared_" else "mlp."), r["shared_activation"])
    layer, p = p, p + r["at"]
    best, weight = choose(W, r, x, p)
    y = np.zeros_like(x)
    for e in np.unique(best):
        token, slot = np.nonzero(best == e)
        gate, up, down, gate_bias, up_bias, down_bias = expert_parts(W, r, p, e)
        h = r["activation"](x[token] @ gate.T + gate_bias, x[token] @ up.T + up_bias)
        y[token] += weight[token, slot, None] * (h @ down.T + down_bias)
    if r["shared"]:
        y = r["share"] * y + r["share"] * (ffn(W, x, layer + r["shared"], r["shared_activation"])
              * (sigmoid(linear(W, x, p + r["shared_gate"])) if r["shared_gate"] else 1))
    return y


def ffn(W, x, p, activation=swiglu, names=("gate_proj", "up_proj", "down_proj")):
    if any(n.startswith(p + "input_linear.") for n in W.raw):
        gate, up, down = *np.split(W.get(p + "input_linear.weight"), 2), W.get(p + "output_linear.weight")
    elif W.has(p + "gate_up_proj.weight"):
        gate, up, down = *np.split(W.get(p + "gate_up_proj.weight"), 2), W.get(p + "down_proj.weight")
    else:
        gate, up, down = (W.get(f"{p}{c}.weight") for c in names)
    return activation(x @ gate.T, x @ up.T) @ down.T


def clamped(config, routed=False):
    """How GLM-5.3-Flash joins gate and up, in all feed-forwards, and Hunyuan 4 in routed experts; swiglu() elsewhere."""
    if config["model_type"] != "glm5_next_text" and not (routed and config["model_type"] == "hy_v4"):
        return swiglu
    limit = config["swiglu_limit"]
    return lambda gate, up: silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def expert_ffn(W, x, p, e, activation):
    if W.has(f"{p}experts.{e}.w1.weight"):
        return ffn(W, x, f"{p}experts.{e}.", activation, ("w1", "w3", "w2"))
    if not W.has(p + "experts.gate_up_proj"):
        return ffn(W, x, f"{p}experts.{e}.", activation)
    gate, up = np.split(W.get(p + "experts.gate_up_proj")[e], 2)
    return activation(x @ gate.T, x @ up.T) @ W.get(p + "experts.down_proj")[e].T


def router(W, p):
    """The name of the router's matrix; Hy3 has one of its own."""
    return p + ("router.gate.weight" if W.has(p + "router.gate.weight") else "gate.weight")


def moe(W, config, x, p):
    k, gate = config["num_experts_per_tok"], W.get(router(W, p))
    experts = len(gate)  # a pruned layer has fewer than config.json says
    stored = {n.removeprefix(p + "experts.").split(".")[0] for n in W.raw if n.startswith(p + "experts.")}
    assert stored == {"gate_up_proj", "down_proj"} or experts == len(stored), p
    logits = x @ gate.T
    names = p + "gate.e_score_correction_bias", p + "gate.expert_bias", p + "expert_bias"
    bias = next((b for b in names if W.has(b)), None)
    if bias:
        score = sigmoid(logits)
        choice = score + W.get(bias)
        groups = choice.reshape(len(x), config.get("n_group", 1), -1)
        value = np.sort(groups, -1)[..., -2:].sum(-1)
        worst = np.argsort(-value, -1)[:, config.get("topk_group", 1):]
        np.put_along_axis(groups, worst[..., None], -np.inf, 1)
        choice = groups.reshape(choice.shape)
    else:
        choice = score = softmax(logits)
    if config.get("topk_method") == "group_limited_greedy":  # the best expert rates a group
        groups = score.copy().reshape(len(x), config["n_group"], -1)
        worst = np.argsort(-groups.max(-1), -1)[:, config["topk_group"]:]
        np.put_along_axis(groups, worst[..., None], -np.inf, 1)
        choice = groups.reshape(score.shape)
    best = np.argsort(-choice, -1)[:, :k]
    weight = np.take_along_axis(score, best, -1)
    if config.get("norm_topk_prob", True):
        weight = weight / weight.sum(-1, keepdims=True)
    weight = weight * config.get("routed_scaling_factor", config.get("router_scaling_factor", 1.0))
    y = np.zeros_like(x)
    for e in range(experts):
        token, slot = np.nonzero(best == e)
        y[token] += weight[token, slot, None] * expert_ffn(W, x[token], p, e, clamped(config, True))
    if config.get("shared_expert_intermediate_size"):  # Qwen
        return y + sigmoid(x @ W.get(p + "shared_expert_gate.weight").T) * ffn(W, x, p + "shared_expert.")
    if W.has(p + "shared_mlp.gate_proj.weight"):  # Hy3
        return y + ffn(W, x, p + "shared_mlp.")
    return y + ffn(W, x, p + "shared_experts.", clamped(config)) if config.get("n_shared_experts") else y


def turn_last(t, position, freq, back=False):
    """Rotates the pairs (2i, 2i + 1) of the last values of t [n, .., d]; back: the other way."""
    angle = np.multiply.outer(position, freq).reshape(len(t), *(1,) * (t.ndim - 2), len(freq))
    cos, sin = np.cos(angle), np.sin(angle) * (-1 if back else 1)
    first = t.shape[-1] - 2 * len(freq)
    a, b, t = t[..., first::2], t[..., first + 1::2], t.copy()
    t[..., first::2], t[..., first + 1::2] = a * cos - b * sin, b * cos + a * sin
    return t


def v4_layer(config, layer):
    """How many tokens a compressed key of the layer has, whether token ids have its experts, and its frequencies."""
    if "layer_types" in config:
        kind, dim = config["layer_types"][layer], int(config["head_dim"] * config["partial_rotary_factor"])
        rope, hashed = config["rope_parameters"], config["mlp_layer_types"][layer] == "hash_moe"
        ratio = config["compress_rates"].get(kind, 0)
        main, theta, rope = rope["main"]["rope_theta"], rope["compress"]["rope_theta"], rope["compress"]
    else:
        ratio, hashed, dim = config["compress_ratios"][layer], layer < config.get("num_hash_layers", 0), config["qk_rope_head_dim"]
        main, theta, rope = config["rope_theta"], config["compress_rope_theta"], config["rope_scaling"]
    i = np.arange(dim // 2)
    if not ratio:
        return ratio, hashed, main ** (-2 * i / dim)
    turns = lambda t: dim * math.log(rope["original_max_position_embeddings"] / (t * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(turns(rope["beta_fast"])), 0), min(math.ceil(turns(rope["beta_slow"])), dim - 1)
    ramp = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
    return ratio, hashed, theta ** (-2 * i / dim) * (1 - ramp + ramp / rope["factor"])


def compressed_keys(W, config, x, p, ratio, freq):
    """The keys of `ratio` tokens each, from their values and the softmax of their gates.  Keys of 4 tokens overlap: the
    first half of a token's values goes to the next key, the second to its own."""
    value, gate = x @ W.get(p + "wkv.weight").T, x @ W.get(p + "wgate.weight").T
    gate = gate + np.tile(W.get(p + "ape"), (len(x) // ratio + 1, 1))[:len(x)]
    weight, rows = W.get(p + "norm.weight"), []
    d, overlap = len(weight), ratio == 4
    for first in range(0, len(x) - ratio + 1, ratio):
        mine, before = slice(first, first + ratio), slice(max(first - ratio, 0), first)
        v, g = value[mine, -d:], gate[mine, -d:]
        if overlap:
            v, g = np.concatenate([value[before, :d], v]), np.concatenate([gate[before, :d], g])
        rows.append((softmax(g.T).T * v).sum(0))
    rows = np.array(rows).reshape(-1, d)
    return turn_last(rms(rows, weight, config["rms_norm_eps"]), np.arange(len(rows)) * ratio, freq)


V4_ROUND = {"key": lambda x, rotated: x, "index": lambda x: x}  # gen_qat.py has others


def v4_attention(W, config, x, p, ratio, freq):
    """One key, which is its value, for all heads: of the tokens in a window, and compressed ones of all tokens before,
    of which an indexer chooses those of 4 tokens."""
    n, heads, d, eps = len(x), config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
    at, groups = np.arange(n), config["o_groups"]
    low = rms(x @ W.get(p + "wq_a.weight").T, W.get(p + "q_norm.weight"), eps)
    q = turn_last(rms((low @ W.get(p + "wq_b.weight").T).reshape(n, heads, d), 1, eps), at, freq)
    own = W.get(p + ("kv_norm.weight" if W.has(p + "kv_norm.weight") else "norm.weight"))
    round_key, round_index = (lambda t: V4_ROUND["key"](t, 2 * len(freq))), V4_ROUND["index"]
    kv = round_key(turn_last(rms(x @ W.get(p + "wkv.weight").T, own, eps), at, freq))
    seen = np.tril(np.ones((n, n), bool)) & ~np.tril(np.ones((n, n), bool), -config["sliding_window"])
    if ratio:
        more = round_key(compressed_keys(W, config, x, p + "compressor.", ratio, freq))
        whole = (at[:, None] + 1) // ratio > np.arange(len(more))
        if ratio == 4:
            keys = round_index(compressed_keys(W, config, x, p + "indexer.compressor.", ratio, freq))
            width = keys.shape[1]
            iq = round_index(turn_last((low @ W.get(p + "indexer.wq_b.weight").T).reshape(n, -1, width), at, freq))
            match = np.maximum(np.einsum("qhd,kd->qhk", iq, keys), 0)
            score = np.einsum("qh,qhk->qk", x @ W.get(p + "indexer.weights_proj.weight").T, match)
            best = np.argsort(np.where(whole, -score, np.inf), -1, kind="stable")[:, :config["index_topk"]]
            chosen = np.zeros_like(whole)
            np.put_along_axis(chosen, best, True, -1)
            whole &= chosen
        kv, seen = np.concatenate([kv, more]), np.concatenate([seen, whole], -1)
    score = np.einsum("qhd,kd->qhk", q, kv) * d ** -0.5
    score = np.where(seen[:, None], score, -np.inf)
    sink = np.broadcast_to(W.get(p + "attn_sink")[:, None], (n, heads, 1))
    y = softmax(np.concatenate([score, sink], -1))[..., :-1] @ kv
    y = turn_last(y, at, freq, back=True).reshape(n, groups, -1)
    joined = np.einsum("ngc,goc->ngo", y, W.get(p + "wo_a.weight").reshape(groups, -1, y.shape[-1]))
    return joined.reshape(n, -1) @ W.get(p + "wo_b.weight").T


def v4_experts(W, config, x, p, ids, hashed):
    act = lambda gate, up: silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
    ffn = lambda t, at: act(t @ W.get(at + "w1.weight").T, t @ W.get(at + "w3.weight").T) @ W.get(at + "w2.weight").T
    limit, k = config["swiglu_limit"], config["num_experts_per_tok"]
    score = np.sqrt(np.logaddexp(0, x @ W.get(p + "gate.weight").T))
    if hashed:
        best = W.plain(p + "gate.tid2eid")[ids]
    else:
        best = np.argsort(-score - W.get(p + "gate.bias"), -1)[:, :k]
    weight = np.take_along_axis(score, best, -1)
    weight = weight / weight.sum(-1, keepdims=True) * config["routed_scaling_factor"]
    y = ffn(x, p + "shared_experts.")
    for e in range(score.shape[1]):
        token, slot = np.nonzero(best == e)
        y[token] += weight[token, slot, None] * ffn(x[token], f"{p}experts.{e}.")
    return y


def v4_mix(W, config, streams, name):
    """The factors [n, hc] that read the streams [n, hc, hidden], those that write to them, and what mixes them."""
    n, hc, eps = len(streams), config["hc_mult"], config["hc_eps"]
    fn, base, scale = (W.get(name + part) for part in ("fn", "base", "scale"))
    v = rms(streams.reshape(n, -1), 1, config["rms_norm_eps"]) @ fn.T
    read = sigmoid(v[:, :hc] * scale[0] + base[:hc]) + eps
    if len(scale) == 1:
        return read, None, None
    write = 2 * sigmoid(v[:, hc:2 * hc] * scale[1] + base[hc:2 * hc])
    if len(scale) == 2:  # Hunyuan 4 does not mix them
        return read, write / 2 * config["hc_magnitude"] + eps, np.eye(hc)[None]
    mix = softmax((v[:, 2 * hc:] * scale[2] + base[2 * hc:]).reshape(n, hc, hc)) + eps
    mix = mix / (mix.sum(1, keepdims=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        mix = mix / (mix.sum(2, keepdims=True) + eps)
        mix = mix / (mix.sum(1, keepdims=True) + eps)
    return read, write, mix


def v4_block(W, config, streams, p, ids, kind):
    """One layer, whose names begin with p.  kind: as v4_layer() says."""
    ratio, hashed, freq = kind
    for half in ("attn", "ffn"):
        read, write, mix = v4_mix(W, config, streams, f"{p}hc_{half}_")
        x = norm(W, config, np.einsum("nj,njd->nd", read, streams), f"{p}{half}_norm.weight")
        y = (v4_attention(W, config, x, p + "attn.", ratio, freq) if half == "attn"
             else v4_experts(W, config, x, p + "ffn.", ids, hashed))
        streams = write[:, :, None] * y[:, None] + np.einsum("njk,njd->nkd", mix, streams)
    return streams


def v4_streams(W, config, ids):
    """The streams behind the last layer of DeepSeek-V4, whose layers read and write several streams of residuals."""
    body = "" if W.has("embed.weight") else "model."
    x = W.get("embed.weight" if W.has("embed.weight") else "model.embed_tokens.weight")[ids]
    streams = np.repeat(x[:, None], config["hc_mult"], 1)
    for layer in range(config["num_hidden_layers"]):
        streams = v4_block(W, config, streams, f"{body}layers.{layer}.", ids, v4_layer(config, layer))
    return streams


def v4_last(W, config, streams, hc, name):
    read, _, _ = v4_mix(W, config, streams, hc)
    return norm(W, config, np.einsum("nj,njd->nd", read, streams), name)


def v4_trunk(W, config, ids):
    """The rows after the final norm."""
    body = "" if W.has("embed.weight") else "model."
    hc = "model.hc_head.hc_" if body else "hc_head_"
    return v4_last(W, config, v4_streams(W, config, ids), hc, body + "norm.weight")


def v4_predict(W, config, ids, last):
    """Row t says what follows token t + 1, from that token and each of the trunk's streams at t.  With `last` beyond 0
    only `last` rows are made of the trunk's, and of each later one of the streams that the one before it leaves."""
    trunk, dim = v4_streams(W, config, ids)[:-1], config["qk_rope_head_dim"]
    kind, rows = (0, False, config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)), trunk[:last]
    while True:
        after = ids[1:len(rows) + 1]
        token = norm(W, config, W.get("embed.weight")[after], "mtp.0.enorm.weight") @ W.get("mtp.0.e_proj.weight").T
        own = norm(W, config, rows, "mtp.0.hnorm.weight") @ W.get("mtp.0.h_proj.weight").T
        out = v4_block(W, config, token[:, None] + own, "mtp.0.", after, kind)
        if len(rows) == len(trunk):
            return v4_last(W, config, out, "mtp.0.hc_head_", "mtp.0.norm.weight") @ head(W, config).T
        rows = np.concatenate([rows, out[-1:]])


def drafts(one, W, config, ids):
    """Chained drafts behind three positions, as in drafts.f32.  one: the function of the family."""
    return np.concatenate([one(W, config, ids[:t + 1 + 4], t + 1)[t:] for t in (5, 40, min(200, len(ids) - 12))])


# What is V4.1's own: keys come from layers before, as do choices; the factors that read streams lag; and n-grams.
V41_ROUND = {"key": lambda x: x, "compressed": lambda x: x, "index": lambda x: x}  # gen_qat.py has others


def v41_plain(token, text):
    """What a token's text is but for case, accents and blanks; a token that is no whole UTF-8 is itself."""
    if "\ufffd" in text:
        return token
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    short = re.sub("[ \t\r\n]+", " ", text)
    return short if short == " " else short.strip() or short


def v41_numbers(folder):
    """The number of every token: tokens that are the same but for case, accents and blanks have one."""
    tokenizer, seen = json.loads((folder / "tokenizer.json").read_text()), {}
    tokens = {i: t for t, i in tokenizer["model"]["vocab"].items()} | {t["id"]: t["content"] for t in tokenizer["added_tokens"]}
    printed = [b for b in range(256) if chr(b).isprintable() and b not in (32, 173)]  # GPT-2's alphabet
    byte = {chr(b): b for b in printed}
    byte |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printed)}
    text = lambda t: bytes(byte[c] for c in t).decode(errors="replace") if all(c in byte for c in t) else t
    return np.array([seen.setdefault(v41_plain(tokens[i], text(tokens[i])), len(seen)) for i in range(len(tokens))])


def v41_sizes(config):
    """The rows of every head of the tables of n-grams: [layers][lengths][heads] primes, none twice."""
    taken, prime = set(), lambda n: all(n % d for d in range(2, math.isqrt(n) + 1))
    for _ in range(len(config["engram_layer_ids"]) * (config["engram_max_ngram_size"] - 1)):
        n = config["engram_vocab_size"]
        for _ in range(config["engram_n_heads"]):
            while n in taken or not prime(n):
                n += 1
            taken.add(n)
    return np.array(sorted(taken)).reshape(-1, config["engram_max_ngram_size"] - 1, config["engram_n_heads"])


def v41_engram(W, config, streams, ids, p, number, which):
    """Adds rows that the latest tokens choose.  number: of the tokens; which: of the table."""
    size, eps, n = config["engram_max_ngram_size"], config["rms_norm_eps"], len(ids)
    assert config["engram_compressed_vocab_size"] == number.max() + 1
    bound = (2 ** 63 - 1) // (number.max() + 1) // 2
    factor = np.random.default_rng(10007 * config["engram_layer_ids"][which]).integers(0, bound, size)
    own = np.concatenate([np.full(size - 1, number[config["engram_pad_token_id"]]), number[ids]])
    product = [own[size - 1 - s:size - 1 - s + n] * (2 * factor[s] + 1) for s in range(size)]
    sizes = v41_sizes(config)[which]
    mixed = np.stack([np.bitwise_xor.reduce(product[:k]) for k in range(2, size + 1)], 1)
    rows = (mixed[:, :, None] % sizes).reshape(n, -1) + np.cumsum(sizes) - sizes.ravel()
    assert config["engram_num_embeddings"][which] == sizes.sum() == len(W.plain(p + "embed.weight"))
    made = W.get(p + "embed.weight")[rows].reshape(n, -1) @ W.get(p + "wkv.weight").T
    made = made.reshape(n, config["hc_mult"] + 1, -1)
    match = (rms(streams, W.get(p + "q_weight"), eps) * rms(made[:, :-1], W.get(p + "k_weight"), eps)).sum(-1)
    match /= math.sqrt(config["hidden_size"])
    return streams + sigmoid(np.sign(match) * np.sqrt(np.maximum(abs(match), 1e-6)))[..., None] * made[:, -1:]


def v41_latents(W, config, x, p, ratio):
    value = x @ W.get(p + "wkv.weight").T
    if ratio > 1:
        cut = lambda t: t[:len(t) // ratio * ratio].reshape(-1, ratio, t.shape[1]).swapaxes(1, 2)
        value = (cut(value) * softmax(cut(x @ W.get(p + "wgate.weight").T))).sum(-1)
    return norm(W, config, value, p + "norm.weight")


def v41_choice(W, config, x, low, p, layer, kept):
    """The keys that a query sees.  kept: what layers hand down."""
    ratio, _, freq = v4_layer(config, layer)
    at, keys, k = np.arange(len(x)), kept["index"], config["index_topk"]
    whole = (at[:, None] + 1) // ratio > np.arange(len(keys))
    q = V41_ROUND["index"](turn_last((low @ W.get(p + "wq_b.weight").T).reshape(len(x), -1, keys.shape[1]), at, freq))
    score = np.einsum("qh,qhk->qk", x @ W.get(p + "weights_proj.weight").T, np.maximum(np.einsum("qhd,kd->qhk", q, keys), 0))
    if 0 <= config["candidate_source_layer_id"] < layer:
        whole = whole & kept["candidates"]
    score = np.where(whole, score, -np.inf)
    if layer == config["candidate_source_layer_id"]:
        size, blocks = config["candidate_block_size"], np.zeros_like(whole)
        for t in range(ratio - 1, len(x)):
            last = ((t + 1) // ratio - 1) // size
            best = [score[t, b * size:(b + 1) * size].max() for b in range(last)]
            for b in [last, *np.argsort(best)[::-1][:config["candidate_topk_blocks"] - 1]]:
                blocks[t, b * size:(b + 1) * size] = True
        kept["candidates"] = blocks
    chosen = np.zeros_like(whole)
    np.put_along_axis(chosen, np.argsort(-score, -1, kind="stable")[:, :k], True, -1)
    return chosen & whole


def v41_attention(W, config, x, p, layer, kept):
    ratio, _, freq = v4_layer(config, layer)
    n, heads, d, groups, at = len(x), config["num_attention_heads"], config["head_dim"], config["o_groups"], np.arange(len(x))
    low = norm(W, config, x @ W.get(p + "wq_a.weight").T, p + "q_norm.weight")
    q = turn_last((low @ W.get(p + "wq_b.weight").T).reshape(n, heads, d), at, freq)
    kv = V41_ROUND["key"](turn_last(norm(W, config, x @ W.get(p + "wkv.weight").T, p + "kv_norm.weight"), at, freq))
    seen = np.tril(np.ones((n, n), bool)) & ~np.tril(np.ones((n, n), bool), -config["sliding_window"])
    if layer in config["kv_source_layer_ids"]:
        latent = v41_latents(W, config, x, p + "compressor.", ratio)
        turned = lambda t: turn_last(t, np.arange(len(t)) * ratio, freq)
        kept["keys"] = V41_ROUND["compressed"](turned(latent))
        key = norm(W, config, latent @ W.get(p + "indexer.wk.weight").T, p + "indexer.k_norm.weight")
        kept["index"] = V41_ROUND["index"](turned(key))
    if layer in config["index_source_layer_ids"]:
        kept["chosen"] = v41_choice(W, config, x, low, p + "indexer.", layer, kept)
    if ratio:
        kv, seen = np.concatenate([kv, kept["keys"]]), np.concatenate([seen, kept["chosen"]], -1)
    score = np.where(seen[:, None], np.einsum("qhd,kd->qhk", q, kv) * d ** -0.5, -np.inf)
    sink = np.broadcast_to(W.get(p + "attn_sink")[:, None], (n, heads, 1))
    y = turn_last(softmax(np.concatenate([score, sink], -1))[..., :-1] @ kv, at, freq, back=True).reshape(n, groups, -1)
    joined = np.einsum("ngc,goc->ngo", y, W.get(p + "wo_a.weight").reshape(groups, -1, y.shape[-1]))
    return joined.reshape(n, -1) @ W.get(p + "wo_b.weight").T


def v41_trunk(W, config, ids):
    """The rows after the final norm.  A layer's factors read the streams of the half after it."""
    number, kept = v41_numbers(W.folder), {}
    streams = np.repeat(W.get("embed.weight")[ids][:, None], config["hc_mult"], 1)
    read = np.eye(config["hc_mult"])[np.zeros(len(ids), int)]
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        if layer in config["engram_layer_ids"]:
            which = config["engram_layer_ids"].index(layer)
            streams = v41_engram(W, config, streams, ids, p + "engram.", number, which)
        for half in ("attn", "ffn"):
            after, write, mix = v4_mix(W, config, streams, f"{p}hc_{half}_")
            x = norm(W, config, np.einsum("nj,njd->nd", read, streams), f"{p}{half}_norm.weight")
            y = (v41_attention(W, config, x, p + "attn.", layer, kept) if half == "attn"
                 else v4_experts(W, config, x, p + "ffn.", ids, False))
            streams = write[:, :, None] * y[:, None] + np.einsum("njk,njd->nkd", mix, streams)
            read = after
    return norm(W, config, np.einsum("nj,njd->nd", read, streams), "norm.weight")


def nemotron_kinds(config):
    """A letter for each layer."""
    names = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
    return config.get("hybrid_override_pattern") or [names[t] for t in config["layers_block_type"]]


def mamba(W, config, x, p):
    """Mamba-2, token by token.  The steps of time are not clamped."""
    n, heads, groups, width = len(x), config["mamba_num_heads"], config["n_groups"], config["ssm_state_size"]
    inner = heads * config["mamba_head_dim"]
    z, xbc, dt = np.split(x @ W.get(p + "in_proj.weight").T, [inner, 2 * inner + 2 * groups * width], -1)
    taps = W.get(p + "conv1d.weight")[:, 0]  # the last tap is the token itself
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, xbc.shape[1])), xbc])
    xbc = silu(sum(padded[j:j + n] * taps[:, j] for j in range(taps.shape[1])) + W.get(p + "conv1d.bias"))
    v, B, C = np.split(xbc, [inner, inner + groups * width], -1)
    v = v.reshape(n, heads, -1)
    B, C = (np.repeat(t.reshape(n, groups, width), heads // groups, 1) for t in (B, C))
    dt = np.logaddexp(0, dt + W.get(p + "dt_bias"))
    keep = np.exp(-np.exp(W.get(p + "A_log")) * dt)
    state, out = np.zeros((heads, width, v.shape[-1])), np.empty(v.shape)
    for t in range(n):
        state = keep[t, :, None, None] * state + np.einsum("hn,hp->hnp", B[t], dt[t, :, None] * v[t])
        out[t] = np.einsum("hnp,hn->hp", state, C[t]) + W.get(p + "D")[:, None] * v[t]
    out = (out.reshape(n, -1) * silu(z)).reshape(n, groups, -1)
    out = rms(out, W.get(p + "norm.weight").reshape(groups, -1), config["layer_norm_epsilon"])
    return out.reshape(n, -1) @ W.get(p + "out_proj.weight").T


def granite_mamba(config):
    """Granite 4's words in those of Nemotron-3."""
    heads = config["mamba_n_heads"]
    return {"mamba_num_heads": heads, "n_groups": config["mamba_n_groups"], "ssm_state_size": config["mamba_d_state"],
            "mamba_head_dim": config["mamba_expand"] * config["hidden_size"] // heads,
            "layer_norm_epsilon": config["rms_norm_eps"]}


def relu2(W, x, p):
    return np.maximum(x @ W.get(p + "up_proj.weight").T, 0) ** 2 @ W.get(p + "down_proj.weight").T


def nemotron_experts(W, config, x, p):
    """The experts read a latent, where there is one; the router and the shared expert do not."""
    score = sigmoid(x @ W.get(p + "gate.weight").T)
    choice = score + W.get(p + "gate.e_score_correction_bias")
    if config["n_group"] > 1:
        groups = choice.reshape(len(x), config["n_group"], -1)
        best = np.sort(groups, -1)[..., -2:].sum(-1)
        out = np.argsort(-best, -1)[:, config["topk_group"]:]
        np.put_along_axis(groups, out[..., None], -np.inf, 1)
        choice = groups.reshape(choice.shape)
    best = np.argsort(-choice, -1)[:, :config["num_experts_per_tok"]]
    weight = np.take_along_axis(score, best, -1)
    assert config["norm_topk_prob"]
    weight = weight / weight.sum(-1, keepdims=True) * config["routed_scaling_factor"]
    read = x @ W.get(p + "fc1_latent_proj.weight").T if config.get("moe_latent_size") else x
    y = np.zeros_like(read)
    for e in range(score.shape[1]):
        token, slot = np.nonzero(best == e)
        y[token] += weight[token, slot, None] * relu2(W, read[token], f"{p}experts.{e}.")
    y = y @ W.get(p + "fc2_latent_proj.weight").T if config.get("moe_latent_size") else y
    return y + relu2(W, x, p + "shared_experts.")


def nemotron_attention(W, config, x, p):
    q, k, v = ((x @ W.get(f"{p}{c}_proj.weight").T).reshape(len(x), -1, config["head_dim"]) for c in "qkv")
    return attend(q, k, v, config["head_dim"] ** -0.5) @ W.get(p + "o_proj.weight").T


def nemotron_layer(W, config, x, p, kind):
    half = {"M": mamba, "*": nemotron_attention, "E": nemotron_experts, "-": lambda W, _, h, at: relu2(W, h, at)}[kind]
    return x + half(W, config, norm(W, config, x, p + "norm.weight"), p + "mixer.")


def nemotron_trunk(W, config, ids):
    """The rows after the final norm."""
    body = "backbone." if W.has("backbone.norm_f.weight") else "model."
    x = W.get(body + "embeddings.weight")[ids]
    for layer, kind in enumerate(nemotron_kinds(config)):
        x = nemotron_layer(W, config, x, f"{body}layers.{layer}.", kind)
    return norm(W, config, x, body + "norm_f.weight")


def nemotron_predict(W, config, ids, hidden):
    """As predict(), for Nemotron-3: an attention layer, then one with experts."""
    token = W.get("backbone.embeddings.weight")[ids[1:]]
    both = norm(W, config, token, "mtp.layers.0.enorm.weight"), norm(W, config, hidden[:-1], "mtp.layers.0.hnorm.weight")
    x = np.concatenate(both, -1) @ W.get("mtp.layers.0.eh_proj.weight").T
    for i, kind in enumerate("*E"):
        x = nemotron_layer(W, config, x, f"mtp.layers.{i}.", kind)
    return norm(W, config, x, "mtp.layers.1.final_layernorm.weight") @ head(W, config).T


def ink_conv(x, taps, own=None):
    """A short convolution of x [n, values] with taps [n_conv, values] by distance, and of each token `own` [n, n_conv,
    values]."""
    y = x.copy()
    for lag, tap in enumerate(taps):
        before = np.concatenate([np.zeros((lag, x.shape[1])), x])[:len(x)]
        y += before * (tap if own is None else tap + own[:, lag])
    return y / math.sqrt((1 if own is None else 2) * len(taps) + 1)


def ink_taps(W, name):
    """Those of an ordinary one: the last tap is the token itself."""
    return W.get(name)[:, 0, ::-1].T


def ink_clip(x, most):
    return x * np.minimum(most / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-6), 1)


def ink_attention(W, config, q_in, k_in, v_in, p, window):
    n, heads, groups, size = len(q_in), config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def convolved(x, c):
        y = x @ W.get(f"{p}w{c}_dv.weight").T
        if window:
            return ink_conv(y, ink_taps(W, f"{p}{c}_sconv.weight")).reshape(n, groups, size)
        taps = W.get(f"{p}{c}_sconv.static_w")
        own = (x @ W.get(f"{p}{c}_sconv.weight_proj").T).reshape(n, groups, len(taps)).transpose(0, 2, 1)
        return ink_conv(y, taps, np.repeat(own, size, -1)).reshape(n, groups, size)

    t = np.arange(n)
    tau = 1 + config["log_scaling_alpha"] * np.log(np.maximum((t + 1) / config["log_scaling_n_floor"], 1))
    tau = np.ones(n) if window else tau
    q = (q_in @ W.get(p + "wq_du.weight").T).reshape(n, heads, size) * W.get(p + "q_l2_clip.scale")
    r = (q_in @ W.get(p + "wr_du.weight").T).reshape(n, heads, -1) * W.get(p + "rel_l2_clip.scale")
    q = ink_clip(q, config["qk_l2_clip_threshold"]) * tau[:, None, None]
    r = ink_clip(r, config["rel_l2_clip_threshold"]) * tau[:, None, None]
    k, v = ink_clip(convolved(k_in, "k"), config["qk_l2_clip_threshold"]), rms(convolved(v_in, "v"), 1, config["rms_norm_eps"])
    bank = W.get(p + "rel_logits_proj.proj")
    assert bank.shape[1] == (window or config["rel_extent"])
    distance = t[:, None] - t
    reach = (distance >= 0) & (distance < bank.shape[1])
    profile = np.take_along_axis(np.einsum("qhr,rd->hqd", r, bank), np.broadcast_to(
        np.clip(distance, 0, bank.shape[1] - 1), (heads, n, n)), -1)
    k, v = (np.repeat(x, heads // groups, 1) for x in (k, v))
    score = np.einsum("qhd,khd->hqk", q, k) * size ** -0.5 + np.where(reach, profile, 0)
    score = np.where((distance < 0) | (distance >= (window or n)), -np.inf, score)
    sink = (q_in @ W.get(p + "attn_sink_proj.weight").T).T[..., None]
    out = np.einsum("hqk,khd->qhd", softmax(np.concatenate([score, sink], -1))[..., :-1], v).reshape(n, -1)
    return (out * sigmoid(q_in @ W.get(p + "gate_attn.weight").T)) @ W.get(p + "wo_ud.weight").T


def ink_experts(W, config, x, p):
    score = sigmoid(x @ W.get(p + "gate.weight").T)
    best = np.argsort(-(score + W.get(p + "gate.bias")), -1)[:, :config["num_experts_per_tok"]]
    weight = np.take_along_axis(score, best, -1)
    weight = weight / weight.sum(-1, keepdims=True) * config["route_scale"]
    up, down, y = W.get(p + "experts.w13_weight"), W.get(p + "experts.w2_weight"), np.zeros_like(x)
    cap = lambda z, name: np.tanh(z / config[name]) * config[name]
    for e in range(score.shape[1]):
        token, slot = np.nonzero(best == e)
        g, u = x[token] @ up[e, ::2].T, x[token] @ up[e, 1::2].T
        h = cap(g, "mlp_gate_softcap") * sigmoid(g) * cap(u, "mlp_up_softcap")
        y[token] += weight[token, slot, None] * (h @ down[e].T)
    return y


def ink_read(rows, query):
    """A reading of the rows, blocks of layers, by a query."""
    rows = rms(np.stack(rows), 1, 1e-6)
    weight = softmax((rows @ query).T * len(query) ** -0.5)
    return np.einsum("nj,jnd->nd", weight, rows)


def ink_gate(W, config, x, message, p):
    low = np.concatenate([rms(t, 1, config["rms_norm_eps"]) for t in (x, message)], -1) @ W.get(p + "down_weight").T
    return (1 - np.tanh(low @ W.get(p + "forget_weight").T)) * x + np.tanh(low @ W.get(p + "gain_weight").T) * message


def ink_layer(W, config, rows, layer, messages):
    """Adds a layer to the rows: the embedding, the sums of blocks, and last that of the block which it belongs to.
    messages: what the loop's last pass has left; None: this is the first."""
    p, first = f"model.llm.layers.{layer}.", layer % config["n_layers_per_attn_res_block"] == 0
    window = config["sliding_window_size"] * (config["layer_types"][layer] == "hybrid_sliding")

    def message(i):  # of queries, keys, values, feed-forward
        kv = i in (1, 2)
        queries = W.get("model.llm.middle_cycle_cross_pass_" + "kv_" * kv + "queries")
        return ink_read(messages, queries[2 * (layer - config["loop_layer_index_start"]) + (i > 1)])

    def gated(i, x):
        name = ("attn", "k", "v", "mlp")[i]
        return x if messages is None else ink_gate(W, config, x, message(i), f"{p}controllers.{name}.")

    queries = W.get(f"model.llm.attn_res.attn_queries.{layer - 1}").reshape(-1, config["hidden_size"]) if layer else None
    norms = ["attn_norm"] * 3 if window else ["q_input_norm", "k_input_norm", "v_input_norm"]
    read = [rows[0] if queries is None else ink_read(rows, queries[i % len(queries)]) for i in range(3)]
    read = [rms(gated(i, x), W.get(f"{p}{name}.weight"), config["rms_norm_eps"])
            for i, (x, name) in enumerate(zip(read, norms))]
    out = ink_conv(ink_attention(W, config, *read, p + "attn.", window), ink_taps(W, p + "attn_sconv.weight"))
    rows = rows + [out] if first else rows[:-1] + [rows[-1] + out]
    x = gated(3, ink_read(rows, W.get(f"model.llm.attn_res.mlp_queries.{layer}")))
    x = ink_experts(W, config, rms(x, W.get(p + "mlp_norm.weight"), config["rms_norm_eps"]), p + "mlp.")
    return rows[:-1] + [rows[-1] + ink_conv(x, ink_taps(W, p + "mlp_sconv.weight"))]


def ink_trunk(W, config, ids):
    """The rows after the final norm."""
    start, end = config.get("loop_layer_index_start", 0), config.get("loop_layer_index_end", 0)
    rows = [rms(W.get("model.llm.embed.weight")[ids], W.get("model.llm.embed_norm.weight"), config["rms_norm_eps"])]
    for layer in range(end):
        rows = ink_layer(W, config, rows, layer, None)
    kept = 1 + start // config["n_layers_per_attn_res_block"]
    for _ in range(1, config.get("loop_num_passes", 1)):
        messages, rows = rows[kept:], rows[:kept]
        for layer in range(start, end):
            rows = ink_layer(W, config, rows, layer, messages)
    for layer in range(end, config["num_hidden_layers"]):
        rows = ink_layer(W, config, rows, layer, None)
    x = ink_read(rows, W.get("model.llm.attn_res.output_query"))
    return rms(x, W.get("model.llm.norm.weight"), config["rms_norm_eps"])


def streams(W, config, X, p):
    """What a half of a layer reads of the streams X [n, count, hidden], whose names begin with p, and how much of its
    result each stream gets [n, count], or None."""
    n, count, _ = X.shape
    z = rms(X, 1 + W.get(p + "hc_norm.weight").reshape(count, -1), config["rms_norm_eps"])
    flat = z.reshape(n, -1)
    low = silu(flat @ W.get(p + "input_mix_weight_down.weight").T / count)
    part = sigmoid(low @ W.get(p + "input_mix_weight_up.weight").T).reshape(z.shape)
    inject = p + "block_inject_weight.weight"
    return (part * z).mean(1), 2 * sigmoid(flat @ W.get(inject).T / count) if W.has(inject) else None


def primes(start):
    """Those from `start` on."""
    while True:
        if start > 1 and all(start % d for d in range(2, math.isqrt(start) + 1)):
            yield start
        start += 1


def multiplier(config, i):
    """That of the token i before the latest, of the first table (SplitMix64)."""
    mask, gamma = 2 ** 64 - 1, 0x9E3779B97F4A7C15
    z = (config["seed"] + gamma * (i + 2)) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return 2 * ((z ^ z >> 31) % max(1, (2 ** 63 - 1) // config["vocab_size"] // 2)) + 1


def ngram_rows(W, config, ids, p):
    """The rows of the table of n-grams for each token [n, values].  How they are found is computed, and has to be what
    the checkpoint says."""
    size, each = config["ngram_size"], config["heads_per_ngram"]
    end = int(np.atleast_1d(config["eos_token_id"])[0])
    some = primes(config["ngram_vocab_size_base"])
    counts = [next(some) for _ in range((size - 1) * each)]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    multipliers = [multiplier(config, i) for i in range(size)]
    for leaf, own in {"layer_multipliers": multipliers, "ngram_heads_vocab_sizes": counts,
                      "ngram_heads_offsets": starts}.items():
        assert W.plain(p + leaf).tolist() == own, leaf
    path = p + "ngram_embedding."
    scale = float(W.plain(path + "weight_scale")[0]) if W.has(path + "weight_scale") else 1
    table = np.concatenate([W.plain(f"{path}shard_{i}.weight") for i in range(config["split_ngram_parts"])]) * scale
    unit = config["make_ngram_vocab_size_divisible_by"]
    assert len(table) == -(-sum(counts) // unit) * unit
    out = []
    for t in range(len(ids)):
        before = []
        for i in range(size):  # the end of a text is seen, and nothing before it
            before.append(end if t < i or end in before[1:] else int(ids[t - i]))
        for j, (count, start) in enumerate(zip(counts, starts)):
            z = 0
            for token, m in zip(before[:2 + j // each], multipliers):
                z ^= token * m
            out.append(table[z % count + start])
    return np.array(out, float).reshape(len(ids), -1)


def ngrams(W, config, ids, X, p):
    """What the table of n-grams adds to the streams X."""
    n, count, hidden = X.shape
    e, eps = ngram_rows(W, config, ids, p + "ple_embedding."), config["rms_norm_eps"]
    normed = lambda t, name: rms(t, 1 + W.get(f"{p}norm_{name}.weight").reshape(count, -1), eps)
    key = normed((e @ W.get(p + "key_proj.weight").T).reshape(X.shape), "key")
    gate = (key * normed(X, "query")).sum(-1) / math.sqrt(hidden)
    gate = np.sign(gate) * np.sqrt(np.maximum(np.abs(gate), 1e-6))
    value = sigmoid(gate)[..., None] * (e @ W.get(p + "value_proj.weight").T)[:, None]
    taps, apart = W.get(p + "conv1d.weight")[:, 0], config["ngram_size"]  # the last tap is the token itself
    reach = (taps.shape[1] - 1) * apart
    padded = np.concatenate([np.zeros((reach, count * hidden)), normed(value, "conv").reshape(n, -1)])
    conv = sum(padded[j * apart:j * apart + n] * taps[:, j] for j in range(taps.shape[1]))
    return value + silu(conv).reshape(X.shape)


def qwen4_body(W):
    return next(p for p in ("model.", "model.language_model.") if W.has(p + "embed_tokens.weight"))


def qwen4_block(W, config, X, p, linear):
    """One layer, whose names begin with p.  linear: its attention is."""
    for half in ("attn", "mlp"):
        h, inject = streams(W, config, X, f"{p}{half}_hyper_connection.")
        if half == "mlp":
            y = moe(W, config, h, p + "mlp.")
        elif linear:
            y = delta_net(W, config, h, p + "linear_attn.")
        else:
            y = qwen_attention(W, config, h, p + "self_attn.")
        X = X + inject[..., None] * y[:, None]
    return X


def qwen4_streams(W, config, ids):
    """The streams behind the last layer."""
    body = qwen4_body(W)
    X = np.repeat(W.get(body + "embed_tokens.weight")[ids][:, None], config["hc_count"], 1)
    for layer in range(config["num_hidden_layers"]):
        p = f"{body}layers.{layer}."
        if layer + 1 in config["ple_layer_ids"]:
            X = X + ngrams(W, config, ids, X, p + "ple.")
        X = qwen4_block(W, config, X, p, is_linear(config, layer))
    return X


def qwen4_trunk(W, config, ids):
    """The rows that the head reads."""
    return streams(W, config, qwen4_streams(W, config, ids), qwen4_body(W) + "hyper_connection_mixer.")[0]


def qwen4_predict(W, config, ids, last):
    """As v4_predict(), for Qwen3.8-Flash-Next, whose streams are normed as one row."""
    trunk, eps = qwen4_streams(W, config, ids)[:-1], config["rms_norm_eps"]
    table, rows = W.get(qwen4_body(W) + "embed_tokens.weight"), trunk[:last]
    normed = lambda x, name: rms(x, 1 + W.get(f"mtp.pre_fc_norm_{name}.weight"), eps)
    while True:
        token = normed(table[ids[1:len(rows) + 1]], "embedding") @ W.get("mtp.fc_embedding.weight").T
        own = normed(rows.reshape(len(rows), -1), "hidden").reshape(rows.shape) @ W.get("mtp.fc_hidden.weight").T
        out = qwen4_block(W, config, token[:, None] + own, "mtp.layers.0.", False)
        if len(rows) == len(trunk):
            return streams(W, config, out, "mtp.hyper_connection_mixer.")[0] @ head(W, config).T
        rows = np.concatenate([rows, out[-1:]])


def is_linear(config, layer):
    if config.get("layer_types"):
        return config["layer_types"][layer] == "linear_attention"
    return (layer + 1) % config["full_attention_interval"] != 0


def text_part(config):
    """The part that describes the language model, in the words of most families too."""
    outer = {k: config[k] for k in ("model_type", "tie_word_embeddings")}
    text = {**outer, **config.get("text_config", config)}
    words = {"num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
             "moe_renormalize": "norm_topk_prob"}
    if text["model_type"] in ("kimi_linear", "bailing_hybrid"):
        words["num_shared_experts"] = "n_shared_experts"
    if text["model_type"] == "glm5_next_text":
        nested = text.get("linear_attn_config")
        text["kda_lower_bound"] = nested["gate_lower_bound"] if nested else text["linear_lower_bound"]
    return {**text, **{other: text[k] for k, other in words.items() if k in text}}


def prefix(W):
    return next(p for p in ("model.", "model.language_model.", "language_model.model.")
                if W.has(p + "norm.weight") or W.has(p + "embedding_norm.weight"))


def norm(W, config, x, name):
    if config["model_type"] == "phimoe":
        return layer_norm(x, W.get(name), W.get(name.replace("weight", "bias")), config["rms_norm_eps"])
    if "layer_norm_eps" in config and not config["rms_norm_eps"]:
        return layer_norm(x, W.get(name), 0, config["layer_norm_eps"])
    eps = next(config[k] for k in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon") if k in config)
    return rms(x, W.get(name) + centred(config), eps)


def block(W, config, x, p, layer):
    """One layer, whose names begin with p.  layer: its number; None: it stands behind the others, all of a kind."""
    if r := rules(config, layer):
        after = lambda y, i: norm(W, config, y, f"{p}{r['after'][i]}.weight") if r["after"] else y * r["residual"]
        h = norm(W, config, x, p + "input_layernorm.weight")
        if r["parallel"]:
            return x + attention(W, config, r, h, p + r["mixer"]) + feed_forward(W, r, h, p)
        x = x + after(mamba(W, granite_mamba(config), h, p + "mamba.") if r["mamba"] else
                      attention(W, config, r, h, p + r["mixer"]), 0)
        before = r["before"] or next(name for name in ("post_attention_layernorm", "pre_mlp_layernorm") if W.has(f"{p}{name}.weight"))
        return x + after(feed_forward(W, r, norm(W, config, x, f"{p}{before}.weight"), p), 1)
    own = "attention." if config["model_type"] == "bailing_hybrid" else "self_attn."
    if is_kda(config, layer):
        mixer, at = kda, own
    elif "linear_num_key_heads" not in config:
        latent = lambda *args: mla(*args, layer)
        mixer, at = latent if "kv_lora_rank" in config else gqa, own
    elif layer is not None and is_linear(config, layer):
        mixer, at = delta_net, "linear_attn."
    else:
        mixer, at = qwen_attention, "self_attn."
    x = x + mixer(W, config, norm(W, config, x, p + "input_layernorm.weight"), p + at)
    h = norm(W, config, x, p + "post_attention_layernorm.weight")
    for name in ("mlp.", "block_sparse_moe."):
        if W.has(router(W, p + name)):
            return x + moe(W, config, h, p + name)
    return x + ffn(W, h, p + "mlp.", clamped(config))


def longcat_trunk(W, config, ids):
    """The rows after the final norm of LongCat-Flash."""
    x = W.get("model.embed_tokens.weight")[ids]
    for layer in range(config["num_layers"]):
        p = f"model.layers.{layer}."
        for half in range(2):
            x = x + mla(W, config, norm(W, config, x, f"{p}input_layernorm.{half}.weight"), f"{p}self_attn.{half}.", layer)
            h = norm(W, config, x, f"{p}post_attention_layernorm.{half}.weight")
            read = h if half == 0 else read  # by the experts, whose sum comes after the second half
            x = x + ffn(W, h, f"{p}mlps.{half}.")
        score = softmax(read @ W.get(p + "mlp.router.classifier.weight").T)
        best = np.argsort(-(score + W.get(p + "mlp.router.e_score_correction_bias")), -1)[:, :config["moe_topk"]]
        weight = np.take_along_axis(score, best, -1) * config["routed_scaling_factor"]
        for e in range(score.shape[1]):
            token, slot = np.nonzero(best == e)
            own = read[token] if e >= config["n_routed_experts"] else ffn(W, read[token], f"{p}mlp.experts.{e}.")
            x[token] += weight[token, slot, None] * own
    return norm(W, config, x, "model.norm.weight")


def llama4_trunk(W, config, ids):
    """The rows after the final norm of Llama 4."""
    x, n, d = W.get("model.embed_tokens.weight")[ids], len(ids), config["head_dim"]
    position, eps = np.arange(n), config["rms_norm_eps"]
    inv, scaling = config["rope_theta"] ** (-2.0 * np.arange(d // 2) / d), config["rope_scaling"]
    if scaling:  # no frequency lies between the two limits, which are the same
        assert scaling["low_freq_factor"] == scaling["high_freq_factor"]
        slow = 2 * math.pi / inv > scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        inv = np.where(slow, inv / scaling["factor"], inv)
    angle = position[:, None, None] * inv
    cos, sin = np.cos(angle), np.sin(angle)
    for layer in range(config["num_hidden_layers"]):
        p, chunked = f"model.layers.{layer}.", (layer + 1) % 4 != 0
        h = norm(W, config, x, p + "input_layernorm.weight")
        q, k, v = ((h @ W.get(f"{p}self_attn.{c}_proj.weight").T).reshape(n, -1, d) for c in "qkv")
        seen = position[:, None] >= position
        if chunked:
            turn = lambda t: np.stack([t[..., ::2] * cos - t[..., 1::2] * sin, t[..., 1::2] * cos + t[..., ::2] * sin],
                                      -1).reshape(t.shape)
            q, k = turn(q), turn(k)
            seen &= position[:, None] // config["attention_chunk_size"] == position // config["attention_chunk_size"]
            if config["use_qk_norm"]:
                q, k = rms(q, 1, eps), rms(k, 1, eps)
        else:
            q = q * (1 + config["attn_scale"] * np.log1p((position + 1) // config["floor_scale"]))[:, None, None]
        x = x + attend(q, k, v, d ** -0.5, chosen=seen) @ W.get(p + "self_attn.o_proj.weight").T
        h, p = norm(W, config, x, p + "post_attention_layernorm.weight"), p + "feed_forward."
        if not W.has(p + "router.weight"):
            x = x + ffn(W, h, p)
            continue
        logits = h @ W.get(p + "router.weight").T
        best = np.argsort(-logits, -1)[:, :config["num_experts_per_tok"]]
        x = x + ffn(W, h, p + "shared_expert.")
        for e in range(logits.shape[1]):
            token, _ = np.nonzero(best == e)
            read = h[token] * sigmoid(logits[token, e])[:, None]
            if W.has(p + "experts.gate_up_proj"):
                gate, up = np.split(read @ W.get(p + "experts.gate_up_proj")[e], 2, -1)
                x[token] += swiglu(gate, up) @ W.get(p + "experts.down_proj")[e]
            else:
                x[token] += ffn(W, read, f"{p}experts.{e}.")
    return norm(W, config, x, "model.norm.weight")


def arctic_trunk(W, config, ids):
    """The rows after the final norm of Arctic."""
    x, n, names = W.get("model.embed_tokens.weight")[ids], len(ids), ("w1", "w3", "w2")
    d = config["hidden_size"] // config["num_attention_heads"]
    turn = np.exp(1j * np.arange(n)[:, None, None] * config["rope_theta"] ** (-2.0 * np.arange(d // 2) / d))
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h, early = (norm(W, config, x, f"{p}{name}_layernorm.weight") for name in ("input", "post_attention"))
        q, k, v = ((h @ W.get(f"{p}self_attn.{c}_proj.weight").T).reshape(n, -1, d) for c in "qkv")
        q, k = ((t[..., :d // 2] + 1j * t[..., d // 2:]) * turn for t in (q, k))
        q, k = (np.concatenate([t.real, t.imag], -1) for t in (q, k))
        x = x + attend(q, k, v, d ** -0.5) @ W.get(p + "self_attn.o_proj.weight").T
        x = x + ffn(W, norm(W, config, x, p + "residual_layernorm.weight"), p + "residual_mlp.", swiglu, names)
        p += "block_sparse_moe."
        logits = early @ W.get(p + "gate.weight").T
        best = np.argsort(-logits, -1)[:, :config["num_experts_per_tok"]]
        weight = softmax(np.take_along_axis(logits, best, -1))
        for e in range(logits.shape[1]):
            token, slot = np.nonzero(best == e)
            x[token] += weight[token, slot, None] * ffn(W, early[token], f"{p}experts.{e}.", swiglu, names)
    return norm(W, config, x, "model.norm.weight")


def thinker_trunk(W, config, ids):
    """The rows after the final norm of SmallThinker."""
    x, n, d = W.get("model.embed_tokens.weight")[ids], len(ids), config["head_dim"]
    for layer, (window, turned) in enumerate(zip(config["sliding_window_layout"], config["rope_layout"])):
        p = f"model.layers.{layer}."
        logits = x @ W.get(p + "block_sparse_moe.primary_router.weight").T
        best = np.argsort(-logits, -1)[:, :config["moe_num_active_primary_experts"]]
        weight = np.take_along_axis(logits, best, -1)
        weight = softmax(weight) if config["moe_primary_router_apply_softmax"] else sigmoid(weight)
        weight = weight / weight.sum(-1, keepdims=True)
        h = norm(W, config, x, p + "input_layernorm.weight")
        q, k, v = ((h @ W.get(f"{p}self_attn.{c}_proj.weight").T).reshape(n, -1, d) for c in "qkv")
        if turned:
            angle = np.arange(n)[:, None, None] * config["rope_theta"] ** (-2.0 * np.arange(d // 2) / d)
            turn = lambda t: np.concatenate([t[..., :d // 2] * np.cos(angle) - t[..., d // 2:] * np.sin(angle),
                                             t[..., d // 2:] * np.cos(angle) + t[..., :d // 2] * np.sin(angle)], -1)
            q, k = turn(q), turn(k)
        y = attend(q, k, v, d ** -0.5, config["sliding_window_size"] if window else None)
        x = x + y @ W.get(p + "self_attn.o_proj.weight").T
        h = norm(W, config, x, p + "post_attention_layernorm.weight")
        for e in range(logits.shape[1]):
            token, slot = np.nonzero(best == e)
            x[token] += weight[token, slot, None] * ffn(W, h[token], f"{p}block_sparse_moe.experts.{e}.",
                                                        lambda g, u: np.maximum(g, 0) * u, ("gate", "up", "down"))
    return norm(W, config, x, "model.norm.weight")


def lfm2_trunk(W, config, ids):
    """The rows after the final norm of LFM2."""
    x, n, d = W.get("model.embed_tokens.weight")[ids], len(ids), config["hidden_size"] // config["num_attention_heads"]
    named = lambda t, name: rms(t, W.get(name + ".weight"), config["norm_eps"])
    for layer, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{layer}."
        h = named(x, p + "operator_norm")
        if kind == "conv":
            before, after, v = np.split(h @ W.get(p + "conv.in_proj.weight").T, 3, -1)
            taps = W.get(p + "conv.conv.weight")[:, 0]  # the last tap is the token itself
            padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), before * v])
            y = after * sum(padded[j:j + n] * taps[:, j] for j in range(taps.shape[1]))
            x = x + y @ W.get(p + "conv.out_proj.weight").T
        else:
            q, k, v = ((h @ W.get(f"{p}self_attn.{c}_proj.weight").T).reshape(n, -1, d) for c in "qkv")
            q, k = named(q, p + "self_attn.q_layernorm"), named(k, p + "self_attn.k_layernorm")
            cos, sin, _ = rope_tables(config, n, d)
            turn = lambda t: np.concatenate(
                [t[..., :d // 2] * cos[:, None] - t[..., d // 2:] * sin[:, None],
                 t[..., d // 2:] * cos[:, None] + t[..., :d // 2] * sin[:, None]], -1)
            x = x + attend(turn(q), turn(k), v, d ** -0.5) @ W.get(p + "self_attn.out_proj.weight").T
        h, p = named(x, p + "ffn_norm"), p + "feed_forward."
        names = "w1", "w3", "w2"
        x = x + (ffn(W, h, p, swiglu, names) if layer < config["num_dense_layers"] else moe(W, config, h, p))
    return named(x, "model.embedding_norm")


def glm5_trunk(W, config, ids):
    """The rows after the final norm of GLM-5.3-Flash, whose layers read and write several streams of residuals.  Their
    mean is the last row."""
    streams = np.repeat(W.get(embedding(W))[ids][:, None], config["hc_mult"], 1)
    for layer in range(config["num_hidden_layers"]):
        p = f"{prefix(W)}layers.{layer}."
        for half in ("attn", "ffn"):
            read, write, mix = v4_mix(W, config, streams, f"{p}hc_{half}_")
            x, before = np.einsum("nj,njd->nd", read, streams), "input" if half == "attn" else "post_attention"
            x = norm(W, config, x, f"{p}{before}_layernorm.weight")
            if half == "ffn":
                y = (moe(W, config, x, p + "mlp.") if W.has(p + "mlp.gate.weight")
                     else ffn(W, x, p + "mlp.", clamped(config)))
            elif is_kda(config, layer):
                y = kda(W, config, x, p + "self_attn.")
            else:
                y = mla(W, config, x, p + "self_attn.", layer)
            streams = write[:, :, None] * y[:, None] + np.einsum("njk,njd->nkd", mix, streams)
    return norm(W, config, streams.mean(1), prefix(W) + "norm.weight")


def hy4_trunk(W, config, ids):
    """The rows after the final norm of Hunyuan 4, whose streams are not mixed."""
    streams = np.repeat(W.get(embedding(W))[ids][:, None], config["hc_mult"], 1)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for half, before in ("attn", "input"), ("mlp", "post_attention"):
            read, write, _ = v4_mix(W, config, streams, f"{p}hc_{half}_layer.hc_pre.hc_")
            x = norm(W, config, np.einsum("nj,njd->nd", read, streams), f"{p}{before}_layernorm.weight")
            if half == "attn":
                y = mla(W, config, x, p + "self_attn.", layer)
            else:
                y = moe(W, config, x, p + "mlp.") if W.has(p + "mlp.gate.weight") else ffn(W, x, p + "mlp.")
            streams = streams + write[:, :, None] * y[:, None]
    return v4_last(W, config, streams, "model.hc_head.hc_head_", "model.norm.weight")


def k3_situ(config):
    cap = lambda x, c: c * np.tanh(x / c)
    return lambda gate, up: cap(gate, config["activation_situ_beta"]) * sigmoid(gate) * cap(
        up, config["activation_situ_linear_beta"])


def k3_ffn(W, config, x, p):
    """p: of the layer."""
    situ, at = k3_situ(config), p + "block_sparse_moe."
    if not W.has(at + "gate.weight"):
        return ffn(W, x, p + "mlp.", situ)
    score = sigmoid(x @ W.get(at + "gate.weight").T)
    best = np.argsort(-score - W.get(at + "gate.e_score_correction_bias"), -1)[:, :config["num_experts_per_token"]]
    weight = np.take_along_axis(score, best, -1)
    weight = weight / weight.sum(-1, keepdims=True) * config["routed_scaling_factor"]
    down = x @ W.get(at + "routed_expert_down_proj.weight").T
    latent = np.zeros_like(down)
    for e in range(score.shape[1]):
        token, slot = np.nonzero(best == e)
        latent[token] += weight[token, slot, None] * ffn(W, down[token], f"{at}experts.{e}.", situ, ("w1", "w3", "w2"))
    latent = rms(latent, W.get(at + "routed_expert_norm.weight"), config["rms_norm_eps"])
    return latent @ W.get(at + "routed_expert_up_proj.weight").T + ffn(W, x, at + "shared_experts.", situ)


def k3_trunk(W, config, ids):
    """The rows after the final norm of Kimi-K3, whose halves read the embedding and the sums of blocks of layers."""
    eps, body = config["rms_norm_eps"], "language_model.model."
    config = config | {"kda_lower_bound": config["linear_attn_config"]["gate_lower_bound"]}

    def read(blocks, name):
        rows = np.stack(blocks)
        query = W.get(name + "_norm.weight") * W.get(name + "_proj.weight").reshape(-1)
        return (softmax((rms(rows, 1, eps) @ query).T).T[..., None] * rows).sum(0)

    blocks = [W.get(body + "embed_tokens.weight")[ids]]
    for layer in range(config["num_hidden_layers"]):
        p = f"{body}layers.{layer}."
        x = rms(read(blocks, p + "self_attention_res"), W.get(p + "input_layernorm.weight"), eps)
        y = (kda if is_kda(config, layer) else lambda *args: mla(*args, layer))(W, config, x, p + "self_attn.")
        blocks = [*blocks, y] if layer % config["attn_res_block_size"] == 0 else [*blocks[:-1], blocks[-1] + y]
        x = rms(read(blocks, p + "mlp_res"), W.get(p + "post_attention_layernorm.weight"), eps)
        blocks = [*blocks[:-1], blocks[-1] + k3_ffn(W, config, x, p)]
    return rms(read(blocks, body + "output_attn_res"), W.get(body + "norm.weight"), eps)


def gelu(gate, up):
    return gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3))) / 2 * up


def gemma4_attention(W, config, x, p, layer):
    """Values are normed without weights; without a window they may be the products of keys."""
    windowed = config["layer_types"][layer] == "sliding_attention"
    rope = config["rope_parameters"][config["layer_types"][layer]]
    k = linear(W, x, p + "k_proj")
    v = linear(W, x, p + "v_proj") if W.has(p + "v_proj.weight") else k
    assert W.has(p + "v_proj.weight") == (windowed or not config["attention_k_eq_v"])
    d = len(W.get(p + "q_norm.weight"))
    full = config.get("per_layer_config", {}).get(str(layer), {"head_dim": config.get("global_head_dim")})
    assert d == (config["head_dim"] if windowed else full["head_dim"])
    q, k, v = (t.reshape(len(x), -1, d) for t in (linear(W, x, p + "q_proj"), k, v))
    q, k = (norm(W, config, t, f"{p}{c}_norm.weight") for t, c in ((q, "q"), (k, "k")))
    half = d // 2
    inv = rope["rope_theta"] ** (-2.0 * np.arange(half) / d)
    inv[int(rope.get("partial_rotary_factor", 1) * d) // 2:] = 0
    angle = np.arange(len(x))[:, None, None] * inv
    turn = lambda t: np.concatenate([t[..., :half] * np.cos(angle) - t[..., half:] * np.sin(angle),
                                     t[..., half:] * np.cos(angle) + t[..., :half] * np.sin(angle)], -1)
    y = attend(turn(q), turn(k), rms(v, 1, config["rms_norm_eps"]), 1, config["sliding_window"] if windowed else None)
    return linear(W, y, p + "o_proj")


def gemma4_experts(W, config, x, p):
    """x: the residual."""
    eps, h = config["rms_norm_eps"], norm(W, config, x, p + "pre_feedforward_layernorm_2.weight")
    score = softmax(rms(x, W.get(p + "router.scale") * x.shape[1] ** -0.5, eps) @ W.get(p + "router.proj.weight").T)
    best = np.argsort(-score, -1)[:, :config["top_k_experts"]]
    weight = np.take_along_axis(score, best, -1)
    weight = weight / weight.sum(-1, keepdims=True) * W.get(p + "router.per_expert_scale")[best]
    y = np.zeros_like(x)
    for e in range(config["num_experts"]):
        token, slot = np.nonzero(best == e)
        if W.has(p + "experts.gate_up_proj"):
            gate, up = np.split(W.get(p + "experts.gate_up_proj")[e], 2)
            part = gelu(h[token] @ gate.T, h[token] @ up.T) @ W.get(p + "experts.down_proj")[e].T
        else:
            part = ffn(W, h[token], f"{p}experts.{e}.", gelu)
        y[token] += weight[token, slot, None] * part
    return y


def gemma4_trunk(W, config, ids):
    """The rows after the final norm of Gemma 4."""
    x = W.get(embedding(W))[ids] * math.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        p = f"{prefix(W)}layers.{layer}."
        named = lambda y, name: norm(W, config, y, f"{p}{name}.weight")
        y = gemma4_attention(W, config, named(x, "input_layernorm"), p + "self_attn.", layer)
        x = x + named(y, "post_attention_layernorm")
        y = ffn(W, named(x, "pre_feedforward_layernorm"), p + "mlp.", gelu)
        if config["enable_moe_block"]:
            y = (named(y, "post_feedforward_layernorm_1")
                 + named(gemma4_experts(W, config, x, p), "post_feedforward_layernorm_2"))
        x = (x + named(y, "post_feedforward_layernorm")) * W.get(p + "layer_scalar")
    return norm(W, config, x, prefix(W) + "norm.weight")


def dbrx_experts(W, config, x, p):
    """The experts of DBRX, whose matrices stand one below the other, those of down transposed, or are linear layers."""
    experts, k = config["ffn_config"]["moe_num_experts"], config["ffn_config"]["moe_top_k"]
    score = softmax(linear(W, x, p + "router.layer"))
    best = np.argsort(-score, -1)[:, :k]
    weight = np.take_along_axis(score, best, -1)
    weight = weight / weight.sum(-1, keepdims=True)
    y = np.zeros_like(x)
    for e in range(experts):
        token, slot = np.nonzero(best == e)
        if W.has(p + "experts.mlp.w1"):
            gate, up, down = (np.split(W.get(f"{p}experts.mlp.{c}"), experts)[e] for c in ("w1", "v1", "w2"))
        else:
            gate, up, down = (W.get(f"{p}experts.mlp.{c}_linear.{e}.weight") for c in ("w1", "v1", "w2"))
            down = down.T
        y[token] += weight[token, slot, None] * (swiglu(x[token] @ gate.T, x[token] @ up.T) @ down)
    return y


def dbrx_trunk(W, config, ids):
    """The rows after the final norm of DBRX."""
    attn, heads, d = config["attn_config"], config["n_heads"], config["d_model"] // config["n_heads"]
    named = lambda x, name: layer_norm(x, W.get(name + ".weight"), 0, 1e-5)
    x = W.get("transformer.wte.weight")[ids]
    rope = {"rope_theta": attn["rope_theta"]}
    cos, sin, _ = rope_tables({"rope_parameters": rope}, len(ids), d)
    for layer in range(config["n_layers"]):
        p = f"transformer.blocks.{layer}.norm_attn_norm."
        qkv = np.clip(linear(W, named(x, p + "norm_1"), p + "attn.Wqkv"), -attn["clip_qkv"], attn["clip_qkv"])
        q, k, v = (t.reshape(len(ids), -1, d)
                   for t in np.split(qkv, [heads * d, (heads + attn["kv_n_heads"]) * d], -1))
        q, k = (turn_halves(t, cos[:, None], sin[:, None]) for t in (q, k))
        x = x + linear(W, attend(q, k, v, d ** -0.5), p + "attn.out_proj")
        x = x + dbrx_experts(W, config, named(x, p + "norm_2"), f"transformer.blocks.{layer}.ffn.")
    return named(x, "transformer.norm_f")


def embedding(W):
    """The name of the embedding."""
    return prefix(W) + ("word_embeddings.weight" if W.has(prefix(W) + "word_embeddings.weight")
                        else "embed_tokens.weight")


def head(W, config):
    if config["model_type"] in ("deepseek_v4", "deepseek_v41_text"):
        return W.get("head.weight")
    if config["model_type"] in ("nemotron_h", "qwen4_exp_text", "dbrx"):
        return W.get("lm_head.weight")
    if config["model_type"].startswith("inkling2"):
        return W.get("model.llm.unembed.weight")
    if config["tie_word_embeddings"]:
        return W.get(embedding(W))
    if config.get("norm_head"):
        w = W.get("lm_head.weight")
        return w / (np.sqrt((w * w).sum(0)) + 1e-7)
    return W.get("language_model." * prefix(W).startswith("language_model.") + "lm_head.weight")


def last_rows(W, config, ids):
    """The rows before the final norm."""
    x = W.get(embedding(W))[ids] * config.get("embedding_multiplier", 1)
    x *= math.sqrt(config["hidden_size"]) if config.get("mup_enabled") else 1
    for layer in range(config["num_hidden_layers"]):
        x = block(W, config, x, f"{prefix(W)}layers.{layer}.", layer)
    return x


def trunk(W, config, ids):
    """The rows after the final norm."""
    if config["model_type"] == "deepseek_v4":
        return v4_trunk(W, config, ids)
    if config["model_type"] == "lfm2_moe":
        return lfm2_trunk(W, config, ids)
    if config["model_type"] == "llama4_text":
        return llama4_trunk(W, config, ids)
    if config["model_type"] == "arctic":
        return arctic_trunk(W, config, ids)
    if config["model_type"] == "longcat_flash":
        return longcat_trunk(W, config, ids)
    if config["model_type"] == "smallthinker":
        return thinker_trunk(W, config, ids)
    if config["model_type"] == "deepseek_v41_text":
        return v41_trunk(W, config, ids)
    if config["model_type"] == "nemotron_h":
        return nemotron_trunk(W, config, ids)
    if config["model_type"].startswith("inkling2"):
        return ink_trunk(W, config, ids)
    if config["model_type"] == "glm5_next_text":
        return glm5_trunk(W, config, ids)
    if config["model_type"] == "hy_v4":
        return hy4_trunk(W, config, ids)
    if "attn_res_block_size" in config:
        return k3_trunk(W, config, ids)
    if config["model_type"] == "qwen4_exp_text":
        return qwen4_trunk(W, config, ids)
    if config["model_type"] == "dbrx":
        return dbrx_trunk(W, config, ids)
    if config["model_type"] == "gemma4_text":
        return gemma4_trunk(W, config, ids)
    return norm(W, config, last_rows(W, config, ids), prefix(W) + "norm.weight")


def mtp_names(W, config):
    """What the names of the layer for multi-token prediction begin with, and four names; None: there is none."""
    join = f"layers.{config['num_hidden_layers']}.eh_proj.weight"
    own = next((name.removesuffix("eh_proj.weight") for name in W.raw
                if name.endswith((join, "mtp_layers.0.eh_proj.weight"))), None)
    if W.has("mtp.fc.weight"):
        return "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
    if own:
        last = "final_layernorm" if W.has(own + "final_layernorm.weight") else "shared_head.norm"
        return own, own + "enorm", own + "hnorm", own + "eh_proj", own + last
    return None


def predict(W, config, ids, hidden):
    """Row t says what follows token t + 1, from that token and the trunk's row t."""
    p, of_token, of_row, join, last = mtp_names(W, config)
    table, out = p + "embed_tokens.weight", p + "shared_head.head.weight"
    token = W.get(table if W.has(table) else embedding(W))[ids[1:]]
    both = norm(W, config, token, of_token + ".weight"), norm(W, config, hidden[:-1], of_row + ".weight")
    x = block(W, config, np.concatenate(both, -1) @ W.get(join + ".weight").T, p, None)
    return norm(W, config, x, last + ".weight") @ (W.get(out) if W.has(out) else head(W, config)).T


def chained(W, config):
    """What the names of the layers begin with that take each other's rows, and those of their last norm and head."""
    n, last = config["num_hidden_layers"], "transformer.shared_head."
    if W.has("model.mtp.layers.0.eh_proj.weight"):
        count = sum(name.endswith(".eh_proj.weight") for name in W.raw)
        return [(f"model.mtp.layers.{i}.", "final_layernorm.weight", None) for i in range(count)]
    return [(f"model.layers.{i}.", last + "norm.weight", last + "output.weight")
            for i in range(n, n + config.get("num_nextn_predict_layers", 0))
            if W.has(f"model.layers.{i}.{last}norm.weight")]


def predict_chain(W, config, ids):
    """Several layers, each on the rows of that before it, which are not normed; the first on the trunk's."""
    rows, out = last_rows(W, config, ids), []
    for i, (p, last, output) in enumerate(chained(W, config)):
        token, rows = W.get("model.embed_tokens.weight")[ids[1 + i:]], rows[:-1]
        both = norm(W, config, token, p + "enorm.weight"), norm(W, config, rows, p + "hnorm.weight")
        joined = np.concatenate(both, -1) @ W.get(p + "eh_proj.weight").T
        rows = block(W, config, joined, p, config["num_hidden_layers"] + i)
        out.append(norm(W, config, rows, p + last) @ (W.get(p + output) if output else head(W, config)).T)
    return np.concatenate(out)


def nmse(got, path):
    want = np.fromfile(path, "<f4").reshape(got.shape).astype(float)
    return ((got - want) ** 2).sum() / (want ** 2).sum()


def check(folder):
    config, W = text_part(json.loads((folder / "config.json").read_text())), Weights(folder)
    if config["model_type"] == "nemotron_h":
        config.setdefault("num_hidden_layers", len(nemotron_kinds(config)))
    for name in ("n_layers", "num_layers"):
        if name in config:
            config["num_hidden_layers"] = config[name]
    ids = np.fromfile(folder / "ids.i32", "<i4")
    hidden = trunk(W, config, ids)
    bias = W.get("lm_head.bias") if W.has("lm_head.bias") else 0
    logits = (hidden @ head(W, config).T + bias) / config.get("logits_scaling", 1) * config.get("logit_scale", 1)
    if config.get("final_logit_softcapping"):
        logits = np.tanh(logits / config["final_logit_softcapping"]) * config["final_logit_softcapping"]
    errors = [nmse(logits, folder / "logits.f32")]
    if W.has("mtp.0.e_proj.weight") or W.has("mtp.fc_hidden.weight"):
        one = v4_predict if W.has("mtp.0.e_proj.weight") else qwen4_predict
        errors.append(nmse(one(W, config, ids, len(ids)), folder / "predict.f32"))
        errors.append(nmse(drafts(one, W, config, ids), folder / "drafts.f32"))
    elif W.has("mtp.layers.1.final_layernorm.weight"):
        errors.append(nmse(nemotron_predict(W, config, ids, hidden), folder / "predict.f32"))
    elif chained(W, config):
        errors.append(nmse(predict_chain(W, config, ids), folder / "predict.f32"))
    elif mtp_names(W, config):
        errors.append(nmse(predict(W, config, ids, hidden), folder / "predict.f32"))

    (start, tail), = json.loads((folder / "greedy.json").read_text()).items()
    start = int(start.rpartition("_")[2])
    seen = (trunk(W, config, np.concatenate([ids[:start], tail])) @ head(W, config).T + bias)[start - 1:-1].argmax(-1)

    ignored = ("model.visual.", "vision_model.", "vision_tower.", "vit_large_projector.", "multi_modal_projector.", "patch_merge_mlp.",
               "k_proj.k_scale", "v_proj.v_scale")
    if config["model_type"] == "deepseek_v41_text":
        ignored += "vision.", "aligner.", "image_", "mtp.", ".gate.bias_vl"
    if config["model_type"] == "longcat_flash":
        ignored += "model.mtp.",
    if config["model_type"] in ("hy_v4", "dots3_note"):
        ignored += "model.mtp", f"model.layers.{config['num_hidden_layers']}."
    unread = [n for n in W.raw if n not in W.used and not any(i in n for i in ignored)]
    good = max(errors) < LIMIT and list(seen) == tail and not unread
    numbers, verdict = " ".join(f"{e:.1e}" for e in errors), "same" if list(seen) == tail else "DIFFERS"
    print(f"{folder.name:20} NMSE {numbers:15}  greedy {verdict}  tensors {len(W.raw):4}  "
          f"unread {len(unread)} {unread[:3] or ''} {'ok' if good else 'FAILED'}")
    return good


def main():
    folders = [FIXTURES / n for n in sys.argv[1:]] or sorted(p.parent for p in FIXTURES.glob("*/config.json"))
    results = [check(folder) for folder in folders]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
