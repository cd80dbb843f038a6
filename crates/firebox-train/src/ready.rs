//! Prepares training: creates the model's parameters on the device, and measures what else the
//! program keeps there. Runs first in `plan` and `fit`, so that a budget counts only what training
//! adds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn_backend::{Backend, DTypeUsage, DeviceOps};
use firebox_lazy::{LazyBackend, StepRecorder, initialize, rehearse};
use firebox_trace::Bytes;

use crate::device::DeviceMemory;
use crate::device::panics::panic_message;
use crate::device::panics::{Listener, without_backtrace};
use crate::error::TrainError;
use crate::planner::labels::label_parameters;

/// Less than this does not count as tensors of the program, because seeds and counters are as
/// large.
const LEAST: Bytes = Bytes::mib(1);

/// Creates the parameters of a model. Returns what the device's allocator holds for other tensors
/// of the program.
///
/// # Errors
///
/// If what the backend needs is not installed, the model does not live on exactly one device, or
/// the device fails.
pub(crate) fn make_ready<B, M>(model: &M) -> Result<OtherTensors, TrainError>
where
    B: LazyBackend<Base: DeviceMemory>,
    M: Module<B>,
{
    B::Base::prerequisites()?;
    let listener = Listener::of_all();
    let made = catch_unwind(AssertUnwindSafe(|| {
        single_device(model)?;
        initialize(model);
        let device = &model.devices()[0];
        has_type::<B>(device)?;
        B::Base::sync(device).map_err(|error| not_ready(&error.to_string()))?;
        let others = held_for_others(model)?;
        // A panic on this device's own thread tells the cause. Panics of other devices do not
        // concern this model.
        listener.heard_of(device.id()).map_or(Ok(others), |message| Err(not_ready(&message)))
    }));
    match made {
        Ok(Err(TrainError::NotReady { message })) => {
            Err(not_ready(&listener.heard().unwrap_or(message)))
        }
        Ok(made) => made,
        Err(panic) => {
            let message = listener.heard().unwrap_or_else(|| panic_message(&*panic));
            Err(not_ready(&message))
        }
    }
}

/// What the device holds for tensors that do not belong to training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherTensors {
    /// The bytes of all of them.
    pub(crate) held: Bytes,
    /// On firebox's pool, the bytes of those on the page for small buffers.
    pub(crate) small: Bytes,
}

fn not_ready(message: &str) -> TrainError {
    TrainError::NotReady { message: without_backtrace(message).to_owned() }
}

fn single_device<B: Backend, M: Module<B>>(model: &M) -> Result<(), TrainError> {
    match model.devices().len() {
        0 => Err(TrainError::NoParameters),
        1 => Ok(()),
        several => Err(TrainError::SeveralDevices(several)),
    }
}

/// Whether the device has the type of 16 bit that the backend computes in.
fn has_type<B: LazyBackend>(device: &B::Device) -> Result<(), TrainError> {
    let Some(dtype) = B::narrow() else { return Ok(()) };
    let usage = B::Base::dtype_usage(device, dtype);
    match usage.is_superset(DTypeUsage::Storage | DTypeUsage::Arithmetic) {
        true => Ok(()),
        false => Err(TrainError::NoNarrowType { dtype, device: format!("{device:?}") }),
    }
}

/// What the allocator holds for tensors other than the model's. Unused pages are given back first.
/// Pages with such tensors count whole, minus the model's own bytes, because it is not known
/// whether training finds room on them.
fn held_for_others<B, M>(model: &M) -> Result<OtherTensors, TrainError>
where
    B: LazyBackend<Base: DeviceMemory>,
    M: Module<B>,
{
    let device = &model.devices()[0];
    let asked = || {
        B::Base::give_back(device);
        B::Base::pool_usage(device)
    };
    let Some(usage) = asked() else { return Ok(OtherTensors::default()) };
    let recorder = StepRecorder::new().refuse_reads();
    let rehearsal = rehearse::<B, M>(&recorder, model, |model| label_parameters(model))?;
    let footprint = B::Base::memory_model(device).footprint(&rehearsal.trace);
    let own = footprint.baseline;
    if let Some(pool) = B::Base::own_pool(device) {
        let pages = footprint.paging.and_then(|paging| paging.pool).unwrap_or_default();
        // The page for lasting buffers holds nothing else.
        let own_small = own - pages.lasting;
        return Ok(OtherTensors {
            held: usage.in_use - own,
            small: pool.small_in_use() - own_small,
        });
    }
    if usage.in_use - own < LEAST {
        return Ok(OtherTensors::default());
    }
    log::info!("the device has {usage} before training, {own} of it for the model's parameters");
    Ok(OtherTensors { held: usage.reserved - own, small: Bytes::ZERO })
}
