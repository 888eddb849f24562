#!/usr/bin/env python3
"""What Hugging Face transformers computes for the layer for multi-token prediction of the demo model.

    gen_demo_predict.py    writes predict_ids.i32 and predict.f32 in tests/golden/demo

predict_ids.i32 has the first ids of a paragraph of prompts/haystack.txt, the one whose closest routing decision in the
trunk and in the MTP layer is the widest; predict.f32 is [ids - 1, vocab] float32, by the definition in "The MTP layer"
of tests/fixtures/README.md: row t from the trunk's final row t and token t + 1.  16 ids make a file of 0.5 MB.  The
weights are those a reader gets by dequantizing convert/demo; that they lie where they belong shows in
reference_hf.json, which the trunk has to reproduce first.
Needs torch, transformers >= 5.23, safetensors, tokenizers, numpy.
"""
import json
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gen_tiny import E2M1, REPO, give, make_model, predict, run

DEMO, GOLDEN = REPO / "convert" / "demo", REPO / "tests" / "golden" / "demo"
IDS, TRIED = 16, 400


def dequantize(tensors):
    """Float32 by name.  NVFP4 (low nibble: even column) is not rounded; the others are BF16 or float32."""
    signed, values = torch.cat([E2M1, -E2M1]), {}
    for name, t in tensors.items():
        if name + "_scale_2" in tensors:
            codes = torch.stack([t & 15, t >> 4], -1).reshape(len(t), -1).long()
            exact = signed[codes] * tensors[name + "_scale"].float().repeat_interleave(16, 1)
            values[name] = exact * tensors[name + "_scale_2"]
        elif not name.endswith(("_scale", "_scale_2")):
            assert t.dtype in (torch.bfloat16, torch.float32), (name, t.dtype)
            values[name] = t.float()
    return values


def load(config, values):
    """The trunk with these values."""
    model, used = make_model(config), set()
    take = lambda name: used.add(name) or values[name]
    for name, old in list(model.state_dict().items()):
        path, _, leaf = name.rpartition(".")
        if path == "lm_head":  # tied
            continue
        if path.endswith(".experts"):
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            new = torch.stack([torch.cat([take(f"{path}.{i}.{p}.weight") for p in parts]) for i in range(len(old))])
        else:
            new = take(name)
        assert new.shape == old.shape, name
        give(model.get_submodule(path), leaf, new)
    model.tie_weights()
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert used == {name for name in values if not name.startswith(mtp)}, "the trunk lacks tensors"
    return model


def check_trunk(model, tokenizer):
    """Prompts, norms of logits, largest logits and greedy continuations of reference_hf.json."""
    cases, worst, error, square = json.loads((GOLDEN / "reference_hf.json").read_text()), 0, 0, 0
    for case in cases:
        ids, tail, top = case["prompt_ids"], case["greedy_ids"], case["last_logits_top8"]
        assert tokenizer.encode(case["prompt"]).ids == ids, case["prompt"]
        logits = model(input_ids=torch.tensor([ids + tail]), use_cache=False).logits[0]
        assert logits[len(ids) - 1:-1].argmax(-1).tolist() == tail, case["prompt"]
        last, norms = logits[len(ids) - 1], torch.tensor(case["logits_l2_per_position"])
        assert last.topk(8).indices.tolist() == top["ids"], case["prompt"]
        want = torch.tensor(top["values"])
        error, square = error + (last[top["ids"]] - want).square().sum(), square + want.square().sum()
        worst = max(worst, (logits[:len(ids)].norm(dim=-1) / norms - 1).abs().max())
    assert error / square < 1e-11 and worst < 1e-5, (error / square, worst)
    print(f"trunk: {len(cases)} prompts, the same ids; largest logits NMSE {error / square:.1e}, "
          f"norms within {worst:.1e}")


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    config = json.loads((DEMO / "config.json").read_text())
    tensors = {n: t for path in DEMO.glob("*.safetensors") for n, t in load_file(path).items()
               if not n.endswith(".input_scale")}
    values = dequantize(tensors)
    model, tokenizer = load(config, values), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    check_trunk(model, tokenizer)
    text = (REPO / "prompts" / "haystack.txt").read_text(encoding="utf-8")
    starts = {tuple(tokenizer.encode(p).ids[:IDS]) for p in text.split("\n\n")[:TRIED]}
    trunk = {ids: run(model, config, ids)[1].min().item() for ids in sorted(starts) if len(ids) == IDS}
    best, widest = None, 0
    for ids in sorted(trunk, key=lambda ids: -trunk[ids])[:20]:
        logits, gaps = predict(model, config, SimpleNamespace(values=values), list(ids))
        if min(gaps.min().item(), trunk[ids]) > widest:
            best, widest = (list(ids), logits), min(gaps.min().item(), trunk[ids])
    ids, logits = best
    np.array(ids, "<i4").tofile(GOLDEN / "predict_ids.i32")
    np.ascontiguousarray(logits.numpy(), "<f4").tofile(GOLDEN / "predict.f32")
    print(f"{tokenizer.decode(ids)!r}: predict {list(logits.shape)}  logits sd {logits.std():.2f}  "
          f"routing gap {widest:.1e}, the widest of {len(trunk)}")
    print(f"predicted: {[tokenizer.decode([i]) for i in logits.argmax(-1)]}")


if __name__ == "__main__":
    main()
