//! Batches of one size and several shapes, as sequences of several lengths, on a card that is not there: whose pages stay
//! open, and for which a buffer is too large or too small.

#[path = "../lengths/model.rs"]
mod model;

use std::sync::Mutex;

use burn::backend::Autodiff;
use firebox::dry::{Capability, Card, Cuda, DryCuda, Lease};
use firebox::{Bytes, Lazy};

use self::model::{Trained, trained};

const WIDTH: usize = 512;

fn run(lengths: &[usize], budget: Bytes) -> Trained {
    // Of the pools of a device, other tests must have nothing.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let card = Card::new("a T4 of its own", Bytes::mib(14_910), Capability::new(7, 5), 40);
    let lease = Lease::<Cuda>::take(&card.properties()).expect("few cards were asked for");
    trained::<Autodiff<Lazy<DryCuda>>>(WIDTH, lengths, budget, lease.device())
}

/// Two lengths whose buffers lie on pages of different sizes, in the order in which they come.
const ORDERS: [[usize; 5]; 2] = [[600, 600, 1000, 600, 1000], [1000, 1000, 600, 1000, 600]];

#[test]
fn pages_for_several_lengths_stay_open_where_there_is_room() {
    let Trained { measured: longest, .. } = run(&[1000; 3], Bytes::gib(8));
    let Trained { predicted, measured, steps } = run(&ORDERS[1], Bytes::gib(8));
    assert_eq!(steps, [1, 1], "each fits whole");
    assert_eq!(predicted, measured);
    assert!(measured > longest.scale(1.2), "{measured} and {longest}");
}

#[test]
fn where_there_is_no_room_they_are_given_back() {
    let budget = Bytes::mib(2200);
    for order in ORDERS {
        // The most that is reserved is looked at behind every batch.
        for end in 2..=order.len() {
            let Trained { predicted, measured, steps } = run(&order[..end], budget);
            assert!(steps.iter().all(|steps| *steps == 1), "each fits whole: {steps:?}");
            assert!(measured <= predicted, "{measured} of {predicted}");
            assert!(predicted <= budget, "{predicted} of {budget}");
        }
    }
}
