#!/usr/bin/env bash
# The native kernel under sanitizers: its Python tests with address and undefined, its C++ tests with thread, and plain.
# Builds elsewhere, so that the library in the source tree stays the fast one. Every native/*.cpp and every test_*.cpp here is
# taken along. Usage: sanitize.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${1:-python3}
compiler=${CXX:-g++}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

echo "== address, undefined: the kernel's Python tests"
mkdir -p "$build/src"
cp -r src/stallfree "$build/src/"
rm -f "$build"/src/stallfree/kernels/*.so
(
  cp setup.py pyproject.toml README.md LICENSE "$build/"
  cd "$build"
  STALLFREE_SANITIZE=address,undefined "$python" setup.py -q build_ext --inplace
)
# Python is not instrumented: the runtime comes first, and what the interpreter never frees is no leak of ours. -s: a report
# is written by a process that ends there and then.
LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 CI=1 PYTHONPATH="$build/src" \
  "$python" -m pytest -q -s -p no:cacheprovider tests/kernels/test_replay*.py tests/kernels/test_native.py tests/kernels/test_queue*.py

for test in tests/kernels/native/test_*.cpp; do
  name=$(basename "$test" .cpp)
  for sanitizer in "" thread; do
    echo "== ${sanitizer:-plain}: $name"
    STALLFREE_SANITIZE=$sanitizer "$python" setup.py -q build_ext --build-lib "$build/$name" --build-temp "$build/$name/objects"
    $compiler -std=c++17 -O1 -g -pthread ${sanitizer:+-fsanitize=$sanitizer} -Isrc/stallfree/kernels/native "$test" \
      "$build/$name/stallfree/kernels/_replay.so" -o "$build/$name/run"
    TSAN_OPTIONS=halt_on_error=1 "$build/$name/run"
  done
done
