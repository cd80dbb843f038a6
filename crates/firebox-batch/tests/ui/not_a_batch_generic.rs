//! A generic batch with a type argument that is not `MicroBatch`, and a type without the impl.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch<X> {
    ids: Vec<u32>,
    extra: X,
}

struct Plain {
    ids: Vec<u32>,
}

fn train<T: MicroBatch>(_batch: T) {}

fn main() {
    train(Batch { ids: vec![1], extra: "en" });
    train(Plain { ids: vec![1] });
}
