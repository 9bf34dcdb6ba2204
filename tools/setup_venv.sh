#!/usr/bin/env bash
# Makes a virtual environment with all that building, testing and measuring need: setup_venv.sh DIRECTORY [PYTHON].
# The package itself is installed in place, without its compiled library, which `make build` builds.
#
# torch: the newest build on a machine with an NVIDIA driver, and a CPU build elsewhere. Where the configured package index has no
# build labelled +cpu, TORCH_INDEX_URL may name one that has; without it the index's default build is taken, which also runs on CPUs.
set -euo pipefail

venv=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
torch_version=2.13.0

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
index=(${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"})

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    "${pip[@]}" "${index[@]}" 'torch>=2.11'
  else
    "${pip[@]}" "${index[@]}" "torch==$torch_version+cpu" 2>/dev/null || "${pip[@]}" "${index[@]}" "torch==$torch_version"
  fi
fi

"${pip[@]}" 'scikit-build-core>=0.11' 'cmake>=3.25' ninja
(cd "$root" && PATH="$venv/bin:$PATH" "${pip[@]}" --no-build-isolation --config-settings=cmake.define.CUTLASS_BN_CUDA=OFF --editable '.[dev]')
