//! One field of a derived batch and how it is cut. The derive's generated code consists of these
//! calls.
//!
//! Creating a part is the only place that requires the field's trait; counting and cutting do not
//! require it again. A type without the trait therefore causes one compiler error, not two.

use std::ops::Range;

use crate::{Elements, MicroBatch, MicroBatchError, SliceDim, Tally};

/// A field, and how its items are counted and cut.
pub struct Part<'a, T> {
    value: &'a T,
    dim: usize,
    tally: fn(Tally, &str, &T, usize) -> Result<Tally, MicroBatchError>,
    range: fn(&T, usize, Range<usize>) -> T,
    weight: fn(&T) -> Option<f64>,
}

/// A field that is cut as its type says.
pub fn field<T: MicroBatch>(value: &T) -> Part<'_, T> {
    Part {
        value,
        dim: 0,
        tally: |tally, name, value, _| tally.field(name, value),
        range: |value, _, range| value.range(range),
        weight: |value| {
            let items = value.items().ok()?;
            Some(value.weight()).filter(|weight| *weight != items as f64)
        },
    }
}

/// A field that is cut along `dim`.
pub fn along<T: SliceDim>(value: &T, dim: usize) -> Part<'_, T> {
    Part {
        value,
        dim,
        tally: |tally, name, value, dim| tally.add(name, value.dim_items(dim)),
        range: |value, dim, range| value.dim_range(dim, range),
        weight: |_| None,
    }
}

/// A list in which every element is cut as its type says.
pub fn each<L>(list: &L) -> Part<'_, L>
where
    L: Elements,
    L::Element: MicroBatch,
{
    Part {
        value: list,
        dim: 0,
        tally: |tally, name, list, _| tally.add_each(name, list.elements().map(MicroBatch::items)),
        range: |list, _, range| list.map_elements(|element| element.range(range.clone())),
        weight: |list| list.elements().find_map(|element| field(element).weight()),
    }
}

/// A list in which every element is cut along `dim`.
pub fn each_along<L>(list: &L, dim: usize) -> Part<'_, L>
where
    L: Elements,
    L::Element: SliceDim,
{
    Part {
        value: list,
        dim,
        tally: |tally, name, list, dim| {
            tally.add_each(name, list.elements().map(|element| element.dim_items(dim)))
        },
        range: |list, dim, range| {
            list.map_elements(|element| element.dim_range(dim, range.clone()))
        },
        weight: |_| None,
    }
}

impl<T> Part<'_, T> {
    /// Counts the items of the field, which is named `name` in errors.
    pub fn tally(self, tally: Tally, name: &str) -> Result<Tally, MicroBatchError> {
        (self.tally)(tally, name, self.value, self.dim)
    }

    /// The weight of the field, if it is something else than its number of items.
    pub fn weight(self) -> Option<f64> {
        (self.weight)(self.value)
    }

    /// The items of the field in `range`.
    pub fn range(self, range: &Range<usize>) -> T {
        (self.range)(self.value, self.dim, range.clone())
    }
}

/// The weight of a batch with fields of these weights: that of the one that has a weight, or the
/// number of items.
///
/// # Panics
/// If fields have different weights, or `items` is an error.
pub fn of_fields<T: MicroBatch>(batch: &T, owner: &str, weights: &[Option<f64>]) -> f64 {
    let mut weights = weights.iter().copied().flatten();
    let Some(weight) = weights.next() else {
        return items_of(batch) as f64;
    };
    if let Some(other) = weights.find(|other| *other != weight) {
        panic!(
            "fields of `{owner}` weigh {weight} and {other}: name a function for the whole batch, \
             `#[micro_batch(weight = ..)]`"
        );
    }
    weight
}

/// The number of items of a batch.
///
/// # Panics
/// If it has none.
pub(crate) fn items_of<T: MicroBatch>(batch: &T) -> usize {
    batch
        .items()
        .unwrap_or_else(|error| panic!("a batch without a number of items has no weight: {error}"))
}
