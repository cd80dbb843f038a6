#!/usr/bin/env bash
# Builds what run.sh runs on a machine with a GPU and without cargo, and packs it: stripped, compressed, in
# target-gpu-pack/. The CUDA version must not be above the one that the driver there knows (nvidia-smi names it).
#
#   benches/gpu/build.sh                   CUDA
#   benches/gpu/build.sh vulkan dev        another backend and profile, for a dry run
set -euo pipefail
cd "$(dirname "$0")/../.."
features="${1:-cuda}"
profile="${2:-release}"
export CUDARC_CUDA_VERSION="${CUDARC_CUDA_VERSION:-13000}"
pack="target-gpu-pack"
most=$((64 << 20))

# What is built: benches that exist, and on CUDA the tests of the device.
targets=(--bench gpu)
if [ "$features" = cuda ]; then targets+=(--bench accuracy_cuda --bench accuracy_pool --test cuda); else targets+=(--bench accuracy); fi
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
cargo build --workspace --profile "$profile" --features "$features" "${targets[@]}" \
    --message-format=json-render-diagnostics > "$messages"

rm -rf "$pack"
mkdir -p "$pack"
# cargo names the executables with a hash; the name of the target is in the same message.
grep '"executable":"' "$messages" \
    | sed -E 's/.*"target":\{[^}]*"name":"([^"]+)".*"executable":"([^"]+)".*/\1 \2/' \
    | while read -r name path; do
        # run.sh knows one bench by one name.
        name=${name/accuracy_cuda/accuracy}
        cp "$path" "$pack/$name"
        strip "$pack/$name"
        echo "$name: $(stat -c %s "$pack/$name") bytes stripped"
    done
for target in "${targets[@]}"; do
    case $target in
        --*) ;;
        *) [ -x "$pack/${target/accuracy_cuda/accuracy}" ] || { echo "cargo said nothing of $target: look at its messages" >&2; exit 1; } ;;
    esac
done
# The driver that computes nothing, for the tests that need no GPU.
if [ "$features" = cuda ]; then
    folder=$(dirname "$(grep -o '"executable":"[^"]*/cuda-[^"]*"' "$messages" | head -1 | cut -d'"' -f4)")
    cp "$folder/libfirebox_blank.so" "$pack/"
    strip "$pack/libfirebox_blank.so"
fi
echo "features=$features profile=$profile cuda=$CUDARC_CUDA_VERSION commit=$(git rev-parse --short HEAD)" > "$pack/about"
# The programs have most of their code in common: a large dictionary finds it again.
tar -C "$pack" -cf - . | xz --lzma2=preset=6,dict=512MiB > "$pack.tar.xz"
rm -rf "${pack:?}"/*
mv "$pack.tar.xz" "$pack/pack.tar.xz"
size=$(stat -c %s "$pack/pack.tar.xz")
echo "$pack/pack.tar.xz: $size bytes"
if [ "$size" -ge "$most" ]; then
    echo "the pack is above $most bytes, and will not travel: build fewer targets" >&2
    exit 1
fi
