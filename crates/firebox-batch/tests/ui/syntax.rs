//! Attributes that are not a list of keys.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch {
    #[micro_batch(dim =)]
    a: Vec<u8>,
    #[micro_batch(1)]
    b: Vec<u8>,
}

fn main() {}
