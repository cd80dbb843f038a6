//! The text form of a trace.

use expect_test::{Expect, expect};
use firebox_heap::Heap;
use firebox_trace::{Bytes, Category, MemoryModel, Trace};

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
    check(
        &step(),
        expect![[r#"
        %0 [64, 32] f32 (parameters: linear.weight)
        %1 [1, 32] f32 (parameters)
        #0 upload 4.00 KiB -> %2 [16, 64] f32 (inputs: images)
        #1 float_matmul %2! %0 -> %3 [16, 32] f32
        #2 float_add %3! %1 -> %4 [16, 32] f32
        #3 mark forward done
        #4 float_swap_dims %4 -> %5 [32, 16] f32
        #5 free %5
        #6 read %4!
    "#]],
    );
}

#[test]
fn nothing_is_nothing() {
    check(&Trace::default(), expect![[""]]);
}

#[test]
fn the_memory_beside_the_steps() {
    let trace = step();
    let footprint =
        Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(1).footprint(&trace);
    expect![[r#"
        |      live |       peak |
        |           |            | %0 [64, 32] f32 (parameters: linear.weight)
        |           |            | %1 [1, 32] f32 (parameters)
        | 12.12 KiB |  12.12 KiB | #0 upload 4.00 KiB -> %2 [16, 64] f32 (inputs: images)
        | 10.12 KiB |  16.12 KiB | #1 float_matmul %2! %0 -> %3 [16, 32] f32 <- peak
        | 10.12 KiB |  10.12 KiB | #2 float_add %3! %1 -> %4 [16, 32] f32
        | 10.12 KiB |  10.12 KiB | #3 mark forward done
        | 10.12 KiB |  10.12 KiB | #4 float_swap_dims %4 -> %5 [32, 16] f32
        | 10.12 KiB |  10.12 KiB | #5 free %5
        |  8.12 KiB |  10.12 KiB | #6 read %4!
    "#]]
    .assert_eq(&barred(&trace.dump(&footprint).to_string()));
}

/// The text with a bar before each line, because `expect!` removes common indentation.
fn barred(text: &str) -> String {
    text.lines().map(|line| format!("|{line}\n")).collect()
}
