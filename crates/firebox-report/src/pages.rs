//! What lies where on the pages of firebox's pool at the peak.

use std::collections::BTreeMap;

use firebox_dry::Lifetimes;
use firebox_pool::{Fit, Lifetime, Region, Space};
use firebox_trace::PoolPages;

use crate::page::{Page, Placed};
use crate::story::Held;

/// Sizes on a page are rounded up to this or to a part of it.
const ROUNDED: u64 = 512;

/// The pages, with the buffers on them at the moment at which most is in use. `lifetimes` are those
/// of a dry run. They are placed as the pool places them. `held` are the tensors of the trace, in
/// the order in which they are made.
pub fn pages(lifetimes: &Lifetimes, planned: &PoolPages, held: &[Held]) -> Vec<Page> {
    let Some(peak) = busiest(&lifetimes.buffers) else { return Vec::new() };
    let tensors = tensors(lifetimes, held);
    let regions = [
        (Region::Step, "for steps", planned.step),
        (Region::Lasting, "lasting", planned.lasting),
        (Region::Small, "small buffers", planned.small),
        (Region::Beside, "other threads", planned.beside),
    ];
    let filled = regions.into_iter().filter(|(_, _, bytes)| bytes.get() > 0);
    let filled = filled.map(|(region, name, bytes)| {
        let from = planned.step_from.get();
        let fit = match region {
            Region::Step if from > 0 => Fit::TwoEnded { from },
            Region::Lasting => Fit::Same,
            _ => Fit::Best,
        };
        let named = lifetimes.buffers.iter().zip(&tensors);
        let own = named.filter(|(lifetime, _)| lifetime.region == region);
        Page { name, bytes: bytes.get(), buffers: placed(own, bytes.get(), fit, peak) }
    });
    filled.collect()
}

/// The tensor of each buffer.
fn tensors(lifetimes: &Lifetimes, held: &[Held]) -> Vec<Option<String>> {
    let mut tensors = vec![None; lifetimes.buffers.len()];
    let mut by_size: BTreeMap<u64, Vec<&Held>> = BTreeMap::new();
    for held in held.iter().filter(|held| held.bytes > 0) {
        by_size.entry(held.bytes.div_ceil(ROUNDED)).or_default().push(held);
    }
    for requests in &lifetimes.requests {
        let mut free = by_size.clone();
        let mut of_round: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
        for (at, lifetime) in lifetimes.buffers.iter().enumerate() {
            let place = requests.partition_point(|count| *count < lifetime.begin);
            if (1..requests.len()).contains(&place) {
                let size = lifetime.place.size.div_ceil(ROUNDED);
                of_round.entry((place, size)).or_default().push(at);
            }
        }
        for ((place, size), requested) in of_round {
            let Some(candidates) = free.get_mut(&size) else { continue };
            let found = candidates_of(candidates, place, requested.len());
            for (at, found) in requested.into_iter().zip(found) {
                tensors[at] = Some(describe(found));
            }
        }
    }
    tensors
}

/// Takes `count` tensors that may have been requested at a place of [`Lifetimes::requests`]: those
/// that existed before the first step, in order, or the latest that were made and are in use.
fn candidates_of<'a>(candidates: &mut Vec<&'a Held>, place: usize, count: usize) -> Vec<&'a Held> {
    let fits = |held: &Held| match (place.checked_sub(2), held.made) {
        (None, made) => made.is_none(),
        (Some(step), Some(made)) => made <= step && held.freed.is_none_or(|freed| freed >= step),
        (Some(_), None) => false,
    };
    let fitting: Vec<usize> = (0..candidates.len()).filter(|at| fits(candidates[*at])).collect();
    let taken: Vec<usize> = match place {
        1 => fitting.into_iter().take(count).collect(),
        _ => fitting[fitting.len().saturating_sub(count)..].to_vec(),
    };
    let found = taken.iter().map(|at| candidates[*at]).collect();
    let mut at = 0;
    candidates.retain(|_| {
        at += 1;
        !taken.contains(&(at - 1))
    });
    found
}

/// A tensor in words.
fn describe(held: &Held) -> String {
    let Held { name, op, category, module, .. } = held;
    match (op.is_empty(), module.as_str()) {
        (false, "") => format!("{op} ({category})"),
        (false, module) => format!("{op} in {module} ({category})"),
        (true, _) => format!("{name} ({category})"),
    }
}

