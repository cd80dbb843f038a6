//! The pages that batches of several shapes have open. The planner adds them up where pages count.

use std::collections::BTreeMap;

use firebox_trace::{Bytes, Footprint};

/// The number of pages of each size.
pub(crate) type Pages = BTreeMap<Bytes, usize>;

/// The pages of a footprint, where pages count.
pub(crate) fn pages_of(footprint: &Footprint) -> Option<Pages> {
    let paging = footprint.paging.as_ref().filter(|paging| !paging.is_refused());
    paging.map(|paging| paging.pages.clone())
}

/// The open pages of a run.
///
/// CubeCL puts buffers of different sizes into pools with pages of different sizes, and a page
/// stays open. A run on sequences of several lengths can therefore need more than its largest
/// batch. Of each size, as many pages are counted as any batch that ran needed. This is a
/// heuristic: replays are more precise, but do not cover all shapes that ever ran.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenPages(Pages);

impl OpenPages {
    /// The bytes of the open pages once a batch with these pages also runs.
    pub(crate) fn with(&self, pages: &Pages) -> Bytes {
        let mut open = self.clone();
        open.open(pages);
        bytes(&open.0)
    }

    /// Notes that a batch with these pages runs.
    pub(crate) fn open(&mut self, pages: &Pages) {
        for (size, count) in pages {
            let open = self.0.entry(*size).or_default();
            *open = (*open).max(*count);
        }
    }

    /// Notes that all pages are given back except those that a batch needs. The pages that buffers
    /// lie on are counted among these.
    pub(crate) fn give_back(&mut self, but: &Pages) {
        self.0.clone_from(but);
    }
}

fn bytes(pages: &Pages) -> Bytes {
    pages.iter().map(|(size, count)| *size * *count as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(pages: &[(u64, usize)]) -> Pages {
        pages.iter().map(|(mib, count)| (Bytes::mib(*mib), *count)).collect()
    }

    #[test]
    fn pages_of_other_sizes_come_on_top_until_they_are_given_back() {
        let mut open = OpenPages::default();
        open.open(&pages(&[(32, 2)]));
        assert_eq!(open.with(&pages(&[(32, 1)])), Bytes::mib(64));
        let other = pages(&[(8, 3), (32, 1)]);
        assert_eq!(open.with(&other), Bytes::mib(88));
        open.open(&other);
        assert_eq!(open.with(&pages(&[(32, 3)])), Bytes::mib(120));
        open.give_back(&other);
        assert_eq!(open.with(&other), Bytes::mib(56));
        assert_eq!(open.with(&pages(&[(32, 3)])), Bytes::mib(120));
    }
}
