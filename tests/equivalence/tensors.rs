//! Tests operations that a router or a fusion backend decomposes, reads or refuses.

use burn::backend::Flex;
use burn::prelude::*;
use burn::tensor::IndexingUpdateOp;
use burn::tensor::backend::AutodiffBackend;

use burn_ndarray::NdArray;

use crate::{LazyFlex, LazyNdArray, Outputs, check};

fn numbers<B: Backend>(device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_floats([[3.0, -1.0, 2.5, 0.0], [7.0, 7.0, -4.0, 1.0]], device)
}

fn sorts<B: Backend>(device: &B::Device) -> Outputs<B> {
    let x = numbers::<B>(device);
    let (sorted, indices) = x.clone().sort_with_indices(1);
    let ints = x.clone().int();
    vec![
        ("sort", x.clone().sort(0).flatten(0, 1)),
        ("sort descending", x.clone().sort_descending(1).flatten(0, 1)),
        ("sorted", sorted.flatten(0, 1)),
        ("indices", indices.float().flatten(0, 1)),
        ("argsort", x.clone().argsort(1).float().flatten(0, 1)),
        ("topk", x.clone().topk(2, 1).flatten(0, 1)),
        ("topk indices", x.topk_with_indices(3, 1).1.float().flatten(0, 1)),
        ("int sort", ints.sort(1).float().flatten(0, 1)),
    ]
}

#[test]
fn sorting() {
    // Not under autodiff, which lacks rules for some of these.
    check!(sorts, Flex, LazyFlex);
    check!(sorts, NdArray, LazyNdArray);
}

fn searches<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let x = numbers::<B>(device);
    let positive = x.clone().greater_elem(0.5);
    vec![
        ("argwhere", positive.clone().argwhere().float().flatten(0, 1)),
        ("any", positive.clone().any().float()),
        ("all", positive.all_dim(1).float().flatten(0, 1)),
        ("argmax", x.clone().argmax(1).float().flatten(0, 1)),
        ("max", x.clone().max_dim_with_indices(0).0.flatten(0, 1)),
        ("nan", (x.clone() / x.clone()).is_nan().float().flatten(0, 1)),
        ("max abs", x.clone().max_abs()),
        ("sign", x.sign().flatten(0, 1)),
    ]
}

#[test]
fn searching() {
    check!(searches);
}

fn slices<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let x = numbers::<B>(device);
    let picked = Tensor::<B, 1, Int>::from_ints([1, 0, 1], device);
    let places = Tensor::<B, 2, Int>::from_ints([[0, 2], [3, 1]], device);
    let values = Tensor::<B, 2>::from_floats([[10.0, 20.0], [30.0, 40.0]], device);
    vec![
        ("slice", x.clone().slice([0..2, 1..3]).flatten(0, 1)),
        ("assign", x.clone().slice_assign([0..2, 1..3], values.clone()).flatten(0, 1)),
        ("select", x.clone().select(0, picked).flatten(0, 1)),
        ("gather", x.clone().gather(1, places.clone()).flatten(0, 1)),
        ("scatter", x.clone().scatter(1, places, values, IndexingUpdateOp::Add).flatten(0, 1)),
        ("cat", Tensor::cat(vec![x.clone(), x.clone().flip([1])], 0).flatten(0, 1)),
        ("repeat", x.clone().repeat_dim(1, 2).flatten(0, 1)),
        ("expand", x.clone().slice([0..1, 0..4]).expand([3, 4]).flatten(0, 1)),
        ("cumsum", x.clone().cumsum(1).flatten(0, 1)),
        ("prod", x.prod_dim(1).flatten(0, 1)),
    ]
}

#[test]
fn slicing() {
    check!(slices);
}

fn random<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    use burn::tensor::Distribution;
    vec![
        ("normal", Tensor::random([9], Distribution::Normal(1.0, 2.0), device)),
        ("uniform", Tensor::random([9], Distribution::Uniform(-1.0, 1.0), device)),
        ("bernoulli", Tensor::random([9], Distribution::Bernoulli(0.3), device)),
        ("ints", Tensor::<B, 1, Int>::random([9], Distribution::Uniform(0.0, 9.0), device).float()),
        ("full", Tensor::full([3], 2.5, device)),
        ("arange", Tensor::arange_step(0..9, 2, device).float()),
    ]
}

#[test]
fn creating() {
    check!(random);
}

fn spectra<B: Backend>(device: &B::Device) -> Outputs<B> {
    use burn::tensor::signal::{irfft, rfft};
    let signal = Tensor::<B, 1>::from_floats([1.0, 2.0, -1.0, 0.5, 0.0, 3.0, -2.0, 1.5], device);
    let (re, im) = rfft(signal, 0, None);
    vec![("real", re.clone()), ("imaginary", im.clone()), ("back", irfft(re, im, 0, None))]
}

#[test]
fn spectra_of_signals() {
    // Not under autodiff, which lacks rules for some of these, and not on NdArray, which has none
    // of them.
    check!(spectra, Flex, LazyFlex);
}
