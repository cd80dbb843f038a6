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
}

/// A field that is cut as its type says.
pub fn field<T: MicroBatch>(value: &T) -> Part<'_, T> {
    Part {
        value,
        dim: 0,
        tally: |tally, name, value, _| tally.field(name, value),
        range: |value, _, range| value.range(range),
    }
}

/// A field that is cut along `dim`.
pub fn along<T: SliceDim>(value: &T, dim: usize) -> Part<'_, T> {
    Part {
        value,
        dim,
        tally: |tally, name, value, dim| tally.add(name, value.dim_items(dim)),
        range: |value, dim, range| value.dim_range(dim, range),
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
    }
}

impl<T> Part<'_, T> {
    /// Counts the items of the field, which is named `name` in errors.
    pub fn tally(self, tally: Tally, name: &str) -> Result<Tally, MicroBatchError> {
        (self.tally)(tally, name, self.value, self.dim)
    }

    /// The items of the field in `range`.
    pub fn range(self, range: &Range<usize>) -> T {
        (self.range)(self.value, self.dim, range.clone())
    }
}
