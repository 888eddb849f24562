#!/usr/bin/env python3
"""Writes tests/golden/tokens: small tokenizers in the form of public releases, and what they make of 10,000 texts.

    gen_tokens.py train        trains the two vocabularies anew (needs sentencepiece and transformers), then the rest
    gen_tokens.py              writes sets.json and expected.bin for the vocabularies that are there
    gen_tokens.py show SET N   prints text N and its tokens

Needs the libraries tokenizers 0.23 and sentencepiece 0.2, which are the truth here. The vocabularies come from the text
of this repository and from texts like the 10,000 with other seeds; the pre-tokenizers, normalizers and decoders are
those of the releases. README.md describes the files. tests/t_tokens.h makes the same texts.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIR = ROOT / "tests/golden/tokens"
TEXTS, TRAINING = 10000, 1 << 32  # the first seed of the texts for training
M64 = (1 << 64) - 1

PARTS = json.loads((DIR / "parts.json").read_text(encoding="utf-8"))


class Random:
    """splitmix64, as rng_next of moe.c."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9e3779b97f4a7c15) & M64
        z = self.state
        z = ((z ^ z >> 30) * 0xbf58476d1ce4e5b9) & M64
        z = ((z ^ z >> 27) * 0x94d049bb133111eb) & M64
        return z ^ z >> 31


def text(seed, repeat=True):
    rng, out = Random(seed), []
    for _ in range(1 + rng.next() % 12):
        r, k = rng.next(), rng.next()
        if r % 8 < 6:
            s = PARTS["parts"][(r >> 8) % len(PARTS["parts"])]
        else:
            first, last = PARTS["ranges"][(r >> 8) % len(PARTS["ranges"])]
            s = chr(first + (r >> 32) % (last - first + 1))
        out.append(s * (1 if not repeat else 1 + (k >> 8) % 300 if k % 512 == 1 else 1 + (k >> 8) % 12 if k % 16 == 0 else 1))
    return "".join(out)


def hash16(ids):
    h = 0x811c9dc5
    for i in ids:
        h = ((h ^ i) * 0x01000193) & 0xffffffff
    return (h ^ h >> 16) & 0xffff


# ---- the sets ----

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
HAN = r"&&[^\p{Han}]"
QWEN2 = SHORT + "|" + LETTERS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
LLAMA3 = SHORT + "|" + LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES


def cased(up, low, short, numbers, tail):
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}[{up}]*[{low}]+{short}|{head}[{up}]+[{low}]*{short}|{numbers}| ?[^\\s\\p{{L}}\\p{{N}}]+{tail}" + SPACES


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def byte_level(regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level(False)]}


def blanks(first):
    """The added tokens for runs of blanks of GPT-NeoX, from id `first` on."""
    return [{"id": first + i, "content": " " * n, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
             "special": False} for i, n in enumerate(range(24, 1, -1))]


