//! A shared field is cloned into every micro-batch, so its type must be `Clone`.

use firebox_batch::MicroBatch;

struct Vocabulary(Vec<String>);

#[derive(MicroBatch)]
struct Batch {
    ids: Vec<u32>,
    #[micro_batch(shared)]
    vocabulary: Vocabulary,
}

#[derive(MicroBatch)]
struct Elements(Vec<Vocabulary>);

fn main() {}
