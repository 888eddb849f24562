#!/usr/bin/env python3
"""The logits of the DeepSeek-V4 and V4.1 fixtures where keys and the indexer are rounded as in training.

    gen_qat.py [NAME ...]   writes tests/fixtures/NAME/qat.f32 of the four models: rows 0, 15, 30, .. of the logits for
                            ids.i32, [rows, 512] float32

check_tiny.py's forward in numpy float64, with the roundings of the release's inference code for keys: E4M3 for those of
attention, but their rotated values; for queries and keys of the indexer a Hadamard matrix and E2M1.  V4.1 rounds the
rotated values too, compressed keys to E2M1 with E4M3 scales, and has no Hadamard matrix.  The other scales are powers
of two.  The inputs of matrices in FP8, which that code rounds too, are not rounded here.
"""
import json
import sys

import numpy as np

import check_tiny

EVERY = 15  # rows that are kept: 0, EVERY, 2 EVERY, ..
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
E4M3 = check_tiny.E4M3[:127]


def nearest(x, values):
    """x to the nearest of the values (ascending, from 0), with its sign; of two as near that with the even index."""
    high = np.clip(np.searchsorted(values, np.abs(x)), 1, len(values) - 1)
    below, above = np.abs(x) - values[high - 1], values[high] - np.abs(x)
    return np.sign(x) * values[np.where((above < below) | ((above == below) & (high % 2 == 0)), high, high - 1)]


def rounded(x, values, block, least):
    """x in blocks of its last axis, each over the least power of two at which the largest value is in range."""
    parts = []
    for first in range(0, x.shape[-1], block):
        part = x[..., first:first + block]
        top = np.maximum(np.abs(part).max(-1, keepdims=True), least) / values[-1]
        scale = 2 ** np.ceil(np.log2(top))
        parts.append(nearest(part / scale, values) * scale)
    return np.concatenate(parts, -1)


def key(x, rope):
    n = x.shape[-1] - rope
    return np.concatenate([rounded(x[..., :n], E4M3, 64, 1e-4), x[..., n:]], -1)


def index(x):
    n = x.shape[-1]
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / n ** .5
    return rounded(x @ matrix, E2M1, 32, 6 * 2.0 ** -126)


def compressed(x):
    """Blocks of 16, whose scales are E4M3 numbers."""
    parts = x.reshape(*x.shape[:-1], -1, 16)
    scale = nearest(np.clip(np.abs(parts).max(-1, keepdims=True) / 6, 2.0 ** -9, 448), E4M3)
    return (nearest(np.clip(parts / scale, -6, 6), E2M1) * scale).reshape(x.shape)


def main():
    check_tiny.V4_ROUND = {"key": key, "index": index}
    check_tiny.V41_ROUND = {"key": lambda x: rounded(x, E4M3, 32, 1e-4), "compressed": compressed,
                            "index": lambda x: rounded(x, E2M1, 32, 6 * 2.0 ** -126)}
    for name in sys.argv[1:] or ("deepseek_v4", "deepseek_v4_pro", "deepseek_v41", "deepseek_v41_nvfp4"):
        folder = check_tiny.FIXTURES / name
        config = check_tiny.text_part(json.loads((folder / "config.json").read_text()))
        W = check_tiny.Weights(folder)
        ids = np.fromfile(folder / "ids.i32", "<i4")
        logits = check_tiny.trunk(W, config, ids) @ check_tiny.head(W, config).T
        logits[::EVERY].astype("<f4").tofile(folder / "qat.f32")
        print(f"{name}: {logits[::EVERY].shape}, NMSE {check_tiny.nmse(logits, folder / 'logits.f32'):.3e} against "
              "logits that are not rounded", file=sys.stderr)


if __name__ == "__main__":
    main()
