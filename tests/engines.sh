#!/bin/bash
# Runs the tests that need a real serving engine.
#   tests/engines.sh ENGINES_DIR WORK_DIR HEAD_DIR [RECIPE]
# ENGINES_DIR holds the install and serve scripts; WORK_DIR receives the engines (some 6 GB) and the target's folder.
set -euo pipefail
engines=$(realpath "$1") work=$(realpath -m "$2") head=$(realpath "$3")
cd "$(dirname "$0")/.."
mkdir -p "$work"
[ -x "$work/vllm/bin/python" ] || bash "$engines/vllm_cpu/install.sh" "$work/vllm"
[ -f "$work/smollm2/config.json" ] || PATH="$work/vllm/bin:$PATH" "$work/vllm/bin/python" "$engines/smollm2.py" "$work/smollm2"
[ -x "$work/sglang/bin/python" ] || bash "$engines/sglang_cpu/install.sh" "$work/sglang" "$work/vllm"

# Those that capture is tested against; the test of acceptance starts its own vLLM, when these are gone.
servers=()
trap 'kill -- "${servers[@]/#/-}" 2>/dev/null || true' EXIT
serve() { # PORT SCRIPT ARGUMENTS...
  local port=$1; shift
  setsid bash "$@" "$port" > "$work/serve-$port.log" 2>&1 &
  servers+=($!)
  for _ in $(seq 300); do
    curl -sf -o /dev/null "localhost:$port/health" && return
    sleep 1
  done
  echo "no server on port $port, see $work/serve-$port.log"; exit 1
}
tests() { cargo test --release --test engines -- --ignored --nocapture --test-threads 1 "$1"; }
export EAGLET_TARGET=$work/smollm2
VLLM_CPU_KVCACHE_SPACE=2 serve 8101 "$engines/vllm_cpu/serve.sh" "$work/vllm" "$work/smollm2"
EAGLET_VLLM_URL=http://127.0.0.1:8101 tests vllm_capture
kill -- "-${servers[0]}"; servers=()
KV_TOKENS=6000 MAX_RUNNING=16 serve 8102 "$engines/sglang_cpu/serve.sh" "$work/sglang" "$work/smollm2"
EAGLET_SGLANG_URL=http://127.0.0.1:8102 tests sglang_capture
kill -- "-${servers[0]}"; servers=()

EAGLET_ENGINES=$engines EAGLET_VLLM=$work/vllm EAGLET_HEAD=$head \
  EAGLET_RECIPE=$(realpath "${4:-recipes/quickstart.toml}") tests vllm_accepts
