//! What is no list of keys at all.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch {
    #[micro_batch(dim =)]
    a: Vec<u8>,
    #[micro_batch(1)]
    b: Vec<u8>,
}

fn main() {}
