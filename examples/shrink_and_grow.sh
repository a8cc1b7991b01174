#!/bin/sh
# One training on 4 ranks, then on 2, then on 3: each begins where the last one ended.
set -e
steps=0
for ranks in 4 2 3; do
    steps=$((steps + 50))
    torchrun --nproc-per-node $ranks "$(dirname "$0")/fsdp2.py" --steps $steps
done
