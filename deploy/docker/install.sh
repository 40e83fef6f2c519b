#!/bin/sh
# What the images install, step by step; runs at the root of the sources, or of a copy that the Dockerfile made.
#
#   install.sh wheel          builds VeriCache's wheel into dist/
#   install.sh cuda WHEEL     into vLLM's image
#   install.sh cpu WHEEL      into an empty environment
#
# PYTHON: the interpreter to install for.
set -eu

pip() {
  "${PYTHON:-python3}" -m pip --disable-pip-version-check "$@"
}

case "${1:-}" in
wheel)
  pip install "$(grep -o '^setuptools==[0-9.]*' requirements/cpu.lock)"
  pip wheel --no-deps --no-build-isolation --wheel-dir dist .
  ;;
cuda)
  # The image has all of vLLM's dependencies, ours among them. Nothing else may come in: pip says what is missing.
  pip install --no-index "$2"
  ;;
cpu)
  # As `make install` does it: pinned, and without vLLM's CUDA builds of torchvision and the like.
  torch=$(sed -n 's/^TORCH := //p' Makefile)
  pip install --no-deps "$torch" ||
    pip install --no-deps "$torch" --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps -r requirements/cpu.lock
  pip install --no-deps "$2"
  ;;
*)
  echo "install.sh: got '${1:-}', expected wheel, cuda WHEEL or cpu WHEEL" >&2
  exit 2
  ;;
esac
