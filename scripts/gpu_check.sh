#!/bin/sh
# Everything of capproof that is to be seen on a CUDA machine, in under four minutes, without network.
#
#   scripts/gpu_check.sh TREES PYTHON [--device cuda|cpu] [--seconds N]
#
# TREES holds unpacked releases, each in a folder of its name (as `capproof targets --fetch` leaves
# them: TREES/0.33.0/vllm); PYTHON has torch and what vLLM imports (requirements/test.txt).
set -eu
[ $# -ge 2 ] || { echo "usage: $0 TREES PYTHON [--device cuda|cpu] [--seconds N]" >&2; exit 2; }
trees=$1 python=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/scripts/gpu_check.py" "$trees" "$@"
