#!/usr/bin/env python3
"""What Hugging Face transformers computes for fixtures that build/moe-reap has pruned in the form of the hub.

    gen_pruned.py [NAME ...]    writes tests/fixtures/NAME/pruned.f32, [ids, 512] float32, for ids.i32

The directory that moe-reap writes is loaded by from_pretrained as any other: its config.json and tensor names have
to be what transformers expects.  tests/t_reap.h prunes with the same arguments.
Needs torch, transformers >= 5.5, safetensors, numpy, and a built tree.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

REPO = Path(__file__).resolve().parents[2]
PRUNED = {"qwen3moe": 5, "deepseek_v3_plain": 3, "qwen3_5_moe": 3}  # experts that every layer keeps


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PRUNED:
        keep = PRUNED[name]
        fixture = REPO / "tests" / "fixtures" / name
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / name
            subprocess.run([REPO / "build" / "moe-reap", fixture, "-o", out, "--keep", str(keep), "--criterion",
                            "random", "--seed", "3"], check=True, stdout=subprocess.DEVNULL)
            wrapped = "text_config" in json.loads((out / "config.json").read_text())
            auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
            model = auto.from_pretrained(out, dtype=torch.float32).eval()
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
            ids = torch.from_numpy(np.fromfile(fixture / "ids.i32", dtype=np.int32).astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0].numpy()
        logits.astype("<f4").tofile(fixture / "pruned.f32")
        print(f"{name}: {logits.shape}, largest logit {np.abs(logits).max():.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
