//! `dim` on a type without dimensions.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch {
    #[micro_batch(dim = 1)]
    ids: Vec<u32>,
    #[micro_batch(each, dim = 1)]
    lists: Vec<Vec<u32>>,
}

fn main() {}
