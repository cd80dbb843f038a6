//! Trains on two thousand batches of sequences of twenty lengths on a Vulkan device. The budget
//! holds the pages of only a few lengths, and the reserved bytes must stay flat.

use std::sync::{Arc, Mutex};

use burn::backend::Vulkan;
use burn::train::renderer::TrainingProgress;
use firebox::{Bytes, DeviceMemory};
use firebox_testing::bench::renderer::OnOutput;
use firebox_testing::lengths::{Trained, trained};

use crate::{B, WIDTH, give_back, run};

/// Number of batches, one per optimizer step.
const BATCHES: usize = 2_000;

#[test]
#[ignore = "takes half an hour"]
fn two_thousand_batches_of_twenty_lengths() {
    let longest = run(&[200; 3], Bytes::gib(1));
    let budget = longest.predicted.scale(1.3);
    // Lengths from ten to two hundred, in an order without a pattern.
    let length = |batch: usize| 10 * (1 + batch * 7919 % 1013 % 20);
    let lengths: Vec<usize> = (0..BATCHES).map(length).collect();
    // The reserved bytes after each batch.
    let samples = Arc::new(Mutex::new(Vec::new()));
    let taken = samples.clone();
    let sample = move |_: &TrainingProgress| {
        let usage = <Vulkan as DeviceMemory>::pool_usage(&Default::default());
        let reserved = usage.expect("the device has an allocator").reserved;
        taken.lock().expect("nobody panics with it").push(reserved);
    };
    let Trained { predicted, measured, .. } =
        trained::<B>(WIDTH, &lengths, budget, OnOutput(sample), &Default::default());
    give_back();
    let samples = samples.lock().expect("nobody panics with it");
    assert!(samples.len() >= BATCHES, "{} samples", samples.len());
    let (first, rest) = samples.split_at(samples.len() / 10);
    let most = |of: &[Bytes]| of.iter().copied().max().unwrap_or_default();
    println!(
        "{BATCHES} batches in {budget}: predicted {predicted}, reserved {measured}, at most {} in the first tenth and {} behind it",
        most(first),
        most(rest)
    );
    assert!(most(rest) <= budget && measured <= budget, "{measured} of {budget}");
    assert!(most(rest) <= most(first).scale(1.05), "what is reserved grows");
}
