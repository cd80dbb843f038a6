//! A field cannot be both shared and cut.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch {
    #[micro_batch(shared, dim = 1)]
    a: Vec<u8>,
    #[micro_batch(each, shared)]
    b: Vec<Vec<u8>>,
    #[micro_batch(each)]
    #[micro_batch(shared)]
    c: Vec<Vec<u8>>,
}

fn main() {}
