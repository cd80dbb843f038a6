//! What the memory at the peak is for.

use firebox_heap::Heap;
use firebox_trace::{Bytes, Category, Footprint, MemoryModel};

use crate::builder::{Builder, floats, keep, last};

fn footprint(builder: &Builder) -> Footprint {
    Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(2).footprint(&builder.trace)
}

#[test]
fn labels_are_believed() {
    let mut b = Builder::default();
    let weight = b.existing(&[100]);
    b.label(weight, Category::Parameter, "weight");
    let state = b.existing(&[50]);
    b.label(state, Category::OptimizerState, "moment");
    let grad = b.exp(keep(weight));
    b.label(grad, Category::Gradient, "weight");
    let footprint = footprint(&b);
    assert_eq!(footprint.categories.get(Category::Parameter), floats(100));
    assert_eq!(footprint.categories.get(Category::OptimizerState), floats(50));
    assert_eq!(footprint.categories.get(Category::Gradient), floats(100));
    assert_eq!(footprint.categories.total(), footprint.peak);
}

#[test]
fn a_shared_buffer_takes_its_most_persistent_label() {
    let mut b = Builder::default();
    let x = b.upload(&[100]);
    b.label(x, Category::Input, "batch");
    let view = b.reshape(keep(x), &[10, 10]);
    b.label(view, Category::Parameter, "constant");
    b.exp(keep(x));
    assert_eq!(footprint(&b).categories.get(Category::Parameter), floats(100));
}

#[test]
fn unlabelled_tensors_are_told_by_their_use() {
    let mut b = Builder::default();
    let x = b.upload(&[100]);
    let kept = b.exp(keep(x));
    let passing = b.exp(keep(kept));
    let largest = b.add(keep(passing), keep(x));
    b.free(passing);
    b.add(last(largest), last(kept));
    let footprint = footprint(&b);
    assert_eq!(footprint.op, "float_add");
    assert_eq!(footprint.categories.get(Category::Input), floats(100), "host data is input");
    assert_eq!(footprint.categories.get(Category::Activation), floats(100), "used again");
    assert_eq!(footprint.categories.get(Category::Temporary), floats(200), "gone in a moment");
}

#[test]
fn what_lives_long_is_an_activation_to_its_last_use() {
    let mut b = Builder::default();
    let x = b.upload(&[1000]);
    let kept = b.exp(keep(x));
    for _ in 0..10 {
        b.mark("layer");
    }
    b.add(keep(x), last(kept));
    assert_eq!(footprint(&b).categories.get(Category::Activation), floats(1000));
}
