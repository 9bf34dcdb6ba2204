#!/usr/bin/env bash
# Makes a virtual environment with all that building, testing and measuring need:
# setup_venv.sh DIRECTORY [PYTHON]. The package itself is installed in place, without its compiled
# library, which `make build` builds.
#
# torch: TORCH_VERSION, a version or "newest"; unless given, the newest build on a machine with an
# NVIDIA driver, and 2.13.0 elsewhere, as a CPU build where the package index has one labelled +cpu.
# TORCH_INDEX_URL may name such an index; any default build runs on CPUs as well.
set -euo pipefail

venv=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
index=(${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"})

version=${TORCH_VERSION:-2.13.0}
if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
  version=${TORCH_VERSION:-newest}
fi
installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
# What is there stays, unless it is not what was asked for.
if [ -z "$installed" ] || { [ -n "${TORCH_VERSION:-}" ] && [ "${installed%+*}" != "$version" ]; }; then
  if [ "$version" = newest ]; then
    "${pip[@]}" "${index[@]}" --upgrade 'torch>=2.11'
  else
    "${pip[@]}" "${index[@]}" "torch==$version+cpu" 2>/dev/null ||
      "${pip[@]}" "${index[@]}" "torch==$version"
  fi
fi

# So that torchvision is the one for this torch, instead of torch the one for the newest torchvision.
"$venv/bin/python" -c 'import torch; print("torch==" + torch.__version__)' >"$venv/constraints.txt"
constraints=$(cd "$venv" && pwd)/constraints.txt

"${pip[@]}" 'scikit-build-core>=0.11' 'cmake>=3.25' ninja
cd "$root"
PATH="$venv/bin:$PATH" "${pip[@]}" --no-build-isolation --constraint "$constraints" \
  --config-settings=cmake.define.CUTLASS_BN_CUDA=OFF --editable '.[dev]'
