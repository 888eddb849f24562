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
import sys
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
        self.raw, self.used = {}, set()
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
            x = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "U8": "u1"}[dtype])
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
        if not self.has(name + "_scale"):
            return self.plain(name).astype(float)
        self.used.add(name.replace("weight", "input_scale"))
        if self.has(name + "_scale_2"):  # ModelOpt NVFP4
            return self.nvfp4(self.plain(name), name) * float(self.plain(name + "_scale_2"))
        return self.plain(name).astype(float) * float(self.plain(name + "_scale"))

    def mxfp4(self, name):
        packed, exponent = self.plain(name + "_blocks"), self.plain(name + "_scales").astype(int) - 127
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 32)
        return np.ldexp(E2M1[codes], exponent[..., None]).reshape(*packed.shape[:2], -1)

    def nvfp4(self, packed, name):
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        return E2M1[codes] * np.repeat(self.plain(name + "_scale"), 16, -1)


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
    angle = np.arange(n)[:, None] * inv
    return np.cos(angle) * amplitude, np.sin(angle) * amplitude, sharpen


def attend(q, k, v, scale, window=None, sinks=None):
    """q [n, heads, d], k [n, kv, d], v [n, kv, dv] -> [n, heads * dv], causal.  window: the number of tokens that one
    sees, itself included; sinks [heads]: scores of nothing."""
    n, heads = q.shape[:2]
    k, v = (np.repeat(t, heads // t.shape[1], 1) for t in (k, v))
    score = np.einsum("qhd,khd->hqk", q, k) * scale + np.triu(np.full((n, n), -np.inf), 1)
    if window:
        score += np.tril(np.full((n, n), -np.inf), -window)
    if sinks is not None:
        score = np.concatenate([score, np.broadcast_to(sinks[:, None, None], (heads, n, 1))], -1)
    return np.einsum("hqk,khd->qhd", softmax(score)[..., :n], v).reshape(n, -1)


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
    """Full attention of Qwen3-Next and Qwen3.5: a gate on the output, RoPE on the first dimensions of a head."""
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

    y = attend(turn(q), turn(k), v, d ** -0.5 * sharpen) * sigmoid(gate.reshape(n, -1))
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
    out = rms(out, W.get(p + "norm.weight"), eps) * silu(z.reshape(out.shape))
    return out.reshape(n, -1) @ W.get(p + "out_proj.weight").T


def mla(W, config, x, p):
    n, heads, eps = len(x), config["num_attention_heads"], config["rms_norm_eps"]
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    if config["q_lora_rank"]:
        q = rms(x @ W.get(p + "q_a_proj.weight").T, W.get(p + "q_a_layernorm.weight"), eps)
        q = q @ W.get(p + "q_b_proj.weight").T
    else:
        q = x @ W.get(p + "q_proj.weight").T
    q = q.reshape(n, heads, nope + rope)
    latent = x @ W.get(p + "kv_a_proj_with_mqa.weight").T
    kv = rms(latent[:, :rank], W.get(p + "kv_a_layernorm.weight"), eps) @ W.get(p + "kv_b_proj.weight").T
    kv = kv.reshape(n, heads, nope + config["v_head_dim"])
    cos, sin, sharpen = rope_tables(config, n, rope)
    cos, sin = cos[:, None], sin[:, None]

    def turn(t):  # pairs (2i, 2i + 1)
        a, b = t[..., 0::2], t[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(t.shape)

    q = np.concatenate([q[..., :nope], turn(q[..., nope:])], -1)
    k_rope = np.repeat(turn(latent[:, None, rank:]), heads, 1)
    k = np.concatenate([kv[..., :nope], k_rope], -1)
    return attend(q, k, kv[..., nope:], (nope + rope) ** -0.5 * sharpen) @ W.get(p + "o_proj.weight").T


def rules(config, layer):
    """What a layer does in the families below, which differ in this alone.  None: another family."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else None
        return dict(head=config["head_dim"], rope={"rope_theta": config["rope_theta"], **config["rope_scaling"]},
                    window=window, sinks="sinks", router="router", k=config["num_experts_per_tok"], score="chosen",
                    activation=lambda g, u: oai(g, u, config["swiglu_limit"]))
    return None


def oai(gate, up, limit):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def linear(W, x, name):
    return x @ W.get(name + ".weight").T + (W.get(name + ".bias") if W.has(name + ".bias") else 0)


def attention(W, config, r, x, p):
    """By the rules r: biases where there are some, RoPE on pairs (i, i + half), a window, sinks."""
    n, d = len(x), r["head"]
    q, k, v = (linear(W, x, f"{p}{c}_proj") for c in "qkv")
    q, k = q.reshape(n, -1, d), k.reshape(n, -1, d)
    v = v.reshape(n, k.shape[1], -1)
    cos, sin, sharpen = rope_tables({"rope_parameters": r["rope"]}, n, d)
    cos, sin = cos[:, None], sin[:, None]

    def turn(t):
        a, b = np.split(t, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    sinks = W.get(p + r["sinks"]) if r["sinks"] else None
    y = attend(turn(q), turn(k), v, d ** -0.5 * sharpen, r["window"], sinks)
    return linear(W, y, p + "o_proj")


def choose(W, r, x, p):
    """The numbers of the chosen experts [n, k] and their weights."""
    logits = linear(W, x, p + r["router"])
    best = np.argsort(-logits, -1)[:, :r["k"]]
    return best, softmax(np.take_along_axis(logits, best, -1))


def expert_parts(W, p, e):
    """Gate, up and down [out, in] of an expert, and the three biases or zeros."""
    gate_up, down = W.get(p + "experts.gate_up_proj")[e], W.get(p + "experts.down_proj")[e]
    if not W.has(p + "experts.down_proj_blocks"):  # [in, out]
        gate_up, down = gate_up.T, down.T
    bias = W.get(p + "experts.gate_up_proj_bias")[e]
    return (gate_up[0::2], gate_up[1::2], down, bias[0::2], bias[1::2], W.get(p + "experts.down_proj_bias")[e])


def experts(W, config, r, x, p):
    best, weight = choose(W, r, x, p)
    y = np.zeros_like(x)
    for e in np.unique(best):
        token, slot = np.nonzero(best == e)
        gate, up, down, gate_bias, up_bias, down_bias = expert_parts(W, p, e)
        h = r["activation"](x[token] @ gate.T + gate_bias, x[token] @ up.T + up_bias)
        y[token] += weight[token, slot, None] * (h @ down.T + down_bias)
    return y


def ffn(W, x, p):
    gate, up, down = (W.get(f"{p}{c}_proj.weight") for c in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def expert_ffn(W, x, p, e):
    if not W.has(p + "experts.gate_up_proj"):
        return ffn(W, x, f"{p}experts.{e}.")
    gate, up = np.split(W.get(p + "experts.gate_up_proj")[e], 2)
    return (silu(x @ gate.T) * (x @ up.T)) @ W.get(p + "experts.down_proj")[e].T


def router(W, p):
    """The name of the router's matrix; Hy3 has one of its own."""
    return p + ("router.gate.weight" if W.has(p + "router.gate.weight") else "gate.weight")


def moe(W, config, x, p):
    k, gate = config["num_experts_per_tok"], W.get(router(W, p))
    experts = len(gate)  # a pruned layer has fewer than config.json says
    stored = {n.removeprefix(p + "experts.").split(".")[0] for n in W.raw if n.startswith(p + "experts.")}
    assert stored == {"gate_up_proj", "down_proj"} or experts == len(stored), p
    logits = x @ gate.T
    bias = next((b for b in (p + "gate.e_score_correction_bias", p + "expert_bias") if W.has(b)), None)
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
    best = np.argsort(-choice, -1)[:, :k]
    weight = np.take_along_axis(score, best, -1)
    if config.get("norm_topk_prob", True):
        weight = weight / weight.sum(-1, keepdims=True)
    weight = weight * config.get("routed_scaling_factor", config.get("router_scaling_factor", 1.0))
    y = np.zeros_like(x)
    for e in range(experts):
        token, slot = np.nonzero(best == e)
        y[token] += weight[token, slot, None] * expert_ffn(W, x[token], p, e)
    if config.get("shared_expert_intermediate_size"):  # Qwen
        return y + sigmoid(x @ W.get(p + "shared_expert_gate.weight").T) * ffn(W, x, p + "shared_expert.")
    if config.get("num_shared_experts"):  # Hy3
        return y + ffn(W, x, p + "shared_mlp.")
    return y + ffn(W, x, p + "shared_experts.") if config.get("n_shared_experts") else y


def is_linear(config, layer):
    if config.get("layer_types"):
        return config["layer_types"][layer] == "linear_attention"
    return (layer + 1) % config["full_attention_interval"] != 0


def text_part(config):
    return {"tie_word_embeddings": config["tie_word_embeddings"], **config.get("text_config", config)}


def prefix(W):
    return "model." + "language_model." * W.has("model.language_model.norm.weight")


def norm(W, config, x, name):
    """With the delta rule a weight is stored less 1."""
    return rms(x, W.get(name) + ("linear_num_key_heads" in config), config["rms_norm_eps"])


def block(W, config, x, p, layer):
    """One layer, whose names begin with p.  layer: its number; None: it stands behind the others."""
    if r := rules(config, layer):
        x = x + attention(W, config, r, norm(W, config, x, p + "input_layernorm.weight"), p + "self_attn.")
        return x + experts(W, config, r, norm(W, config, x, p + "post_attention_layernorm.weight"), p + "mlp.")
    if "linear_num_key_heads" not in config:
        mixer, at = mla if "kv_lora_rank" in config else gqa, "self_attn."
    elif layer is not None and is_linear(config, layer):
        mixer, at = delta_net, "linear_attn."
    else:
        mixer, at = qwen_attention, "self_attn."
    x = x + mixer(W, config, norm(W, config, x, p + "input_layernorm.weight"), p + at)
    h = norm(W, config, x, p + "post_attention_layernorm.weight")
    return x + (moe(W, config, h, p + "mlp.") if W.has(router(W, p + "mlp.")) else ffn(W, h, p + "mlp."))


def head(W, config):
    return W.get(prefix(W) + "embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight")


def trunk(W, config, ids):
    """The rows after the final norm."""
    x = W.get(prefix(W) + "embed_tokens.weight")[ids]
    for layer in range(config["num_hidden_layers"]):
        x = block(W, config, x, f"{prefix(W)}layers.{layer}.", layer)
    return norm(W, config, x, prefix(W) + "norm.weight")


def mtp_names(W, config):
    """What the names of the layer for multi-token prediction begin with, and four names; None: there is none."""
    own = f"model.layers.{config['num_hidden_layers']}."
    if W.has("mtp.fc.weight"):
        return "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
    if W.has(own + "eh_proj.weight"):
        last = "final_layernorm" if W.has(own + "final_layernorm.weight") else "shared_head.norm"
        return own, own + "enorm", own + "hnorm", own + "eh_proj", own + last
    return None


def predict(W, config, ids, hidden):
    """Row t says what follows token t + 1, from that token and the trunk's row t."""
    p, of_token, of_row, join, last = mtp_names(W, config)
    table, out = p + "embed_tokens.weight", p + "shared_head.head.weight"
    token = W.get(table if W.has(table) else prefix(W) + "embed_tokens.weight")[ids[1:]]
    both = norm(W, config, token, of_token + ".weight"), norm(W, config, hidden[:-1], of_row + ".weight")
    x = block(W, config, np.concatenate(both, -1) @ W.get(join + ".weight").T, p, None)
    return norm(W, config, x, last + ".weight") @ (W.get(out) if W.has(out) else head(W, config)).T


def nmse(got, path):
    want = np.fromfile(path, "<f4").reshape(got.shape).astype(float)
    return ((got - want) ** 2).sum() / (want ** 2).sum()


def check(folder):
    config, W = text_part(json.loads((folder / "config.json").read_text())), Weights(folder)
    ids = np.fromfile(folder / "ids.i32", "<i4")
    hidden = trunk(W, config, ids)
    errors = [nmse(hidden @ head(W, config).T, folder / "logits.f32")]
    if mtp_names(W, config):
        errors.append(nmse(predict(W, config, ids, hidden), folder / "predict.f32"))

    (start, tail), = json.loads((folder / "greedy.json").read_text()).items()
    start = int(start.rpartition("_")[2])
    seen = (trunk(W, config, np.concatenate([ids[:start], tail])) @ head(W, config).T)[start - 1:-1].argmax(-1)

    ignored = "model.visual.", "k_proj.k_scale", "v_proj.v_scale"
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
