//! Dry devices and their leases. `replay/model.rs` and `replay/pooled.rs` take a lease for each
//! footprint and run their programs through it. `registry.rs` knows which devices exist.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_backend::DeviceOps;
use cubecl::ir::DeviceProperties;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;

use firebox_pool::Measure;
use firebox_trace::Bytes;

use crate::registry::{self, LeaseError};
use crate::replay::panic_message;
use crate::server::DryServer;
use crate::server::usage::Usage;
use crate::target::Target;

/// A device without memory, as burn's backends see it.
///
/// The index alone means nothing; only devices of a [`Lease`] have properties.
pub struct DryDevice<T: Target> {
    index: u16,
    target: PhantomData<T>,
}

impl<T: Target> Clone for DryDevice<T> {
    fn clone(&self) -> Self {
        Self { index: self.index, target: PhantomData }
    }
}

impl<T: Target> Default for DryDevice<T> {
    fn default() -> Self {
        Self { index: 0, target: PhantomData }
    }
}

impl<T: Target> PartialEq for DryDevice<T> {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}

impl<T: Target> std::fmt::Debug for DryDevice<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({})", T::NAME, self.index)
    }
}

impl<T: Target> Device for DryDevice<T> {
    fn from_id(id: DeviceId) -> Self {
        Self { index: id.index_id, target: PhantomData }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(T::DEVICE_TYPE, self.index)
    }
}

impl<T: Target> DeviceOps for DryDevice<T> {}

/// The stream of the program on a dry device.
pub(crate) const STREAM: StreamId = StreamId { value: 0 };

/// A dry device on loan. Nobody else uses it until the lease is dropped.
#[derive(Debug)]
pub struct Lease<T: Target> {
    device: DryDevice<T>,
    /// The real device whose tuned choices are used, as the tuner names it.
    tuned: Option<String>,
    broken: bool,
}

/// A program panicked on a dry device.
///
/// burn's queues for that device are in an unknown state, so it is never lent again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the program panicked on a device without memory: {message}")]
pub struct Panicked {
    /// The message of the panic.
    pub message: String,
}

impl<T: Target> Lease<T> {
    /// Borrows a dry device with these properties. Waits while all devices that the card may have
    /// are lent.
    pub fn take(properties: &DeviceProperties) -> Result<Self, LeaseError> {
        let index = registry::lend(T::DEVICE_TYPE, properties)?;
        Ok(Self { device: DryDevice { index, target: PhantomData }, tuned: None, broken: false })
    }

    /// Makes burn's tuner choose what it has on disk for a real device. `tuned` is the device's
    /// name as CubeCL's `CubeTuneId` is written. What is not on disk is tuned, as on the real
    /// device. Default: everything is tuned.
    pub fn with_choices_of(mut self, tuned: Option<&str>) -> Self {
        self.tuned = tuned.map(str::to_owned);
        self
    }

    /// The device. Its memory is counted from the last [`run`](Self::run) on.
    pub fn device(&self) -> &DryDevice<T> {
        &self.device
    }

    /// Runs `program` on the empty device and returns its result and what it reserved.
    ///
    /// The program runs on the device's own thread and stream, so the result does not depend on the
    /// caller's thread. It must drain what it leaves in burn's queues (`Backend::sync`), and must
    /// not leave threads of its own running.
    pub fn run<R: Send>(
        &mut self,
        program: impl FnOnce(&DryDevice<T>) -> R + Send,
    ) -> Result<(R, Usage), Panicked> {
        let server = self.server();
        let device = &self.device;
        let ran = STREAM.executes(|| {
            let (id, tuned) = (device.to_id(), self.tuned.clone());
            server.submit_blocking(move |server| {
                server.reset();
                server.info().tuned().begin(id, tuned.as_deref());
            })?;
            let result = server.exclusive(|| catch_unwind(AssertUnwindSafe(|| program(device))));
            server.submit_blocking(move |server| server.info().tuned().end(id))?;
            result
        });
        let result = match ran {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => return Err(self.give_up(&*panic)),
            Err(_) => return Err(self.give_up(&"the thread of the device is gone")),
        };
        match server.submit_blocking(DryServer::usage) {
            Ok(usage) => Ok((result, usage)),
            Err(_) => Err(self.give_up(&"the thread of the device is gone")),
        }
    }

    fn server(&self) -> DeviceHandle<DryServer<T>> {
        DeviceHandle::new(self.device.to_id())
    }

    fn give_up(&mut self, panic: &(dyn Any + Send)) -> Panicked {
        self.broken = true;
        Panicked { message: panic_message(panic) }
    }
}

impl<T: Target> Drop for Lease<T> {
    fn drop(&mut self) {
        registry::take_back(self.device.to_id(), self.broken);
    }
}

/// Reads and controls the counters of a device while a program runs on it.
pub(crate) struct Monitor<T: Target>(DeviceHandle<DryServer<T>>);

impl<T: Target> Monitor<T> {
    pub(crate) fn of(device: &DryDevice<T>) -> Self {
        Self(DeviceHandle::new(device.to_id()))
    }

    /// The bytes of all pages.
    pub(crate) fn reserved(&self) -> Bytes {
        self.0.submit_blocking(|server| server.reserved()).expect("the device runs this program")
    }

    /// The number of buffers requested and kernels launched.
    pub(crate) fn calls(&self) -> u64 {
        self.0.submit_blocking(|server| server.calls()).expect("the device runs this program")
    }

    /// Puts firebox's pool on the device until the program ends, which trains on [`STREAM`].
    pub(crate) fn begin_pool(&self) {
        self.0
            .submit_blocking(|server| server.begin_pool(STREAM))
            .expect("the device runs this program");
    }

    /// Asks firebox's pool.
    pub(crate) fn pool<R: Send>(&self, ask: impl FnOnce(&mut Measure) -> R + Send) -> R {
        let asked = self.0.submit_blocking(|server| server.pool().map(ask));
        asked.expect("the device runs this program").expect("the program has begun with a pool")
    }

    /// What was measured so far.
    pub(crate) fn usage(&self) -> Usage {
        self.0.submit_blocking(DryServer::usage).expect("the device runs this program")
    }
}
