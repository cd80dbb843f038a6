//! The workspace of the `gemm` crate (0.19), which Flex calls for matrix products.
//!
//! What it packs depends on the machine's caches and vector instructions. The block sizes are
//! queried from `gemm` itself.

use burn_std::DType;
use gemm_common::cache::{CACHE_INFO, kernel_params};

use crate::arena::{Arena, Keeper};
use firebox_trace::Bytes;

/// The number of multiplications from which Flex lets one product use all threads.
pub(super) const PARALLEL: usize = 192 * 192 * 192;

/// A product with a row-major result: `[m, k] × [k, n]`.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// The distance between neighbours in a row of the left matrix.
    pub(super) lhs_stride: isize,
    /// The distance between neighbours in a row of the right matrix.
    pub(super) rhs_stride: isize,
    pub(super) dtype: DType,
}

/// Who computes a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    /// The thread that runs the operation. It hands a large product to the pool.
    WhereCalled,
    /// A thread of the pool.
    InThePool,
}

/// The rows and columns that one micro-kernel of `gemm` computes, and the elements that a vector
/// register holds.
struct Kernel {
    rows: usize,
    columns: usize,
    lanes: usize,
}

impl Kernel {
    /// On x86-64, the kernel for 256-bit vectors, which `gemm` uses there unless configured
    /// otherwise at build time. Elsewhere, the kernel for 128-bit vectors.
    fn of(dtype: DType) -> Self {
        let (lanes, rows) = match (cfg!(target_arch = "x86_64"), dtype == DType::F64) {
            (true, false) => (8, 16),
            (true, true) => (4, 8),
            (false, false) => (4, 8),
            (false, true) => (2, 4),
        };
        let columns = if cfg!(target_arch = "x86_64") { 6 } else { 4 };
        Self { rows, columns, lanes }
    }
}

impl Product {
    /// The number of multiplications.
    pub(super) fn work(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    /// Whether the product is one of vectors, or too small for blocks.
    fn is_small(&self) -> bool {
        self.k <= 2 || self.m <= 1 || self.n <= 1
    }

    /// The bytes into which one call of `gemm` packs its operands.
    ///
    /// `gemm` computes the transposed product: its right operand is our left one. It packs its
    /// right operand if our result is wide; the limit is lower if the elements of a row of our left
    /// matrix are not adjacent. It packs its left operand if our result is narrow, and its width is
    /// not a multiple of the vector lanes or the elements of a row of our right matrix are not
    /// adjacent. Excludes the block that each thread keeps for good.
    pub(super) fn packed_bytes(&self) -> u64 {
        // `gemm` widens 16-bit floats while it packs.
        let size = self.dtype.size().max(4);
        if self.is_small() {
            return 0;
        }
        let Kernel { rows, columns, lanes } = Kernel::of(self.dtype);
        let (m, n, k) = (self.n, self.m, self.k);
        let (depth, block, width) = if m <= 64 && n <= 64 {
            let depth = k.min(512);
            let block = CACHE_INFO[1].cache_bytes / size / depth / rows * rows;
            (depth, block, n.next_multiple_of(columns))
        } else {
            let params = kernel_params(m, n, k, rows, columns, size);
            (params.kc, params.mc, params.nc)
        };
        let width = if width > 0 { width } else { n.next_multiple_of(columns) };
        let packs_right = match self.lhs_stride {
            1 if cfg!(target_arch = "aarch64") => m > 4 * rows,
            1 => m > 128 * rows,
            _ => m > 2 * rows,
        };
        let packs_left = m <= 2 * block && (m % lanes != 0 || self.rhs_stride != 1);
        let mut packed = 0;
        if packs_right {
            packed += depth * columns * (width / columns);
        }
        if packs_left {
            packed += depth * m.next_multiple_of(rows);
        }
        (packed * size) as u64
    }

    /// Records the blocks that the computing threads keep for good. Each block is as large as the
    /// second-level cache.
    ///
    /// `gemm` does not use them if it packs its left operand as a whole, which follows from the
    /// shape. They are counted all the same: the same model also runs in other shapes, as in
    /// validation, and what those have left stays.
    pub(super) fn keep_blocks(&self, arena: &Arena, runs: Runs) {
        if self.is_small() {
            return;
        }
        let keeper = match runs {
            Runs::WhereCalled if self.work() < PARALLEL => Keeper::Caller,
            _ => Keeper::Pool,
        };
        arena.keep_for_good(keeper);
    }
}

/// What a thread keeps for good once it has computed a product.
pub(crate) fn kept_per_thread() -> Bytes {
    Bytes::new(CACHE_INFO[1].cache_bytes as u64)
}
