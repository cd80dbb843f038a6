//! Searches for the largest batch that fits without being split. `saved.rs` asks a memory model for
//! each size.

use firebox_trace::Bytes;

/// The size that is tried after one item. What few items need says little about many.
const SECOND: usize = 64;

/// The most times that a size grows in one try.
const GROWTH: usize = 256;

/// A size that was tried, and what it needs.
#[derive(Clone, Copy, Debug)]
struct Tried {
    items: usize,
    need: Bytes,
}

impl Tried {
    /// The size at which the straight line through both reaches `budget`. None if it never does, or
    /// one of them is not known to need a number of bytes.
    fn crossing(self, other: Self, budget: Bytes) -> Option<usize> {
        let (low, high) = if self.items < other.items { (self, other) } else { (other, self) };
        let items = (high.items - low.items).max(1);
        let growth = (high.need - low.need).get() as f64 / items as f64;
        let is_line = growth > 0.0 && high.need < Bytes::MAX;
        let items = (budget - low.need).get() as f64 / growth;
        is_line.then(|| low.items.saturating_add(items as usize))
    }
}

/// A size of up to `most` items that fits `budget`, while one item more does not. Zero if one item
/// does not fit. `need` tells what a size needs; above the budget, that may be too little.
///
/// If needs grow by the same with each item, about eight sizes are tried. If they do not, at most
/// about twice as many as by halving, and there may be larger sizes that fit.
pub(crate) fn largest<E>(
    most: usize,
    budget: Bytes,
    mut need: impl FnMut(usize) -> Result<Bytes, E>,
) -> Result<usize, E> {
    let mut ask = |items: usize| need(items).map(|need| Tried { items, need });
    let mut fitting = ask(1)?;
    if fitting.need > budget {
        return Ok(0);
    }
    let (mut before, mut too_large): (Option<Tried>, Option<Tried>) = (None, None);
    // How far from a size that was tried the next one is at least. It grows while the line leads to
    // sizes next to it.
    let mut step = 1;
    loop {
        let end = too_large.map_or(most.saturating_add(1), |tried| tried.items);
        let open = end - fitting.items;
        if open <= 1 {
            return Ok(fitting.items);
        }
        let other = too_large.or(before);
        let guess = other.and_then(|other| fitting.crossing(other, budget));
        let (first, last, otherwise) = match too_large {
            Some(_) => (fitting.items + step, end - step.min(end), fitting.items + open / 2),
            None => {
                let grown = fitting.items.saturating_mul(GROWTH).min(most);
                (fitting.items + step, grown, fitting.items.saturating_mul(SECOND).min(most))
            }
        };
        let items = match guess {
            Some(guess) if first <= last => guess.clamp(first, last),
            _ => otherwise,
        };
        let tried = ask(items)?;
        match tried.need <= budget {
            true => (before, fitting) = (Some(fitting), tried),
            false => too_large = Some(tried),
        }
        let left = too_large.map_or(most.saturating_add(1), |tried| tried.items) - fitting.items;
        step = if left <= open / 2 { 1 } else { step.saturating_mul(2) };
    }
}

/// The same where only `fits` is known, from a size that fits on. Zero fits.
pub(crate) fn largest_from<E>(
    start: usize,
    most: usize,
    mut fits: impl FnMut(usize) -> Result<bool, E>,
) -> Result<usize, E> {
    let (mut fitting, mut end) = (start, most.saturating_add(1));
    let mut stride = (start / 4).max(1);
    while end - fitting > 1 {
        // Strides double until one leads too far.
        let items = match end > most {
            true => fitting.saturating_add(stride).min(most),
            false => fitting + (end - fitting) / 2,
        };
        stride = stride.saturating_mul(2);
        match fits(items)? {
            true => fitting = items,
            false => end = items,
        }
    }
    Ok(fitting)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const MOST: usize = 1 << 24;

    /// Checks the largest size within 10,000 MiB, and how often it is asked for.
    #[track_caller]
    fn check(need: impl Fn(usize) -> Bytes, expected: usize, most_asked: usize) {
        let (mut asked, budget) = (0, Bytes::mib(10_000));
        let found = largest(MOST, budget, |items| {
            asked += 1;
            assert!((1..=MOST).contains(&items), "{items}");
            Ok::<_, Infallible>(need(items))
        });
        assert_eq!(found, Ok(expected));
        assert!(asked <= most_asked, "{asked} sizes");
    }

    fn line(fixed: u64, item: u64) -> impl Fn(usize) -> Bytes {
        move |items| Bytes::mib(fixed) + Bytes::kib(item) * items as u64
    }

    #[test]
    fn a_straight_line_is_followed() {
        check(line(20, 1), 9_980 * 1024, 9);
        check(line(20, 1024), 9_980, 9);
        check(line(9_999, 512), 2, 9);
        check(line(9_000, 1024 * 1024), 0, 9);
        check(line(20_000, 1), 0, 1);
        check(line(1, 0), MOST, 9);
    }

    #[test]
    fn a_lower_bound_above_the_budget_leads_there_too() {
        let bounded = |items: usize| match line(20, 1024)(items) {
            need if need.scale(0.6) > Bytes::mib(10_000) => need.scale(0.6),
            need => need,
        };
        check(bounded, 9_980, 12);
        let known = line(20, 1024);
        let unknown = |items: usize| if items > 20_000 { Bytes::MAX } else { known(items) };
        check(unknown, 9_980, 12);
    }

    #[test]
    fn pages_are_found_too() {
        let pages = |items: usize| Bytes::mib((20 + items as u64).next_multiple_of(128));
        check(pages, 9_984 - 20, 40);
        let squares = |items: usize| Bytes::mib((items * items) as u64);
        check(squares, 100, 40);
        check(|items| if items > 77 { Bytes::MAX } else { Bytes::ZERO }, 77, 40);
    }

    #[test]
    fn what_is_computed_again_is_searched_from_what_fits() {
        for limit in [0, 1, 2, 7, 100, 4095, 4096] {
            for start in [0, 1, 5, 99, 4000] {
                let mut asked = 0;
                let found = largest_from(start, 4096, |items| {
                    asked += 1;
                    Ok::<_, Infallible>(items <= limit)
                });
                assert_eq!(found, Ok(limit.max(start)), "from {start}");
                assert!(asked < 30, "{asked} sizes from {start} to {limit}");
            }
        }
    }
}
