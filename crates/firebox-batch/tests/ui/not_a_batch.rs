//! A field of a type that is not `MicroBatch`.

use std::sync::Arc;

use firebox_batch::MicroBatch;

struct Labels(Vec<u8>);

#[derive(MicroBatch)]
struct Batch {
    ids: Vec<u32>,
    language: String,
    classes: usize,
    labels: Option<Labels>,
    names: (Vec<u8>, Arc<str>),
}

fn main() {}
