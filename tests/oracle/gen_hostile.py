#!/usr/bin/env python3
"""Writes tests/corpus: GGUF files that are wrong in one way each, and seeds for the other parsers' fuzzers.

    gen_hostile.py      always the same bytes; only the standard library is needed

expected.txt of gguf and session has one line per file: its name, a tab, and a part of the message that refuses it ("-": it is valid).
The models are tiny: one layer of width 64, one or two experts, eight tokens. found-* in the other directories are files
that a fuzzer found; they stay.
"""
import copy
import json
import math
import struct
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
T_F32, T_F16, T_Q4_0, T_Q8_0, T_Q4_K, T_I32, T_F64, T_BF16, T_MXFP4, T_NVFP4 = 0, 1, 2, 8, 12, 26, 28, 30, 39, 40
FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
BLOCK = {T_F32: (1, 4), T_F16: (1, 2), T_Q8_0: (32, 34), T_I32: (1, 4), T_BF16: (1, 2), T_MXFP4: (32, 17), T_NVFP4: (64, 36)}


def string(s):
    b = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(b)) + b

def payload(kind, v):
    return string(v) if kind == STR else struct.pack("<" + FORMAT[kind], v)

def val(kind, v):
    return struct.pack("<I", kind) + payload(kind, v)

def arr(kind, vs, n=None):
    return struct.pack("<IIQ", ARR, kind, len(vs) if n is None else n) + b"".join(payload(kind, v) for v in vs)

def u32(v):
    return val(U32, v)


