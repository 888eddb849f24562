#!/usr/bin/env python3
"""Mutates the directories of tests/fixtures, converts them and runs what came out.

    fuzz_directories.py [--seconds N] [--seed S] [--one] [--moe PATH] [--convert PATH]

A directory is converted, or refused with a message and no file left. What is converted runs, and a tensor of an unknown
name is mentioned. Cases of which this is not true are printed with their seeds and kept in build/fuzzed; exit 1 if there
is one. --one repeats the case of a seed. Runs at the top of the tree.
"""
import argparse
import copy
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time

FIXTURES = "tests/fixtures"
WORK = "build/fuzzed"
VALUES = [None, True, False, 0, 1, -1, 2, 3, 7, 64, 1024.0, 0.5, -0.5, 1e30, 10**30, 2**31, 2**63, float("nan"),
          float("inf"), float("-inf"), "", "x", "1", "float8_e4m3fn", "none", [], [1], [0, 1], [None], {}, {"type": "yarn"}]
QUANTIZED = ["quant_method", "quant_algo", "kv_cache_quant_algo", "transform_config", "sparsity_config", "group_size",
             "weight_block_size", "ignore", "exclude_modules", "modules_to_not_convert", "activation_scheme", "scale_fmt",
             "format", "symmetric", "actorder", "desc_act", "zero_point", "rotation", "smooth"]
DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32", "I64", "BOOL"]
SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8}


