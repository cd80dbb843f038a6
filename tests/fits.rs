//! Tests the search of the example `fits`: the batch found fits, one item more does not, and more
//! memory fits more.

#[path = "../examples/fits/models/cnn.rs"]
mod cnn;
#[allow(dead_code, reason = "written for the example")]
#[path = "../examples/fits/search.rs"]
mod search;

use burn::backend::Autodiff;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::prelude::*;
use firebox::dry::{Capability, Card, Dry, DryCuda, DryPooledCuda, DryTwin};
use firebox::{Bytes, Lazy};

use cnn::Cnn;
use search::{Rehearsals, largest_batch};

type B = Autodiff<Lazy<DryCuda>>;

/// Mean cross-entropy of `logits`, `[items, classes]`.
fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets)
}

const GIBS: [u64; 2] = [2, 4];

fn card(gib: u64) -> Card {
    Card::new("a card", Bytes::gib(gib), Capability::new(8, 6), 64)
}

/// Finds the largest batches of a model on the backend `D`, and checks them.
fn largest<D: DryTwin>(rehearsals: &Rehearsals<B, Cnn<B>>) -> [usize; 2] {
    let mut before = 0;
    GIBS.map(|gib| {
        let card = card(gib);
        let fit = largest_batch::<D, _, _>(&card, rehearsals).expect("the model trains");
        assert!(fit.batch > before, "{} fit in {gib} GiB, {before} in less", fit.batch);
        before = fit.batch;

        // Asks again on a fresh device, because the answer must not depend on earlier questions.
        let model = Dry::<D>::new(card.properties());
        let peak = |items| {
            let trace = rehearsals.trace(items).expect("the model records");
            model.replay(&trace).expect("the model trains").peak
        };
        assert!(peak(fit.batch) <= fit.budget);
        assert!(peak(fit.batch + 1) > fit.budget);
        assert_eq!(fit.footprint.map(|footprint| footprint.peak), Some(peak(fit.batch)));
        assert_eq!(fit.next.map(|next| next.peak), Some(peak(fit.batch + 1)));
        fit.batch
    })
}

#[test]
fn a_batch_is_found_that_fits_and_is_the_largest() {
    let rehearsals = Rehearsals::<B, _>::new(Cnn::new(28), &card(2)).expect("a dry device");
    let (burns, ours) = (largest::<DryCuda>(&rehearsals), largest::<DryPooledCuda>(&rehearsals));
    for (ours, burns) in ours.into_iter().zip(burns) {
        assert!(ours * 100 >= burns * 105, "{ours} on firebox's pool, {burns} on burn's");
    }
}
