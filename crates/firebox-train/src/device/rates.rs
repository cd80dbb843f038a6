//! How fast a card computes, as published.

use firebox_dry::Card;
use firebox_recompute::Rates;

/// How fast a card computes, as published. None if that is not known.
pub fn rates_of(card: &Card) -> Option<Rates> {
    let throughput = card.throughput()?;
    let giga = |count: u32| 1e9 * f64::from(count);
    Some(Rates::device(giga(throughput.gflops), giga(throughput.gigabytes)))
}
