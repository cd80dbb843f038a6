//! The text form of a trace.

use expect_test::{Expect, expect};
use firebox_trace::{Category, Heap, MemoryModel, Trace};

use crate::builder::{Builder, keep, last};

#[track_caller]
fn check(trace: &Trace, expected: Expect) {
    expected.assert_eq(&trace.to_string());
}

fn step() -> Trace {
    let mut b = Builder::default();
    let weight = b.existing(&[64, 32]);
    b.label(weight, Category::Parameter, "linear.weight");
    let bias = b.existing(&[1, 32]);
    b.label(bias, Category::Parameter, "");
    let x = b.upload(&[16, 64]);
    b.label(x, Category::Input, "images");
    let y = b.matmul(last(x), keep(weight));
    let y = b.add(last(y), keep(bias));
    b.mark("forward done");
    let t = b.transpose(keep(y));
    b.free(t);
    b.read(last(y));
    b.trace
}

#[test]
fn a_line_a_step() {
    check(&step(), expect![[""]]);
}

#[test]
fn nothing_is_nothing() {
    check(&Trace::default(), expect![[""]]);
}

#[test]
fn the_memory_beside_the_steps() {
    let trace = step();
    let footprint = Heap::flex().with_threads(1).footprint(&trace);
    expect![[""]].assert_eq(&trace.dump(&footprint).to_string());
}
