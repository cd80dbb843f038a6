//! Tests batches of one size and several shapes, such as sequences of several lengths, on a dry
//! card.
//!
//! Covers pages that are given back when another shape comes, and pages for which a buffer is too
//! large or too small.

use std::sync::Mutex;

use burn::backend::{Autodiff, Flex};
use burn::train::renderer::CliMetricsRenderer;
use firebox::dry::{Capability, Card, Cuda, DryCuda, Lease};
use firebox::{Bytes, Lazy};
use firebox_testing::lengths::{Trained, trained};
use firebox_testing::task::random_state;

/// Makes the parameters of a layer take 1 MiB.
const WIDTH: usize = 512;
/// Makes them take 16 MiB.
const WIDE: usize = 2048;

fn run(width: usize, lengths: &[usize], budget: Bytes) -> Trained {
    // No other test may use the pools of this device.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let card = Card::new("a T4 of its own", Bytes::mib(14_910), Capability::new(7, 5), 40);
    let mut lease = Lease::<Cuda>::take(&card.properties()).expect("few cards were asked for");
    // Programs run on an empty device. The run clears a page that the previous one may have left.
    lease.run(|_| ()).expect("it does nothing");
    let renderer = CliMetricsRenderer::new();
    trained::<Autodiff<Lazy<DryCuda>>>(width, lengths, budget, renderer, lease.device())
}

/// Trains on two lengths, whose buffers lie on pages of different sizes, in a budget that holds
/// each alone but not both, in either order.
#[track_caller]
fn check_no_room(width: usize, [long, short]: [usize; 2]) {
    let alone = run(width, &[long; 3], Bytes::gib(8));
    let orders = [[short, short, long, short, long], [long, long, short, long, short]];
    let budget = alone.predicted.scale(1.03);
    for order in orders {
        // The most reserved bytes after the first change of length, and after all.
        for end in [3, order.len()] {
            let Trained { predicted, measured, steps } = run(width, &order[..end], budget);
            assert!(steps.iter().all(|steps| *steps == 1), "each fits whole: {steps:?}");
            println!("{:?} in {budget}: {predicted}, {measured}, {steps:?}", &order[..end]);
            assert!(measured <= predicted, "{measured} of {predicted}");
            assert!(predicted <= budget, "{predicted} of {budget}");
        }
    }
}

#[test]
fn pages_of_another_length_are_given_back() {
    check_no_room(WIDTH, [1000, 600]);
}

#[test]
fn what_lies_on_them_stays() {
    check_no_room(WIDE, [250, 150]);
}

/// On the CPU, only sizes have plans until a batch of some length turns out to be too large.
#[test]
fn a_length_that_was_too_large_once_is_planned() {
    let _lock = random_state();
    let train = |lengths: &[usize], budget| {
        let (renderer, device) = (CliMetricsRenderer::new(), Default::default());
        trained::<Autodiff<Lazy<Flex>>>(128, lengths, budget, renderer, &device)
    };
    let short = train(&[100; 2], Bytes::gib(1));
    assert_eq!(short.steps, [1]);
    let budget = short.predicted.scale(1.2);
    let Trained { steps, predicted, .. } = train(&[100, 250, 250, 100, 250, 300], budget);
    assert!(
        matches!(steps[..], [1, long] if long >= 2),
        "the short ones, and the long ones: {steps:?}"
    );
    assert!(predicted <= budget);
}
