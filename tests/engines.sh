#!/bin/bash
# Runs the tests that need a real serving engine.
#   tests/engines.sh ENGINES_DIR WORK_DIR HEAD_DIR [RECIPE]
# ENGINES_DIR holds the install and serve scripts; WORK_DIR receives the engine (some 5 GB) and the target's folder.
set -euo pipefail
engines=$(realpath "$1") work=$(realpath -m "$2") head=$(realpath "$3")
cd "$(dirname "$0")/.."
mkdir -p "$work"
[ -x "$work/vllm/bin/python" ] || bash "$engines/vllm_cpu/install.sh" "$work/vllm"
[ -f "$work/smollm2/config.json" ] || PATH="$work/vllm/bin:$PATH" "$work/vllm/bin/python" "$engines/smollm2.py" "$work/smollm2"
EAGLET_ENGINES=$engines EAGLET_VLLM=$work/vllm EAGLET_TARGET=$work/smollm2 EAGLET_HEAD=$head \
  EAGLET_RECIPE=$(realpath "${4:-recipes/quickstart.toml}") \
  cargo test --release --test engines -- --ignored --nocapture