def places(value, path=()):
    """Paths of all values of a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, one in list(items)[:300]:
        yield from places(one, path + (key,))


def parent(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


def change(r, document, value=None):
    """Changes one place of a document."""
    all_places = [p for p in places(document) if p]
    if not all_places:
        return
    path = r.choice(all_places)
    holder, key = parent(document, path), path[-1]
    old = holder[key]
    how = r.randrange(8)
    if how == 0 and isinstance(holder, dict):
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[r.choice(["x_", "_", ""]) + str(key) + r.choice(["s", "_v2", ""])] = holder.pop(key)
    elif how == 2 and isinstance(holder, dict):
        holder[r.choice(QUANTIZED)] = copy.deepcopy(r.choice(VALUES))
    elif how == 3 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = r.choice([old + 1, old - 1, old * 2, float(old), -old, str(old), old // 2 if old == old else 0])
    elif how == 4 and isinstance(old, list) and old:
        holder[key] = old[:-1] if r.random() < 0.5 else old + [copy.deepcopy(old[-1])]
    elif how == 5:
        other = r.choice(all_places)
        holder[key] = copy.deepcopy(parent(document, other)[other[-1]])
    else:
        holder[key] = copy.deepcopy(r.choice(VALUES))


def mutate_json(r, path):
    try:
        document = json.load(open(path))
    except ValueError:
        return
    if os.path.basename(path) == "tokenizer.json" and r.random() < 0.5:  # outside the vocabulary
        head = {k: v for k, v in document.items() if k != "model"}
        change(r, head)
        document = {**head, "model": document.get("model")}
    else:
        for _ in range(r.choice([1, 1, 1, 2, 4])):
            change(r, document)
    text = json.dumps(document)
    kind = r.randrange(12)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\ufeff" + text if kind == 0 else text[:r.randrange(len(text) + 1)] if kind == 1 else text)


def mutate_tensors(r, path):
    """Changes the header; returns whether a tensor of an unknown name was added."""
    added = False
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + n]), data[8 + n:]
    for _ in range(r.choice([1, 1, 2])):
        names = [k for k in header if k != "__metadata__"]
        name = r.choice(names)
        tensor = header[name]
        how = r.randrange(8)
        if how == 0:
            del header[name]
        elif how == 1:
            parts = name.split(".")
            i = r.randrange(len(parts))
            parts[i] = r.choice(["x", "0", "99", parts[i] + "_scale", "weight_scale_inv", "bias", "input_scale"])
            header[".".join(parts)] = header.pop(name)
        elif how == 2:
            size = SIZE.get(tensor["dtype"], 1)
            tensor["dtype"] = r.choice([d for d in DTYPES if SIZE.get(d, 1) == size])
        elif how == 3 and tensor["shape"]:
            tensor["shape"] = tensor["shape"][::-1]
        elif how == 4:
            tensor["shape"] = r.choice([tensor["shape"] + [1], [1] + tensor["shape"], tensor["shape"][1:]])
        elif how == 5:
            suffix = r.choice(["_scale", "_scale_inv", "_scale_2", ".extra", "2"])
            header[r.choice(names) + suffix] = tensor
            added |= suffix in (".extra", "2")
        elif how == 6 and tensor["shape"] and tensor["shape"][0] > 1:  # fewer rows
            begin, end = tensor["data_offsets"]
            rows = tensor["shape"][0]
            tensor["shape"][0] = rows - 1
            tensor["data_offsets"] = [begin, begin + (end - begin) // rows * (rows - 1)]
        else:
            other = header[r.choice(names)]
            header[name] = copy.deepcopy(other)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)
    return added


def mutate_files(r, directory, files):
    name = r.choice(files)
    path = os.path.join(directory, name)
    how = r.randrange(5)
    if how == 0:
        os.remove(path)
    elif how == 1:
        open(path, "w").close()
    elif how == 2:
        os.rename(path, os.path.join(directory, r.choice(["x-", ""]) + name + r.choice([".bak", ".json", ".safetensors"])))
    elif how == 3 and name.endswith(".safetensors"):
        shutil.copy(path, os.path.join(directory, "more.safetensors"))
    else:
        index = {"metadata": {"total_size": r.choice(VALUES[:12])},
                 "weight_map": {"model.norm.weight": r.choice(files + ["none.safetensors"]), "lm_head.weight": name}}
        with open(os.path.join(directory, "model.safetensors.index.json"), "w") as f:
            json.dump(index, f)


def case(seed, o, models):
    """Runs a case; returns what is wrong with it, or None, and whether it was converted."""
    r = random.Random(seed)
    directory, out = os.path.join(WORK, "in"), os.path.join(WORK, "out.gguf")
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    source = os.path.join(FIXTURES, r.choice(models))
    for name in os.listdir(source):
        if name.endswith((".json", ".safetensors", ".jinja", ".txt", ".model")) and name != "greedy.json":
            shutil.copy(os.path.join(source, name), directory)
    added = False
    for _ in range(r.choice([1, 1, 1, 2])):
        files = sorted(os.listdir(directory))
        jsons = [f for f in files if f.endswith(".json")]
        tensors = [f for f in files if f.endswith(".safetensors")]
        how = r.random()
        if how < 0.55 and jsons:
            weights = [4 if f == "config.json" else 1 for f in jsons]
            mutate_json(r, os.path.join(directory, r.choices(jsons, weights)[0]))
        elif how < 0.9 and tensors:
            try:
                added |= mutate_tensors(r, os.path.join(directory, r.choice(tensors)))
            except (ValueError, struct.error, KeyError, IndexError):
                pass  # an earlier mutation left no header
        elif files:
            mutate_files(r, directory, files)
    if os.path.exists(out):
        os.remove(out)
    options = r.choice([[], [], [], [], ["--no-mtp"], ["--quantize", "nvfp4", "--dense"], ["--backbone", "q8_0"]])
    convert = subprocess.run([o.convert, directory, "-o", out, *options], capture_output=True)
    said = convert.stderr.decode(errors="replace")
    lines = said.rstrip("\n").split("\n")
    if convert.returncode not in (0, 1):
        return f"moe-convert ended with {convert.returncode}: {said[-2000:]}", False
    if convert.returncode == 1:
        if os.path.exists(out):
            return f"a file is left of what is refused: {said}", False
        return (None if said and len(lines[-1]) > 15 else f"refused without a message: {said!r}"), False
    if added and "left out" not in said:
        return f"a tensor was dropped without a word: {said}", True
    run = subprocess.run([o.moe, "-m", out, "--cpu", "-t", "1", "-c", "64", "--ids", "5,6,7", "--logits",
                          os.path.join(WORK, "logits")], stdin=subprocess.DEVNULL, capture_output=True)
    if run.returncode != 0:
        return f"moe ended with {run.returncode}: {run.stderr.decode(errors='replace')}\nmoe-convert said: {said}", True
    return None, True


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seconds", type=float, default=1200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--one", action="store_true")
    p.add_argument("--moe", default="./moe")
    p.add_argument("--convert", default="build/moe-convert")
    o = p.parse_args()
    models = sorted(d for d in os.listdir(FIXTURES) if os.path.exists(os.path.join(FIXTURES, d, "config.json")))
    os.makedirs(WORK, exist_ok=True)
    end, seed, accepted, wrong = time.time() + o.seconds, o.seed, 0, 0
    while time.time() < end:
        problem, taken = case(seed, o, models)
        accepted += taken
        if problem:
            wrong += 1
            print(f"seed {seed}: {problem}", flush=True)
            shutil.copytree(os.path.join(WORK, "in"), os.path.join(WORK, f"seed{seed}"), dirs_exist_ok=True)
        seed += 1
        if o.one:
            break
    print(f"{seed - o.seed} directories, {accepted} converted and run, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
