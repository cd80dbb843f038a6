//! Why a batch cannot be cut: the errors of [`MicroBatch::items`](crate::MicroBatch::items).

/// Why a batch cannot be cut into micro-batches.
///
/// Fields are named by their path from the outermost batch, such as `inputs.ids`, `0` or
/// `images[2]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MicroBatchError {
    /// Two fields hold different numbers of items.
    #[error(
        "items disagree in `{owner}`: `{first}` has {first_items} and `{second}` has {second_items}; \
         give every field one entry per item, name the dimension of the items with \
         `#[micro_batch(dim = ...)]`, or mark what every item uses with `#[micro_batch(shared)]`"
    )]
    ItemsDisagree {
        /// The type of the batch.
        owner: &'static str,
        /// The path of the first field that counts items.
        first: String,
        /// Number of items in the first field.
        first_items: usize,
        /// The path of the first field whose number of items differs.
        second: String,
        /// Number of items in the second field.
        second_items: usize,
    },

    /// Nothing in the batch counts items: every field that could is absent or has no elements.
    #[error(
        "nothing in `{owner}` counts items: fill one of its optional fields, or add a tensor or a `Vec` \
         with one entry per item"
    )]
    NoItems {
        /// The type of the batch.
        owner: &'static str,
    },

    /// The tensor lacks the dimension that should hold its items.
    #[error(
        "`{field}` in `{owner}` has no dim {dim}, its rank is {rank}: write `#[micro_batch(dim = ...)]` \
         with a number below {rank}, counted from 0"
    )]
    DimOutOfRank {
        /// The type of the batch.
        owner: &'static str,
        /// The path of the tensor.
        field: String,
        /// The requested dimension, counted from 0.
        dim: usize,
        /// The number of dimensions the tensor has.
        rank: usize,
    },
}

impl MicroBatchError {
    /// The same error as seen from `owner`, in which the failing part is the field `outer`.
    pub(crate) fn within(self, owner: &'static str, outer: &str) -> Self {
        match self {
            Self::ItemsDisagree { first, first_items, second, second_items, .. } => {
                Self::ItemsDisagree {
                    owner,
                    first: join(outer, &first),
                    first_items,
                    second: join(outer, &second),
                    second_items,
                }
            }
            Self::NoItems { .. } => Self::NoItems { owner },
            Self::DimOutOfRank { field, dim, rank, .. } => {
                Self::DimOutOfRank { owner, field: join(outer, &field), dim, rank }
            }
        }
    }
}

/// Joins paths: `inputs` and `ids` make `inputs.ids`; `images` and `[2]` make `images[2]`. A leaf
/// has an empty path.
fn join(outer: &str, inner: &str) -> String {
    let dot = if inner.is_empty() || inner.starts_with('[') { "" } else { "." };
    format!("{outer}{dot}{inner}")
}
