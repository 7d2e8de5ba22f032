"""Packs a trained drafter for shipping: bfloat16, six bits where it pays, nothing that the target already has.

  python benchmarks/ship_drafter.py D/dspark/drafter mlx_spark/drafters/smollm2-135m-dspark
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_spark
import mlx.core as mx

from mlx_spark import load, load_drafter, save_drafter

if __name__ == "__main__":
    source, out = sys.argv[1:3]
    model, _ = load("smollm2-135m")
    drafter = load_drafter(source, model, dtype=mx.bfloat16).quantize(6, markov_bits=6)
    save_drafter(drafter, out)
    print({f.name: f.stat().st_size for f in Path(out).iterdir()})
