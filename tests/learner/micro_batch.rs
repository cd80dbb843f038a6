//! Tests cutting batches of tensors.

use burn::backend::Flex;
use burn::prelude::*;
use firebox::{MicroBatch, MicroBatchError};

type B = Flex;

#[derive(Clone, Debug, MicroBatch)]
struct Everything<B: Backend> {
    images: Tensor<B, 3>,
    targets: Tensor<B, 1, Int>,
    #[micro_batch(dim = 1)]
    tokens: Tensor<B, 2>,
    mask: Option<Tensor<B, 2, Bool>>,
    #[micro_batch(shared)]
    table: Tensor<B, 2>,
    names: Vec<String>,
    #[micro_batch(each)]
    levels: Vec<Tensor<B, 2>>,
}

fn batch(items: usize) -> Everything<B> {
    let device = Default::default();
    let numbers = |shape: [usize; 2]| {
        Tensor::<B, 1, Int>::arange(0..(shape[0] * shape[1]) as i64, &device).float().reshape(shape)
    };
    Everything {
        images: numbers([items, 6]).reshape([items, 2, 3]),
        targets: Tensor::arange(0..items as i64, &device),
        tokens: numbers([4, items]),
        mask: Some(numbers([items, 2]).greater_elem(3.0)),
        table: numbers([5, 2]),
        names: (0..items).map(|item| item.to_string()).collect(),
        levels: vec![numbers([items, 2]), numbers([items, 1])],
    }
}

#[test]
fn every_field_is_cut_where_its_items_lie() {
    let batch = batch(5);
    assert_eq!(batch.items(), Ok(5));
    let part = batch.range(1..3);
    assert_eq!(part.items(), Ok(2));
    assert_eq!(part.images.dims(), [2, 2, 3]);
    part.images.into_data().assert_eq(&batch.images.slice_dim(0, 1..3).into_data(), true);
    assert_eq!(part.targets.into_data().to_vec::<i32>().map_err(|_| ()), Ok(vec![1, 2]));
    part.tokens.into_data().assert_eq(&batch.tokens.slice([0..4, 1..3]).into_data(), true);
    assert_eq!(part.mask.map(|mask| mask.dims()), Some([2, 2]));
    part.table.into_data().assert_eq(&batch.table.into_data(), true);
    assert_eq!(part.names, ["1", "2"]);
    assert_eq!(part.levels[1].dims(), [2, 1]);
}

#[test]
fn fields_that_disagree_are_named() {
    let mut wrong = batch(5);
    wrong.targets = wrong.targets.slice_dim(0, 0..4);
    let error = wrong.items().expect_err("five images and four targets");
    let MicroBatchError::ItemsDisagree { first, second, first_items, second_items, .. } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((first.as_str(), second.as_str()), ("images", "targets"));
    assert_eq!((*first_items, *second_items), (5, 4));
}
