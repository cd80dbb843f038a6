//! What was recorded of a training step, and the memory that it needs: pure data, no device.

mod quantity;
mod trace;

mod structure;

mod dump;

mod footprint;
mod heap;

pub use footprint::{CategoryBytes, Estimate, Footprint, MemoryModel, Moment, Paging, PoolPages};
pub use heap::Heap;
pub use quantity::{Bytes, Items, OpIndex, ParseBytesError};
pub use structure::StructuralHash;
pub use trace::{
    Call, Category, Description, DescriptionIndex, Label, Origin, Step, TensorIndex, TensorInfo,
    TensorType, Trace, TraceError, Use,
};
