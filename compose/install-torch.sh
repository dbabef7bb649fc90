#!/bin/sh
# Install torch into the Python given, without pulling gigabytes of CUDA onto a machine that asked for none.
#
#   compose/install-torch.sh .venv/bin/python
#
# TORCH_INDEX: where to take it from (default: PyTorch's public CPU index). Empty: whatever pip finds, CUDA included.
# If that index cannot be reached, pip's own configuration is asked, and its answer is taken only if it brings no CUDA.
# A torch that is installed already is left alone.
set -eu

TORCH_VERSION=2.13.0 # the one place that pins it; pyproject.toml says what range works

python=${1:-python3}
index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# Exit 0 if the packages that "pip install $@" would take are free of CUDA; 1 if not; 2 if pip finds no torch.
free_of_cuda() {
    report=$(pip install --dry-run --ignore-installed --quiet --report - "$@" "torch==$TORCH_VERSION" 2>/dev/null) || return 2
    printf '%s' "$report" | "$python" -c '
import json, re, sys
packages = [item["metadata"] for item in json.load(sys.stdin)["install"]]
names = [package["name"] for package in packages]
if len(names) == 1:  # asked for without its dependencies: torch itself says what it needs
    names += packages[0].get("requires_dist", []) if sys.platform == "linux" else []
sys.exit(any(re.match(r"nvidia|cuda|triton", name, re.IGNORECASE) for name in names))
'
}

if "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    exit 0
fi

if [ -z "$index" ]; then
    echo "installing torch $TORCH_VERSION as pip finds it" >&2
    pip install "torch==$TORCH_VERSION"
elif free_of_cuda --no-deps --timeout 10 --retries 1 --index-url "$index"; then
    echo "installing torch $TORCH_VERSION from $index" >&2
    pip install --no-deps --index-url "$index" "torch==$TORCH_VERSION" # its dependencies come with Headrace's own
elif free_of_cuda; then
    echo "installing torch $TORCH_VERSION as pip finds it: $index cannot be used, and this build is free of CUDA" >&2
    pip install "torch==$TORCH_VERSION"
else
    echo "no CPU build of torch $TORCH_VERSION at $index, and pip would bring CUDA or nothing: set TORCH_INDEX to an" \
        "index that has one, or to an empty value to take what pip finds" >&2
    exit 1
fi
