//! `MicroBatch` is derived for structs only.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
enum Samples {
    Labelled(Vec<u8>, Vec<u8>),
    Unlabelled(Vec<u8>),
}

#[derive(MicroBatch)]
union Bits {
    float: f32,
    int: u32,
}

fn main() {}
