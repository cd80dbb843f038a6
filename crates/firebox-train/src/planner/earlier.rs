//! What the splits of a batch need, as a search in an earlier run has found. A search then records
//! the whole batch, to know that it is the same, and the split that it finds, to know that it fits.

use std::collections::HashMap;
use std::fmt::Debug;

use firebox_plan::{Need, Plan, Split};

use super::assess::need_of;
use crate::cache::{Cache, Key};
use crate::planner::rehearsed::Rehearsed;

/// What an earlier search has found.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    cache: Option<Cache>,
    /// Whether an earlier search is believed.
    is_used: bool,
    key: Option<Key>,
    needs: HashMap<Split, Need>,
}

impl Earlier {
    /// Nothing yet. `is_used` tells whether to look for what was found. Without a cache, nothing is
    /// found or kept.
    pub(super) fn new(cache: Option<Cache>, is_used: bool) -> Self {
        Self { cache, is_used, ..Self::default() }
    }

    /// What these splits need, if that is known of all of them.
    pub(super) fn needs(&self, splits: &[Split]) -> Option<Vec<Need>> {
        splits.iter().map(|split| self.needs.get(split).cloned()).collect()
    }

    /// Whether it must be known what determines the footprints of these splits.
    pub(super) fn wants_key(&self, splits: &[Split]) -> bool {
        self.cache.is_some() && splits.iter().any(|split| split.len() == 1)
    }

    /// Looks for an earlier search once the whole batch is rehearsed. The search depends on `more`.
    pub(super) fn look(&mut self, split: Split, rehearsed: &Rehearsed, more: &impl Debug) {
        let Some(cache) = self.cache.as_ref().filter(|_| split.len() == 1) else { return };
        self.key = rehearsed.key.map(|key| key.with(more));
        let found = self.key.filter(|_| self.is_used).and_then(|key| cache.needs(&key));
        self.needs = found.into_iter().flatten().collect();
    }

    /// Whether a split needs what was found earlier.
    pub(super) fn agrees(&self, split: Split, rehearsed: &Rehearsed) -> bool {
        self.needs.get(&split) == Some(&need_of(rehearsed))
    }

    /// Keeps what a search has found for later ones, unless it was found earlier.
    pub(super) fn keep(&self, plan: &Plan) {
        if let (Some(cache), Some(key), true) = (&self.cache, &self.key, self.needs.is_empty()) {
            let needs = plan.asked().iter().map(|asked| (asked.split, asked.need.clone()));
            cache.keep_needs(key, &needs.collect::<Vec<_>>());
        }
    }
}
