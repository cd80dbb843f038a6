//! Unknown, misplaced, repeated and empty attributes, all reported in one run.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
#[micro_batch(dim = 1, wieght = tokens)]
#[micro_batch(weight = tokens, weight = tokens)]
struct Batch {
    #[micro_batch(share)]
    a: Vec<u8>,
    #[micro_batch(weight = tokens)]
    b: Vec<u8>,
    #[micro_batch(each)]
    #[micro_batch(each)]
    c: Vec<Vec<u8>>,
    #[micro_batch]
    d: Vec<u8>,
    #[micro_batch()]
    e: Vec<u8>,
    #[micro_batch = "shared"]
    f: Vec<u8>,
    #[micro_batch(shared = true)]
    g: Vec<u8>,
    #[micro_batch(each(2))]
    h: Vec<Vec<u8>>,
}

fn tokens(_: &Batch) -> f64 {
    0.0
}

fn main() {}
