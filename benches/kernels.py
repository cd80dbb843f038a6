#!/usr/bin/env python3
"""Compiles every CUDA kernel that the zoo launches with NVIDIA's own compiler, which needs no GPU.

    python3 benches/kernels.py [--cards T4,...] [--folder target/kernels]

builds the bench `accuracy_cuda`, trains a case of every model of the zoo on the blank driver as each card, keeping the programs
that burn hands to NVRTC, installs NVRTC and CUDA's headers from PyPI into the folder (nothing else of the machine changes),
and compiles each program for its card with the options that CubeCL gave. Programs that do not compile stay in the folder,
beside what NVRTC said. The last line is for scripts. Ends with 1 if a program does not compile.
"""

import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import subprocess
import sys
import time

# A card for each compute capability: 7.5, 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0.
CARDS = "T4,A100 80GB,RTX 3070,RTX 4090,H100 80GB,sm_100,RTX 5090"
# Whole batches, a split one, and a validated one.
CASES = (
    "mlp-2400 cnn-260 cnn-400-by-150 resnet-150 unet-180 encoder-180 gpt-200 gpt-240-validated lstm-4000 "
    "autoencoder-500 siamese-650 reader-3000"
).split()
NVRTC = "13.0.88"
PACKAGES = [
    f"nvidia-cuda-nvrtc=={NVRTC}",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]


def collect(cards, cases, sources):
    """Runs the zoo on the blank driver and keeps what is compiled."""
    environment = dict(os.environ)
    environment.setdefault("CUDARC_CUDA_VERSION", "13000")
    command = ["cargo", "bench", "--workspace", "--profile", "dev", "--features", "cuda", "--bench", "accuracy_cuda", "--"]
    command += ["--processes", "1", "--jobs", "2", "--tune", "--card", cards, "--sources", str(sources)]
    for case in cases:
        command += ["--case", case]
    subprocess.run(command, env=environment, check=True)


def install(folder):
    """Installs the compiler and the headers; gives the library and the folders of headers."""
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run(command + PACKAGES, check=True)
    library = next(folder.glob("**/libnvrtc.so.13"), None)
    header = next(folder.glob("**/include/cuda_runtime.h"), None)
    if library is None or header is None:
        sys.exit(f"{folder} holds no NVRTC 13 with headers; remove it and try again")
    return library, sorted({header.parent, *folder.glob("**/include/cccl")})


def compile_program(job):
    """Compiles one program; gives its path and what NVRTC said, or nothing if it compiles."""
    library, includes, path = job
    # NVRTC opens it by its name, and finds it where it is loaded already.
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    options = path.with_suffix(".options").read_text().split("\n")
    options = [option for option in options if option] + [f"--include-path={folder}" for folder in includes]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    source = path.read_bytes()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, None, 0, None, None)
    if created != 0:
        return path, f"NVRTC cannot begin: error {created}"
    result = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return path, None if result == 0 else f"error {result}\n{log.value.decode(errors='replace')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default=CARDS, help="cards of firebox's table, by commas")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("target/kernels"))
    parser.add_argument("--case", action="append", help="a case of the bench accuracy_cuda (default: one or two of each model)")
    parser.add_argument("--collected", action="store_true", help="compile what an earlier call has kept")
    options = parser.parse_args()
    folder = options.folder.resolve()
    sources = folder / "sources"
    if not options.collected:
        collect(options.cards, options.case or CASES, sources)
    library, includes = install(folder / "nvrtc")
    kept = sorted(sources.glob("*/*.cu"))
    if not kept:
        sys.exit(f"{sources} holds no programs")
    started = time.monotonic()
    counts = {}
    with concurrent.futures.ProcessPoolExecutor() as pool:
        jobs = ((library, includes, path) for path in kept)
        for done, (path, fault) in enumerate(pool.map(compile_program, jobs, chunksize=8), 1):
            tally = counts.setdefault(path.parent.name, [0, 0])
            tally[0] += 1
            path.with_suffix(".log").unlink(missing_ok=True)
            if fault is not None:
                tally[1] += 1
                path.with_suffix(".log").write_text(fault)
                print(f"{path.parent.name}: {path.name} does not compile: {fault.splitlines()[-1]}")
            if done % 200 == 0:
                print(f"{done} of {len(kept)} programs, {time.monotonic() - started:.0f} s", file=sys.stderr)
    for card, (count, failed) in counts.items():
        print(f"{card}: {count} programs, {failed} do not compile")
    failed = sum(failed for _, failed in counts.values())
    print(f"result: bench=kernels nvrtc={NVRTC} cards={len(counts)} programs={len(kept)} failed={failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
