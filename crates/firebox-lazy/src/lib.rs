//! `Lazy<B>`: a decorator for burn backends that records operations without running them.
//!
//! A recording yields a [`Trace`](firebox_trace::Trace), from which memory models compute a
//! footprint. The recording is then run or discarded.

mod backend;
mod custom;
mod half;
mod kind;
mod module;
mod ops;
mod record;
mod states;
mod tensor;
mod threads;

pub use backend::{Lazy, LazyBackend};
pub use custom::{CustomInputs, CustomOp, CustomResults};
pub use half::{Half, Narrow, in_full_precision};
pub use kind::{Bool, Float, Int, Kind, Quantized, Value};
pub use module::{Rehearsal, forget_graphs, initialize, rehearse, restore};
pub use record::arrival::Arrival;
pub use record::inputs::Input;
pub use record::known::forget_calls;
pub use record::limits::{
    HOST_BYTES_PER_CALL, host_bytes_of_descriptions, host_bytes_of_rehearsal,
};
pub use record::parking::{Parked, park_uploads, types_read};
pub use record::recorder::{RecordError, StepRecorder};
pub use record::recording::{
    Discarded, Recording, Survivor, index_in_trace, label, label_of, mark,
};
pub use record::rehearsing::{goes_on_with_zeros, is_rehearsal, rehearsing};
pub use record::session::{is_recording, latest_recording};
pub use states::{HiddenState, HiddenStates, SavedStates};
pub use tensor::LazyTensor;
pub use threads::handover::TrainingGuard;
pub use threads::loaders::{LoaderGate, LoaderGuard, loader_streams};
#[doc(hidden)]
pub use threads::locks::locks_taken;
pub use threads::making::bytes_made;
pub use threads::streams::stream_of_worker;
