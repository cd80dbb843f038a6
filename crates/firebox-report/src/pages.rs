//! What lies where on the pages of firebox's pool at the peak.

use std::collections::BTreeMap;

use firebox_pool::{Fit, Lifetime, Region, Space};
use firebox_trace::PoolPages;

/// One page.
#[derive(Debug)]
pub struct Page {
    /// What it is for.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Offsets and sizes.
    pub buffers: Vec<(u64, u64)>,
}

/// The pages, with the buffers on them at the moment at which most is in use. `lifetimes` are those
/// of a dry run. They are placed as the pool places them.
pub fn pages(lifetimes: &[Lifetime], planned: &PoolPages) -> Vec<Page> {
    let Some(peak) = busiest(lifetimes) else { return Vec::new() };
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
        let own = lifetimes.iter().filter(|lifetime| lifetime.region == region);
        Page { name, bytes: bytes.get(), buffers: placed(own, bytes.get(), fit, peak) }
    });
    filled.collect()
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
    lifetimes: impl Iterator<Item = &'a Lifetime>,
    page: u64,
    fit: Fit,
    peak: u32,
) -> Vec<(u64, u64)> {
    let mut space = Space::new(page, fit);
    // The end, offset and size of each buffer that is there.
    let mut there: Vec<(u32, u64, u64)> = Vec::new();
    for lifetime in lifetimes.filter(|lifetime| lifetime.begin <= peak) {
        let size = lifetime.place.size;
        there.retain(|(end, offset, size)| {
            let stays = *end > lifetime.begin;
            if !stays {
                space.give(*offset, *size);
            }
            stays
        });
        if size > 0
            && let Some(offset) = space.take(size)
        {
            there.push((lifetime.end.unwrap_or(u32::MAX), offset, size));
        }
    }
    let at_peak = there.into_iter().filter(|(end, ..)| *end > peak);
    let mut at_peak: Vec<(u64, u64)> = at_peak.map(|(_, offset, size)| (offset, size)).collect();
    at_peak.sort_unstable();
    at_peak
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use firebox_pool::{Holder, Pool};
    use firebox_trace::Bytes;

    use super::*;

    struct Flag(Rc<Cell<bool>>);

    impl Holder for Flag {
        fn is_free(&self) -> bool {
            self.0.get()
        }
    }

    /// The lifetimes of buffers of these KiB, of which the one at `freed` ends before the last
    /// comes.
    fn lifetimes(sizes: &[u64], freed: usize) -> Vec<Lifetime> {
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
        pool.lifetimes().to_vec()
    }

    #[test]
    fn buffers_at_the_peak_lie_apart_and_on_their_page() {
        let lifetimes = lifetimes(&[100, 300, 200, 250], 1);
        let planned = PoolPages { step: Bytes::kib(600), ..PoolPages::default() };
        let pages = pages(&lifetimes, &planned);
        let [page] = &pages[..] else { panic!("{pages:?}") };
        let kib = |buffers: &[(u64, u64)]| {
            buffers.iter().map(|(at, size)| (at / 1024, size / 1024)).collect::<Vec<_>>()
        };
        // 600 KiB are in use before the second buffer ends.
        assert_eq!(kib(&page.buffers), [(0, 100), (100, 300), (400, 200)]);
    }

    #[test]
    fn no_buffers_no_pages() {
        assert!(pages(&[], &PoolPages::default()).is_empty());
    }
}
