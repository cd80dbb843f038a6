//! `each` on a type without elements, and on elements that are not `MicroBatch`.

use burn_tensor::{Tensor, backend::Backend};
use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Batch<B: Backend> {
    #[micro_batch(each)]
    images: Tensor<B, 4>,
    #[micro_batch(each)]
    words: Vec<String>,
}

fn train<B: Backend>(batch: Batch<B>) {
    let _ = batch.items();
}

fn main() {}
