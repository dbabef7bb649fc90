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

# Print the URL of the torch that "pip install OPTIONS torch" would take; fail if it finds none or would bring CUDA.
url_free_of_cuda() {
    report=$(pip install --dry-run --ignore-installed --quiet --report - "$@" "torch==$TORCH_VERSION" 2>/dev/null) ||
        return 1
    printf '%s' "$report" | "$python" -c '
import json, re, sys
items = json.load(sys.stdin)["install"]
torch = next(item for item in items if item["metadata"]["name"] == "torch")
names = [item["metadata"]["name"] for item in items]
if len(items) == 1 and sys.platform == "linux":  # asked without dependencies: torch itself says what it needs
    names += torch["metadata"].get("requires_dist", [])
if any(re.match(r"nvidia|cuda|triton", name, re.IGNORECASE) for name in names):
    sys.exit(1)
print(torch["download_info"]["url"])
'
}

if "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    exit 0
fi

if [ -z "$index" ]; then
    echo "installing torch $TORCH_VERSION as pip finds it (with CUDA gigabytes: many minutes)" >&2
    pip install "torch==$TORCH_VERSION"
    exit
fi

# pip is silent while it answers, also where it must fetch the whole wheel (some 200 MB) to know what it needs.
echo "looking for a CPU build of torch $TORCH_VERSION at $index (seconds; a minute or two on a slow line)" >&2
# First without its dependencies, for which that index is not meant; the second question has them in its answer.
if ! url=$(url_free_of_cuda --no-deps --timeout 10 --retries 1 --index-url "$index") &&
    ! url=$(url_free_of_cuda); then
    echo "no CPU build of torch $TORCH_VERSION at $index, and pip would bring CUDA or nothing: set TORCH_INDEX to an" \
        "index that has one, or to an empty value to take what pip finds" >&2
    exit 1
fi
echo "installing torch $TORCH_VERSION for the CPU from ${url%%#*} (some 200 MB; a minute or two)" >&2
pip install "torch @ $url" # the very file that was judged; its dependencies come from pip's own index
