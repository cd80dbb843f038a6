//! What happens before training begins: the model's parameters come to be on the device, and what else the program keeps
//! there is told apart from what training adds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn_backend::{Backend, DeviceOps};
use firebox_lazy::{LazyBackend, Recorder, initialize, rehearse};
use firebox_trace::Bytes;

use crate::device::DeviceMemory;
use crate::error::{TrainError, panic_message};
use crate::labels::label_parameters;
use crate::panics::{Listener, without_backtrace};

/// Less than this is not taken for tensors of the program: seeds and counters are as large.
const LEAST: Bytes = Bytes::mib(1);

/// Makes the parameters of a model. Gives what the device's allocator holds for other tensors of the program.
///
/// # Errors
///
/// If what the backend needs is not installed, the model has no single device, or the device fails.
pub(crate) fn make_ready<B, M>(model: &M) -> Result<Others, TrainError>
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
        B::Base::sync(device).map_err(|error| not_ready(&error.to_string()))?;
        let others = held_for_others(model)?;
        // The panic of the device's own thread tells the cause. Others are none of this model's business.
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

/// What the device holds for tensors that are not the training's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    /// The bytes of all.
    pub(crate) held: Bytes,
    /// On a pool of ours, those of the tensors that lie on the page for small ones.
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

/// What the allocator holds for tensors that are not the model's. Pages that nothing lies on are given back first. Those on which
/// such tensors lie count whole, less the model's own bytes: whether training finds room there is not known.
fn held_for_others<B, M>(model: &M) -> Result<Others, TrainError>
where
    B: LazyBackend<Base: DeviceMemory>,
    M: Module<B>,
{
    let device = &model.devices()[0];
    let asked = || {
        B::Base::give_back(device);
        B::Base::pool_usage(device)
    };
    let Some(usage) = asked() else { return Ok(Others::default()) };
    let recorder = Recorder::new().refuse_reads();
    let rehearsal = rehearse::<B, M>(&recorder, model, |model| label_parameters(model))?;
    let footprint = B::Base::memory_model(device).footprint(&rehearsal.trace);
    let own = footprint.baseline;
    if let Some(pool) = B::Base::own_pool(device) {
        let pages = footprint.paging.and_then(|paging| paging.pool).unwrap_or_default();
        // The page of what lasts has nothing else.
        let own_small = own - pages.lasting;
        return Ok(Others { held: usage.in_use - own, small: pool.small_in_use() - own_small });
    }
    if usage.in_use - own < LEAST {
        return Ok(Others::default());
    }
    log::info!("the device has {usage} before training, {own} of it for the model's parameters");
    Ok(Others { held: usage.reserved - own, small: Bytes::ZERO })
}
