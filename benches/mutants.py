#!/usr/bin/env python3
"""Breaks the proofs and the check of split batches in one place after the other and says which tests notice.

python3 benches/mutants.py [--cases 2000] [--of check|proofs] [--only NAME] [--target FOLDER]

Works in a copy of the tree, so that nothing here changes. Do not give it the target folder of another checkout: cargo takes
packages of two checkouts for the same, and would use what was built of a mutant. On two cores a mutant of the check takes about four minutes, one of
the proofs one.
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
    ("alike items establish all", CHECK + "mod.rs", "Verdict::Equal if !choice.differ =>", "Verdict::Equal if false && !choice.differ =>"),
    ("hidden weights are seen", CHECK + "mod.rs", "let hides_weights = is_mean", "let hides_weights = !is_mean"),
    ("one share for all", CHECK + "mod.rs", "with_share(share,", "with_share(1.0f64.max(share),"),
    ("random draws", CHECK + "mod.rs", "Recorder::new().fixed_draws()", "Recorder::new()"),
    ("normalization hides the rest", CHECK + "mod.rs", "same: self.means.normalizes && others", "same: false && self.means.normalizes && others"),
    ("what is no number agrees", CHECK + "mod.rs", "match is_number || weighed.weight == 0.0", "match is_number || weighed.weight >= 0.0"),
    ("repeats may differ", CHECK + "mod.rs", "if whole.gradient != again.gradient", "if false && whole.gradient != again.gradient"),
    ("never asked", COUPLED, "Asks::Next => true,", "Asks::Next => false,"),
    ("asked once", COUPLED, "Asks::Unless { each } => weights::differ(each * items as f64, weight, items)", "Asks::Unless { .. } => false"),
    ("all is accepted", COUPLED, "let cause = TrainError::Coupled { coupling, by, parameter, at };\n                if !settings.accepted.contains(&coupling)", "let cause = TrainError::Coupled { coupling, by, parameter, at };\n                if settings.accepted.len() > 99"),
]

PROOF = "crates/firebox-proof/src/"
RULES, FOLLOW, VALUE = PROOF + "rules.rs", PROOF + "follow.rs", PROOF + "value.rs"

# The same of proofs: `tests/proofs` compares them with gradients.
PROOFS = [
    ("a sort keeps items", RULES, "(_, Some(dim)) if is_sort => self.over(a, b, dim, By::Any),", "(_, Some::<usize>(_)) if is_sort => self.all(a, b, By::Any),"),
    ("what is picked stays an item", RULES, "let of = move |of: usize| if of == dim { Goes::Meets } else { Goes::To(of) };\n        self.make(out, vec![goes(indices, at), goes(tensor, of)], By::Selection);", "let of = move |of: usize| Goes::To(of);\n        self.make(out, vec![goes(indices, at), goes(tensor, of)], By::Selection);"),
    ("a flip keeps the order", RULES, "axis.free || !x.axes.contains(&axis.dim)", "axis.free || x.axes.len() < 9"),
    ("a slice keeps the places", RULES, "let outer = self.rounds(axis, parts).filter(|_| is_same)?;", "let outer = self.rounds(axis, parts).unwrap_or(1);"),
    ("means are sums", RULES, "self.reduce(&value, Both(&x.out, &y.out), None, mean);", "self.reduce(&value, Both(&x.out, &y.out), None, mean.map(|_| false));"),
    ("means of a dimension are sums", RULES, "self.reduce(&value, Both(&x.out, &y.out), Some(x.axis), mean);", "self.reduce(&value, Both(&x.out, &y.out), Some(x.axis), mean.map(|_| false));"),
    ("powers are linear", RULES, "(O::PowfScalar(x), O::PowfScalar(y)) => {\n                let value = self.get(&x.lhs);\n                self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), By::Any);", "(O::PowfScalar(x), O::PowfScalar(y)) => {\n                let value = self.get(&x.lhs);\n                self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), By::Sum);"),
    ("roots and reciprocals are linear", RULES, "(O::Cross(_) | O::GridSample2d(_), _) => return false,\n            _ => self.all(a, b, By::Any),", "(O::Cross(_) | O::GridSample2d(_), _) => return false,\n            _ => self.all(a, b, By::Sum),"),
    ("comparisons are linear", RULES, "| (O::LowerEqual(_), O::LowerEqual(_)) => self.all(a, b, By::Any),", "| (O::LowerEqual(_), O::LowerEqual(_)) => self.all(a, b, By::Sum),"),
    ("quotients of integers are exact", RULES, "let quotient = if is_int { By::Any } else { By::Quotient };", "let quotient = if is_int && false { By::Any } else { By::Quotient };"),
    ("truth values add up", RULES, "if out.0.dtype.is_bool() { By::Any }", "if false && out.0.dtype.is_bool() { By::Any }"),
    ("rows of matrices are items", RULES, "if dim + 1 == rank { Goes::Adds(0) } else { Goes::To(dim) });\n        let right", "if dim + 1 == rank { Goes::Adds(0) } else { Goes::To(0) });\n        let right"),
    ("items are put anywhere", RULES, "false => self.opaque(out, &[&of, &value], \"items are put by their places\"),", "false => self.elementwise(out, &[&of, &value], By::Sum),"),
    ("sums meet items", FOLLOW, "if values.iter().any(|value| value.is_open_sum()) {", "if values.len() > 99 {"),
    ("products of sums are sums", FOLLOW, "By::Product => sums == 1,", "By::Product => sums >= 1,"),
    ("what is divided by a sum is one", FOLLOW, "By::Quotient | By::First => sums == 1 && is_sum(values[0]),", "By::Quotient | By::First => sums == 1,"),
    ("any order pairs", FOLLOW, "Some((_, of)) if !of.free && (of.outer, of.inner) != (axis.outer, axis.inner) => {", "Some((_, of)) if !of.free && of.outer > 99 => {"),
    ("n does not count", FOLLOW, "*terms = terms.iter().map(|term| term.clone().scaled(Root::Items, -1)).collect();", "*terms = terms.clone();"),
    ("penalties are scaled", FOLLOW, "terms.insert(Term::of([Root::Items].into()));", "terms.insert(Term::default());"),
    ("several numbers cancel", VALUE, "matches!(self, Self::Items | Self::Number(_))", "!matches!(self, Self::Inside(_))"),
    ("factors are not given", VALUE, "_ => [Term::of(value.factor().unwrap_or_default())].into(),", "_ => [Term::default()].into(),"),
    ("quotients are products", VALUE, "let power = if by == By::Product { 1 } else { -1 };", "let power = if by == By::Product { 1 } else { 1 };"),
    ("what scales is not scaled", PROOF + "given.rs", ".powi(self.share)", ".powi(0)"),
    ("rows of the first items", PROOF + "given.rs", "let own = range.start * each * row..range.end * each * row;", "let own = 0..range.len() * each * row;"),
    ("one scale for all", PROOF + "lib.rs", "Some(of) => of == power && other.power(Root::Items) == 0,", "Some(_) => true,"),
    ("penalties do not count", PROOF + "lib.rs", "Kind::Fixed(_) if value.zero => {}", "Kind::Fixed(_) => {}"),
]

# Those of the Learner take minutes to compile for a release.
CHECK_TESTS = [
    ["--release", "--test", "splits"],
    ["--lib", "check::"],
    ["--test", "learner", "coupling::"],
    ["--test", "learner", "states::"],
]
PROOF_TESTS = [["--test", "proofs"]]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cases", default="2000", help="cases of the property test")
    arguments.add_argument("--of", choices=["check", "proofs"], default="check", help="what is broken")
    arguments.add_argument("--only", help="a part of the names of the mutants that are run")
    arguments.add_argument("--target", help="where cargo builds (default: beside the copy)")
    arguments = arguments.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    mutants, tests = (PROOFS, PROOF_TESTS) if arguments.of == "proofs" else (MUTANTS, CHECK_TESTS)
    wanted = [mutant for mutant in mutants if arguments.only is None or arguments.only in mutant[0]]
    for name, file, old, _ in MUTANTS + PROOFS:
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
            noticed = notice(copy, environment, tests)
            path.write_text(text)
            print(f"{name}: {noticed or 'not noticed'}", flush=True)
            if old == "" and noticed:
                sys.exit("the tests fail as they are")
            if old and not noticed:
                alive.append(name)
        print(f"result: mutants={len(wanted)} caught={len(wanted) - len(alive)} alive={alive}")


def notice(copy, environment, tests):
    """The first test that fails; none if all pass."""
    for test in tests:
        command = ["cargo", "test", "--workspace"] + test
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=3600)
        if "error: could not compile" in run.stderr:
            return "it does not compile: " + run.stderr[-2000:]
        if run.returncode != 0:
            failed = [line.strip() for line in run.stdout.splitlines() if line.startswith("    ")]
            return f"{' '.join(test)}: {failed[-1] if failed else 'failed'}"
    return None


if __name__ == "__main__":
    main()
