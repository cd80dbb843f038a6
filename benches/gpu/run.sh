#!/usr/bin/env bash
# Measures firebox on this machine's NVIDIA GPU. Needs what build.sh packed, nvidia-smi, and for the peers a Python with
# PyTorch, Lightning and Accelerate; no network and no cargo. Results go to $OUT (default: target-gpu-pack/out), the
# summary to $OUT/summary.md. Each part has a time limit; together they stay under 35 minutes.
#
#   benches/gpu/run.sh                      everything
#   benches/gpu/run.sh largest peers        some parts: cuda ratio costs pool out-of-memory beyond plan accuracy largest
#                                           peers
#   benches/gpu/run.sh --dry-run            the same steps on what was packed, in small, without an NVIDIA GPU
#
# With NO_BLANK=1 the tests on the driver that computes nothing are left out.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
export OUT="${OUT:-$root/target-gpu-pack/out}"
python="${PYTHON:-python3}"
dry=
parts=()
for argument in "$@"; do
    case $argument in
        --dry-run) dry=1 ;;
        cuda | ratio | costs | pool | out-of-memory | beyond | plan | accuracy | largest | peers) parts+=("$argument") ;;
        *) echo "no part is called $argument: see the head of $0" >&2; exit 2 ;;
    esac
done
if [ ${#parts[@]} -eq 0 ]; then
    parts=(cuda ratio costs pool out-of-memory beyond plan accuracy largest peers)
fi
# Where a kernel is tuned, it is launched from deep down.
export RUST_MIN_STACK="${RUST_MIN_STACK:-16777216}"
mkdir -p "$OUT"
summary="$OUT/summary.md"

# Unpacks next to other temporary files, for the repository may be read-only.
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
if ! tar -C "$bin" -xJf "$root/target-gpu-pack/pack.tar.xz"; then
    echo "there is no pack: run benches/gpu/build.sh on a machine with cargo, and bring target-gpu-pack along" >&2
    exit 1
fi

# Programs run in this folder, so that kernels and choices of the tuner are compiled and made once.
cd "$bin" || exit 1
cat > cubecl.toml <<END
[compilation]
cache = { file = "$bin/kernels" }
[autotune]
cache = { file = "$bin/kernels" }
END

# CubeCL compiles kernels at run time and needs CUDA's headers. Python packages bring them as well.
if [ -z "${CUDA_PATH:-}" ]; then
    for folder in /usr/local/cuda /opt/cuda; do
        if [ -e "$folder/include/cuda_runtime.h" ]; then export CUDA_PATH=$folder; break; fi
    done
fi

# The real backend on a driver that computes nothing needs no GPU. What fails there would fail on one.
if [ -x "$bin/cuda" ] && [ -z "${NO_BLANK:-}" ]; then
    echo "== on the blank driver (at most 240 s)"
    timeout --kill-after=10 240 "$bin/cuda" --nocapture > "$OUT/blank.txt" 2>&1
    blank=$(grep -a '^test result:' "$OUT/blank.txt" | tail -1)
    blank=${blank:-"not finished, see blank.txt"}
    echo "$blank"
else
    blank="not run"
fi

if [ -z "$dry" ]; then
    if ! card=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader --id=0); then
        echo "nvidia-smi finds no GPU: run this on a machine with one, or with --dry-run" >&2
        exit 1
    fi
else
    card="dry run: nothing here was measured on a GPU"
fi
{
    echo "# Run of $(date -u +%Y-%m-%dT%H:%MZ)"
    echo
    echo "- card: $card"
    echo "- build: $(cat "$bin/about")"
    echo "- CUDA: ${CUDA_PATH:-no headers found}"
    echo "- on the blank driver, before anything else: $blank"
    echo
    echo "| part | end | seconds | result |"
    echo "|---|---|---|---|"
} > "$summary"

# part NAME SECONDS COMMAND...: runs a command within its time, keeps its output, adds a line to the summary.
part() {
    local name=$1 limit=$2 started=$SECONDS end result
    shift 2
    echo "== $name (at most $limit s): $*"
    timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.txt" 2>&1
    end=$?
    case $end in
        0) end="done" ;;
        124 | 137) end="stopped after $limit s" ;;
        *) end="failed with $end" ;;
    esac
    result=$(grep -a '^result: ' "$OUT/$name.txt" | tail -1)
    if [ -z "$result" ]; then result=$(grep -a 'test result:' "$OUT/$name.txt" | tail -1); fi
    if [ -z "$result" ]; then result=$(grep -a '^measured: ' "$OUT/$name.txt" | tail -1); fi
    if [ -z "$result" ]; then result=$(tail -c 300 "$OUT/$name.txt" | tail -1); fi
    echo "| $name | $end | $((SECONDS - started)) | ${result//|/ } |" >> "$summary"
    tail -3 "$OUT/$name.txt"
}
skip() {
    echo "== $1: not run, $2"
    echo "| $1 | not run: $2 | 0 | |" >> "$summary"
}
# Every part where the pack has the program.
for name in "${parts[@]}"; do
    case $name in
        cuda)
            if [ ! -x "$bin/cuda" ]; then skip cuda "the pack has no such test"
            elif [ -n "$dry" ]; then skip cuda "it needs computed values; the rest ran on the blank driver"
            else part cuda 80 "$bin/cuda" --nocapture values; fi ;;
        costs)
            if [ -n "$dry" ]; then part costs 300 "$bin/gpu" costs --model small-gpt --items 4 --timed 1
            else part costs 150 "$bin/gpu" costs --limit 60; fi ;;
        pool)
            if [ ! -x "$bin/accuracy_pool" ]; then skip pool "the pack has no such bench"
            elif [ -n "$dry" ]; then part pool 60 "$bin/accuracy_pool" --bench --list
            else part pool 150 "$bin/accuracy_pool" --bench --processes 1 --jobs 12 --limit 100 --json "$OUT/pool.json"; fi ;;
        beyond)
            if [ -n "$dry" ]; then
                part beyond 120 "$bin/gpu" trial --model small-gpt --batch 64 --memory 256MiB
            else
                part beyond 120 "$bin/gpu" trial --model gpt --batch 1024 --memory free
            fi ;;
        accuracy)
            if [ ! -x "$bin/accuracy" ]; then skip accuracy "the pack has no such bench"
            elif [ -n "$dry" ]; then part accuracy 60 "$bin/accuracy" --bench --list
            else part accuracy 480 "$bin/accuracy" --bench --jobs 8 --limit 400 --json "$OUT/accuracy.json"; fi ;;
        largest)
            if [ -n "$dry" ]; then
                part largest 400 "$bin/gpu" largest --model cnn --memory 64MiB --steps 2 --stride 100 --limit 180
            else
                part largest 300 "$bin/gpu" largest --model cnn,gpt --memory 4GiB,16GiB
            fi ;;
        ratio)
            if [ -n "$dry" ]; then part ratio 240 "$bin/gpu" ratio --model cnn --rounds 1 --items 2
            else part ratio 90 "$bin/gpu" ratio --rounds 15; fi ;;
        plan)
            if [ -n "$dry" ]; then part plan 120 "$bin/gpu" plan-time --model small-gpt --items 16 --memory 512MiB
            else part plan 90 "$bin/gpu" plan-time; fi ;;
        out-of-memory)
            if [ -n "$dry" ]; then
                part out-of-memory 200 "$bin/gpu" out-of-memory --model cnn --items 2000 --limit 150
            else
                part out-of-memory 70 "$bin/gpu" out-of-memory --limit 32
            fi ;;
        peers)
            if ! "$python" -c 'import torch, accelerate, importlib.util as i; assert i.find_spec("lightning") or i.find_spec("pytorch_lightning")' 2> /dev/null; then
                skip peers "no torch, lightning and accelerate for $python"
            elif [ -n "$dry" ]; then
                part peers 120 "$python" "$here/peers.py" --device cpu --model tiny --limit 100
            else
                part peers 240 "$python" "$here/peers.py" --memory-gib 8 --limit 50
            fi ;;
    esac
done
echo
cat "$summary"
