#!/usr/bin/env python3
"""Makes the tiny random models of DeepSeek-V4.1 in tests/fixtures and their reference logits.

    gen_deepseek_v41.py [NAME ...]      no name: deepseek_v41 and deepseek_v41_nvfp4

transformers does not have this family.  The forward is written here in torch float64 after the release's inference
code; weights are drawn, stored and described as in gen_tiny.py.  The map of tokens comes from the library `tokenizers`,
multipliers from numpy's generator, as in the release.  Needs torch, tokenizers, and what gen_tiny.py needs.
"""
import json
import math
import re
import sys
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, normalizers

import gen_tiny
from gen_tiny import EOT, FIXTURES, GREEDY_FROM, GREEDY_INDEX_GAP, GREEDY_LEN, IM_END, INDEX_GAP, VOCAB

BLOCK = 32  # of FP8 matrices, in both directions
FP8 = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|(shared_experts\.w\d|engram\.wkv|main_proj)\.weight$"
STORE = [(r"(^|[._])hc_|attn_sink$|gate\.bias(_vl)?$", "full"), (r"engram\.embed\.weight$", "rows"), (FP8, "fp8_square")]
INF = math.inf


def yarn(factor, original):
    return {"rope_type": "yarn", "factor": factor, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": original}


def text_config(**changes):
    """The keys of the release's text_config.  The limit is not that of the release: it clips some values here."""
    return {"model_type": "deepseek_v41_text", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": EOT,
            "eos_token_id": IM_END, "vocab_size": VOCAB, "hidden_size": 64, "moe_intermediate_size": 64,
            "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
            "qk_rope_head_dim": 16, "q_lora_rank": 80, "o_lora_rank": 32, "o_groups": 2, "hidden_act": "silu",
            "swiglu_limit": 1.5, "rms_norm_eps": 1e-20, "tie_word_embeddings": False, "max_position_embeddings": 2048,
            "rope_theta": 10000, "rope_scaling": yarn(16, 128), "compress_rope_theta": 160000, "n_routed_experts": 6,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
            "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 16, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8,
            "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0], "kv_source_layer_ids": [1, 4],
            "index_source_layer_ids": [1, 3, 4, 6], "candidate_source_layer_id": 4, "candidate_topk_blocks": 6,
            "candidate_block_size": 4, "engram_layer_ids": [1, 4], "engram_max_ngram_size": 4, "engram_vocab_size": 100,
            "engram_n_heads": 2, "engram_head_dim": 32, "engram_pad_token_id": 2, "num_nextn_predict_layers": 1,
            "dspark_block_size": 5, "dspark_noise_token_id": EOT, "dspark_target_layer_ids": [4, 5, 6],
            "dspark_markov_rank": 16, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1, "use_cache": True,
            **changes}


# name -> text_config; positions: ids of the prompt; experts: how they are stored; shards: files;
# aside: tensors that are left out when the release is read
SPECS = {
    "deepseek_v41": dict(
        text=text_config(), positions=160, experts="fp4", shards=1,
        vision={"model_type": "deepseek_v41_vision", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
                "intermediate_size": 64, "patch_size": 14, "downsample_ratio": 3},
        aside={"vision.blocks.0.norm1.weight": (32,), "vision.patch_embed.proj.weight": (32, 588),
               "aligner.w1.bias": (64,), "image_start": (64,), "image_end": (64,), "image_newline": (64,),
               "mtp.0.attn_norm.weight": (64,), "mtp.0.main_norm.weight": (64,), "mtp.0.main_proj.weight": (64, 192),
               "mtp.0.hc_attn_scale": (3,), "mtp.0.confidence_head.proj.weight": (1, 80),
               "mtp.0.ffn.gate.bias_vl": (4,)}),
    "deepseek_v41_nvfp4": dict(
        text=text_config(
            hidden_size=128, num_hidden_layers=6, num_attention_heads=8, head_dim=32, qk_rope_head_dim=8, q_lora_rank=64,
            o_groups=4, rms_norm_eps=0.01, hc_mult=2, hc_sinkhorn_iters=3, hc_eps=0.02, sliding_window=24,
            n_routed_experts=6, num_experts_per_tok=3, routed_scaling_factor=2.5, swiglu_limit=2.0, index_n_heads=12,
            index_head_dim=64, index_topk=12, compress_ratios=[2, 2, 0, 1, 1, 1], kv_source_layer_ids=[0, 3],
            index_source_layer_ids=[0, 3, 5], candidate_topk_blocks=9, candidate_block_size=3,
            candidate_source_layer_id=3, engram_layer_ids=[0, 5], engram_max_ngram_size=3, engram_vocab_size=90,
            engram_n_heads=3, engram_head_dim=64, engram_pad_token_id=11, rope_scaling=yarn(8, 64),
            num_nextn_predict_layers=0),
        positions=128, experts="nvfp4", shards=2, vision=None, aside={}),
}


# ---- n-grams -----------------------------------------------------------------------------------------------


def token_map(tokenizer):
    """Tokens that differ by case, accents and blanks alone have one number.  A token that is no whole UTF-8 stands for
    itself."""
    sentinel, numbers, out = "\ue000", {}, []
    normalizer = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), sentinel), normalizers.Strip(),
        normalizers.Replace(sentinel, " ")])
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes(config):
    """[engram layers][n-gram lengths][heads], ascending, none twice."""
    seen, out = set(), []
    for _ in config["engram_layer_ids"]:
        out.append([])
        for _ in range(config["engram_max_ngram_size"] - 1):
            at, heads = config["engram_vocab_size"] - 1, []
            while len(heads) < config["engram_n_heads"]:
                at += 1
                if is_prime(at) and at not in seen:
                    seen.add(at)
                    heads.append(at)
            out[-1].append(heads)
    return out


