//! The shapes of items: batches of as many items may still differ, in the lengths of sequences for
//! example. Planners tell batches apart by them.

use std::cell::RefCell;

use crate::MicroBatch;

thread_local! {
    /// What was noted, while someone asks.
    static NOTED: RefCell<Option<Vec<Vec<usize>>>> = const { RefCell::new(None) };
}

/// The shapes of the tensors that a batch's items are counted by, without the dimension of the
/// items, in the order in which they are counted. Fields that are shared and lists with one element
/// per item have none.
///
/// Asks the batch for its [`items`](MicroBatch::items): an implementation by hand takes part if it
/// asks its tensors for theirs.
///
/// ```
/// use burn_ndarray::NdArray;
/// use burn_tensor::Tensor;
/// use firebox_batch::item_shapes;
///
/// let device = Default::default();
/// let tokens = Tensor::<NdArray, 2>::zeros([8, 120], &device);
/// let labels = Tensor::<NdArray, 1>::zeros([8], &device);
/// assert_eq!(item_shapes(&(tokens, labels)), [vec![120], vec![]]);
/// ```
pub fn item_shapes<T: MicroBatch>(batch: &T) -> Vec<Vec<usize>> {
    let outer = NOTED.replace(Some(Vec::new()));
    // An error is that of whoever counts.
    let _ = batch.items();
    NOTED.replace(outer).unwrap_or_default()
}

/// Notes a tensor whose items lie along a dimension.
#[cfg(any(feature = "burn-0-21", feature = "burn-0-22"))]
pub(crate) fn note(shape: &[usize], items: usize) {
    NOTED.with_borrow_mut(|noted| {
        if let Some(noted) = noted {
            let others = shape.iter().enumerate().filter(|(dim, _)| *dim != items);
            noted.push(others.map(|(_, length)| *length).collect());
        }
    });
}