NFC = {"type": "NFC"}
OLMO_BLANKS = 1504  # behind the other tokens of bytes.json
BYTE_SETS = [  # name, pre-tokenizer as moe-convert calls it, keys of tokenizer.json, keys of its model
    ("gpt-oss, minimax-m2", "gpt-4o", {"pre_tokenizer": sequence(split(cased(UPPER, LOWER, SHORT + "?", r"\p{N}{1,3}", r"[\r\n/]*")))}, {}),
    ("olmoe", "olmo", {"pre_tokenizer": byte_level(True), "normalizer": NFC, "added_tokens": blanks(OLMO_BLANKS)}, {}),
    ("laguna", "laguna", {"pre_tokenizer": sequence(split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), split(QWEN2))}, {}),
    ("qwen2moe, mimo2", "qwen2", {"pre_tokenizer": sequence(split(QWEN2)), "normalizer": NFC}, {}),
    ("step35, deepseek-v3", "deepseek-v3", {"pre_tokenizer": sequence(
        split(r"\p{N}{1,3}"), split("[一-龥\u3040-\u309f\u30a0-\u30ff]+"),
        split("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"))}, {}),
    ("tekken", "tekken", {"pre_tokenizer": sequence(split(cased(UPPER, LOWER, "", r"\p{N}", r"[\r\n/]*")))}, {"ignore_merges": True}),
    ("seed-coder", "seed-coder", {"pre_tokenizer": sequence(split(
        SHORT + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"))}, {}),
    ("bailingmoe2", "bailingmoe2", {"pre_tokenizer": sequence(split(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"))}, {}),
    ("granite, starcoder", "refact", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, byte_level(True)]}}, {}),
    ("qwen35", "qwen35", {"pre_tokenizer": sequence(split(
        SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES)), "normalizer": NFC}, {}),
    ("glm4, glm-dsa", "llama-bpe", {"pre_tokenizer": sequence(split(LLAMA3))}, {"ignore_merges": True}),
    ("olmo-2, llama-3", "llama-bpe", {"pre_tokenizer": sequence(split(LLAMA3, "Removed", True))}, {"ignore_merges": True}),
    ("kimi-k2", "kimi-k2", {"pre_tokenizer": sequence(split(r"[\p{Han}]+|" + cased(UPPER + HAN, LOWER + HAN, SHORT + "?", r"\p{N}{1,3}", r"[\r\n]*")))}, {}),
]

ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}


def metaspace(scheme):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


PIECE_SETS = [  # name, moe.tokenizer.blanks, keys of tokenizer.json
    ("mixtral, tokenizer.json with a normalizer", "all", {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, ESCAPE]}}),
    ("mixtral, tokenizer.json with Metaspace", "start", {"pre_tokenizer": metaspace("first")}),
    ("metaspace everywhere", "stretches", {"pre_tokenizer": metaspace("always")}),
    ("ernie4_5-moe, tokenizer.json", "", {"normalizer": ESCAPE}),
]
MODEL_SET = "mixtral, tokenizer.model"
SINGLE_SET = "merges of the library's trainer"


def tokenizer_json(base, keys, model=()):
    d = json.loads((DIR / base).read_text(encoding="utf-8"))
    d["model"].update(model)
    d["added_tokens"] = d["added_tokens"] + keys.get("added_tokens", [])
    d.update({k: v for k, v in keys.items() if k != "added_tokens"})
    return d


def library(d):
    from tokenizers import Tokenizer
    t = Tokenizer.from_str(json.dumps(d))
    return lambda s: t.encode(s, add_special_tokens=False).ids


def encoders():
    """name, what sets.json says of the set, the function from text to ids"""
    for name, pre, keys, model in BYTE_SETS:
        yield name, {"base": "bytes.json", "pre": pre, "keys": keys, "model": model}, library(tokenizer_json("bytes.json", keys, model))
    for name, rule, keys in PIECE_SETS:
        yield name, {"base": "pieces.json", "blanks": rule, "keys": keys}, library(tokenizer_json("pieces.json", keys))
    keys = PIECE_SETS[0][2]
    yield SINGLE_SET, {"base": "single.json", "blanks": "all", "keys": keys}, library(tokenizer_json("single.json", keys))
    import sentencepiece
    yield MODEL_SET, {"base": "pieces.model", "blanks": "control"}, sentencepiece.SentencePieceProcessor(model_file=str(DIR / "pieces.model")).encode


# ---- training ----

def added(token, special):
    return {"content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def corpus():
    """Text without special tokens: as ordinary text they would become ordinary tokens."""
    special = ["<|", "|>", "|||", "<think", "</think", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[REF_0]", "<ref>", "<0x", "▁"]
    lines = (ROOT / "prompts/haystack.txt").read_text(encoding="utf-8")[:150000].split("\n")
    lines += (ROOT / "convert/moe-convert.c").read_text(encoding="utf-8")[:60000].split("\n")
    lines += [text(TRAINING + i, repeat=False) for i in range(6000)]
    return [s for s in lines if s and not any(x in s for x in special)]


def train():
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import generate_merges
    lines = corpus()
    # byte-level, trained without an expression, so that tokens reach across every place where an expression cuts
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                                     max_token_length=24, show_progress=False))
    t.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("|||IP_ADDRESS|||", normalized=False)])
    write_json("bytes.json", json.loads(t.to_str()))
    # SentencePiece, whose tokens may reach across blanks
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(DIR / "pieces"), model_type="bpe", vocab_size=1700, byte_fallback=True,
        character_coverage=0.985, split_digits=True, split_by_whitespace=False, split_by_unicode_script=False,
        allow_whitespace_only_pieces=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        max_sentencepiece_length=16, max_sentence_length=100000, control_symbols=["[INST]", "[/INST]"],
        user_defined_symbols=["[REF_0]", "<ref>"], num_threads=1, minloglevel=2)
    (DIR / "pieces.vocab").unlink()
    from sentencepiece import sentencepiece_model_pb2 as pb
    m = pb.ModelProto()
    m.ParseFromString((DIR / "pieces.model").read_bytes())
    m.trainer_spec.ClearField("model_prefix")
    (DIR / "pieces.model").write_bytes(m.SerializeToString())
    kinds = {"unk": 2, "control": 3, "user": 4}
    vocab = {p.piece: i for i, p in enumerate(m.pieces)}
    scores = {p.piece: p.score for p in m.pieces}
    special = [p.piece for p in m.pieces if p.type in kinds.values()]
    d = {"version": "1.0", "truncation": None, "padding": None,
         "added_tokens": [{"id": vocab[p.piece], **added(p.piece, p.type != 4)} for p in m.pieces if p.type in kinds.values()],
         "normalizer": None, "pre_tokenizer": None, "post_processor": None,
         "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                     {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
         "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                   "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
                   "merges": [list(x) for x in generate_merges(vocab, scores, special)]}}
    write_json("pieces.json", d)
    # the same form by the trainer of the tokenizers library: one merge for each token
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    t.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)], limit_alphabet=500,
        max_token_length=12, show_progress=False))
    single = json.loads(t.to_str())
    d["added_tokens"] = [{"id": i, **added(s, True)} for i, s in enumerate(["<unk>", "<s>", "</s>"])]
    d["model"]["vocab"], d["model"]["merges"] = single["model"]["vocab"], single["model"]["merges"]
    write_json("single.json", d)


def write_json(name, d):
    (DIR / name).write_text(json.dumps(d, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    if sys.argv[1:2] == ["show"]:
        s = text(int(sys.argv[3]))
        ids = next(encode for name, _, encode in encoders() if name == sys.argv[2])(s)
        print(json.dumps(s, ensure_ascii=False), *ids)
        return
    if sys.argv[1:2] == ["train"]:
        train()
    texts = [text(i) for i in range(TEXTS)]
    sets, expected = [], bytearray()
    for name, facts, encode in encoders():
        sets.append({"name": name, **facts})
        tokens = 0
        for s in texts:
            ids = encode(s)
            tokens += len(ids)
            expected += hash16(ids).to_bytes(2, "little")
        print(f"{name}: {tokens} tokens")
    (DIR / "sets.json").write_text("[\n" + ",\n".join(json.dumps(s, ensure_ascii=False) for s in sets) + "\n]\n", encoding="utf-8")
    (DIR / "expected.bin").write_bytes(expected)


if __name__ == "__main__":
    main()
