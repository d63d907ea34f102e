#!/usr/bin/env bash
# The tools of other people that tests use: compilers for AMD, Chromium, Dawn, Mesa's drivers. Installs what it can without
# asking. The tests do without what it cannot: tests/tools.py says which tests need which tool.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
has() { command -v "$1" >/dev/null; }
# Where they ask for the library, tests open it by its name.
has_library() { compgen -G "/usr/lib/*/$1" >/dev/null || compgen -G "/usr/lib*/$1" >/dev/null; }

groups=()
has clang-19 && has ld.lld-19 && has llvm-objdump-19 || groups+=('clang-19 lld-19 llvm-19')
has clang-22 && has ld.lld-22 && has llvm-objdump-22 || groups+=('clang-22 lld-22 llvm-22') # for gfx950
has node || groups+=(nodejs)
has chromium || has chromium-browser || has google-chrome || groups+=(chromium)
has_library libvulkan_radeon.so && has_library libvulkan.so.1 || groups+=('mesa-vulkan-drivers libvulkan1')
has_library libjemalloc.so.2 || groups+=(libjemalloc2) # tests only take longer without it

"${PYTHON:-python3}" tests/portability/fetch_dawn.py ||
    { has npm && npm ci --prefix tests/portability --ignore-scripts --no-audit --no-fund --loglevel=error; } &
tests/portability/fetch_mesa.sh &
if [ "${#groups[@]}" != 0 ]; then
    echo "installing ${groups[*]} ..."
    .ci/apt "${groups[@]}"
fi
wait
