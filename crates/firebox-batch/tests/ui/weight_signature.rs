//! The weight must be a function from `&Self` to `f64`.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
#[micro_batch(weight = count)]
struct Counted(Vec<u8>);

fn count(batch: &Counted) -> usize {
    batch.0.len()
}

#[derive(MicroBatch)]
#[micro_batch(weight = Consumed::total)]
struct Consumed(Vec<u8>);

impl Consumed {
    fn total(self) -> f64 {
        self.0.len() as f64
    }
}

#[derive(MicroBatch)]
#[micro_batch(weight = tokens)]
struct Unknown(Vec<u8>);

fn main() {}
