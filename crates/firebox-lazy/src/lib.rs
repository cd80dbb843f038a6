//! `Lazy<B>`: a decorator for burn backends that records operations without running them.

mod backend;
mod call;
mod describe;
mod forms;
mod kind;
mod known;
mod module;
mod ops;
mod recording;
mod session;
mod tensor;

pub use backend::{Lazy, LazyBackend};
pub use kind::{Bool, Float, Int, Kind, Quantized, Value};
pub use known::forget_calls;
pub use module::{Rehearsal, initialize, rehearse, restore};
pub use recording::{
    Discarded, HOST_BYTES_PER_CALL, RecordError, Recorder, Recording, Survivor,
    host_bytes_of_descriptions, label, mark,
};
pub use tensor::LazyTensor;