class Tensor:
    def __init__(self, name, ne, kind, fill=None):
        self.name, self.ne, self.kind, self.offset = name, ne, kind, None
        n = 1
        for d in ne:
            n *= d
        block, size = BLOCK.get(kind, (1, 4))
        if fill is not None:
            self.data = fill
        elif kind == T_F32:
            self.data = struct.pack("<f", 1.0) * n
        elif kind in (T_BF16, T_F16):  # halves of both signs
            self.data = b"".join(struct.pack("<H", (0x3f00 if kind == T_BF16 else 0x3800) | (i * 7 % 3 == 0) << 15) for i in range(n))
        else:  # scales of about 1, codes that vary
            head = {T_Q8_0: b"\x00\x20", T_MXFP4: b"\x7e", T_NVFP4: b"\x30\x34\x38\x30"}.get(kind, b"")
            self.data = b"".join(head + bytes((i * 37 + k * 11) & 255 for k in range(size - len(head))) for i in range(n // block))


class File:
    """A GGUF file in the making; bytes() also notes where its sections begin."""

    def __init__(self, kv, tensors):
        self.kv, self.tensors, self.align, self.mark = list(kv), tensors, 32, {}
        self.magic, self.version, self.n_kv, self.n_tensors = b"GGUF", 3, None, None

    def set(self, key, value):
        """Replaces, appends, or with None removes a key."""
        at = [i for i, (k, _) in enumerate(self.kv) if k == key]
        if value is None:
            del self.kv[at[0]]
        elif at:
            self.kv[at[0]] = (key, value)
        else:
            self.kv.append((key, value))

    def t(self, name):
        return next(t for t in self.tensors if t.name == name)

    def drop(self, name):
        self.tensors.remove(self.t(name))

    def put(self, name, ne, kind, fill=None):
        self.tensors = [t for t in self.tensors if t.name != name] + [Tensor(name, ne, kind, fill)]

    def bytes(self):
        b = self.magic + struct.pack("<I", self.version)
        b += struct.pack("<QQ", len(self.tensors) if self.n_tensors is None else self.n_tensors, len(self.kv) if self.n_kv is None else self.n_kv)
        for key, value in self.kv:
            self.mark[key] = len(b)
            b += string(key) + value
        info, data = b"", b""
        self.mark["tensors"] = len(b)
        for t in self.tensors:
            info += string(t.name) + struct.pack(f"<I{len(t.ne)}QI", len(t.ne), *t.ne, t.kind)
            info += struct.pack("<Q", len(data) if t.offset is None else t.offset)
            data += t.data + bytes(-len(t.data) % self.align)
        b += info
        self.mark["data"] = len(b)
        return b + bytes(-len(b) % self.align) + data


def hparams(arch, n_embd=64, **more):
    kv = {"context_length": u32(64), "embedding_length": u32(n_embd), "block_count": u32(1), "attention.head_count": u32(1),
          "attention.layer_norm_rms_epsilon": val(F32, 1e-6), "expert_count": u32(2), "expert_used_count": u32(1)}
    if arch not in ("deepseek2", "deepseek32", "glm-dsa"):
        kv |= {"attention.key_length": u32(4), "attention.value_length": u32(2)}
    else:
        kv |= {"attention.q_lora_rank": u32(0), "attention.kv_lora_rank": u32(4), "attention.key_length_mla": u32(4),
               "attention.value_length_mla": u32(2), "rope.dimension_count": u32(2), "expert_gating_func": u32(2)}
    kv |= more
    return [("general.architecture", val(STR, arch))] + [(f"{arch}.{k}", v) for k, v in kv.items()]


VOCABULARY = [("tokenizer.ggml.model", val(STR, "gpt2")), ("tokenizer.ggml.pre", val(STR, "qwen2")),
              ("tokenizer.ggml.tokens", arr(STR, ["a", "b", "ab", "\u0120", "<s>", "</s>", "<t>", "c"])),
              ("tokenizer.ggml.token_type", arr(I32, [1, 1, 1, 1, 3, 3, 4, 1])), ("tokenizer.ggml.merges", arr(STR, ["a b"])),
              ("tokenizer.ggml.eos_token_id", u32(5))]


def bare(arch="qwen3moe"):
    """Metadata and one tensor: enough for what is refused before the tensors are looked at."""
    return File(hparams(arch), [Tensor("token_embd.weight", [64, 1], T_NVFP4)])


def qwen():
    t = [Tensor("token_embd.weight", [64, 8], T_NVFP4), Tensor("output_norm.weight", [64], T_BF16)]
    for name, ne, kind in [("attn_norm", [64], T_BF16), ("ffn_norm", [64], T_BF16), ("attn_q", [64, 4], T_NVFP4), ("attn_k", [64, 4], T_NVFP4),
                           ("attn_v", [64, 2], T_NVFP4), ("attn_q_norm", [4], T_F32), ("attn_k_norm", [4], T_F32), ("attn_output", [2, 64], T_BF16),
                           ("ffn_gate_inp", [64, 2], T_NVFP4), ("ffn_gate_exps", [64, 1, 2], T_NVFP4), ("ffn_up_exps", [64, 1, 2], T_NVFP4),
                           ("ffn_down_exps", [1, 64, 2], T_BF16)]:
        t.append(Tensor(f"blk.0.{name}.weight", ne, kind))
    return File(hparams("qwen3moe") + VOCABULARY, t)


def deepseek():
    t = [Tensor("token_embd.weight", [64, 8], T_MXFP4), Tensor("output_norm.weight", [64], T_BF16)]
    for name, ne, kind in [("attn_norm", [64], T_BF16), ("ffn_norm", [64], T_BF16), ("attn_q", [64, 4], T_Q8_0), ("attn_kv_a_mqa", [64, 6], T_NVFP4),
                           ("attn_kv_a_norm", [4], T_F32), ("attn_k_b", [2, 4], T_BF16), ("attn_v_b", [4, 2], T_F16), ("attn_output", [2, 64], T_BF16),
                           ("ffn_gate_inp", [64, 2], T_NVFP4), ("ffn_gate_exps", [64, 1, 2], T_MXFP4), ("ffn_up_exps", [64, 1, 2], T_MXFP4),
                           ("ffn_down_exps", [1, 64, 2], T_BF16), ("ffn_gate_shexp", [64, 1], T_NVFP4), ("ffn_up_shexp", [64, 1], T_NVFP4),
                           ("ffn_down_shexp", [1, 64], T_BF16)]:
        t.append(Tensor(f"blk.0.{name}.weight", ne, kind))
    t.append(Tensor("blk.0.exp_probs_b.bias", [2], T_F32))
    return File(hparams("deepseek2"), t)


def gptoss():
    f = File(hparams("gpt-oss", **{"attention.sliding_window": u32(4)}), [])
    for name, ne, kind in [("token_embd.weight", [64, 8], T_BF16), ("output_norm.weight", [64], T_F32), ("attn_norm.weight", [64], T_F32),
                           ("post_attention_norm.weight", [64], T_F32), ("attn_q.weight", [64, 4], T_BF16), ("attn_k.weight", [64, 4], T_BF16),
                           ("attn_v.weight", [64, 2], T_BF16), ("attn_q.bias", [4], T_F32), ("attn_k.bias", [4], T_F32), ("attn_v.bias", [2], T_F32),
                           ("attn_output.weight", [2, 64], T_BF16), ("attn_output.bias", [64], T_F32), ("attn_sinks.weight", [1], T_F32),
                           ("ffn_gate_inp.weight", [64, 2], T_F32), ("ffn_gate_inp.bias", [2], T_F32), ("ffn_gate_exps.weight", [64, 1, 2], T_MXFP4),
                           ("ffn_up_exps.weight", [64, 1, 2], T_MXFP4), ("ffn_down_exps.weight", [1, 64, 2], T_BF16), ("ffn_gate_exps.bias", [1, 2], T_F32),
                           ("ffn_up_exps.bias", [1, 2], T_F32), ("ffn_down_exps.bias", [64, 2], T_F32)]:
        f.tensors.append(Tensor(name if name.startswith(("token", "output")) else f"blk.0.{name}", ne, kind))
    return f


def step():
    """A layer of Step-3.5 with a window, gates and factors of the rotation."""
    f = File(hparams("step35", **{"attention.sliding_window": u32(4), "attention.sliding_window_pattern": arr(BOOL, [1]), "swiglu_clamp_exp": arr(F32, [7])}), [])
    for name, ne, kind in [("token_embd.weight", [64, 8], T_BF16), ("output_norm.weight", [64], T_F32), ("rope_freqs.weight", [2], T_F32),
                           ("attn_norm.weight", [64], T_F32), ("ffn_norm.weight", [64], T_F32), ("attn_q.weight", [64, 4], T_BF16), ("attn_k.weight", [64, 4], T_BF16),
                           ("attn_v.weight", [64, 2], T_BF16), ("attn_gate.weight", [64, 1], T_BF16), ("attn_output.weight", [2, 64], T_BF16),
                           ("ffn_gate_inp.weight", [64, 2], T_F32), ("ffn_gate_exps.weight", [64, 1, 2], T_BF16), ("ffn_up_exps.weight", [64, 1, 2], T_BF16),
                           ("ffn_down_exps.weight", [1, 64, 2], T_BF16)]:
        f.tensors.append(Tensor(name if name.startswith(("token", "output", "rope")) else f"blk.0.{name}", ne, kind))
    return f


def sparse(arch="glm-dsa"):
    """Two layers with latent attention over two keys, of which the first has an indexer."""
    f = File(hparams(arch, block_count=u32(2), **{"attention.q_lora_rank": u32(4), "attention.indexer.head_count": u32(2), "attention.indexer.key_length": u32(4),
                                                  "attention.indexer.top_k": u32(2)}) + VOCABULARY, [])
    f.tensors = [Tensor("token_embd.weight", [64, 8], T_BF16), Tensor("output_norm.weight", [64], T_F32)]
    for i in range(2):
        indexer = [] if i else [("indexer.attn_q_b.weight", [4, 8], T_BF16), ("indexer.attn_k.weight", [64, 4], T_NVFP4), ("indexer.k_norm.weight", [4], T_F32),
                                ("indexer.k_norm.bias", [4], T_F32), ("indexer.proj.weight", [64, 2], T_F32)]
        for name, ne, kind in [("attn_norm.weight", [64], T_F32), ("ffn_norm.weight", [64], T_F32), ("attn_q_a.weight", [64, 4], T_BF16), ("attn_q_a_norm.weight", [4], T_F32),
                               ("attn_q_b.weight", [4, 4], T_BF16), ("attn_kv_a_mqa.weight", [64, 6], T_NVFP4), ("attn_kv_a_norm.weight", [4], T_F32), ("attn_k_b.weight", [2, 4], T_BF16),
                               ("attn_v_b.weight", [4, 2], T_BF16), ("attn_output.weight", [2, 64], T_BF16), ("ffn_gate_inp.weight", [64, 2], T_F32), ("exp_probs_b.bias", [2], T_F32),
                               ("ffn_gate_exps.weight", [64, 1, 2], T_NVFP4), ("ffn_up_exps.weight", [64, 1, 2], T_NVFP4), ("ffn_down_exps.weight", [1, 64, 2], T_BF16)] + indexer:
            f.tensors.append(Tensor(f"blk.{i}.{name}", ne, kind))
    return f


def blocks():
    """Two layers of MiniMax-M3, a dense one that sees all keys and a mixture over two of the blocks of two keys."""
    f = File(hparams("minimax-m3", block_count=u32(2), **{"attention.head_count": u32(4), "attention.head_count_kv": u32(2)}, **{
        "attention.indexer." + k: u32(v) for k, v in [("head_count", 2), ("key_length", 4), ("top_k", 2), ("block_size", 2), ("local_blocks", 1)]}) + VOCABULARY, [])
    f.tensors = [Tensor("token_embd.weight", [64, 8], T_BF16), Tensor("output_norm.weight", [64], T_F32)]
    dense = [("ffn_gate.weight", [64, 2], T_BF16), ("ffn_up.weight", [64, 2], T_BF16), ("ffn_down.weight", [2, 64], T_BF16)]
    mixture = [("ffn_gate_inp.weight", [64, 2], T_F32), ("exp_probs_b.bias", [2], T_F32), ("ffn_gate_exps.weight", [64, 1, 2], T_NVFP4), ("ffn_up_exps.weight", [64, 1, 2], T_NVFP4),
               ("ffn_down_exps.weight", [1, 64, 2], T_BF16), ("ffn_gate_shexp.weight", [64, 1], T_BF16), ("ffn_up_shexp.weight", [64, 1], T_BF16), ("ffn_down_shexp.weight", [1, 64], T_BF16),
               ("indexer.q_proj.weight", [64, 8], T_BF16), ("indexer.k_proj.weight", [64, 4], T_NVFP4), ("indexer.q_norm.weight", [4], T_F32), ("indexer.k_norm.weight", [4], T_F32)]
    for i in range(2):
        for name, ne, kind in [("attn_norm.weight", [64], T_F32), ("ffn_norm.weight", [64], T_F32), ("attn_q.weight", [64, 16], T_BF16), ("attn_k.weight", [64, 8], T_BF16),
                               ("attn_v.weight", [64, 4], T_BF16), ("attn_q_norm.weight", [4], T_F32), ("attn_k_norm.weight", [4], T_F32), ("attn_output.weight", [8, 64], T_BF16)] + (mixture if i else dense):
            f.tensors.append(Tensor(f"blk.{i}.{name}", ne, kind))
    return f


NEXTN = [("eh_proj", [128, 64], T_BF16), ("enorm", [64], T_F32), ("hnorm", [64], T_F32), ("shared_head_norm", [64], T_F32), ("hc_head_fn", [128, 2], T_F32), ("hc_head_base", [2], T_F32),
         ("hc_head_scale", [1], T_F32)]


def streams(predicts=0):
    """Three layers of DeepSeek-V4 with two streams: a window alone and a table of experts, overlapping keys of four tokens of which two are chosen, keys of eight.
    predicts: 1 for a prediction layer behind them."""
    a = "attention."
    more = {"nextn_predict_layers": u32(1)} if predicts else {}
    f = File(hparams("deepseek4", block_count=u32(3 + predicts), **more, **{a + "head_count": u32(2), a + "head_count_kv": u32(1), a + "value_length": u32(4), a + "q_lora_rank": u32(4), a + "sliding_window": u32(4),
                     a + "output_group_count": u32(2), a + "output_lora_rank": u32(2), a + "compress_ratios": arr(I32, [0, 4, 8, 0]), a + "compress_rope_freq_base": val(F32, 160000),
                     a + "indexer.head_count": u32(2), a + "indexer.key_length": u32(4), a + "indexer.top_k": u32(2), "rope.dimension_count": u32(2), "hash_layer_count": u32(1),
                     "hyper_connection.count": u32(2), "hyper_connection.sinkhorn_iterations": u32(2), "hyper_connection.epsilon": val(F32, 1e-6), "expert_gating_func": u32(4), "expert_weights_scale": val(F32, 1.5),
                     "swiglu_clamp_exp": arr(F32, [10] * (3 + predicts)), "swiglu_clamp_shexp": val(F32, 10)}) + VOCABULARY, [])
    f.tensors = [Tensor("token_embd.weight", [64, 8], T_BF16), Tensor("output_norm.weight", [64], T_F32), Tensor("output_hc_fn.weight", [128, 2], T_F32), Tensor("output_hc_base.weight", [2], T_F32),
                 Tensor("output_hc_scale.weight", [1], T_F32)]
    for i in range(3 + predicts):
        own = [("exp_probs_b.bias", [2], T_F32)] if i else [("ffn_gate_tid2eid.weight", [1, 8], T_I32, struct.pack("<8i", *[0, 1] * 4))]
        own += [(f"nextn.{name}.weight", *ne) for name, *ne in NEXTN] * (i == 3)
        for name, width in [("attn_compressor", 4)] * (0 < i < 3) + [("indexer_compressor", 4)] * (i == 1):
            wide, ratio = (8, 4) if i == 1 else (4, 8)
            own += [(name + "_kv.weight", [64, wide], T_BF16), (name + "_gate.weight", [64, wide], T_BF16), (name + "_ape.weight", [wide, ratio], T_F32), (name + "_norm.weight", [width], T_F32)]
        own += [("indexer.attn_q_b.weight", [4, 8], T_BF16), ("indexer.proj.weight", [64, 2], T_F32)] * (i == 1)
        for half in ("attn", "ffn"):
            own += [(f"hc_{half}_fn.weight", [128, 8], T_F32), (f"hc_{half}_base.weight", [8], T_F32), (f"hc_{half}_scale.weight", [3], T_F32)]
        for name, ne, kind, *fill in [("attn_norm.weight", [64], T_F32), ("ffn_norm.weight", [64], T_F32), ("attn_q_a.weight", [64, 4], T_BF16), ("attn_q_a_norm.weight", [4], T_F32),
                                      ("attn_q_b.weight", [4, 8], T_BF16), ("attn_kv.weight", [64, 4], T_NVFP4), ("attn_kv_a_norm.weight", [4], T_F32), ("attn_sinks.weight", [2], T_F32),
                                      ("attn_output_a.weight", [4, 4], T_BF16), ("attn_output_b.weight", [4, 64], T_BF16), ("ffn_gate_inp.weight", [64, 2], T_F32), ("ffn_gate_exps.weight", [64, 1, 2], T_MXFP4),
                                      ("ffn_up_exps.weight", [64, 1, 2], T_MXFP4), ("ffn_down_exps.weight", [1, 64, 2], T_BF16), ("ffn_gate_shexp.weight", [64, 1], T_NVFP4),
                                      ("ffn_up_shexp.weight", [64, 1], T_NVFP4), ("ffn_down_shexp.weight", [1, 64], T_BF16)] + own:
            f.tensors.append(Tensor(f"blk.{i}.{name}", ne, kind, *fill))
    return f


def nan_router():
    """Experts whose router rows are NaN can only be chosen when there is no other: as many experts are used as there are."""
    f = qwen()
    for key, v in [("expert_count", 4), ("expert_used_count", 3), ("expert_gating_func", 2)]:
        f.set("qwen3moe." + key, u32(v))
    f.put("blk.0.ffn_gate_inp.weight", [64, 4], T_BF16, b"\xff\xff" * 64 + b"\x80\x3f" * 64 + b"\xff\xff" * 128)
    for name, ne in [("ffn_gate_exps", [64, 1, 4]), ("ffn_up_exps", [64, 1, 4]), ("ffn_down_exps", [1, 64, 4])]:
        f.put(f"blk.0.{name}.weight", ne, f.t(f"blk.0.{name}.weight").kind)
    return f


def odd():
    """No width is a multiple of anything, the first layer is dense, the gate and up rows are fused."""
    f = File(hparams("qwen3moe", 11, block_count=u32(2), expert_count=u32(3), expert_used_count=u32(2), **{
        "attention.head_count": u32(3), "attention.key_length": u32(6), "attention.value_length": u32(5), "attention.head_count_kv": u32(1),
        "rope.dimension_count": u32(4), "rope.scaling.type": val(STR, "yarn"), "rope.scaling.factor": val(F32, 4),
        "rope.scale_linear": val(F32, 1), "rope.scaling.yarn_ext_factor": val(F32, 1)}), [])
    f.tensors = [Tensor("token_embd.weight", [11, 5], T_BF16), Tensor("output_norm.weight", [11], T_F32)]
    for i in range(2):
        ffn = [("ffn_gate_inp", [11, 3]), ("ffn_down_exps", [3, 11, 3]), ("ffn_gate_up_exps", [11, 6, 3])] if i else \
              [("ffn_gate", [11, 7]), ("ffn_up", [11, 7]), ("ffn_down", [7, 11])]
        for name, ne in [("attn_norm", [11]), ("ffn_norm", [11]), ("attn_q", [11, 18]), ("attn_k", [11, 6]), ("attn_v", [11, 5]),
                         ("attn_q_norm", [6]), ("attn_k_norm", [6]), ("attn_output", [15, 11])] + ffn:
            f.tensors.append(Tensor(f"blk.{i}.{name}.weight", ne, T_BF16))
    return f


cases = []


def case(name, expect, base, change=None, cut=None):
    """change(file) may return other bytes; cut: a length, or (section, bytes behind its beginning)."""
    f = copy.deepcopy(base)
    b = change(f) if change else None
    b = b if isinstance(b, bytes) else f.bytes()
    if cut is not None:
        b = b[:cut if isinstance(cut, int) else f.mark[cut[0]] + cut[1]]
    assert name not in [c[0] for c in cases], name
    cases.append((name, expect, b))

def setting(key, value):
    return lambda f: f.set(key, value)

def attr(name, value):
    return lambda f: setattr(f, name, value)

def tensor(**changes):
    return lambda f: f.tensors[0].__dict__.update(changes)


def reader_cases():
    B = bare()
    case("magic", "not a GGUF file (starts with 47 47 55 00)", B, attr("magic", b"GGU\0"))
    case("magic-elf", "not a GGUF file", B, attr("magic", b"\x7fELF"))
    case("empty", "the file is empty", B, cut=0)
    for name, at in [("the magic", 3), ("the version", 6), ("the tensor count", 10), ("the metadata count", 20)]:
        case("cut-in-" + name[4:].replace(" ", "-"), "file ends inside " + name, B, cut=at)
    for v in (1, 4, 0x7fffffff):
        case(f"version-{v}", f"GGUF version {v} is not 2 or 3", B, attr("version", v))
    case("big-endian", "big-endian", B, attr("version", 3 << 24))
    for what, n in [("large", 1000), ("huge", 1 << 63), ("all-ones", (1 << 64) - 1)]:
        case(f"tensor-count-{what}", f"{n} tensors do not fit", B, attr("n_tensors", n))
        case(f"metadata-count-{what}", f"{n} metadata entries do not fit", B, attr("n_kv", n))
    case("tensor-count-one-more", " at byte ", B, attr("n_tensors", 2))
    case("metadata-count-one-more", " at byte ", B, attr("n_kv", 9))
    key = B.kv[-1][0]
    case("cut-in-key-length", "file ends inside a key", B, cut=(key, 4))
    case("cut-in-key", "file ends inside a key", B, cut=(key, 12))
    case("cut-in-value-type", "file ends inside a value type", B, cut=(key, 8 + len(key) + 2))
    case("cut-in-value", "has 1 elements of 4 bytes, more than the file holds", B, cut=(key, 8 + len(key) + 6))
    case("key-length-65536", "length 65536 of a key is above 65535", B, lambda f: f.kv.insert(0, ("k" * 65536, b"")), cut=300)
    case("key-empty", "an empty key", B, setting("", u32(1)))
    case("key-twice", "key 'qwen3moe.block_count' occurs twice", B, lambda f: f.kv.append(("qwen3moe.block_count", u32(1))))
    case("value-type-13", "key 'x' has the unknown value type 13", B, setting("x", struct.pack("<II", 13, 0)))
    case("value-type-all-ones", "unknown value type 4294967295", B, setting("x", b"\xff" * 8))
    case("key-of-controls", "key '??[31m?' has the unknown value type 99", B, setting(b"\x07\x1b[31m\n", struct.pack("<II", 99, 0)))
    f = setting("x", arr(U32, [1, 2, 3]))
    B2 = copy.deepcopy(B)
    f(B2)
    case("cut-in-element-type", "file ends inside an array's element type", B2, cut=("x", 8 + 1 + 4 + 2))
    case("cut-in-array-length", "file ends inside an array's length", B2, cut=("x", 8 + 1 + 8 + 2))
    case("cut-in-array", "key 'x' has 3 elements of 4 bytes", B2, cut=("x", 8 + 1 + 16 + 11))
    case("array-of-arrays", "key 'x' is an array of arrays", B, setting("x", struct.pack("<IIQ", ARR, ARR, 1)))
    case("array-of-type-13", "unknown value type 13", B, setting("x", struct.pack("<IIQ", ARR, 13, 1)))
    case("array-length-huge", "key 'x' has 9223372036854775808 elements", B, setting("x", arr(U64, [], 1 << 63)))
    case("array-length-wraps", "key 'x' has 4611686018427387905 elements", B, setting("x", arr(U32, [], (1 << 62) + 1)))
    case("array-of-strings-too-short", "file ends inside x", B, lambda f: f.set("x", arr(STR, ["a"], 1 << 40)), cut=("tensors", 0))
    case("string-length-all-ones", "file ends inside x", B, setting("x", struct.pack("<IQ", STR, (1 << 64) - 1)))
    case("cut-in-string", "file ends inside x", B, setting("x", val(STR, "hello")), cut=("x", 8 + 1 + 4 + 8 + 3))
    case("boolean-2", "key 'x' has the boolean 2", B, setting("x", val(BOOL, 2)))
    for name, value, msg in [("u64", val(U64, 32), "is not a u32"), ("array", arr(U32, [32]), "is not a u32"), ("string", val(STR, "32"), "is not a u32"),
                             ("0", u32(0), "0 is not a power of two"), ("3", u32(3), "3 is not a power of two"),
                             ("131072", u32(1 << 17), "131072 is not a power of two up to 65536")]:
        case("alignment-" + name, "general.alignment " + msg, B, setting("general.alignment", value))
    case("alignment-beyond-the-data", "the file holds only a header", B, setting("general.alignment", u32(65536)))

    def info(f, at):
        return ("tensors", 8 + len("token_embd.weight") + at)
    for name, at, what in [("tensor-name", -3, "a tensor name"), ("dimensions", 2, "a tensor's dimensions"), ("shape", 10, "a tensor's shape"),
                           ("tensor-type", 22, "a tensor's type"), ("offset", 30, "a tensor's offset")]:
        case("cut-in-" + name, "file ends inside " + what, B, cut=info(B, at))
    case("tensor-name-256", "length 256 of a tensor name is above 255", B, tensor(name="n" * 256))
    case("tensor-name-empty", "a tensor without a name", B, tensor(name=""))
    case("tensor-twice", "tensor 'token_embd.weight' occurs twice", B, lambda f: f.tensors.append(copy.deepcopy(f.tensors[0])))
    case("dimensions-0", "has 0 dimensions, not 1 to 4", B, tensor(ne=[]))
    case("dimensions-5", "has 5 dimensions, not 1 to 4", B, tensor(ne=[64, 1, 1, 1, 1]))
    case("dimension-zero", "dimension 1 is 0", B, tensor(ne=[64, 0]))
    case("dimension-all-ones", "dimension 0 is 18446744073709551615", B, tensor(ne=[(1 << 64) - 1, 1]))
    case("shape-overflows", "dimension 2 is 4294967296", B, tensor(ne=[1 << 32, 1 << 30, 1 << 32]))
    case("size-overflows", "its size overflows", B, tensor(ne=[1 << 61], kind=T_F64))
    case("tensor-type-99", "has the type unknown (99)", B, tensor(kind=99))
    case("tensor-type-all-ones", "has the type unknown (4294967295)", B, tensor(kind=(1 << 32) - 1))
    for kind, name in [(T_Q4_0, "Q4_0"), (T_Q4_K, "Q4_K"), (14, "Q6_K"), (23, "IQ4_XS"), (34, "TQ1_0")]:
        case("tensor-type-" + name.lower(), f"has the type {name} ({kind}), expected F32, F16, Q8_0, BF16", B, tensor(kind=kind))
    case("row-not-whole-blocks", "rows of 63 elements are not whole NVFP4 blocks of 64", B, tensor(ne=[63, 1]))
    case("offset-misaligned", "offset 4 is not a multiple of 32", B, tensor(offset=4))
    case("offset-beyond", "at offset 1048576 end beyond the file", B, tensor(offset=1 << 20))
    case("offset-huge", "end beyond the file", B, tensor(offset=(1 << 64) - 32))
    case("offset-end-wraps", "end beyond the file", B, tensor(ne=[8], kind=T_F32, offset=(1 << 64) - 32, data=bytes(32)))
    case("size-padding-wraps", "end beyond the file", B, tensor(ne=[(1 << 61) - 1], kind=T_F32, offset=1 << 63, data=bytes(32)))
    case("sizes-sum-wraps", "end beyond the file", B,  # four times 2^62 bytes
         lambda f: [f.put(name, [1 << 60], T_F32, bytes(32)) for name in ("token_embd.weight", "a", "b", "c")])
    case("data-cut", "data of 36 bytes at offset 0 end beyond the file", B, lambda f: f.bytes()[:-29])
    case("data-missing", "the file holds only a header", B, cut=("data", 0))
    case("data-too-small", "end beyond the file", B, tensor(ne=[64, 1 << 40]))
    case("data-overlaps", "tensors 'token_embd.weight' and 'x' overlap", B, lambda f: (f.put("x", [1], T_F32), setattr(f.tensors[1], "offset", 32)))
    case("split-count", "split.count is 3, the name says 1 part", B, setting("split.count", val(U16, 3)))
    case("split-tensors-count", "split.tensors.count is 9, the parts hold 1", B, setting("split.tensors.count", val(I32, 9)))
    case("part-00005-of-00003", "part 5 of 3 does not exist", B)
    case("part-00000-of-00003", "part 0 of 3 does not exist", B)
    case("alone-00002-of-00002", "alone-00001-of-00002.gguf': cannot open", B)
    case("pair-00001-of-00002", "pair-00002-of-00002.gguf': file ends inside the version", B)
    case("pair-00002-of-00002", "pair-00002-of-00002.gguf': file ends inside the version", B, cut=5)
    case("twins-00001-of-00002", "tensor 'token_embd.weight' occurs twice", B)
    case("twins-00002-of-00002", "tensor 'token_embd.weight' occurs twice", B)


def metadata_cases():
    B, D = bare(), bare("deepseek2")
    case("architecture-missing", "'general.architecture' is missing", B, setting("general.architecture", None))
    case("architecture-number", "'general.architecture' is missing", B, setting("general.architecture", u32(1)))
    case("architecture-unknown", "the architecture 'mamba' is not supported; known are qwen3moe,", B, setting("general.architecture", val(STR, "mamba")))
    case("architecture-of-controls", "the architecture '??]0;x?' is not", B, setting("general.architecture", val(STR, b"\n\x1b]0;x\xff")))
    case("no-tensors", "the file holds a vocabulary but no tensors", B, attr("tensors", []))
    for base, arch, keys in [(B, "qwen3moe", ["context_length", "embedding_length", "block_count", "attention.head_count", "expert_count",
                                              "attention.layer_norm_rms_epsilon", "expert_used_count"]),
                             (D, "deepseek2", ["attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count"])]:
        for k in keys:
            case(f"{arch}-no-{k}", f"metadata key '{arch}.{k}' is missing", base, setting(f"{arch}.{k}", None))
    bad = [("context_length", "string", val(STR, "64"), "is not an integer"), ("context_length", "float", val(F32, 64), "is not an integer"),
           ("context_length", "empty-array", arr(U32, []), "is not an integer"), ("context_length", "0", u32(0), "is 0, expected 1 to"),
           ("context_length", "u64-max", val(U64, (1 << 64) - 1), "is not an integer"), ("context_length", "negative", val(I64, -1), "is -1, expected 1 to"),
           ("embedding_length", "huge", val(U64, 1 << 62), "is 4611686018427387904, expected 1 to 131072"), ("block_count", "513", u32(513), "is 513, expected 1 to 512"),
           ("block_count", "0", u32(0), "is 0, expected 1 to 512"), ("nextn_predict_layers", "all", u32(1), "is 1, expected 0 to 0"),
           ("attention.head_count", "differs", arr(U32, [1, 2]), "has 2 values, expected one for each of 1 layers"), ("attention.head_count", "0", u32(0), "is 0, expected 1 to 1024"),
           ("attention.head_count_kv", "more", u32(2), "is 2, expected 1 to 1"), ("attention.layer_norm_rms_epsilon", "string", val(STR, "1e-6"), "is not a number"),
           ("attention.layer_norm_rms_epsilon", "nan", val(F32, float("nan")), "is nan, expected 0 to 1"), ("attention.key_length", "1", u32(1), "is 1, expected 2 to 4096"),
           ("attention.layer_norm_rms_epsilon", "array", arr(F32, [1e-6]), "is not a number"), ("attention.value_length", "0", u32(0), "is 0, expected 1 to 4096"),
           ("expert_count", "1025", u32(1025), "is 1025, expected 1 to 1024"), ("expert_used_count", "3", u32(3), "is 3, expected 1 to 2"),
           ("rope.dimension_count", "6", u32(6), "is 6, expected 2 to 4"), ("expert_group_count", "negative", val(I32, -2), "is -2, expected 0 to 1024"),
           ("expert_group_used_count", "2", u32(2), "is 2, expected 0 to 1"), ("expert_gating_func", "5", u32(5), "is 5, expected 0 to 4"),
           ("expert_weights_scale", "negative", val(F32, -1), "is -1, expected 0 to"),
           ("rope.freq_base", "bool", val(BOOL, 1), "is not a number"), ("rope.freq_base", "0", val(F32, 0), "is 0, expected 1 to"),
           ("rope.scaling.type", "ntk", val(STR, "ntk"), "is 'ntk'; known are none, linear and yarn"),
           ("rope.scaling.type", "number", u32(2), "is not a string"), ("rope.scale_linear", "4", val(F32, 4), "is 4, expected 1 to 1"),
           ("rope.scaling.yarn_ext_factor", "without-yarn", val(F32, 1), "is 1, expected 0"),
           ("rope.scaling.factor", "infinite", val(F32, float("inf")), "is inf, expected 0 to")]
    for k, what, value, msg in bad:
        case(f"{k}-{what}", f"metadata key 'qwen3moe.{k}' {msg}", B, setting(f"qwen3moe.{k}", value))
    case("rope-dimension-odd", "'qwen3moe.rope.dimension_count' is 3, expected an even number", B, setting("qwen3moe.rope.dimension_count", u32(3)))
    case("heads-do-not-divide", "layer 0 has 3 heads, expected a multiple of its 2 KV heads", B,
         lambda f: (f.set("qwen3moe.attention.head_count", u32(3)), f.set("qwen3moe.attention.head_count_kv", u32(2))))
    case("head-of-nothing", "metadata key 'qwen3moe.attention.key_length' is 0 by default, expected 2 to 4096", B,
         lambda f: (f.set("qwen3moe.attention.key_length", None), f.set("qwen3moe.attention.head_count", u32(65))))
    case("weights-norm-u32", "metadata key 'qwen3moe.expert_weights_norm' is not a boolean", B,
         lambda f: (f.set("qwen3moe.expert_gating_func", u32(1)), f.set("qwen3moe.expert_weights_norm", u32(1))))
    case("yarn-latent-without-multiplier", "yarn_log_multiplier' is missing", D, setting("deepseek2.rope.scaling.type", val(STR, "yarn")))
    case("groups-none-used", "expert_group_used_count' is 0", B,
         lambda f: (f.set("qwen3moe.expert_group_count", u32(2)), f.set("qwen3moe.expert_group_used_count", u32(0))))
    case("rope-not-finite", "rotary frequency 0 is not finite", B,
         lambda f: (f.set("qwen3moe.rope.scaling.type", val(STR, "linear")), f.set("qwen3moe.rope.scaling.factor", val(F64, 1e-44))))
    case("kv_lora_rank-0", "attention.kv_lora_rank' is 0, expected 1 to 8192", D, setting("deepseek2.attention.kv_lora_rank", u32(0)))
    case("rope-whole-head", "rope.dimension_count' is 4, expected 2 to 3", D, setting("deepseek2.rope.dimension_count", u32(4)))
    case("temperature-scale", "attention.temperature_scale' is -1, expected 0 to", D, setting("deepseek2.attention.temperature_scale", val(F32, -1)))


def window_cases():
    G, S = gptoss(), step()
    case("gpt-oss", "-", G)
    case("gpt-oss-no-window", "metadata key 'gpt-oss.attention.sliding_window' is missing", G, setting("gpt-oss.attention.sliding_window", None))
    case("window-negative", "attention.sliding_window' is -1, expected 0 to", G, setting("gpt-oss.attention.sliding_window", val(I32, -1)))
    case("window-pattern-length", "attention.sliding_window_pattern' has 2 values, expected one for each of 1 layers", G,
         setting("gpt-oss.attention.sliding_window_pattern", arr(U32, [1, 0])))
    case("window-pattern-2", "attention.sliding_window_pattern' is 2, expected 0 to 1", G, setting("gpt-oss.attention.sliding_window_pattern", arr(U32, [2])))
    case("window-base", "rope.freq_base_swa' is 20000, expected rope.freq_base, 10000", G, setting("gpt-oss.rope.freq_base_swa", val(F32, 20000)))
    for t in G.tensors[7:]:
        if t.name.endswith(".bias") and "attn_output" not in t.name and "ffn" not in t.name:
            continue  # those of q, k and v are optional
        if "sinks" in t.name or t.name.endswith(".bias"):
            case(f"gpt-oss-no-{t.name[6:]}", f"tensor '{t.name}' is missing", G, lambda f, n=t.name: f.drop(n))
    case("expert-bias-shape", "tensor 'blk.0.ffn_up_exps.bias' has the shape {1, 3}, expected {1, 2}", G, lambda f: f.put("blk.0.ffn_up_exps.bias", [1, 3], T_F32))
    case("expert-bias-nan", "tensor 'blk.0.ffn_down_exps.bias' holds -nan at index 0", G, lambda f: f.put("blk.0.ffn_down_exps.bias", [64, 2], T_F32, b"\xff" * 512))
    case("sinks-shape", "tensor 'blk.0.attn_sinks.weight' has the shape {2}, expected {1}", G, lambda f: f.put("blk.0.attn_sinks.weight", [2], T_F32))
    case("step35", "-", S)
    case("gate-width", "tensor 'blk.0.attn_gate.weight' has the shape {64, 3}, expected {64, 2}", S, lambda f: f.put("blk.0.attn_gate.weight", [64, 3], T_BF16))
    case("clamp-length", "swiglu_clamp_exp' has 2 values, expected one for each of 1 layers", S, setting("step35.swiglu_clamp_exp", arr(F32, [7, 7])))
    case("clamp-negative", "swiglu_clamp_exp' is -7, expected 0 to", S, setting("step35.swiglu_clamp_exp", val(F32, -7)))
    case("clamp-string", "swiglu_clamp_shexp' is not a number", S, setting("step35.swiglu_clamp_shexp", val(STR, "7")))
    case("rope-factors-zero", "rotary frequency 0 is not finite", S, lambda f: f.put("rope_freqs.weight", [2], T_F32, bytes(8)))
    case("rope-factors-many", "tensor 'rope_freqs.weight' has 5000 values, expected 1", S, lambda f: f.put("rope_freqs.weight", [5000], T_F32))


def sparse_cases():
    S, key = sparse(), "glm-dsa.attention.indexer."
    case("glm-dsa", "-", S)
    case("deepseek32", "-", sparse("deepseek32"))
    for name in ("head_count", "key_length", "top_k"):
        case(f"indexer-no-{name}", f"metadata key '{key}{name}' is missing", S, setting(key + name, None))
        case(f"indexer-{name}-0", f"metadata key '{key}{name}' is 0, expected", S, setting(key + name, u32(0)))
    case("indexer-top_k-array", "metadata key 'glm-dsa.attention.indexer.top_k'", S, setting(key + "top_k", arr(U32, [2, 3])))
    case("indexer-top_k-many", "-", S, setting(key + "top_k", u32(1 << 28)))
    case("indexer-no-low-rank", "attention.q_lora_rank' is missing: the indexer needs a low-rank query", S, setting("glm-dsa.attention.q_lora_rank", u32(0)))
    case("indexer-narrow", "key_length' is 2, expected at least the 4 rotated values", S,
         lambda f: (f.set(key + "key_length", u32(2)), f.set("glm-dsa.rope.dimension_count", u32(4)), f.set("glm-dsa.attention.key_length_mla", u32(6))))
    for t in S.tensors:
        if "indexer.attn_k." not in t.name and "indexer." in t.name:
            case("indexer-no-" + t.name[14:], f"tensor '{t.name}' is missing", S, lambda f, n=t.name: f.drop(n))
            case("indexer-shape-" + t.name[14:], f"tensor '{t.name}' has the shape", S, lambda f, n=t.name: f.put(n, f.t(n).ne[:-1] + [f.t(n).ne[-1] + 1], f.t(n).kind))
            case("indexer-shared-" + t.name[14:], "tensor 'blk.1" + t.name[5:] + "'", S, lambda f, t=t: f.put("blk.1" + t.name[5:], t.ne, t.kind))
    case("indexer-not-first", "layer 0 has no indexer, expected tensor 'blk.0.indexer.attn_k.weight'", S, lambda f: [f.drop(t.name) for t in S.tensors if "indexer." in t.name])
    case("indexer-nan", "tensor 'blk.0.indexer.k_norm.bias' holds -nan at index 0", S, lambda f: f.put("blk.0.indexer.k_norm.bias", [4], T_F32, b"\xff" * 16))
    case("indexer-nan-scores", "-", S, lambda f: f.put("blk.0.indexer.proj.weight", [64, 2], T_BF16, b"\xff" * 256))


def block_cases():
    B, key = blocks(), "minimax-m3.attention.indexer."
    case("minimax-m3", "-", B)
    for name in ("head_count", "key_length", "top_k", "block_size", "local_blocks"):
        case(f"blocks-no-{name}", f"metadata key '{key}{name}' is missing", B, setting(key + name, None))
        case(f"blocks-{name}-0", f"metadata key '{key}{name}' is 0, expected", B, setting(key + name, u32(0)))
    case("blocks-odd", f"metadata key '{key}block_size' is 3, expected a power of two", B, setting(key + "block_size", u32(3)))
    case("blocks-long", f"metadata key '{key}block_size' is 131072, expected 1 to 65536", B, setting(key + "block_size", u32(1 << 17)))
    case("blocks-alone", "-", B, setting(key + "block_size", u32(1)))
    case("blocks-many", f"metadata key '{key}top_k' is", B, setting(key + "top_k", u32(1 << 31)))
    case("blocks-all", "-", B, setting(key + "top_k", u32(1 << 20)))
    case("blocks-local", "-", B, setting(key + "local_blocks", u32(2)))
    case("blocks-local-3", f"metadata key '{key}local_blocks' is 3, expected 1 to 2", B, setting(key + "local_blocks", u32(3)))
    case("blocks-heads", f"metadata key '{key}head_count' is 1, expected the 2 KV heads of layer 0", B, setting(key + "head_count", u32(1)))
    case("blocks-heads-list", f"metadata key '{key}head_count' is 2, expected the 1 KV heads of layer 1", B, setting("minimax-m3.attention.head_count_kv", arr(U32, [2, 1])))
    case("blocks-narrow", "key_length' is 2, expected at least the 4 rotated values", B, setting(key + "key_length", u32(2)))
    for t in B.tensors:
        if "indexer." in t.name:
            name = t.name[14:]
            if "k_proj" not in name:
                case("blocks-no-" + name, f"tensor '{t.name}' is missing", B, lambda f, n=t.name: f.drop(n))
                case("blocks-first-" + name, "tensor 'blk.0" + t.name[5:] + "'", B, lambda f, t=t: f.put("blk.0" + t.name[5:], t.ne, t.kind))
            case("blocks-shape-" + name, f"tensor '{t.name}' has the shape", B, lambda f, n=t.name: f.put(n, f.t(n).ne[:-1] + [f.t(n).ne[-1] + 1], f.t(n).kind))
    case("blocks-bias", "tensor 'blk.1.indexer.k_norm.bias'", B, lambda f: f.put("blk.1.indexer.k_norm.bias", [4], T_F32))
    case("blocks-none", "-", B, lambda f: [f.drop(t.name) for t in B.tensors if "indexer." in t.name])
    case("blocks-both", "-", B, lambda f: [f.put("blk.0" + t.name[5:], t.ne, t.kind) for t in B.tensors if "indexer." in t.name])
    case("blocks-nan", "tensor 'blk.1.indexer.q_norm.weight' holds -nan at index 0", B, lambda f: f.put("blk.1.indexer.q_norm.weight", [4], T_F32, b"\xff" * 16))
    case("blocks-nan-scores", "-", B, lambda f: f.put("blk.1.indexer.q_proj.weight", [64, 8], T_BF16, b"\xff" * 1024))


def stream_cases():
    S, at = streams(), "deepseek4."
    ratios, table = at + "attention.compress_ratios", "blk.0.ffn_gate_tid2eid.weight"
    case("deepseek4", "-", S)
    for name in ("attention.sliding_window", "attention.output_group_count", "attention.output_lora_rank", "attention.q_lora_rank", "attention.compress_rope_freq_base", "attention.indexer.top_k",
                 "rope.dimension_count", "hash_layer_count", "hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon"):
        case("streams-no-" + name, f"metadata key '{at}{name}' is missing", S, setting(at + name, None))
    for name in ("expert_weights_scale", "swiglu_clamp_exp"):
        case("streams-no-" + name, f"metadata key '{at}{name}' is missing", S, setting(at + name, None))
    case("streams-no-swiglu_clamp_shexp", "-", S, setting(at + "swiglu_clamp_shexp", None))
    case("streams-gating", f"metadata key '{at}expert_gating_func' is 2, expected 4", S, setting(at + "expert_gating_func", u32(2)))
    case("streams-attn-factor", f"metadata key '{at}rope.scaling.attn_factor' is 0.5, expected 1", S, setting(at + "rope.scaling.attn_factor", val(F32, 0.5)))
    case("streams-no-bias", "tensor 'blk.2.exp_probs_b.bias' is missing", S, lambda f: f.drop("blk.2.exp_probs_b.bias"))
    case("ratios-missing", f"metadata key '{ratios}' is missing or has no number for each of 3 layers", S, setting(ratios, None))
    case("ratios-short", f"metadata key '{ratios}' is missing or has no number for each of 3 layers", S, setting(ratios, arr(I32, [0, 4])))
    case("ratios-one", f"metadata key '{ratios}' is missing or has no number for each of 3 layers", S, setting(ratios, u32(4)))
    case("ratios-negative", f"metadata key '{ratios}' has no number from 0 to 65536 for layer 2", S, setting(ratios, arr(I32, [0, 4, -4])))
    case("ratios-huge", f"metadata key '{ratios}' has no number from 0 to 65536 for layer 1", S, setting(ratios, arr(I32, [0, 1 << 30, 8])))
    case("ratios-strings", f"metadata key '{ratios}' has no number from 0 to 65536 for layer 0", S, setting(ratios, arr(STR, ["0", "4", "8"])))
    case("ratios-real", f"metadata key '{ratios}' has no number from 0 to 65536 for layer 0", S, setting(ratios, arr(F32, [0, 4, 8])))
    case("ratios-unsigned", "-", S, setting(ratios, arr(U32, [0, 4, 8])))
    case("ratios-other", "tensor 'blk.1.attn_compressor_kv.weight' has the shape", S, setting(ratios, arr(I32, [0, 8, 8])))
    case("ratios-none", "tensor 'blk.1.", S, setting(ratios, arr(I32, [0, 0, 8])))
    for n in (0, 9):
        case(f"streams-{n}", f"metadata key '{at}hyper_connection.count' is {n}, expected 1 to 8", S, setting(at + "hyper_connection.count", u32(n)))
    case("streams-3", "tensor 'output_hc_fn.weight' has the shape", S, setting(at + "hyper_connection.count", u32(3)))
    case("streams-iterations-0", "hyper_connection.sinkhorn_iterations' is 0, expected 1 to 1000", S, setting(at + "hyper_connection.sinkhorn_iterations", u32(0)))
    case("streams-eps", "hyper_connection.epsilon' is -1, expected 0 to 1", S, setting(at + "hyper_connection.epsilon", val(F32, -1)))
    case("groups-odd", "layer 0 has 2 heads, expected a multiple of the 3 groups of 'deepseek4.attention.output_group_count'", S, setting(at + "attention.output_group_count", u32(3)))
    case("groups-0", "attention.output_group_count' is 0, expected 1 to 1024", S, setting(at + "attention.output_group_count", u32(0)))
    case("groups-one", "tensor 'blk.0.attn_output_a.weight' has the shape", S, setting(at + "attention.output_group_count", u32(1)))
    case("shared-heads", "has 2 KV heads, expected 1", S, setting(at + "attention.head_count_kv", u32(2)))
    case("shared-values", "attention.value_length' is 2, expected the key length, 4", S, setting(at + "attention.value_length", u32(2)))
    case("shared-rotation", "rope.dimension_count' is", S, setting(at + "rope.dimension_count", u32(6)))
    case("hash-many", "hash_layer_count' is 4, expected 0 to 3", S, setting(at + "hash_layer_count", u32(4)))
    case("hash-more", "tensor 'blk.1.ffn_gate_tid2eid.weight' is missing", S, setting(at + "hash_layer_count", u32(2)))
    case("hash-none", "tensor 'blk.0.exp_probs_b.bias' is missing, and 'deepseek4.hash_layer_count' is 0", S, setting(at + "hash_layer_count", u32(0)))
    case("table-beyond", f"tensor '{table}' holds 2 at index 3, expected an expert below 2", S, lambda f: f.put(table, [1, 8], T_I32, struct.pack("<8i", 0, 1, 0, 2, 0, 0, 0, 0)))
    case("table-negative", f"tensor '{table}' holds -1 at index 7", S, lambda f: f.put(table, [1, 8], T_I32, struct.pack("<8i", *[0] * 7, -1)))
    case("table-twice", f"tensor '{table}' holds 1 twice for a token, at index 5", S,
         lambda f: (f.set(at + "expert_used_count", u32(2)), f.put(table, [2, 8], T_I32, struct.pack("<16i", 0, 1, 1, 0, 1, 1, *[0, 1] * 5))))
    case("table-real", f"tensor '{table}' has the type F32, expected I32", S, lambda f: f.put(table, [1, 8], T_F32))
    case("table-short", f"tensor '{table}' has the shape", S, lambda f: f.put(table, [1, 7], T_I32, bytes(28)))
    case("table-missing", f"tensor '{table}' is missing", S, lambda f: f.drop(table))
    case("table-elsewhere", "tensor 'blk.2.ffn_gate_tid2eid.weight'", S, lambda f: f.put("blk.2.ffn_gate_tid2eid.weight", [1, 8], T_I32, bytes(32)))
    for name in ("attn_sinks", "hc_ffn_base", "attn_output_a", "attn_kv_a_norm"):
        case("streams-no-" + name, f"tensor 'blk.0.{name}.weight' is missing", S, lambda f, n=name: f.drop(f"blk.0.{n}.weight"))
    for name in ("output_hc_fn", "output_hc_base", "output_hc_scale", "blk.1.indexer_compressor_ape", "blk.1.indexer.proj", "blk.2.attn_compressor_norm"):
        case("streams-no-" + name.replace("blk.", ""), f"tensor '{name}.weight' is missing", S, lambda f, n=name: f.drop(n + ".weight"))
    case("streams-ids", "tensor 'blk.0.attn_kv.weight' has the type I32, which is not a weight type", S, lambda f: f.put("blk.0.attn_kv.weight", [64, 4], T_I32))
    case("streams-nan", "tensor 'blk.0.hc_attn_fn.weight' holds -nan at index 0", S, lambda f: f.put("blk.0.hc_attn_fn.weight", [128, 8], T_F32, b"\xff" * 4096))
    P, own = streams(1), "blk.3.nextn."
    case("deepseek4-predicts", "-", P)
    for name, *_ in NEXTN:
        if name != "shared_head_norm":
            case("predicts-no-" + name, f"tensor '{own}{name}.weight' is missing", P, lambda f, n=name: f.drop(f"{own}{n}.weight"))
    for name, ne in [("eh_proj", [64, 128]), ("hc_head_fn", [64, 2]), ("hc_head_base", [8]), ("hc_head_scale", [3])]:
        case("predicts-shape-" + name, f"tensor '{own}{name}.weight' has the shape", P, lambda f, n=name, ne=ne: f.put(f"{own}{n}.weight", ne, f.t(f"{own}{n}.weight").kind))
    case("predicts-nan", f"tensor '{own}hc_head_base.weight' holds -nan at index 0", P, lambda f: f.put(own + "hc_head_base.weight", [2], T_F32, b"\xff" * 8))
    case("predicts-bf16-nan", "-", P, lambda f: f.put(own + "eh_proj.weight", [128, 64], T_BF16, b"\xff" * 16384))
    case("predicts-ratio", f"metadata key '{ratios}' has 4 for prediction layer 3, expected 0", P, setting(ratios, arr(I32, [0, 4, 8, 4])))
    case("predicts-ratio-short", f"metadata key '{ratios}' is missing or has no number for each of 4 layers", P, setting(ratios, arr(I32, [0, 4, 8])))
    case("predicts-hash", f"metadata key '{at}hash_layer_count' is 4, expected 0 to 3", P, setting(at + "hash_layer_count", u32(4)))
    case("predicts-table", "tensor 'blk.3.ffn_gate_tid2eid.weight' is not part", P, lambda f: f.put("blk.3.ffn_gate_tid2eid.weight", [1, 8], T_I32, bytes(32)))
    case("predicts-alone", "the file holds only multi-token-prediction layers", P, lambda f: [f.drop(t.name) for t in P.tensors if t.name[:6] in ("blk.0.", "blk.1.", "blk.2.")])
    case("predicts-left-out", "-", P, lambda f: [f.drop(t.name) for t in P.tensors if t.name.startswith("blk.3.")])
    case("predicts-trunk", "tensor 'blk.2.nextn.enorm.weight' is not part", S, lambda f: f.put("blk.2.nextn.enorm.weight", [64], T_F32))
    case("streams-infinite-scores", "-", S, lambda f: f.put("blk.1.indexer.proj.weight", [64, 2], T_BF16, b"\xff" * 256))


def tensor_cases():
    Q, D = qwen(), deepseek()
    for base, names in [(Q, [t.name for t in Q.tensors if t.name[-8:-7] not in "vkx"]), (D, ["blk.0.attn_q.weight", "blk.0.attn_kv_a_mqa.weight", "blk.0.attn_k_b.weight", "blk.0.ffn_up_shexp.weight"])]:
        for n in names:  # without a router the layer counts as dense
            case(f"no-{n.removesuffix('.weight')}" if base is Q else f"deepseek2-no-{n[6:-7]}", f"tensor '{'blk.0.ffn_gate.weight' if 'gate_inp' in n else n}' is missing", base, lambda f, n=n: f.drop(n))
    shape = "has the shape {%s}, expected {%s}"
    for base, n, ne, kind, msg in [
            (Q, "token_embd", [128, 4], T_NVFP4, shape % ("128, 4", "64, 4")), (Q, "token_embd", [64, 4, 2], T_NVFP4, shape % ("64, 4, 2", "64, 4")),
            (Q, "output_norm", [65], T_F32, shape % ("65", "64")), (Q, "blk.0.attn_q", [64, 5], T_NVFP4, shape % ("64, 5", "64, 4")),
            (Q, "blk.0.attn_output", [64, 2], T_NVFP4, shape % ("64, 2", "2, 64")), (Q, "output", [64, 7], T_NVFP4, shape % ("64, 7", "64, 8")),
            (Q, "blk.0.ffn_up_exps", [64, 1, 1], T_NVFP4, shape % ("64, 1, 1", "64, 1, 2")),
            (Q, "blk.0.ffn_down_exps", [1, 64, 1], T_BF16, shape % ("1, 64, 1", "1, 64, 2")),
            (Q, "blk.0.ffn_gate_inp", [64, 3], T_NVFP4, "routes to 3 experts, expected 1 to 2"),
            (Q, "output_norm", [64], T_Q8_0, "has the type Q8_0, expected F32, F16 or BF16"), (Q, "output_norm", [64], T_I32, "has the type I32, expected F32"),
            (Q, "blk.0.attn_v", [64, 2], T_I32, "has the type I32, which is not a weight type"),
            (D, "blk.0.attn_k_b", [4, 2], T_BF16, shape % ("4, 2", "2, 4")), (D, "blk.0.ffn_down_shexp", [2, 64], T_BF16, "ffn_gate_shexp.weight' " + shape % ("64, 1", "64, 2")),
            (D, "output", [64, 1, 1, 2], T_NVFP4, shape % ("64, 1, 1, 2", "64, 8"))]:
        name = f"{n}-{'x'.join(map(str, ne))}-{kind}"
        case("shape-" + name if msg.startswith("has the shape") else name, msg, base, lambda f, n=n, ne=ne, kind=kind: f.put(n + ".weight", ne, kind))
    for what, bits in [("nan", 0x7fc00000), ("inf", 0xff800000)]:
        case(f"norm-{what}", f"tensor 'output_norm.weight' holds {'nan' if what == 'nan' else '-inf'} at index 63", Q,
             lambda f, bits=bits: f.put("output_norm.weight", [64], T_F32, struct.pack("<f", 1) * 63 + struct.pack("<I", bits)))
    case("router-bias-nan", "tensor 'blk.0.exp_probs_b.bias' holds nan at index 0", D, lambda f: f.put("blk.0.exp_probs_b.bias", [2], T_F32, b"\0\0\xc0\x7f" * 2))
    case("gate-up-types", "layer 0: gate has the type NVFP4, expected that of up, BF16", Q, lambda f: f.put("blk.0.ffn_up_exps.weight", [64, 1, 2], T_BF16))
    case("shared-gate-up-types", "layer 0: gate has the type F16, expected that of up, NVFP4", D, lambda f: f.put("blk.0.ffn_gate_shexp.weight", [64, 1], T_F16))
    case("bias-shape", "tensor 'blk.0.attn_q.bias' " + shape % ("1", "4"), Q, lambda f: f.put("blk.0.attn_q.bias", [1], T_F32))
    case("router-bias-softmax", "layer 0 has a routing bias, which needs a sigmoid router", Q, lambda f: f.put("blk.0.exp_probs_b.bias", [2], T_F32))
    case("scale-of-3", "tensor 'blk.0.ffn_up_exps.scale' " + shape % ("3", "2"), Q, lambda f: f.put("blk.0.ffn_up_exps.scale", [3], T_F32))
    case("scale-nan", "tensor 'token_embd.scale' holds nan at index 0", Q, lambda f: f.put("token_embd.scale", [1], T_F32, b"\0\0\xc0\x7f"))
    case("router-fewer-than-used", "routes to 1 experts, expected 2 to 2", Q,
         lambda f: (f.set("qwen3moe.expert_used_count", u32(2)), f.put("blk.0.ffn_gate_inp.weight", [64, 1], T_NVFP4)))
    case("router-no-whole-groups", "expected 1 to 3, in 3 equal groups", Q,
         lambda f: (f.set("qwen3moe.expert_count", u32(3)), f.set("qwen3moe.expert_group_count", u32(3))))
    for name in ("blk.0.attn_sinks.weight", "blk.1.attn_q.weight", "blk.0.ffn_gate.weight", "unknown\x1b\n"):
        shown = "".join(c if c.isprintable() else "?" for c in name)
        case("unused-" + shown.replace("?", "_"), f"tensor '{shown}' is not part of the architecture qwen3moe", Q, lambda f, name=name: f.put(name, [1], T_F32))
    for what, v, msg in [("short", arr(U32, [0]), "lists 1 experts, the layer has 2"), ("scalar", u32(0), "lists 1 experts, the layer has 2"),
                         ("descending", arr(U32, [1, 0]), "is not an ascending list"), ("equal", arr(U32, [1, 1]), "is not an ascending list"),
                         ("strings", arr(STR, ["0", "1"]), "is not an ascending list"), ("huge", arr(U64, [1, 1 << 40]), "is not an ascending list"),
                         ("negative", arr(I32, [-1, 1]), "is not an ascending list")]:
        case("kept-" + what, "metadata key 'moe.reap.kept.0' " + msg, Q, setting("moe.reap.kept.0", v))


def vocabulary_cases():
    Q = qwen()
    g = "tokenizer.ggml."
    for what, key, value, msg in [
            ("model-missing", "model", None, "the key tokenizer.ggml.model is missing"), ("model-bert", "model", val(STR, "bert"), "the tokenizer 'bert' is not supported"), ("model-llama", "model", val(STR, "llama"), "there is no byte token <0x00>"),
            ("model-number", "model", u32(1), "the key tokenizer.ggml.model is missing"), ("pre-missing", "pre", None, "the key tokenizer.ggml.pre is missing"),
            ("pre-unknown", "pre", val(STR, "gpt-2 qwen2"), "the pre-tokenizer 'gpt-2 qwen2'"), ("pre-empty", "pre", val(STR, ""), "the pre-tokenizer ''"),
            ("tokens-numbers", "tokens", arr(U32, [1, 2]), "tokens is not an array of strings"), ("tokens-string", "tokens", val(STR, "a"), "tokens is not an array of strings"),
            ("tokens-empty", "tokens", arr(STR, []), "tokens has 0 elements, expected 1 to"), ("merges-missing", "merges", None, "the key tokenizer.ggml.merges is missing"),
            ("tokens-9", "tokens", arr(STR, list("abcdefghi")), "found 8 elements"), ("merges-numbers", "merges", arr(U64, [1]), "merges is not an array of strings"),
            ("merges-empty", "merges", arr(STR, []), "merges has 0 elements"), ("types-short", "token_type", arr(I32, [1] * 7), "an array of 8 integers, found 7 elements"),
            ("types-strings", "token_type", arr(STR, ["1"] * 8), "expected an array of 8 integers"), ("types-scalar", "token_type", u32(1), "expected an array of 8 integers"),
            ("types-empty", "token_type", arr(I32, []), "found 0 elements")]:
        case("vocabulary-" + what, msg, Q, setting(g + key, value))
    case("vocabulary-larger", "the vocabulary has 9 tokens, the embedding 8 rows", Q,
         lambda f: (f.set(g + "tokens", arr(STR, list("abcdefghi"))), f.set(g + "token_type", arr(I32, [1] * 9))))
    case("valid-strange-vocabulary", "-", Q, lambda f: (  # nothing here is wrong enough to refuse
        f.set(g + "tokens", arr(STR, ["", "a", "a", b"\xff\xfe", "\u0120\u0120", "</s>", "<", ">"])), f.set(g + "token_type", arr(I32, [3, 1, 1, -1, 99, 4, 4, 2])),
        f.set(g + "merges", arr(STR, ["", " ", "a", "a ", " a", "  ", b"\xff a", "x y"])), f.set(g + "eos_token_id", val(I64, -5)),
        f.set(g + "bos_token_id", u32(8)), f.set(g + "eos_token_ids", arr(STR, ["x"])), f.set("tokenizer.chat_template", val(STR, b"{{ \xff\0"))))
    case("valid-byte-tokens", "-", Q, lambda f: (  # names of bytes in other vocabularies, the first ones of none
        f.set(g + "tokens", arr(STR, ["<0x-1>", "<0xFFF>", "<0x>", "<0xG0>", "<0x00>", "</s>", "<0xff>", "<0x 1>"])), f.set(g + "token_type", arr(I32, [6] * 8))))
    controls = b"a\x1b]0;owned\x07\x1b[31m\x7f\xc2\x9b2J" + "\u061c\u200e\u200f\u202a\u202e\u2066\u2069z\n".encode()
    case("valid-controls", "-", Q, lambda f: (f.set("general.name", val(STR, controls)), f.set("tokenizer.chat_template", val(STR, controls + b"{{ x }}"))))


TEMPLATES = {
    "chat": (b'{"messages":[{"role":"user","content":"Hi"}],"add_generation_prompt":true}',
             b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"),
    "macro": (b'{"x":[1,2,{"a":null}]}', b"{% macro f(a, b=2) %}{{ a ~ b }}{{ caller() }}{% endmacro %}{% call f(x) %}{{ x | tojson(indent=2) }}{% endcall %}"),
    "spread": (b'{"x":[1,[2]],"m":{"sep":",","end":"!"}}',
               b"{% macro f(a, sep='') %}{{ a }}{{ sep }}{% endmacro %}{{ f(*x[:1], **{'sep': m.sep}) }}{{ range(*x[1]) | list }}{{ dict(m, **m) }}{{ f(*x, **m) }}"),
    "namespace": (b"{}", b"{% set n = namespace(i=0) %}{% for k in range(9) if k % 2 %}{% set n.i = n.i + k %}{{ loop.index ~ loop.last }}{% else %}-{% endfor %}{{ n.i }}"),
    "filters": (b'{"s":"a<b>\\u00e9\\ud83d\\ude00"}', b"{{ s | upper | replace('A','') | e }}{{ s[::-1] }}{{ s[1:-1] }}{{ '%05.2f|%s' | format(1.5, s) }}{{ s.split('<') | join(',') }}"),
    "recursion": (b"{}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "nesting": (b"{}", b"{{ " + b"(" * 300 + b")" * 300 + b" }}"),
    "brackets": (b"{}", b"{{ " + b"[" * 1000), "minus": (b"{}", b"{{ " + b"-" * 1000 + b"1 }}"), "not": (b"{}", b"{{ " + b"not " * 300 + b"1 }}"),
    "ranges": (b"{}", b"{{ range(9, -9223372036854775808, -5) | length }}{{ range(100001) }}"),
    "integers": (b'{"i":-9223372036854775808}', b"{{ i // -1 }}{{ i % -1 }}{{ -i }}{{ i * i }}{{ i - 1 }}{{ i | abs }}{{ 2 ** 64 }}{{ 'x'[i:] }}{{ [1][::i] }}"),
    "zero": (b"{}", b"{{ 1 / 0 }}{{ 1 % 0 }}"), "repeat": (b"{}", b"{{ 'abc' * 1000000000000 }}{{ [1] * 100000000000 }}"),
    "unterminated": (b"{}", b"{% if a %}{{ 'x\\"), "exception": (b"{}", b"{{ raise_exception('no\nway \x1b[31m') }}"),
    "controls": (b"{}", b"{{ raise 'no\nway \x1b[31m\xc2\x9b\xff' }}"),
    "format": (b'{"u":"a"}', b"{{ '{:>{}}{0:*^99999999d}{:.2f}{{{k}}}{1:\xc3\xa9=08}{!r}{0[1]}{' .format(1, 2.5, k='x') }}{{ '{:0134217728s}{}{' .format(1) }}\n"),
    "percent": (b'{"u":"a\\u00e9","d":{"k":-7}}', b"{{ '%5d|%-*.3x|%+08.2f|%#o|%c|%r|%a|%%' % (d.k, 9, 255, 1e100, 8, 955, u, u) }}{{ '%(k)05d%(k)s' % d }}{{ '%*.*g|%s' | format(-5, 3, 2.5, u) }}{{ ('%s' | safe) % u }}{{ '%999999999d' % 1 }}{{ '%(' % d }}"),
    "spec": (b'{"u":"<a>","d":{"k":[1,{"x":2}]}}', b"{{ '{:+,}{:_x}{:#b}{:e}{:.3}{:%}{:n}{:c}{:z.1f}{!a:^9.3}'.format(-1234, 65535, 5, 1e-5, 12.5, 0.5, 3, 97, -0.01, u) }}{{ '{0[k][1][x]}{0.k!r:{1}}'.format(d, 30) }}{{ ('{}{{}}' | safe).format(u) }}{{ '{a}'.format_map({'a': u}) }}{{ '{:{:{}}}'.format(1, 2, 3) }}"),
    "wrap": (b'{"s":"well-known state--of the-art\\n\\nabcdefghijklmnop \\u00e9\\u2028x"}', b"{{ s | wordwrap(5) }}{{ s | wordwrap(3, false, '<br>', false) }}{{ s | wordwrap(1) }}{{ (s ~ s) | wordwrap(wrapstring='' | safe) }}"),
    "tags": (b'{"s":"<p>a<!-- <b> --> &amp;&#65;&#x110000;&copy&notit;</p"}', b"{{ s | striptags }}{{ s | forceescape | striptags }}{{ ('&#' ~ s) | striptags }}"),
    "pretty": (b'{"d":{"b":[1,"x y z \\n w"],"a":{"k":null}},"s":"word word word "}', b"{{ d | pprint }}{{ {1: d, 'a': [s * 9, s * 9], none: (s * 20,), 2.5: [d, d, d, d, d]} | pprint }}{{ range(50) | list | pprint }}"),
    "blocks": (b'{"x":[1,2]}', b"{% block a scoped %}{{ x }}{% block b %}{% endblock b %}{% endblock %}{{ self.b() }}{% for i in x %}{% block c required %} {% endblock %}{% endfor %}{% autoescape x[0] %}{% endautoescape %}{% print x, 1 %}"),
    "literals": (b"{}", b"{{ 0x1F + 0b1_0 + 0o17 + 1_000 + 1_0.5e-1_0 }}{{ 00.5 }}{{ '0x_f' | int(0, 16) }}{{ '\xd9\xa3' | int(1, 0) }}{{ (255).bit_length() }}{{ (0.1).hex() }}{{ (0.1).as_integer_ratio() }}{{ 0x }}"),
    "letters": (b'{"s":"\\u00df\\u03a3\\ufb01\\u0130 a\\tb"}', b"{{ s | upper }}{{ s.lower() }}{{ s | title }}{{ s.swapcase() }}{{ s.casefold() }}{{ s.expandtabs(3) }}{{ s.translate({97: 'x', 98: none, 9: 955}) }}{{ s.translate(''.maketrans('ab', 'ba', 'c')) }}{{ s.istitle() }}{{ s.isidentifier() }}{{ s.startswith(('a', s), 0, -1) }}"),
    "bytes": (b"[1]", b"\xff\xfe\0{{ '\xff' ~ '\\ud800' }}{# \xc3"), "self": (b'{"a":[]}', b"{% set a = a + [a] %}{% set d = {'k': a, 1: 2} %}{{ d.items() | list }}{{ d }}"),
}


def state(n, tokens, kind=2, digest=0, row_bytes=16, broken=0, magic=b"MOEKV003", n_plane=2, pos=0):
    """A saved state of valid-qwen3moe.gguf under an F32 cache; the checksum is FNV-1a over 64-bit words."""
    planes = struct.pack("<16I", 0, 0, 0, 0, 0, 4, row_bytes, 0, 0, 1, 0, 0, 0, 2, 16, 0)
    ids, rows, check = struct.pack(f"<{len(tokens)}i", *tokens), struct.pack("<f", 0.5) * 8 * len(tokens), 0xcbf29ce484222325
    for (word,) in struct.iter_unpack("<Q", planes + ids + bytes(-len(ids) % 8) + rows):
        check = (check ^ word) * 0x100000001b3 % 2**64
    return magic + struct.pack("<QIIIIQ", digest, kind, n_plane, n, pos, check ^ broken) + planes + ids + rows


SESSIONS = {  # a part of the message that refuses the file ("-": it is valid), and the file
    "valid.kv": ("-", state(3, [0, 1, 7])), "none.kv": ("-", state(0, [])), "full.kv": ("-", state(8, [1] * 8)),
    "many.kv": ("holds 9 tokens, but the context only 8", state(9, [1] * 9)), "count.kv": ("holds 4294967295 tokens", state(0xffffffff, [1])),
    "token.kv": ("the token id 8", state(2, [0, 8])), "negative.kv": ("the token id -1", state(2, [-1, 0])), "type.kv": ("a different --kv", state(1, [0], kind=0)),
    "model.kv": ("another model file", state(1, [0], digest=1)), "rows.kv": ("a different cache layout", state(1, [0], row_bytes=1 << 31)),
    "planes.kv": ("a different cache layout", state(1, [0], n_plane=0xffffffff)), "position.kv": ("4 of 3 tokens are in its state", state(3, [0, 1, 7], pos=4)),
    "reach.kv": ("4 of 3 tokens cannot be taken back", state(3, [0, 1, 7], kind=2 | 4 << 4)),
    "old.kv": ("MOEKV002 of another version", state(1, [0], magic=b"MOEKV002")), "long.kv": ("141 bytes long, expected 140", state(1, [0]) + b"x"),
    "short.kv": ("211 bytes long, expected 212", state(3, [0, 1, 7])[:-1]), "head.kv": ("40 bytes long, expected 104 or more", state(1, [0])[:40]),
    "magic.kv": ("not a saved state", b"MOEKV003"), "sum.kv": ("its checksum is wrong", state(3, [0, 1, 7], broken=1)),
    "valid.jsonl": ("-", b'{"moe":1}\n{"role":"system","content":"s"}\n{"role":"user","content":"\\u00e9"}\n{"role":"assistant","content":"<think>\\n</think>"}\n'),
    "thinking.jsonl": ("-", b'{"moe":1}\n{"role":"assistant","content":"","thinking":"t"}\n{"role":"assistant","content":"a","thinking":7}\n'),
    "header.jsonl": ("line 1 is not the header", b'{"moe":2}\n'), "role.jsonl": ("line 2 is not a message", b'{"moe":1}\n{"role":"tool","content":"x"}\n'),
    "content.jsonl": ("line 2 is not a message", b'{"moe":1}\n{"role":"user","content":[]}\n'),
    "cut.jsonl": ("line 3 is not a message", b'{"moe":1}\n{"role":"user","content":"x"}\n{"role":"us'),
    "nul.jsonl": ("line 2 is not a message", b'{"moe":1}\n{"role":"user","content":"\\u0000"}\n\0\n'),
    "twice.jsonl": ("line 2 is not a message", b'{"moe":1}\n{"role":"user","role":"user","content":"x"}\n'),
    "deep.jsonl": ("line 2 is not a message", b'{"moe":1}\n' + b"[" * 3000), "bytes.jsonl": ("line 2 is not a message", b'{"moe":1}\n{"role":"user","content":"\xff"}'),
}

TEXTS = [b"Hello, world! 1234567 it's\r\n\n   don't  ", "Gr\u00fc\u00dfe \u4e2d\u6587 \u00c5\u0041\u030a \u1100\u1161 \U0001f600\u200d\u2764\ufe0f".encode(), b"<|im_start|>user<|im_end|><think>[x]",
         b"\xff\xc3\xe2\x82\xf0\x9f\x98 \xed\xa0\x80\0\x7f", b"a" * 600, b" " * 600, "\u0301".encode() * 200, b"\r\n" * 100, b"'s'S'lL'Re", b"\xe2\x80\xa8\xe3\x80\x80\xc2\x85\xc2\xa0"]


ROUTERS = "ed0e84f8008ff175"  # the hash of the routers of valid-qwen3moe.gguf

# Directories of Hugging Face as fuzz_hf reads them: a line that chooses the command, then files behind lines "=== NAME";
# of a safetensors file the header. All models are of width 16 with two experts, but those in NVFP4 of width 64.
QWEN2 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
HF_SIZE = {"I64": 8, "I8": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def compact(j):
    return json.dumps(j, ensure_ascii=False, separators=(",", ":")).encode()


class Directory:
    def __init__(self, kind, **config):
        common = {"model_type": kind, "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
                  "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
        self.config, self.tensors, self.files = common | config, {}, {}
        self.files["tokenizer.json"] = {
            "added_tokens": [{"id": 6, "content": "<|im_end|>", "special": True}, {"id": 7, "content": "<think>"}], "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3}, "merges": ["a b"]}}
        self.files["tokenizer_config.json"] = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}

    def put(self, name, *shape, kind="BF16"):
        self.tensors[name] = (kind, shape)

    def linear(self, name, rows, cols, nvfp4=False):
        if not nvfp4:
            return self.put(name + ".weight", rows, cols)
        self.put(name + ".weight", rows, cols // 2, kind="U8"), self.put(name + ".weight_scale", rows, cols // 16, kind="F8_E4M3")
        self.put(name + ".weight_scale_2", kind="F32"), self.put(name + ".input_scale", kind="F32")

    def ffn(self, name, width, nvfp4=False):
        d = self.config["hidden_size"]
        self.linear(name + "gate_proj", width, d, nvfp4), self.linear(name + "up_proj", width, d, nvfp4), self.linear(name + "down_proj", d, width, nvfp4)

    def gqa(self, at, q=1):
        d, h = self.config["hidden_size"], self.config["head_dim"]
        self.linear(at + "self_attn.q_proj", q * h, d), self.linear(at + "self_attn.k_proj", h, d), self.linear(at + "self_attn.v_proj", h, d)
        self.linear(at + "self_attn.o_proj", d, h), self.put(at + "self_attn.q_norm.weight", h), self.put(at + "self_attn.k_norm.weight", h)

    def experts(self, at, router="gate", nvfp4=False):
        self.put(f"{at}mlp.{router}.weight", 2, self.config["hidden_size"])
        for e in range(2):
            self.ffn(f"{at}mlp.experts.{e}.", self.config["moe_intermediate_size"], nvfp4)

    def ends(self, body="model.", layers=1):
        d = self.config.get("text_config", self.config)["hidden_size"]
        n = self.config.get("text_config", self.config)["vocab_size"]
        self.put(body + "embed_tokens.weight", n, d), self.put(body + "norm.weight", d), self.put("lm_head.weight", n, d)
        for i in range(layers):
            self.put(f"{body}layers.{i}.input_layernorm.weight", d), self.put(f"{body}layers.{i}.post_attention_layernorm.weight", d)

    def header(self, names=None):
        out, at = {}, 0
        for name in names or self.tensors:
            kind, shape = self.tensors[name]
            n = HF_SIZE[kind] * math.prod(shape)
            out[name], at = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + n]}, at + n
        return compact(out)

    def text(self, command=""):
        files = {"config.json": self.config, "model.safetensors": self.header()} | self.files
        parts = [b"=== " + name.encode() + b"\n" + (v if isinstance(v, bytes) else compact(v)) for name, v in files.items() if v is not None]
        return b"\n".join([command.encode()] * bool(command) + parts)


def hf_qwen(nvfp4=False, **config):
    d = Directory("qwen3_moe", **({"hidden_size": 64, "moe_intermediate_size": 64} if nvfp4 else {}), **config)
    d.ends(), d.gqa("model.layers.0."), d.experts("model.layers.0.", nvfp4=nvfp4)
    return d


def hf_deepseek(kind="deepseek_v3", groups=2):
    d = Directory(kind, num_hidden_layers=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=16,
                  n_routed_experts=2, n_shared_experts=1, n_group=groups, topk_group=1, routed_scaling_factor=2.5,
                  rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0})
    d.ends(layers=2)
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        d.linear(at + "q_a_proj", 16, 16), d.put(at + "q_a_layernorm.weight", 16), d.linear(at + "q_b_proj", 12, 16), d.linear(at + "kv_a_proj_with_mqa", 20, 16)
        d.put(at + "kv_a_layernorm.weight", 16), d.linear(at + "kv_b_proj", 16, 16), d.linear(at + "o_proj", 16, 8)
    d.ffn("model.layers.0.mlp.", 16), d.experts("model.layers.1."), d.ffn("model.layers.1.mlp.shared_experts.", 16)
    d.put("model.layers.1.mlp.gate.e_score_correction_bias", 2, kind="F32")
    return d


def hf_dsa(kind="glm_moe_dsa", **config):
    d = hf_deepseek(kind, groups=1)
    d.config |= {"index_n_heads": 2, "index_head_dim": 4, "index_topk": 2, "num_nextn_predict_layers": 0, **config}
    for i in range(2 if kind == "deepseek_v32" else 1):
        at = f"model.layers.{i}.self_attn.indexer."
        d.put(at + "wq_b.weight", 8, 16, kind="F8_E4M3"), d.put(at + "wq_b.weight_scale_inv", 1, 1, kind="F32"), d.linear(at + "wk", 4, 16)
        d.put(at + "k_norm.weight", 4), d.put(at + "k_norm.bias", 4), d.linear(at + "weights_proj", 2, 16)
    return d


def hf_deepseek_v4(saved=False, **config):
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    own = {"layer_types": kinds, "mlp_layer_types": ["hash_moe", "moe", "moe"], "partial_rotary_factor": 0.25} if saved else {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 4, "num_nextn_predict_layers": 1}
    d = Directory("deepseek_v4", num_hidden_layers=3, num_attention_heads=2, hidden_size=32, moe_intermediate_size=32, n_routed_experts=2, n_shared_experts=1, q_lora_rank=16, o_groups=2, o_lora_rank=8,
                  sliding_window=4, index_n_heads=2, index_head_dim=8, index_topk=2, hc_mult=2, hc_sinkhorn_iters=2, hc_eps=1e-6, swiglu_limit=10, routed_scaling_factor=1.5, compress_rope_theta=160000,
                  rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64}, **own, **config)
    body = "model." * saved
    fp8 = lambda name, rows, cols: (d.put(name + ".weight", rows, cols, kind="F8_E4M3"), d.put(name + ".scale", 1, 1, kind="F8_E8M0"))
    d.put(body + ("embed_tokens" if saved else "embed") + ".weight", 8, 32), d.put("head.weight", 8, 32), d.put(body + "norm.weight", 32)
    for part, shape in [("fn", (2, 64)), ("base", (2,)), ("scale", (1,))]:
        d.put(f"model.hc_head.hc_{part}" if saved else f"hc_head_{part}", *shape, kind="F32")
    for i in range(3 if saved else 4):
        at = f"{body}layers.{i}." if i < 3 else "mtp.0."
        for half in ("attn", "ffn"):
            d.put(f"{at}{half}_norm.weight", 32), d.put(f"{at}hc_{half}_fn", 8, 64, kind="F32"), d.put(f"{at}hc_{half}_base", 8, kind="F32"), d.put(f"{at}hc_{half}_scale", 3, kind="F32")
        fp8(at + "attn.wq_a", 16, 32), fp8(at + "attn.wq_b", 32, 16), fp8(at + "attn.wkv", 16, 32), fp8(at + "attn.wo_a", 16, 16), fp8(at + "attn.wo_b", 32, 16)
        d.put(at + "attn.q_norm.weight", 16), d.put(at + ("attn.norm.weight" if saved else "attn.kv_norm.weight"), 16), d.put(at + "attn.attn_sink", 2, kind="F32")
        for name, width in [("attn.compressor.", 16)] * (0 < i < 3) + [("attn.indexer.compressor.", 8)] * (i == 1):
            wide, ratio = (2 * width, 4) if i == 1 else (width, 128)
            d.linear(at + name + "wkv", wide, 32), d.linear(at + name + "wgate", wide, 32), d.put(at + name + "ape", ratio, wide, kind="F32"), d.put(at + name + "norm.weight", width)
        if i == 1:
            fp8(at + "attn.indexer.wq_b", 16, 16), d.linear(at + "attn.indexer.weights_proj", 2, 32)
        d.linear(at + "ffn.gate", 2, 32), d.put(at + "ffn.gate.bias", 2, kind="F32") if i else d.put(at + "ffn.gate.tid2eid", 8, 1, kind="I64")
        for e in range(2):
            for part in ("w1", "w2", "w3"):
                d.put(f"{at}ffn.experts.{e}.{part}.weight", 32, 16, kind="I8"), d.put(f"{at}ffn.experts.{e}.{part}.scale", 32, 1, kind="F8_E8M0")
        for part in ("w1", "w2", "w3"):
            fp8(f"{at}ffn.shared_experts.{part}", 32, 32)
    if not saved:
        fp8("mtp.0.e_proj", 32, 32), fp8("mtp.0.h_proj", 32, 32)
        d.put("mtp.0.norm.weight", 32), d.put("mtp.0.enorm.weight", 32), d.put("mtp.0.hnorm.weight", 32)
        d.put("mtp.0.hc_head_fn", 2, 64, kind="F32"), d.put("mtp.0.hc_head_base", 2, kind="F32"), d.put("mtp.0.hc_head_scale", 1, kind="F32")
    return d


def hf_hy3():
    d = Directory("hy_v3", num_hidden_layers=2, mlp_layer_types=["dense", "sparse"], num_shared_experts=1, intermediate_size=16, router_scaling_factor=2.8)
    d.ends(layers=2), d.gqa("model.layers.0."), d.gqa("model.layers.1."), d.ffn("model.layers.0.mlp.", 16), d.ffn("model.layers.1.mlp.shared_mlp.", 16)
    d.experts("model.layers.1.", router="router.gate"), d.put("model.layers.1.mlp.expert_bias", 2, kind="F32")
    return d


def hf_delta(body="model.", split=False):
    """Qwen3-Next; split: Qwen3.5, with the projections apart and without text_config."""
    d = Directory("qwen3_5_moe_text" if split else "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=4, linear_value_head_dim=4,
                  linear_num_key_heads=1, linear_num_value_heads=2, shared_expert_intermediate_size=16, partial_rotary_factor=0.25)
    at = body + "layers.0.linear_attn."
    d.ends(body, 2), d.gqa(body + "layers.1.", q=2)
    if split:
        d.linear(at + "in_proj_qkv", 16, 16), d.linear(at + "in_proj_z", 8, 16), d.linear(at + "in_proj_a", 2, 16), d.linear(at + "in_proj_b", 2, 16)
    else:
        d.linear(at + "in_proj_qkvz", 24, 16), d.linear(at + "in_proj_ba", 4, 16)
    d.put(at + "A_log", 2), d.put(at + "conv1d.weight", 16, 1, 4), d.put(at + "dt_bias", 2), d.put(at + "norm.weight", 4), d.linear(at + "out_proj", 16, 8)
    for i in range(2):
        d.experts(f"{body}layers.{i}."), d.ffn(f"{body}layers.{i}.mlp.shared_expert.", 16), d.put(f"{body}layers.{i}.mlp.shared_expert_gate.weight", 1, 16)
    return d


def hf_wrapped():
    d = hf_delta("model.language_model.", split=True)
    d.config = {"model_type": "qwen3_5_moe", "text_config": d.config, "tie_word_embeddings": False}
    d.config["text_config"]["rope_parameters"] = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    return d


def hf_kimi():
    d = hf_deepseek("kimi_k2")
    d.files["tokenizer.json"], d.files["tiktoken.model"] = None, b"YQ== 0\nYg== 1\nYWI= 2\nIA== 3\n"
    d.files["tokenizer_config.json"] = {"tokenizer_class": "TikTokenTokenizer", "eos_token": {"content": "[EOS]"}, "added_tokens_decoder": {"4": {"content": "[EOS]", "special": True}}}
    d.files["chat_template.jinja"] = b"{{ messages[0].content }}"
    return d


def hf_plain(kind, layers=1, heads=(1,), names=("mlp.gate", "mlp.experts.%d.", ("gate_proj", "up_proj", "down_proj")), dense=(), norms=None, bias=None, **config):
    """A family with grouped-query attention: heads of its layers in turn, names of router and experts, what q_norm and k_norm are as wide as, the router's bias."""
    config = {"num_hidden_layers": layers, "intermediate_size": 16, "num_attention_heads": heads[0]} | config
    d = Directory(kind, **config)
    width, (router, expert, parts) = d.config["hidden_size"], names
    d.ends(layers=layers)
    for i in range(layers):
        at, h = f"model.layers.{i}.", heads[i % len(heads)]
        v = d.config.get("v_head_dim", 16)
        d.linear(at + "self_attn.q_proj", 16 * h, width), d.linear(at + "self_attn.k_proj", 16, width), d.linear(at + "self_attn.v_proj", v, width), d.linear(at + "self_attn.o_proj", width, v * h)
        if norms:
            d.put(at + "self_attn.q_norm.weight", 16 * h if norms == "row" else 16), d.put(at + "self_attn.k_norm.weight", 16)
        if i in dense:
            d.ffn(at + "mlp.", 16)
            continue
        d.put(f"{at}{router}.weight", 2, width)
        for e in range(2):
            for part, (rows, cols) in zip(parts, [(16, width)] * 2 + [(width, 16)]):
                d.linear(at + expert % e + part, rows, cols)
        if bias:
            d.put(at + bias, 2, kind="F32")
    return d


W123 = ("block_sparse_moe.gate", "block_sparse_moe.experts.%d.", ("w1", "w3", "w2"))


def hf_gpt_oss(blocks=True):
    n = 32 if blocks else 16
    d = Directory("gpt_oss", num_hidden_layers=2, hidden_size=n, intermediate_size=n, num_local_experts=2, sliding_window=4, attention_bias=True)
    d.ends(layers=2)
    for i in range(2):
        at = f"model.layers.{i}."
        for part in "qkv":
            d.linear(f"{at}self_attn.{part}_proj", 16, n), d.put(f"{at}self_attn.{part}_proj.bias", 16)
        d.linear(at + "self_attn.o_proj", n, 16), d.put(at + "self_attn.o_proj.bias", n), d.put(at + "self_attn.sinks", 1)
        d.put(at + "mlp.router.weight", 2, n), d.put(at + "mlp.router.bias", 2)
        for part, rows in (("gate_up_proj", 2 * n), ("down_proj", n)):
            x = f"{at}mlp.experts.{part}"
            d.put(x + "_bias", 2, rows)
            if blocks:
                d.put(x + "_blocks", 2, rows, n // 32, 16, kind="U8"), d.put(x + "_scales", 2, rows, n // 32, kind="U8")
            else:
                d.put(x, 2, n, rows)
    return d


def hf_qwen2_moe():
    d = hf_plain("qwen2_moe", layers=2, dense=(0,), mlp_only_layers=[0], shared_expert_intermediate_size=16, norm_topk_prob=True)
    for i in range(2):
        for part in "qkv":
            d.put(f"model.layers.{i}.self_attn.{part}_proj.bias", 16)
    d.ffn("model.layers.1.mlp.shared_expert.", 16), d.put("model.layers.1.mlp.shared_expert_gate.weight", 1, 16)
    return d


def hf_ernie():
    d = hf_plain("ernie4_5_moe", layers=2, dense=(0,), moe_num_experts=2, moe_k=1, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_interval=1)
    d.ffn("model.layers.1.mlp.shared_experts.", 16), d.put("model.layers.1.mlp.moe_statics.e_score_correction_bias", 1, 2, kind="F32")
    return d


def hf_step():
    d = hf_plain("step3p5", layers=3, dense=(0, 2), heads=(1, 2), norms="head", names=("moe.gate", "moe.experts.%d.", ("gate_proj", "up_proj", "down_proj")), bias="moe.router_bias",
                 num_attention_groups=1, moe_num_experts=2, moe_top_k=1, share_expert_dim=16, moe_layers_enum="1", sliding_window=4, use_head_wise_attn_gate=True,
                 layer_types=["full_attention", "sliding_attention", "full_attention"], attention_other_setting={"num_attention_heads": 2, "num_attention_groups": 1},
                 rope_theta=[1e4, 1e3, 1e4], partial_rotary_factors=[0.5, 1, 0.5], swiglu_limits=[0, 1, None], yarn_only_types=["full_attention"],
                 rope_scaling={"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8})
    d.config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    for i, heads in enumerate((1, 2, 1)):
        d.put(f"model.layers.{i}.self_attn.g_proj.weight", heads, 16)
    d.ffn("model.layers.1.share_expert.", 16), d.put("model.layers.2.enorm.weight", 16), d.put("model.layers.2.hnorm.weight", 16), d.linear("model.layers.2.eh_proj", 16, 32)
    d.put("model.layers.2.transformer.shared_head.norm.weight", 16), d.put("model.layers.2.transformer.shared_head.output.weight", 8, 16)
    for part in ("gate_proj", "up_proj", "down_proj"):
        for e in range(2):
            del d.tensors[f"model.layers.1.moe.experts.{e}.{part}.weight"]
        d.put(f"model.layers.1.moe.{part}.weight", 2, 16, 16, kind="F8_E4M3"), d.put(f"model.layers.1.moe.{part}.weight_scale_inv", 2, 1, 1, kind="F32")
    return d


def hf_laguna():
    d = hf_plain("laguna", layers=2, dense=(0,), heads=(2, 1), norms="head", bias="mlp.experts.e_score_correction_bias", num_attention_heads_per_layer=[2, 1], gating_types=["per_head", "per_element"],
                 layer_types=["full_attention", "sliding_attention"], sliding_window=4, shared_expert_intermediate_size=16, moe_routed_scaling_factor=2.5,
                 rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}})
    d.put("model.layers.0.self_attn.g_proj.weight", 2, 16), d.put("model.layers.1.self_attn.g_proj.weight", 16, 16), d.ffn("model.layers.1.mlp.shared_expert.", 16)
    return d


def hf_mimo():
    d = hf_plain("mimo_v2", layers=2, dense=(0,), heads=(2,), v_head_dim=8, bias="mlp.gate.e_score_correction_bias", n_routed_experts=2, hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1], sliding_window=4,
                 swa_num_key_value_heads=1, swa_rope_theta=1e3, add_swa_attention_sink_bias=True, attention_value_scale=0.7, partial_rotary_factor=0.5, layernorm_epsilon=1e-5)
    for part in "qkv":
        del d.tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
    d.put("model.layers.0.self_attn.qkv_proj.weight", 56, 16, kind="F8_E4M3"), d.put("model.layers.0.self_attn.qkv_proj.weight_scale_inv", 1, 1, kind="F32")
    d.put("model.layers.1.self_attn.attention_sink_bias", 2), d.put("visual.x", 4)
    at = "model.mtp.layers.0."
    d.linear(at + "self_attn.q_proj", 32, 16), d.linear(at + "self_attn.k_proj", 16, 16), d.linear(at + "self_attn.v_proj", 8, 16), d.linear(at + "self_attn.o_proj", 16, 16)
    d.put(at + "self_attn.attention_sink_bias", 2), d.ffn(at + "mlp.", 16), d.linear(at + "eh_proj", 16, 32)
    for name in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
        d.put(f"{at}{name}.weight", 16)
    d.config["vision_config"] = {}
    return d


def hf_minimax_m3(wrapped):
    sparse = {"sparse_attention_freq": [0, 1], "sparse_num_index_heads": 1, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1}
    own = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"], **dict(zip(
        ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"), list(sparse.values())[1:]))}
    d = hf_plain("minimax_m3", layers=2, heads=(2,), dense=(0,), names=W123, norms="head", bias="block_sparse_moe.e_score_correction_bias", num_local_experts=2, rotary_dim=8, hidden_size=32,
                 dense_intermediate_size=16, shared_intermediate_size=16, **({"sparse_attention_config": sparse, "moe_layer_freq": [0, 1]} if wrapped else own))
    at = "model.layers.1."
    d.ffn(at + "block_sparse_moe.shared_experts.", 16), d.linear(at + "self_attn.index_q_proj", 16, 32), d.linear(at + "self_attn.index_k_proj", 16, 32)
    d.put(at + "self_attn.index_q_norm.weight", 16), d.put(at + "self_attn.index_k_norm.weight", 16)
    d.put(at + "self_attn.q_proj.weight", 32, 32, kind="F8_E4M3"), d.put(at + "self_attn.q_proj.weight_scale" + "_inv" * wrapped, 32, 1, kind="U8")
    if wrapped:
        d.tensors = {"language_model." + k: v for k, v in d.tensors.items()} | {"patch_merge_mlp.linear_1.bias": ("BF16", (4,))}
        d.config = {"model_type": "minimax_m3_vl", "text_config": {k: v for k, v in d.config.items() if k != "model_type"}}
    return d


def hf_families():
    lists = {"num_experts": [2], "per_layer_num_experts": [2], "quantization_config": {"quant_method": "compressed-tensors", "moe_sparsity_config": {"method": "prune", "num_experts": [2]}}}
    all = {"gpt_oss": hf_gpt_oss(), "gpt_oss-bf16": hf_gpt_oss(False), "qwen2_moe": hf_qwen2_moe(), "ernie4_5_moe": hf_ernie(), "step3p5": hf_step(), "laguna": hf_laguna(), "mimo_v2": hf_mimo(),
           "minimax_m2": hf_plain("minimax_m2", heads=(2,), names=W123, norms="row", bias="block_sparse_moe.e_score_correction_bias", num_local_experts=2, rotary_dim=8),
           "mixtral": hf_plain("mixtral", heads=(2,), names=W123, num_local_experts=2), "olmoe": hf_plain("olmoe", norms="row", clip_qkv=None), "counts": hf_qwen(**lists),
           "deepseek_v32": hf_dsa("deepseek_v32"), "glm_moe_dsa": hf_dsa(indexer_types=["full", "shared"]), "glm_moe_dsa-pattern": hf_dsa(index_topk_pattern="FS"),
           "deepseek_v4": hf_deepseek_v4(), "deepseek_v4-saved": hf_deepseek_v4(True),
           "minimax_m3": hf_minimax_m3(False), "minimax_m3_vl": hf_minimax_m3(True),
           "glm_moe_dsa-often": hf_dsa(index_topk_freq=2, index_skip_topk_offset=1, indexer_types=None)}
    return {k: d.text() for k, d in all.items()} | {"reap-" + k: d.text("reap") for k, d in all.items()} | {"quantize-gpt_oss": hf_gpt_oss(False).text("quantize")}


def pieces():
    """A vocabulary of SentencePiece: (text, score, type)"""
    return ([("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)] + [(f"<0x{b:02X}>", 0, 6) for b in range(256)]
            + [("\u2581a", -1, 1), ("ab", -2, 1), ("\u2581", -3, 1), ("a", -4, 1), ("b", -5, 1), ("<t>", 0, 4)])


def hf_pieces():
    d = hf_qwen(vocab_size=266)
    d.files["tokenizer.json"] = {
        "added_tokens": [{"id": i, "content": text, "special": kind != 4} for i, (text, _, kind) in enumerate(pieces()) if 2 <= kind <= 4],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": {text: i for i, (text, _, _) in enumerate(pieces())}, "merges": ["\u2581 a", "a b"]}}
    d.files["tokenizer_config.json"] = {"eos_token": "</s>", "bos_token": "<s>"}
    return d


def hf_pieces_model():
    def field(number, b):
        return bytes([number << 3 | 2]) + bytes([len(b) & 127 | 128, len(b) >> 7] if len(b) > 127 else [len(b)]) + b
    d = hf_pieces()
    d.files["tokenizer.json"] = None
    d.files["tokenizer.model"] = b"".join(field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([24, kind])) for text, score, kind in pieces()) + \
        field(2, b"\x18\2\xc0\1\0\x98\2\1") + field(3, b"\x20\0\x28\1")
    d.files["added_tokens.json"] = {"<x>": 265}
    return d


def hf_sharded():
    d = hf_qwen()
    names, (one, two) = list(d.tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    d.files |= {"model.safetensors": None, one: d.header(names[:7]), two: d.header(names[7:]),
                "model.safetensors.index.json": {"weight_map": {n: one if n in names[:7] else two for n in names}}}
    d.files["generation_config.json"] = {"eos_token_id": [6, 7], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    return d


def hf_reduced():
    d = hf_qwen(reap={"original_experts": 4, "kept": [[1, 3]]}, num_local_experts=2)
    d.files["tokenizer_config.json"]["bos_token"] = "ab"
    d.files["tokenizer.json"] |= {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_end|>"}}, {"Sequence": {"id": "A"}}]},
                                  "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated"}, {"type": "ByteLevel", "use_regex": False}]}}
    return d


def hf_nvfp4():
    d = hf_qwen(nvfp4=True, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    d.files["hf_quant_config.json"] = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    return d


def hf_changed(change):
    d = hf_qwen()
    change(d)
    return d.text()


def hf_seeds():
    files = {"qwen3_moe": hf_qwen().text(), "nvfp4": hf_nvfp4().text(), "quantize": hf_qwen(hidden_size=64, moe_intermediate_size=64).text("quantize"), "dry": hf_qwen().text("dry"),
             "reap": hf_qwen().text("reap"), "reap-sharded": hf_sharded().text("reap"), "reap-nvfp4": hf_nvfp4().text("reap"), "reap-deepseek": hf_deepseek(groups=1).text("reap"),
             "sharded": hf_sharded().text(), "reduced": hf_reduced().text(), "deepseek_v3": hf_deepseek().text(), "kimi_k2": hf_kimi().text(), "pieces": hf_pieces().text(), "pieces-model": hf_pieces_model().text(), "hy_v3": hf_hy3().text(),
             "qwen3_next": hf_delta().text(), "qwen3_5_moe": hf_wrapped().text(), "empty": b"", "no-model": hf_changed(lambda d: d.files.update({"model.safetensors": None})),
             "no-config": b"=== tokenizer.json\n{}", "list": b"=== config.json\n[]", "controls": b'=== config.json\n{"model_type":"\\u001b[31m\\u009b\\n\xff"}'}
    wrong = {"vocab-size": lambda d: d.config.update(vocab_size=10**10), "layers": lambda d: d.config.update(num_hidden_layers=0), "real": lambda d: d.config.update(hidden_size=16.0),
             "theta": lambda d: d.config.update(rope_theta=1e300), "kind": lambda d: d.config.update(model_type=None), "wide": lambda d: d.config.update(hidden_size=2**31 - 1, head_dim=65536),
             "token-id": lambda d: d.files["tokenizer.json"]["added_tokens"].append({"id": 8, "content": "x"}), "merge": lambda d: d.files["tokenizer.json"]["model"].update(merges=["a  b"]),
             "merges-none": lambda d: d.files["tokenizer.json"]["model"].update(merges=[]),
             "template": lambda d: d.files["tokenizer_config.json"].update(chat_template=[{"name": "tools", "template": ""}]), "eos": lambda d: d.files.update({"tokenizer_config.json": {"eos_token": "none"}}),
             "hole": lambda d: d.files.update({"model.safetensors": d.header().replace(b"[0,", b"[1,")}), "twice": lambda d: d.files.update({"config.json": b'{"a":1,"a":2}'})}
    return {k + ".txt": v for k, v in (files | hf_families()).items()} | {k + ".txt": hf_changed(change) for k, change in wrong.items()}


def safetensors_seeds():
    d, fill = hf_qwen(), b"\x3c"
    whole = d.header()

    def file(header, n=None, more=b""):
        return struct.pack("<Q", len(header) if n is None else n) + header + more

    def tensor(**changes):
        return file(compact({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} | changes, "__metadata__": {"format": "pt"}}), more=fill * 4)
    size = sum(HF_SIZE[kind] * math.prod(shape) for kind, shape in d.tensors.values())
    return {k + ".safetensors": v for k, v in {
        "valid": file(whole, more=fill * size), "short": file(whole, more=fill * (size - 1)), "long": file(whole, more=fill * (size + 1)), "one": tensor(), "empty": b"", "cut": b"\x10\0\0",
        "length": file(b"{}", n=2**63), "length-limit": file(b"{}", n=10**8 + 1), "no-brace": file(b" {}"), "deep": file(b'{"a":' + b"[" * 3000), "twice": file(b'{"a":1,"a":1}'), "bytes": file(b'{"\xff":1}'),
        "dtype": tensor(dtype="F31"), "dtype-number": tensor(dtype=1), "rank": tensor(shape=[1] * 9), "shape": tensor(shape=2), "negative": tensor(shape=[-2]), "real": tensor(shape=[2.0]),
        "overflow": tensor(shape=[2**32, 2**32]), "offsets": tensor(data_offsets=[4, 0]), "offsets-many": tensor(data_offsets=[0, 4, 4]), "offsets-big": tensor(data_offsets=[0, 2**63 - 1]),
        "hole": tensor(data_offsets=[1, 5]), "half-byte": tensor(dtype="F4", shape=[7]), "scalar": tensor(dtype="F32", shape=[]), "none": file(b"{}"),
        "controls": file(b'{"\\u001b[31m\\u009b":{}}'), "list": file(b"[]")}.items()}


def score_seeds():
    def scores(**changes):
        layer = {"tokens": [3, 5], "weighted_sum": [1.5, 0.1], "weighted_max": [1, 0.1], "norm_sum": [2.5, 1e-300], "gate_sum": [1, 0.5]}
        source = {"name": "a.txt", "hash": "00000000000000ff", "tokens": 8, "unit": 1, "window": 8, "done": True}
        j = {"format": "moe-scores", "version": 1, "model": {"name": "x", "routers": ROUTERS}, "tokens": 8, "sources": [source], "layers": [layer]}
        for k, v in changes.items():
            at = layer if k in layer and k != "tokens" or k == "chosen" else source if k in source and k != "tokens" else j
            at["tokens" if k == "chosen" else k] = v
        return compact(j)
    return {k + ".json": v for k, v in {
        "valid": scores(), "no-source": scores(sources=[]), "null": scores(layers=[None]), "layers": scores(layers=[]), "version": scores(version=2), "routers": scores(model={"routers": "1"}),
        "format": scores(format=None), "tokens": scores(tokens=-1), "tokens-many": scores(tokens=2**62), "tokens-real": scores(tokens=8.5), "chosen-real": scores(chosen=[2.5, 3]), "chosen-many": scores(chosen=[2**53 + 2, 1]),
        "chosen-limit": scores(chosen=[2**53, 0]), "short": scores(norm_sum=[1]), "negative": scores(weighted_sum=[-1, 1]), "overflow": scores(weighted_sum=[1.7e308, 1.7e308], norm_sum=[1.7e308, 0]),
        "string": scores(weighted_max=["1", "2"]), "huge": scores().replace(b"1.5", b"1e999"), "denormal": scores(gate_sum=[5e-324, 2.2250738585072011e-308]), "offset": scores(done=False).replace(b'"unit"', b'"offset":1,"unit"'),
        "hash": scores(hash="x"), "window": scores(window=2**31), "name": scores(name="\x1b[31m\x9b\u202e"), "name-none": scores(name=None), "cut": scores()[:-9], "empty": b"", "list": b"[]",
        "deep": b"[" * 3000, "bytes": b'{"format":"\xff"}', "unseen": scores(chosen=[0, 0])}.items()}


OPTIONS = {
    "chat": "-m x.gguf -c 4096 -t 2 --greedy -n 16", "equals": "--temp=0.5 --top_k=4 --seed=-1 --kv=fp8", "glued": "-n16 -c-1 -t999", "prompt": "-p|a\\n\\x41\\|-e", "files": "--calibrate|a|b|-o|c",
    "modes": "--plan --gpus 4x96@1792 --json", "about": "--plan --help", "help": "--help all", "choice": "--kv bf17", "flag": "--greedy=maybe", "number": "--temp 1e999", "number-nan": "--temp nan",
    "number-hex": "-c 0x10", "number-long": "-n 99999999999999999999", "foreign": "-ngl 99 --mlock --no-warmup --jinja", "foreign-value": "-b", "refused": "--lora x", "cache": "-ctk q8_0 -ctv bf16", "unknown": "--no-such -z -1x",
    "dashes": "- -- --- --=", "controls": "--\x1b[31m -c \x9b", "quiet": "--quiet --verbose", "twice": "a.gguf b.gguf", "model": "tests/corpus/gguf/valid-qwen3moe.gguf -v", "directory": "tests", "value": "-m",
    "long": "--" + "a" * 200 + " -" + "c" * 100, "set": "/set temp 0.7 top-k 40 seed -1 think off greedy on", "set-wrong": "/set temp 9 model x nothing 1 top-p -0 temp 1e-5", "set-numbers": "/set temp 0.123456789 top-p 1e-7 min-p .5 n-predict 007"}


def option_seeds():
    """Arguments with a NUL behind each."""
    return {k + ".bin": b"".join(a.encode("latin-1") + b"\0" for a in v.split("|" if "|" in v else " ")) for k, v in OPTIONS.items()}


def write(folder, files):
    folder = CORPUS / folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith("found-"):
            old.unlink()
    for name, b in files.items():
        (folder / name).write_bytes(b)


def write_cases(folder, files):
    expected = "".join(f"{name}\t{expect}\n" for name, (expect, _) in files.items())
    write(folder, {name: b for name, (_, b) in files.items()} | {"expected.txt": expected.encode()})


def main():
    for name, make in [("qwen3moe", qwen), ("deepseek2", deepseek), ("odd-widths", odd), ("nan-router", nan_router)]:
        case("valid-" + name, "-", make())
    reader_cases(), metadata_cases(), window_cases(), sparse_cases(), block_cases(), stream_cases(), tensor_cases(), vocabulary_cases()
    write_cases("gguf", {f"{name}.gguf": (expect, b) for name, expect, b in sorted(cases)})
    write("template", {name + ".txt": head + b"\n" + body for name, (head, body) in TEMPLATES.items()})
    write_cases("session", SESSIONS)
    texts = {f"{i:02}.bin": bytes([i, i * 29 & 255]) + t for i, t in enumerate(TEXTS)}
    texts["marks.bin"] = b"\x09\0" + "\u0f73\u0f75\u0f81\u0344".encode() * 300  # qwen2: NFC sorts them
    vocabulary = File(VOCABULARY, []).bytes()  # the first half is the file, the second the text
    texts["vocabulary.bin"] = vocabulary + (b"ab ba<s>abab</s><t>c " * 99)[:len(vocabulary)]
    blanks = File([("tokenizer.ggml.model", val(STR, "llama")), ("tokenizer.ggml.tokens", arr(STR, [text for text, _, _ in pieces()])), ("moe.tokenizer.blanks", val(STR, "control")),
                   ("tokenizer.ggml.scores", arr(F32, [score for _, score, _ in pieces()])), ("tokenizer.ggml.token_type", arr(I32, [kind for _, _, kind in pieces()]))], []).bytes()
    texts["pieces.bin"] = blanks + ("a ab<t>\u2581ab</s>b\u00e9 " * 999).encode()[:len(blanks)]
    write("tokenizer", texts)
    write("hf", hf_seeds()), write("safetensors", safetensors_seeds()), write("scores", score_seeds()), write("options", option_seeds())


if __name__ == "__main__":
    main()
