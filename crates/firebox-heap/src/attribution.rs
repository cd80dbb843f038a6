//! Says what the memory at the peak is for.
//!
//! A buffer takes the most persistent label of the tensors that are on it in the step of the peak.
//! In order of persistence: parameter, optimizer state, accumulated gradient, gradient, input,
//! activation, temporary. If the recorder gave no label, the history of the buffer decides:
//!
//! - What existed before the recording, and host data, is an input.
//! - What an earlier call made is an activation if a call after the peak uses it again, or if it
//!   lives for more than [`MOMENT`] steps.
//! - Everything else is a temporary: the workspace of operations, and what threads keep for good.

use crate::arena::{Arena, Record, Source};
use firebox_trace::{Bytes, Category, CategoryBytes, Trace};

/// How many steps an unlabelled buffer may live and still be a temporary.
const MOMENT: u32 = 8;

/// The bytes at the peak, by category.
pub(super) fn at_peak(trace: &Trace, arena: &Arena) -> CategoryBytes {
    arena.with_state(|state| {
        let mut held = CategoryBytes::default();
        for record in state.at_peak() {
            held.add(category(trace, record, state.peak_step), Bytes::new(record.bytes));
        }
        held
    })
}

fn category(trace: &Trace, record: &Record, peak: u32) -> Category {
    let labels = record
        .tensors
        .iter()
        .filter(|tenancy| tenancy.from <= peak && tenancy.to.is_none_or(|to| to >= peak))
        .filter_map(|tenancy| trace.tensor(tenancy.tensor).label.as_ref())
        .map(|label| label.category);
    labels.min_by_key(|category| persistence(*category)).unwrap_or_else(|| by_history(record, peak))
}

/// The rank of a category. The lower the rank, the longer its tensors stay.
fn persistence(category: Category) -> u8 {
    match category {
        Category::Parameter => 0,
        Category::OptimizerState => 1,
        Category::AccumulatedGradient => 2,
        Category::Gradient => 3,
        Category::Input => 4,
        Category::Activation => 5,
        Category::Temporary | Category::Unused => 6,
    }
}

fn by_history(record: &Record, peak: u32) -> Category {
    if record.source == Source::Kept {
        return Category::Temporary;
    }
    if record.source != Source::Operation {
        return Category::Input;
    }
    let used_later = record.tensors.iter().any(|tenancy| tenancy.used > peak);
    let lives_long = record.died.is_none_or(|died| died - record.born > MOMENT);
    if record.born < peak && (used_later || lives_long) {
        Category::Activation
    } else {
        Category::Temporary
    }
}