def multipliers(config):
    bound = max(1, np.iinfo(np.int64).max // config["engram_compressed_vocab_size"] // 2)
    return [np.random.default_rng(10007 * layer).integers(0, bound, config["engram_max_ngram_size"], dtype=np.int64) * 2 + 1
            for layer in config["engram_layer_ids"]]


def engram_rows(config, tokens, ids, which):
    """[n, columns] rows of the table of engram layer number `which`."""
    numbers, factors = np.array(tokens)[ids], multipliers(config)[which]
    pad, columns, start = tokens[config["engram_pad_token_id"]], [], 0
    mixed = numbers * factors[0]
    for back, sizes in enumerate(primes(config)[which], 1):
        before = np.concatenate([np.full(min(back, len(ids)), pad), numbers[:-back]])
        mixed = mixed ^ before * factors[back]
        for size in sizes:
            columns.append(start + mixed % size)
            start += size
    return torch.from_numpy(np.stack(columns, -1))


# ---- the forward -------------------------------------------------------------------------------------------


def rms(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def frequencies(config, ratio):
    dim, i = config["qk_rope_head_dim"], torch.arange(0, config["qk_rope_head_dim"], 2, dtype=torch.float64)
    if not ratio:
        return config["rope_theta"] ** (-i / dim)
    base, scaling = config["compress_rope_theta"], config["rope_scaling"]
    place = lambda turns: dim * math.log(
        scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
    low = max(math.floor(place(scaling["beta_fast"])), 0)
    high = min(math.ceil(place(scaling["beta_slow"])), dim - 1)
    ramp = ((i / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = base ** (-i / dim)
    return plain * (1 - ramp) + plain / scaling["factor"] * ramp


def rotate(x, at, freq, back=False):
    """x [n, (heads,) d]: the last values, neighbors as complex numbers."""
    dim = 2 * len(freq)
    turned = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
    phase = torch.polar(torch.ones(1, dtype=torch.float64), torch.outer(at.double(), -freq if back else freq))
    phase = phase.reshape(len(x), *(1,) * (x.ndim - 2), -1)
    return torch.cat([x[..., :-dim], torch.view_as_real(turned * phase).flatten(-2)], -1)


def gap_of(score, k):
    """How far the last chosen of each row [n, m] lies above the first that is not; -inf is no choice."""
    if score.shape[1] <= k:
        return torch.full((len(score),), INF, dtype=torch.float64)
    top = score.topk(k + 1, -1).values
    return torch.where(top[:, k] > -INF, top[:, k - 1] - top[:, k], INF)


class Model:
    """W: name -> tensor, what a reader gets.  tokens: the map.  told: what the prompt has shown."""

    def __init__(self, W, config, tokens):
        self.W, self.config, self.tokens = {k: v.double() for k, v in W.items()}, config, tokens

    def linear(self, x, name):
        return x @ self.W[name + ".weight"].T

    def norm(self, x, name):
        return rms(x, self.W[name + ".weight"], self.config["rms_norm_eps"])

    def decide(self, score, k):
        """A mask of the k largest of each row that are above -inf."""
        self.gaps.append(gap_of(score, k))
        mask = torch.zeros_like(score, dtype=torch.bool)
        mask.scatter_(1, score.topk(min(k, score.shape[1]), -1).indices, True)
        return mask & (score > -INF)

    def engram(self, streams, ids, p, which):
        c = self.config
        rows = self.W[p + "embed.weight"][engram_rows(c, self.tokens, ids, which)].flatten(1)
        keys, value = self.linear(rows, p + "wkv").split([c["hc_mult"] * c["hidden_size"], c["hidden_size"]], -1)
        keys, eps = keys.unflatten(-1, (c["hc_mult"], -1)), c["rms_norm_eps"]
        q, k = rms(streams, self.W[p + "q_weight"], eps), rms(keys, self.W[p + "k_weight"], eps)
        match = (q * k).sum(-1) * c["hidden_size"] ** -0.5
        gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match))
        return streams + gate[..., None] * value[:, None]

    def coefficients(self, streams, p):
        c, n = self.config, self.config["hc_mult"]
        v = rms(streams.flatten(1), 1, c["rms_norm_eps"]) @ self.W[p + "fn"].T
        scale, base = self.W[p + "scale"], self.W[p + "base"]
        pre = torch.sigmoid(v[:, :n] * scale[0] + base[:n]) + c["hc_eps"]
        post = 2 * torch.sigmoid(v[:, n:2 * n] * scale[1] + base[n:2 * n])
        comb = (v[:, 2 * n:] * scale[2] + base[2 * n:]).unflatten(-1, (n, n)).softmax(-1) + c["hc_eps"]
        comb = comb / (comb.sum(1, keepdim=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + c["hc_eps"])
            comb = comb / (comb.sum(1, keepdim=True) + c["hc_eps"])
        return pre, post, comb

    def latents(self, x, p, ratio):
        """Compressed keys before their rotation."""
        value = self.linear(x, p + "wkv")
        if ratio > 1:
            groups = len(x) // ratio
            cut = lambda t: t[:groups * ratio].unflatten(0, (groups, ratio))
            value = (cut(value) * cut(self.linear(x, p + "wgate")).softmax(1)).sum(1)
        return self.norm(value, p + "norm")

    def choose(self, x, low, p, layer, freq):
        """Which compressed keys each query sees."""
        c, at = self.config, torch.arange(len(x))
        ratio, heads = c["compress_ratios"][layer], c["index_n_heads"]
        visible = at[:, None] >= torch.arange(len(self.keys)) * ratio + ratio - 1
        q = rotate(self.linear(low, p + "indexer.wq_b").unflatten(-1, (heads, -1)), at, freq)
        weight = self.linear(x, p + "indexer.weights_proj") * (c["index_head_dim"] * heads) ** -0.5
        score = (F.relu(torch.einsum("qhd,kd->qhk", q, self.keys)) * weight[..., None]).sum(1)
        score = score.masked_fill(~visible, -INF)
        source, size = c["candidate_source_layer_id"], c["candidate_block_size"]
        if 0 <= source < layer:
            free = torch.zeros_like(visible).scatter_(1, score.topk(min(c["index_topk"], score.shape[1])).indices, True)
            score = score.masked_fill(~self.candidates, -INF)
            self.told["candidates"] |= bool((free & visible & ~self.candidates).any())
        if layer == source:
            best = F.pad(score, (0, -score.shape[1] % size), value=-INF).unflatten(-1, (-1, size)).amax(-1)
            newest = ((at + 1) // ratio - 1).div(size, rounding_mode="floor")
            pinned = best.scatter(1, newest.clamp_min(0)[:, None], INF).masked_fill((newest < 0)[:, None], -INF)
            kept = self.decide(pinned, c["candidate_topk_blocks"])
            self.told["newest"] |= bool((best.argsort(1, descending=True).argsort(1).gather(1, newest.clamp_min(0)[:, None])
                                         >= c["candidate_topk_blocks"]).any())
            self.candidates = kept.repeat_interleave(size, 1)[:, :score.shape[1]]
        return self.decide(score, c["index_topk"])

    def attention(self, x, p, layer):
        c, at = self.config, torch.arange(len(x))
        ratio, heads, d = c["compress_ratios"][layer], c["num_attention_heads"], c["head_dim"]
        freq = frequencies(c, ratio)
        low = self.norm(self.linear(x, p + "wq_a"), p + "q_norm")
        q = rotate(self.linear(low, p + "wq_b").unflatten(-1, (heads, d)), at, freq)
        kv = rotate(self.norm(self.linear(x, p + "wkv"), p + "kv_norm"), at, freq)
        seen = (at[:, None] >= at) & (at[:, None] - at < c["sliding_window"])
        if ratio:
            if layer in c["kv_source_layer_ids"]:
                latent = self.latents(x, p + "compressor.", ratio)
                first = torch.arange(len(latent)) * ratio
                self.compressed = rotate(latent, first, freq)
                self.keys = rotate(self.norm(self.linear(latent, p + "indexer.wk"), p + "indexer.k_norm"), first, freq)
            if layer in c["index_source_layer_ids"]:
                self.chosen = self.choose(x, low, p, layer, freq)
            kv, seen = torch.cat([kv, self.compressed]), torch.cat([seen, self.chosen], 1)
        score = torch.einsum("qhd,kd->hqk", q, kv) * d ** -0.5
        score = score.masked_fill(~seen, -INF)
        sinks = self.W[p + "attn_sink"][:, None, None].expand(heads, len(x), 1)
        y = torch.cat([score, sinks], -1).softmax(-1)[..., :-1] @ kv
        y = rotate(y.transpose(0, 1), at, freq, back=True).reshape(len(x), c["o_groups"], -1)
        joined = torch.einsum("ngd,grd->ngr", y, self.W[p + "wo_a.weight"].unflatten(0, (c["o_groups"], -1)))
        return self.linear(joined.flatten(1), p + "wo_b")

    def expert(self, x, p):
        limit = self.config["swiglu_limit"]
        gate, up = self.linear(x, p + "w1").clamp(max=limit), self.linear(x, p + "w3").clamp(-limit, limit)
        return self.linear(F.silu(gate) * up, p + "w2")

    def experts(self, x, p):
        c = self.config
        score = F.softplus(self.linear(x, p + "gate")).sqrt()
        mask = self.decide(score + self.W[p + "gate.bias"], c["num_experts_per_tok"])
        self.told["bias"] |= not torch.equal(mask, torch.zeros_like(mask).scatter_(
            1, score.topk(c["num_experts_per_tok"]).indices, True))
        weight = score * mask
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        y = self.expert(x, p + "shared_experts.")
        for e in range(c["n_routed_experts"]):
            at = mask[:, e].nonzero()[:, 0]
            y[at] += weight[at, e, None] * self.expert(x[at], f"{p}experts.{e}.")
        return y

    def run(self, ids):
        """Logits [n, vocab] and each token's smallest gap of routers, indexers and candidates."""
        c, self.gaps = self.config, []
        self.told = {"bias": False, "candidates": False, "newest": False}
        streams = self.W["embed.weight"][torch.tensor(ids)][:, None].repeat(1, c["hc_mult"], 1)
        pre = F.one_hot(torch.zeros(len(ids), dtype=torch.long), c["hc_mult"]).double()  # the first stream alone
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}."
            if layer in c["engram_layer_ids"]:
                streams = self.engram(streams, ids, p + "engram.", c["engram_layer_ids"].index(layer))
            for half, run in (("attn", lambda x: self.attention(x, p + "attn.", layer)),
                              ("ffn", lambda x: self.experts(x, p + "ffn."))):
                before, (pre, post, comb) = pre, self.coefficients(streams, f"{p}hc_{half}_")
                x = self.norm((before[..., None] * streams).sum(1), f"{p}{half}_norm")
                streams = post[..., None] * run(x)[:, None] + torch.einsum("njk,njd->nkd", comb, streams)
        logits = self.linear(self.norm((pre[..., None] * streams).sum(1), "norm"), "head")
        return logits, torch.stack(self.gaps).amin(0)


# ---- weights and files -------------------------------------------------------------------------------------


class Checkpoint(gen_tiny.Checkpoint):
    def draw(self, name, shape):
        rng = np.random.default_rng([zlib.crc32(self.fixture.encode()), zlib.crc32(name.encode())])
        x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        if name.endswith("embed.weight"):
            return x
        if name.endswith((".q_weight", ".k_weight")):
            return 1 + 0.3 * x
        return super().draw(name, shape)

    def put_fp8_square(self, name, _, x):
        """Squares of 32 x 32, cut at the edges, with scales that are powers of two; exact in BF16."""
        rows, columns = (-(-n // BLOCK) for n in x.shape)
        scale = torch.stack([x[r * BLOCK:(r + 1) * BLOCK, k * BLOCK:(k + 1) * BLOCK].abs().max() / 448
                             for r in range(rows) for k in range(columns)]).reshape(rows, columns).log2().ceil().exp2()
        whole = scale.repeat_interleave(BLOCK, 0)[:len(x)].repeat_interleave(BLOCK, 1)[:, :x.shape[1]]
        self.tensors[name] = gen_tiny.fp8_encode(x, whole)
        self.tensors[name.replace("weight", "scale")] = scale.to(torch.float8_e8m0fnu)
        return self.tensors[name].float() * whole

    def put_rows(self, name, _, x):
        self.tensors[name], exponent, exact = gen_tiny.mxfp8_encode(x)
        self.tensors[name.replace("weight", "scale")] = exponent.view(torch.float8_e8m0fnu)
        return exact


def shapes(config):
    """name -> shape of the tensors of the text model."""
    c, hidden, d = config, config["hidden_size"], config["head_dim"]
    matrix = {"embed": (VOCAB, hidden), "head": (VOCAB, hidden), "norm": (hidden,)}
    other, mix = {}, (2 + c["hc_mult"]) * c["hc_mult"]
    for layer in range(c["num_hidden_layers"]):
        p, ratio = f"layers.{layer}.", c["compress_ratios"][layer]
        for half in ("attn", "ffn"):
            matrix[f"{p}{half}_norm"] = (hidden,)
            other |= {f"{p}hc_{half}_fn": (mix, c["hc_mult"] * hidden), f"{p}hc_{half}_base": (mix,),
                      f"{p}hc_{half}_scale": (3,)}
        a, f = p + "attn.", p + "ffn."
        matrix |= {a + "wq_a": (c["q_lora_rank"], hidden), a + "q_norm": (c["q_lora_rank"],),
                   a + "wq_b": (c["num_attention_heads"] * d, c["q_lora_rank"]), a + "wkv": (d, hidden),
                   a + "kv_norm": (d,), a + "wo_b": (hidden, c["o_groups"] * c["o_lora_rank"]),
                   a + "wo_a": (c["o_groups"] * c["o_lora_rank"], c["num_attention_heads"] * d // c["o_groups"])}
        other[a + "attn_sink"] = (c["num_attention_heads"],)
        if layer in c["index_source_layer_ids"]:
            matrix |= {a + "indexer.wq_b": (c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"]),
                       a + "indexer.weights_proj": (c["index_n_heads"], hidden)}
        if layer in c["kv_source_layer_ids"]:
            matrix |= {a + "indexer.wk": (c["index_head_dim"], d), a + "indexer.k_norm": (c["index_head_dim"],),
                       a + "compressor.wkv": (d, hidden), a + "compressor.norm": (d,)}
            if ratio > 1:
                matrix[a + "compressor.wgate"] = (d, hidden)
        matrix[f + "gate"] = (c["n_routed_experts"], hidden)
        other |= {f + "gate.bias": (c["n_routed_experts"],), f + "gate.bias_vl": (c["n_routed_experts"],)}
        for at in ("shared_experts", *(f"experts.{e}" for e in range(c["n_routed_experts"]))):
            matrix |= {f"{f}{at}.w{i}": (hidden, c["moe_intermediate_size"])[::1 if i == 2 else -1] for i in (1, 2, 3)}
        if layer in c["engram_layer_ids"]:
            e, columns = p + "engram.", (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
            matrix |= {e + "embed": (rows, c["engram_head_dim"]),
                       e + "wkv": ((c["hc_mult"] + 1) * hidden, columns * c["engram_head_dim"])}
            other |= {e + "q_weight": (c["hc_mult"], hidden), e + "k_weight": (c["hc_mult"], hidden)}
    return {**{name + ".weight": shape for name, shape in matrix.items()}, **other}


def greedy(model, ids):
    """Greedy continuation, the smallest gap between best and second logit, and that of all decisions."""
    ids, margins = list(ids), []
    for _ in range(GREEDY_LEN):
        top = model.run(ids)[0][-1].topk(2)
        margins.append((top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[-GREEDY_LEN:], min(margins), model.run(ids)[1].min().item()


def choose_prompt(model, positions):
    """As gen_tiny.choose_indexed_prompt(): every decision is clear, and the prompt shows that biases, candidates and the
    newest block change choices."""
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, VOCAB, positions).tolist()
        for n in (GREEDY_FROM, positions):
            logits, gaps = model.run(ids[:n])
            while gaps.min() < INDEX_GAP:
                ids[(gaps < INDEX_GAP).nonzero()[0].item()] = int(rng.integers(0, VOCAB))
                logits, gaps = model.run(ids[:n])
            if n == GREEDY_FROM:
                tail, margin, close = greedy(model, ids[:n])
                if close < GREEDY_INDEX_GAP or margin < 0.02 or len(set(tail)) < GREEDY_LEN // 3:
                    break
        else:
            assert all(model.told.values()), model.told
            print(f"smallest gap in the greedy continuation {close:.1e}, seed {seed}")
            return ids, logits, gaps.min().item(), tail, margin
    raise AssertionError("no prompt is good enough")


def build(name):
    spec, folder = SPECS[name], FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    gen_tiny.write_tokenizer(folder)
    tokens = token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    text = dict(spec["text"])
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes(text)]
    text["engram_compressed_vocab_size"] = max(tokens) + 1
    experts = r"\.experts\.\d+\.w\d\.weight$"
    checkpoint = Checkpoint(name, {"store": [*STORE, (experts, spec["experts"])], "config": text})
    W = {tensor: checkpoint.put(tensor, shape) for tensor, shape in shapes(text).items()}
    for tensor, shape in spec["aside"].items():
        checkpoint.put(tensor, shape)
    model = Model(W, text, tokens)
    ids, logits, gap, tail, margin = choose_prompt(model, spec["positions"])

    quantization = {"activation_scheme": "dynamic", "expert_dtype": "fp4", "fmt": "e4m3", "quant_method": "fp8",
                    "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
    if spec["experts"] == "nvfp4":
        quantization |= {"moe_quant_algo": "NVFP4", "ignore": ["mtp.*"]}
    config = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "torch_dtype": "bfloat16",
              "tie_word_embeddings": False, "image_token_id": EOT, "text_config": text,
              "quantization_config": quantization}
    if spec["vision"]:
        config["vision_config"] = spec["vision"]
    gen_tiny.write_json(folder / "config.json", config)
    gen_tiny.write_json(folder / "generation_config.json", {"eos_token_id": [IM_END, EOT], "pad_token_id": EOT})
    gen_tiny.write_tensors(folder, checkpoint.tensors, spec["shards"], None)
    size = gen_tiny.finish(folder, ids, logits, tail)
    print(f"{name:20} {size / 1e6:5.2f} MB  {max(tokens) + 1} of {len(tokens)} tokens  logits sd {logits.std():.2f}  "
          f"gap {gap:.1e}  greedy gap {margin:.3f} ({len(set(tail))} distinct)", flush=True)


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SPECS:
        build(name)


if __name__ == "__main__":
    main()
