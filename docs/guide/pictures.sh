#!/usr/bin/env bash
# Draws the pictures of the guide: docs/guide/pictures.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${CARGO_TARGET_DIR:-target}"
into=docs/guide/src/pictures
mkdir -p "$into"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cargo build --workspace --example digits --bin firebox
"$target/debug/examples/digits" --trace "$work/digits.trace"
firebox() { "$target/debug/firebox" "$@"; }
firebox report "$work/digits.trace" --batch 256 --card cpu --memory 1GiB -o "$into/whole.svg"
firebox report "$work/digits.trace" --batch 256 --card cpu --memory 16MiB -o "$into/split.svg"
firebox report "$work/digits.trace" --batch 4096 --card t4 --card cpu --memory 1GiB -o "$work/report.html"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=4000 \
    --window-size=1200,1100 --screenshot="$into/report.png" "file://$work/report.html" 2> /dev/null
