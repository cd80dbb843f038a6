#!/usr/bin/env python3
"""Has the operations on checkpoint files fail one after the other, and goes on from what is left.

python3 benches/file_faults.py [--binary tests/resume's program]

Each run trains for eight epochs under strace (Linux, a package of its own), which answers one call on a file below `checkpoint` with an error.
Training has to end with an error or without harm, within a minute, and a second run without faults has to end bit for bit as one that
nothing happened to.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

EPOCHS = 8
FAULTS = [
    ("openat", "ENOSPC"),
    ("openat", "EACCES"),
    ("write", "ENOSPC"),
    ("write", "EIO"),
    ("read", "EIO"),
    ("fsync", "EIO"),
    ("rename", "ENOSPC"),
    ("unlink", "EACCES"),
]


def program():
    build = ["cargo", "test", "--workspace", "--test", "resume", "--no-run", "--message-format", "json"]
    lines = subprocess.run(build, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [message.get("executable") for message in map(json.loads, lines) if message.get("target", {}).get("name") == "resume"]
    return next(path for path in found if path)


def train(binary, folder, under=()):
    environment = dict(os.environ, FIREBOX_RESUME_FOLDER=str(folder), FIREBOX_RESUME_WORKERS="0")
    command = [*under, binary, "--exact", "process", "--nocapture"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def files(folder):
    names = [f"{part}-{epoch}{end}" for part in ("model", "optim", "scheduler") for epoch in range(1, EPOCHS + 1)
             for end in (".mpk", "-unfinished.mpk")]
    return [folder / "checkpoint" / name for name in names]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--binary", help="the built test program")
    arguments = arguments.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed: apt-get install strace")
    binary = arguments.binary or program()
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        whole = place / "whole"
        whole.mkdir()
        if train(binary, whole).returncode != 0:
            sys.exit("training fails without a fault")
        expected = (whole / "result").read_bytes()
        ends = {}
        for call, error in FAULTS:
            for number in range(1, 200):
                folder = place / f"{call}-{error}-{number}"
                folder.mkdir()
                log = place / "log"
                under = ["strace", "-f", "-o", str(log), "-e", f"trace={call}"]
                under += [f"--trace-path={path}" for path in files(folder)]
                under += ["-e", f"inject={call}:error={error}:when={number}"]
                run = train(binary, folder, under)
                if "(INJECTED)" not in log.read_text():
                    break
                if run.returncode < 0 or "SIGABRT" in run.stderr:
                    sys.exit(f"{call} {number} with {error} ended the process: {run.stderr[-2000:]}")
                said = [line for line in run.stderr.splitlines() if line.startswith("it fits: ")]
                if run.returncode != 0 and not said:
                    sys.exit(f"{call} {number} with {error}: {run.stderr[-2000:]}")
                end = said[0].split(": ")[1] if said else "trained"
                ends[(call, error, end)] = ends.get((call, error, end), 0) + 1
                if not (folder / "result").exists():
                    again = train(binary, folder)
                    if again.returncode != 0:
                        sys.exit(f"after {call} {number} with {error} training does not go on: {again.stderr[-2000:]}")
                if (folder / "result").read_bytes() != expected:
                    sys.exit(f"{call} {number} with {error} ended otherwise")
                shutil.rmtree(folder)
        for (call, error, end), count in sorted(ends.items()):
            print(f"{call} {error}: {count} ended with: {end}")
        print(f"result: faults={sum(ends.values())} lost=0")


if __name__ == "__main__":
    main()
