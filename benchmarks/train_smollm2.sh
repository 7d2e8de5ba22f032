#!/usr/bin/env bash
# Data, draft vocabulary, both drafters and the shipped folder; two GPUs. usage: bash benchmarks/train_smollm2.sh WORK_FOLDER
set -euo pipefail
D=$1; mkdir -p "$D"; cd "$(dirname "$0")/.."
T="python3 benchmarks/train_smollm2.py"
for s in 1 2 3 4; do
  CUDA_VISIBLE_DEVICES=$((s % 2)) $T data --out "$D/d$s.jsonl" --seed "$s" --seconds 160 --batch 512 --seq-len 320 &
done
wait
$T vocab --data "$D/d?.jsonl" --out "$D/vocab.npy"
CUDA_VISIBLE_DEVICES=0 $T train --data "$D/d?.jsonl" --vocab "$D/vocab.npy" --out "$D/dspark" --iters 8000 --bf16 &
CUDA_VISIBLE_DEVICES=1 $T train --data "$D/d?.jsonl" --vocab "$D/vocab.npy" --out "$D/dflash" --iters 8000 --bf16 --seq-head none &
wait
python3 benchmarks/ship_drafter.py "$D/dspark/drafter" mlx_spark/drafters/smollm2-135m-dspark
