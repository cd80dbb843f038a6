//! The layout of a view: shape, strides and offset, transformed as Flex transforms them.
//!
//! Whether a layout is contiguous decides whether Flex copies. This file holds only that
//! arithmetic.

use burn_std::Slice;

/// How a view reads its buffer. Strides and offset are in elements. Strides may be negative or
/// zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    pub(crate) offset: usize,
}

impl Layout {
    /// Row-major from the start of the buffer.
    pub(crate) fn contiguous(shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        let mut strides = vec![1_isize; shape.len()];
        for i in (0..shape.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * shape[i + 1] as isize;
        }
        Self { shape, strides, offset: 0 }
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Row-major without gaps. Flex is strict: a dimension of size one with an unusual stride is
    /// not contiguous.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *stride != expected {
                return false;
            }
            expected *= *size as isize;
        }
        true
    }

    /// Row-major without gaps, from the start of the buffer.
    pub(crate) fn is_contiguous_from_start(&self) -> bool {
        self.is_contiguous() && self.offset == 0
    }

    pub(crate) fn swap(mut self, dim1: usize, dim2: usize) -> Self {
        self.shape.swap(dim1, dim2);
        self.strides.swap(dim1, dim2);
        self
    }

    pub(crate) fn permute(&self, axes: &[usize]) -> Self {
        Self {
            shape: axes.iter().map(|axis| self.shape[*axis]).collect(),
            strides: axes.iter().map(|axis| self.strides[*axis]).collect(),
            offset: self.offset,
        }
    }

    pub(crate) fn flip(mut self, axes: &[usize]) -> Self {
        let mut offset = self.offset as isize;
        for &axis in axes {
            if self.shape[axis] > 1 {
                offset += (self.shape[axis] as isize - 1) * self.strides[axis];
                self.strides[axis] = -self.strides[axis];
            }
        }
        self.offset = offset as usize;
        self
    }

    /// Broadcasts dimensions of size one and new leading dimensions, with stride zero.
    pub(crate) fn expand(&self, target: &[usize]) -> Self {
        let new = target.len() - self.rank();
        let strides = (0..target.len())
            .map(|dim| match dim.checked_sub(new) {
                Some(source) if self.shape[source] == target[dim] => self.strides[source],
                _ => 0,
            })
            .collect();
        Self { shape: target.to_vec(), strides, offset: self.offset }
    }

    /// The layout of a slice, and whether its elements must be copied (a negative step).
    pub(crate) fn slice(&self, slices: &[Slice]) -> (Self, bool) {
        let mut sliced = self.clone();
        let mut offset = self.offset as isize;
        let mut copies = false;
        for (dim, slice) in slices.iter().enumerate().take(self.rank()) {
            let (start, end) = bounds(slice, self.shape[dim]);
            let step = slice.step;
            sliced.shape[dim] = end.saturating_sub(start).div_ceil(step.unsigned_abs());
            if step > 0 {
                sliced.strides[dim] = self.strides[dim] * step;
                offset += self.strides[dim] * start as isize;
            } else {
                copies = true;
            }
        }
        sliced.offset = offset.max(0) as usize;
        (sliced, copies)
    }

    /// Sliding windows of `size` elements along `dim`. The window becomes a new last dimension.
    pub(crate) fn unfold(&self, dim: usize, size: usize, step: usize) -> Self {
        let mut windows = self.clone();
        windows.shape[dim] = (self.shape[dim] + step).saturating_sub(size) / step;
        windows.strides[dim] = self.strides[dim] * step as isize;
        windows.shape.push(size);
        windows.strides.push(self.strides[dim]);
        windows
    }

    /// The same elements in another shape, if that needs no copy.
    pub(crate) fn reshape(&self, shape: &[usize]) -> Option<Self> {
        self.is_contiguous_from_start().then(|| Self::contiguous(shape))
    }
}

/// The half-open range that a slice selects from a dimension of `size`.
fn bounds(slice: &Slice, size: usize) -> (usize, usize) {
    let clamp = |index: isize| match index {
        index if index < 0 => (size as isize + index).max(0) as usize,
        index => (index as usize).min(size),
    };
    (clamp(slice.start), slice.end.map_or(size, clamp))
}

/// The shape to which both operands of a binary operation are broadcast.
pub(crate) fn broadcast(lhs: &[usize], rhs: &[usize]) -> Vec<usize> {
    let rank = lhs.len().max(rhs.len());
    let size = |shape: &[usize], dim: usize| match (dim + shape.len()).checked_sub(rank) {
        Some(dim) => shape[dim],
        None => 1,
    };
    (0..rank)
        .map(|dim| match (size(lhs, dim), size(rhs, dim)) {
            (1, size) => size,
            (size, _) => size,
        })
        .collect()
}
