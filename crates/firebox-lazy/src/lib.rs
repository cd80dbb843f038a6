//! `Lazy<B>`: a decorator for burn backends that records operations without running them.

mod backend;
mod call;
mod custom;
mod deferred;
mod describe;
mod draws;
mod forms;
mod gate;
mod handover;
mod inputs;
mod kind;
mod known;
mod limits;
mod loaders;
mod module;
mod ops;
mod progress;
mod recording;
mod session;
mod states;
mod streams;
mod tensor;
mod threads;
mod values;

pub use backend::{Lazy, LazyBackend};
pub use custom::{CustomInputs, CustomOp, CustomResults};
pub use draws::fixed_draw;
pub use handover::TrainingGuard;
pub use inputs::Input;
pub use kind::{Bool, Float, Int, Kind, Quantized, Value};
pub use known::{forget_calls, remember_calls_within};
pub use limits::{HOST_BYTES_PER_CALL, host_bytes_of_descriptions, host_bytes_of_rehearsal};
pub use loaders::{LoaderGate, LoaderGuard, loader_streams};
pub use module::{
    Rehearsal, forget_graphs, goes_on_with_zeros, initialize, is_rehearsal, rehearse, rehearsing,
    restore,
};
pub use recording::{
    Discarded, RecordError, Recorder, Recording, Survivor, index_in_trace, label, mark,
};
pub use session::{is_recording, latest_recording};
pub use states::{HiddenState, HiddenStates, SavedStates};
pub use streams::stream_of_worker;
pub use tensor::LazyTensor;
