#!/usr/bin/env python3
"""Breaks the check of split batches in one place after the other and says which of its tests notices.

python3 benches/mutants.py [--cases 2000] [--only NAME] [--target FOLDER]

Works in a copy of the tree, so that nothing here changes; takes about four minutes a mutant on two cores.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

CHECK = "crates/firebox-train/src/check/"
COUPLED = "crates/firebox-train/src/run/strategy/coupled.rs"

# A name, a file, what stands there, and what is put in its place.
MUTANTS = [
    ("tolerance of a half", CHECK + "verdict.rs", "DType::F64 => (1e-4, f64::EPSILON)", "DType::F64 => (0.5, f64::EPSILON)"),
    ("32 bit with a tolerance of a half", CHECK + "verdict.rs", "DType::F32 => (1e-3,", "DType::F32 => (0.5,"),
    ("all differences are rounding", CHECK + "verdict.rs", "const ABOVE_PERMUTATION: f64 = 10.0", "const ABOVE_PERMUTATION: f64 = 1e6"),
    ("another order may change all", CHECK + "verdict.rs", "const MOST_ROUNDING: f64 = 0.01", "const MOST_ROUNDING: f64 = 1e9"),
    ("parameters count by the largest", CHECK + "verdict.rs", "scale.max(10.0 * epsilon / tolerance * most)", "scale.max(most)"),
    ("without two parts", CHECK + "mod.rs", "let pair = (groups == GROUPS)", "let pair = (groups > GROUPS)"),
    ("two groups", CHECK + "mod.rs", "const GROUPS: usize = 3", "const GROUPS: usize = 2"),
    ("single items alone", CHECK + "mod.rs", "const SIZES: [usize; 3] = [1, 2, 4]", "const SIZES: [usize; 1] = [1]"),
    ("the first items", CHECK + "mod.rs", "let choice = candidates.choose(groups * size);\n            if", "let choice = candidates.first(groups * size);\n            if"),
    ("alike items establish all", CHECK + "mod.rs", "let items_differ = choice.differ;", "let items_differ = true;"),
    ("hidden weights are seen", CHECK + "mod.rs", "let hides_weights = is_mean", "let hides_weights = !is_mean"),
    ("one share for all", CHECK + "mod.rs", "with_share(share,", "with_share(1.0f64.max(share),"),
    ("random draws", CHECK + "mod.rs", "Recorder::new().fixed_draws()", "Recorder::new()"),
    ("statistics are not given back", CHECK + "mod.rs", "let restored = restore::<LC::Backend, M>(&model, snapshot);\n            restored.map", "let restored = Ok::<(), RecordError>(drop(snapshot));\n            restored.map"),
    ("normalization hides the rest", CHECK + "mod.rs", "same: self.normalizes && others", "same: false && self.normalizes && others"),
    ("what is no number agrees", CHECK + "mod.rs", "match is_number || weighed.weight == 0.0", "match is_number || weighed.weight >= 0.0"),
    ("repeats may differ", CHECK + "mod.rs", "if whole.gradient != again.gradient", "if false && whole.gradient != again.gradient"),
    ("never asked", COUPLED, "Asks::Next => true,", "Asks::Next => false,"),
    ("asked once", COUPLED, "Asks::Unless { each } => weights::differ(each * items as f64, weight, items)", "Asks::Unless { .. } => false"),
    ("all is accepted", COUPLED, "if !settings.accepted.contains(&coupling)", "if settings.accepted.len() > 99"),
]

# Those of the Learner take minutes to compile for a release.
TESTS = [
    ["--release", "--test", "splits"],
    ["--lib", "check::"],
    ["--test", "learner", "coupling::"],
    ["--test", "learner", "states::"],
]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cases", default="2000", help="cases of the property test")
    arguments.add_argument("--only", help="a part of the names of the mutants that are run")
    arguments.add_argument("--target", help="where cargo builds (default: beside the copy)")
    arguments = arguments.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    wanted = [mutant for mutant in MUTANTS if arguments.only is None or arguments.only in mutant[0]]
    for name, file, old, _ in MUTANTS:
        found = (root / file).read_text().count(old)
        if found != 1:
            sys.exit(f"{name}: {file} has {old!r} {found} times")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "firebox"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout
        for name in filter(None, tracked.decode().split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy / name)
        target = arguments.target or str(pathlib.Path(folder) / "target")
        environment = dict(os.environ, CARGO_TARGET_DIR=target, FIREBOX_CASES=arguments.cases)
        alive = []
        for name, file, old, new in [("none", COUPLED, "", "")] + wanted:
            path = copy / file
            text = path.read_text()
            path.write_text(text.replace(old, new) if old else text)
            noticed = notice(copy, environment)
            path.write_text(text)
            print(f"{name}: {noticed or 'not noticed'}", flush=True)
            if old == "" and noticed:
                sys.exit("the tests fail as they are")
            if old and not noticed:
                alive.append(name)
        print(f"result: mutants={len(wanted)} caught={len(wanted) - len(alive)} alive={alive}")


def notice(copy, environment):
    """The first test that fails; none if all pass."""
    for test in TESTS:
        command = ["cargo", "test", "--workspace"] + test
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=3600)
        if "error: could not compile" in run.stderr:
            sys.exit("it does not compile: " + run.stderr[-2000:])
        if run.returncode != 0:
            failed = [line.strip() for line in run.stdout.splitlines() if line.startswith("    ")]
            return f"{' '.join(test)}: {failed[-1] if failed else 'failed'}"
    return None


if __name__ == "__main__":
    main()