/// The request at which most bytes are in use.
fn busiest(lifetimes: &[Lifetime]) -> Option<u32> {
    let mut changes: BTreeMap<u32, i64> = BTreeMap::new();
    for lifetime in lifetimes {
        *changes.entry(lifetime.begin).or_default() += lifetime.place.size as i64;
        if let Some(end) = lifetime.end {
            *changes.entry(end).or_default() -= lifetime.place.size as i64;
        }
    }
    let mut now = 0;
    let sums = changes.into_iter().map(|(request, change)| {
        now += change;
        (now, std::cmp::Reverse(request))
    });
    sums.max().map(|(_, request)| request.0)
}

/// Places buffers up to a request, and gives those that are there then.
fn placed<'a>(
    lifetimes: impl Iterator<Item = (&'a Lifetime, &'a Option<String>)>,
    page: u64,
    fit: Fit,
    peak: u32,
) -> Vec<Placed> {
    let mut space = Space::new(page, fit);
    // Each buffer that is there, and its end.
    let mut there: Vec<(u32, Placed)> = Vec::new();
    for (lifetime, tensor) in lifetimes.filter(|(lifetime, _)| lifetime.begin <= peak) {
        let size = lifetime.place.size;
        there.retain(|(end, placed)| {
            let stays = *end > lifetime.begin;
            if !stays {
                space.give(placed.offset, placed.size);
            }
            stays
        });
        if size > 0
            && let Some(offset) = space.take(size)
        {
            let placed = Placed { offset, size, tensor: tensor.clone() };
            there.push((lifetime.end.unwrap_or(u32::MAX), placed));
        }
    }
    let at_peak = there.into_iter().filter(|(end, _)| *end > peak);
    let mut at_peak: Vec<Placed> = at_peak.map(|(_, placed)| placed).collect();
    at_peak.sort_by_key(|placed| placed.offset);
    at_peak
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use firebox_pool::{Holder, Pool};
    use firebox_trace::{Bytes, Category};

    use super::*;

    struct Flag(Rc<Cell<bool>>);

    impl Holder for Flag {
        fn is_free(&self) -> bool {
            self.0.get()
        }
    }

    /// The lifetimes of buffers of these KiB, of which the one at `freed` ends before the last
    /// comes.
    fn lifetimes(sizes: &[u64], freed: usize) -> Lifetimes {
        let mut pool = Pool::new(256, Fit::Best);
        pool.keep_lifetimes();
        pool.open(Region::Step, u64::MAX);
        let flags: Vec<_> = sizes.iter().map(|_| Rc::new(Cell::new(false))).collect();
        for (id, (kib, flag)) in sizes.iter().zip(&flags).enumerate() {
            if id + 1 == sizes.len() {
                flags[freed].set(true);
                pool.collect();
            }
            let placed = pool.place(id as u64, Flag(flag.clone()), kib * 1024, Region::Step);
            assert!(placed.is_ok());
        }
        // The first exists before the first step, each further one is made by a step.
        let requests = vec![(0..=sizes.len() as u32).collect()];
        Lifetimes { buffers: pool.lifetimes().to_vec(), requests }
    }

    #[test]
    fn buffers_at_the_peak_lie_apart_and_on_their_page() {
        let lifetimes = lifetimes(&[100, 300, 200, 250], 1);
        let planned = PoolPages { step: Bytes::kib(600), ..PoolPages::default() };
        let held = |op: &str, kib: u64, made: Option<usize>| Held {
            name: "weight".to_owned(),
            op: op.to_owned(),
            shape: Vec::new(),
            dtype: String::new(),
            bytes: kib * 1024,
            category: Category::Activation.name(),
            module: made.map_or("", |_| "block").to_owned(),
            made,
            freed: None,
        };
        // Fusion has requested the buffer of 200 KiB a step after the one that makes the tensor,
        // and no buffer for another one.
        let tensors = [
            held("", 100, None),
            held("add", 300, Some(0)),
            held("exp", 200, Some(0)),
            held("gelu", 200, Some(1)),
            held("sum", 200, Some(2)),
        ];
        let pages = pages(&lifetimes, &planned, &tensors);
        let [page] = &pages[..] else { panic!("{pages:?}") };
        // 600 KiB are in use before the second buffer ends.
        let lie: Vec<(u64, u64, &str)> = page
            .buffers
            .iter()
            .map(|of| (of.offset / 1024, of.size / 1024, of.tensor.as_deref().unwrap_or_default()))
            .collect();
        let expected = [
            (0, 100, "weight (activations)"),
            (100, 300, "add in block (activations)"),
            (400, 200, "gelu in block (activations)"),
        ];
        assert_eq!(lie, expected);
    }

    #[test]
    fn no_buffers_no_pages() {
        let none = pages(&Lifetimes::default(), &PoolPages::default(), &[]);
        assert!(none.is_empty());
    }
}
