//! What is alive when: views, sharing, operations in place, uploads, reads.

use firebox_heap::Heap;
use firebox_trace::{Bytes, Estimate, Footprint, MemoryModel, OpIndex, StructuralHash};

use crate::builder::{Builder, floats, keep, last};

fn footprint(builder: Builder) -> Footprint {
    builder.trace.check().expect("the trace is consistent");
    Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(2).footprint(&builder.trace)
}

fn peaks(builder: Builder) -> Vec<Bytes> {
    footprint(builder).timeline.iter().map(|moment| moment.peak).collect()
}

#[test]
fn an_owned_tensor_is_overwritten() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    let y = b.exp(last(x));
    b.exp(last(y));
    assert_eq!(peaks(b), [floats(100), floats(100)]);
}

#[test]
fn a_kept_tensor_is_copied() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    let y = b.exp(keep(x));
    b.exp(last(y));
    b.free(x);
    assert_eq!(peaks(b), [floats(200), floats(200), floats(200)]);
}

#[test]
fn a_view_keeps_the_buffer_alive_and_shared() {
    let mut b = Builder::default();
    let x = b.existing(&[10, 10]);
    let view = b.reshape(keep(x), &[100]);
    let y = b.exp(last(x));
    b.free(y);
    b.exp(last(view));
    let footprint = footprint(b);
    let live: Vec<Bytes> = footprint.timeline.iter().map(|moment| moment.live).collect();
    assert_eq!(live, [floats(100), floats(200), floats(100), floats(100)]);
}

#[test]
fn a_slice_keeps_the_whole_buffer() {
    let mut b = Builder::default();
    let x = b.existing(&[100, 2]);
    let head = b.head(last(x), 1);
    b.exp(last(head));
    let footprint = footprint(b);
    assert_eq!(footprint.timeline[0].live, floats(200));
    assert_eq!(footprint.timeline[1].live, floats(200), "the owned slice is overwritten in place");
}

#[test]
fn a_transposed_tensor_is_copied_by_a_reshape() {
    let mut b = Builder::default();
    let x = b.existing(&[10, 20]);
    let t = b.transpose(last(x));
    b.reshape(last(t), &[200]);
    assert_eq!(peaks(b), [floats(200), floats(400)]);
}

#[test]
fn a_product_of_a_tensor_with_itself_owns_nothing() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    b.add(keep(x), last(x));
    let footprint = footprint(b);
    assert_eq!(footprint.peak, floats(200));
    assert_eq!(footprint.timeline[0].live, floats(100));
}

#[test]
fn the_last_use_may_be_marked_on_either_argument() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    b.add(last(x), last(x));
    assert_eq!(footprint(b).timeline[0].live, floats(100));
}

#[test]
fn host_data_is_alive_from_the_beginning_and_moves() {
    let mut b = Builder::default();
    let x = b.upload(&[100]);
    let y = b.upload(&[50]);
    b.free(x);
    b.free(y);
    let footprint = footprint(b);
    let live: Vec<Bytes> = footprint.timeline.iter().map(|moment| moment.live).collect();
    assert_eq!(live, [floats(150), floats(150), floats(50), Bytes::ZERO]);
    assert_eq!(footprint.baseline, Bytes::ZERO);
    assert_eq!(footprint.peak, floats(150));
}

#[test]
fn a_read_copies_what_somebody_keeps() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    b.read(keep(x));
    b.read(last(x));
    let footprint = footprint(b);
    assert_eq!(footprint.timeline[0].peak, floats(300), "once more to align it");
    assert_eq!(footprint.timeline[1].peak, floats(100));
    assert_eq!(footprint.timeline[1].live, Bytes::ZERO);
}

#[test]
fn a_read_of_a_transposed_tensor_copies() {
    let mut b = Builder::default();
    let x = b.existing(&[10, 10]);
    let t = b.transpose(last(x));
    b.read(last(t));
    assert_eq!(footprint(b).timeline[1].peak, floats(200));
}

#[test]
fn the_peak_is_found_where_it_is() {
    let mut b = Builder::default();
    let x = b.existing(&[64, 64]);
    b.mark("forward");
    let y = b.matmul(keep(x), keep(x));
    b.free(x);
    b.free(y);
    let footprint = footprint(b);
    assert_eq!((footprint.at, footprint.op.as_str()), (OpIndex(1), "float_matmul"));
    assert_eq!(footprint.baseline, floats(64 * 64));
    assert!(footprint.growth() >= floats(64 * 64));
    assert_eq!(footprint.estimate, Estimate::Exact);
}

#[test]
fn an_exact_estimate_says_so() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    b.exp(last(x));
    assert_eq!(footprint(b).estimate, Estimate::Exact);
}

#[test]
fn an_unknown_operation_is_named_and_widens_the_estimate() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    let y = b.unknown(last(x));
    b.unknown(last(y));
    let footprint = footprint(b);
    assert_eq!(footprint.unaccounted, ["float_fold_space"]);
    assert_eq!(footprint.estimate, Estimate::Heuristic);
    assert_eq!(footprint.peak, floats(400), "input, output, and both once more");
    assert_eq!(footprint.timeline[1].live, floats(100));
}

#[test]
fn the_simple_heap_shares_reuses_and_guesses() {
    let mut b = Builder::default();
    let x = b.existing(&[10, 10]);
    let t = b.transpose(keep(x));
    let flat = b.reshape(last(t), &[100]);
    let y = b.exp(last(flat));
    b.free(x);
    b.exp(last(y));
    let footprint = Heap::simple().footprint(&b.trace);
    assert_eq!(footprint.peak, floats(200));
    assert_eq!(footprint.timeline[1].peak, floats(100), "a reshape shares");
    assert_eq!(footprint.timeline[4].live, floats(100));
    assert_eq!(footprint.estimate, Estimate::Heuristic);
}

#[test]
fn a_footprint_can_be_saved() {
    let mut b = Builder::default();
    let x = b.existing(&[100]);
    b.exp(keep(x));
    let footprint = footprint(b);
    let saved = serde_json::to_string(&footprint).expect("a footprint is data");
    assert_eq!(serde_json::from_str::<Footprint>(&saved).expect("and is read back"), footprint);
}

/// The structural hash of a program that frees tensors in this order.
fn structure(freed: &[usize]) -> StructuralHash {
    let mut b = Builder::default();
    let tensors = [b.existing(&[4]), b.existing(&[4]), b.existing(&[4])];
    b.exp(keep(tensors[0]));
    freed.iter().for_each(|i| b.free(tensors[*i]));
    b.exp(keep(tensors[2]));
    b.trace.structural_hash()
}

#[test]
fn the_order_of_frees_is_no_structure_but_what_is_freed_is() {
    assert_eq!(structure(&[0, 1]), structure(&[1, 0]));
    assert_ne!(structure(&[0, 1]), structure(&[0]));
    assert_ne!(structure(&[0]), structure(&[1]));
    assert_ne!(structure(&[0]), structure(&[]));
}
