//! The tensors of a batch that is checked, and which of their rows are run.

use burn::tensor::TensorData;
use firebox_lazy::Input;

/// A tensor of the batch.
#[derive(Clone, Debug)]
pub(super) struct OfBatch {
    pub(super) input: Input,
    /// The values of its first rows (the candidates), if they can be read.
    pub(super) candidates: Option<TensorData>,
    /// Whether all items get the row of one item.
    pub(super) same: bool,
}

/// The items of a batch that are compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) tensors: &'a [OfBatch],
    /// Their rows. If the rows are consecutive, the splitter cuts them off and no tensor is
    /// replaced, because a batch may hold more than tensors.
    pub(super) chosen: &'a [usize],
    pub(super) in_a_row: bool,
    /// The row that all items get in tensors that must be the same.
    pub(super) same: usize,
}

impl Rows<'_> {
    /// The rows that replace those of a tensor, from the first on. `None` if the tensor stays
    /// unchanged.
    pub(super) fn of(&self, tensor: &OfBatch) -> Option<Vec<usize>> {
        match (tensor.same, self.in_a_row) {
            (true, _) => Some(vec![self.same; self.first() + self.chosen.len()]),
            (false, false) => Some(self.chosen.to_vec()),
            (false, true) => None,
        }
    }

    pub(super) fn selected(&self) -> impl Iterator<Item = (u64, Vec<usize>)> {
        self.tensors.iter().filter_map(|tensor| Some((tensor.input.id, self.of(tensor)?)))
    }

    /// The first item that the splitter cuts off.
    pub(super) fn first(&self) -> usize {
        if self.in_a_row { self.chosen.first().copied().unwrap_or(0) } else { 0 }
    }
}
