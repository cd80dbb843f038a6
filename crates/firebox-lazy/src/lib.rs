//! `Lazy<B>`: a decorator for burn backends that records operations without running them.

mod backend;
mod call;
mod custom;
mod describe;
mod draws;
mod forms;
mod handover;
mod inputs;
mod kind;
mod known;
mod loaders;
mod module;
mod ops;
mod recording;
mod session;
mod states;
mod streams;
mod tensor;
mod threads;

pub use backend::{Lazy, LazyBackend};
pub use custom::{CustomInputs, CustomOp, CustomResults};
pub use draws::fixed_draw;
pub use handover::TrainingGuard;
pub use inputs::Input;
pub use kind::{Bool, Float, Int, Kind, Quantized, Value};
pub use known::forget_calls;
pub use loaders::{LoaderGate, LoaderGuard, loader_streams};
pub use module::{Rehearsal, initialize, is_rehearsal, rehearse, rehearsing, restore};
pub use recording::{
    Discarded, HOST_BYTES_PER_CALL, RecordError, Recorder, Recording, Survivor,
    host_bytes_of_descriptions, index_in_trace, label, mark,
};
pub use session::is_recording;
pub use states::{HiddenState, HiddenStates, SavedStates};
pub use streams::stream_of_worker;
pub use tensor::LazyTensor;
