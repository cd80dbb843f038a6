//! A struct must have a field that counts items.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Unit;

#[derive(MicroBatch)]
struct Empty {}

#[derive(MicroBatch)]
struct Settings {
    #[micro_batch(shared)]
    classes: usize,
}

fn main() {}
