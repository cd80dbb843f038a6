//! Records of training steps and the memory that they need: pure data, no device.
//!
//! `firebox-lazy` records traces, memory models turn them into footprints, and the planner compares
//! footprints with a budget.

mod mark;
mod quantity;
mod trace;

mod structure;

mod difference;

mod footprint;

mod modules;

mod nonlinear;

pub use difference::Difference;
pub use footprint::{
    CategoryBytes, Estimate, Footprint, MemoryModel, Moment, Paging, PoolPages, Question,
};
pub use mark::Mark;
pub use modules::{ModuleBytes, Modules};
pub use nonlinear::Nonlinear;
pub use quantity::{Bytes, Items, OpIndex, ParseBytesError};
pub use structure::StructuralHash;
pub use trace::{
    Call, Category, Description, DescriptionIndex, Label, Origin, Step, TensorIndex, TensorInfo,
    TensorType, Trace, TraceError, Use,
};
