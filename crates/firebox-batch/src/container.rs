//! Containers as batches. A list has one item per element; options and tuples have the items of
//! their contents.

use std::ops::Range;

use crate::part::{field, of_fields};
use crate::{MicroBatch, MicroBatchError, Tally};

/// One item per element. To cut a list whose elements are batches themselves, use
/// `#[micro_batch(each)]`.
impl<T: Clone> MicroBatch for Vec<T> {
    fn items(&self) -> Result<usize, MicroBatchError> {
        Ok(self.len())
    }

    fn range(&self, range: Range<usize>) -> Self {
        self[range].to_vec()
    }
}

/// The items of the value. `None` counts none, and every range of it is `None`.
impl<T: MicroBatch> MicroBatch for Option<T> {
    fn items(&self) -> Result<usize, MicroBatchError> {
        match self {
            Some(value) => value.items(),
            None => Err(MicroBatchError::NoItems { owner: "Option" }),
        }
    }

    fn range(&self, range: Range<usize>) -> Self {
        self.as_ref().map(|value| value.range(range))
    }

    fn weight(&self) -> f64 {
        self.as_ref().map_or(0.0, MicroBatch::weight)
    }
}

macro_rules! tuple {
    ($($T:ident $index:tt),+) => {
        /// The items of all fields, which must agree on their number. They weigh what one of them
        /// weighs.
        impl<$($T: MicroBatch),+> MicroBatch for ($($T,)+) {
            fn items(&self) -> Result<usize, MicroBatchError> {
                Tally::new(stringify!(($($T),+)))
                    $(.field(stringify!($index), &self.$index)?)+
                    .items()
            }

            fn range(&self, range: Range<usize>) -> Self {
                ($(self.$index.range(range.clone()),)+)
            }

            fn weight(&self) -> f64 {
                let weights = [$(field(&self.$index).weight()),+];
                of_fields(self, stringify!(($($T),+)), &weights)
            }
        }
    };
}

tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
