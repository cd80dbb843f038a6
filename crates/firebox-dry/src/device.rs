//! Dry devices: a fixed number of device indices, each bound to the properties of one card, lent to one user at a time.
//!
//! CubeCL starts a thread for a device index and never ends it, and burn's fusion keeps its plans with it. So there is
//! a pool: an index is made when a card needs one, kept, and lent again.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use burn_backend::DeviceOps;
use cubecl::ir::DeviceProperties;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;

use firebox_trace::Bytes;

use crate::server::DryServer;
use crate::target::Target;
use crate::usage::Usage;

/// How many dry devices a process can have, over all cards and targets.
pub const MAX_DEVICES: usize = 64;

/// How many dry devices one card can have, and so how many footprints on one card are found at the same time.
pub const MAX_DEVICES_PER_CARD: usize = 4;

/// A device without memory, as burn's backends know it.
///
/// The index says nothing by itself; only devices of a [`Lease`] have properties.
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

/// A dry device on loan: nobody else uses it until the lease is dropped.
#[derive(Debug)]
pub struct Lease<T: Target> {
    device: DryDevice<T>,
    /// The real device whose tuned choices are taken, as the tuner calls it.
    tuned: Option<String>,
    broken: bool,
}

/// Why there is no dry device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// All device indices belong to other cards.
    #[error(
        "all {MAX_DEVICES} dry devices of this process belong to other cards; ask about fewer cards in one process"
    )]
    TooManyCards,
}

/// A program panicked on a dry device.
///
/// burn's queues for that device are in an unknown state, so it is never lent again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the program panicked on a device without memory: {message}")]
pub struct Panicked {
    /// What it said.
    pub message: String,
}

impl<T: Target> Lease<T> {
    /// Borrows a dry device with these properties. Waits while all that the card may have are lent.
    pub fn take(properties: &DeviceProperties) -> Result<Self, LeaseError> {
        let mut known = known();
        let index = loop {
            let is_ours = |slot: &Slot| {
                slot.id.type_id == T::DEVICE_TYPE
                    && slot.state != State::Broken
                    && slot.properties == *properties
            };
            if let Some(slot) =
                known.iter_mut().find(|slot| is_ours(slot) && slot.state == State::Idle)
            {
                slot.state = State::Lent;
                break slot.id.index_id;
            }
            let ours = known.iter().filter(|slot| is_ours(slot)).count();
            if ours < MAX_DEVICES_PER_CARD && known.len() < MAX_DEVICES {
                let id = DeviceId::new(T::DEVICE_TYPE, known.len() as u16);
                known.push(Slot { id, properties: properties.clone(), state: State::Lent });
                break id.index_id;
            }
            if ours == 0 {
                return Err(LeaseError::TooManyCards);
            }
            known = RETURNED.wait(known).unwrap_or_else(PoisonError::into_inner);
        };
        drop(known);
        Ok(Self { device: DryDevice { index, target: PhantomData }, tuned: None, broken: false })
    }

    /// Makes burn's tuner choose what it has on disk for a real device, called as `CubeTuneId` of CubeCL is written. What is
    /// not there it tunes, as it would on the real device. Default: it tunes everything.
    pub fn with_choices_of(mut self, tuned: Option<&str>) -> Self {
        self.tuned = tuned.map(str::to_owned);
        self
    }

    /// The device. Its memory is counted from the last [`run`](Self::run) on.
    pub fn device(&self) -> &DryDevice<T> {
        &self.device
    }

    /// Runs `program` on the empty device and tells what it reserved.
    ///
    /// The program runs on the device's own thread and stream, so that the result does not depend on who asks. It
    /// must drain what it leaves in burn's queues (`Backend::sync`) and not keep threads of its own at work.
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

/// What a panic says.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".into())
}

impl<T: Target> Drop for Lease<T> {
    fn drop(&mut self) {
        let id = self.device.to_id();
        if let Some(slot) = known().iter_mut().find(|slot| slot.id == id) {
            slot.state = if self.broken { State::Broken } else { State::Idle };
        }
        RETURNED.notify_all();
    }
}

/// A look at a device while a program runs on it.
pub(crate) struct Monitor<T: Target>(DeviceHandle<DryServer<T>>);

impl<T: Target> Monitor<T> {
    pub(crate) fn of(device: &DryDevice<T>) -> Self {
        Self(DeviceHandle::new(device.to_id()))
    }

    /// The bytes of all pages.
    pub(crate) fn reserved(&self) -> Bytes {
        self.0.submit_blocking(|server| server.reserved()).expect("the device runs this program")
    }

    /// How many buffers were asked for and kernels launched.
    pub(crate) fn calls(&self) -> u64 {
        self.0.submit_blocking(|server| server.calls()).expect("the device runs this program")
    }

    /// Begins to look whether small pools are full, and forgets which were.
    pub(crate) fn look_for_room(&self) {
        self.0.submit_blocking(DryServer::look_for_room).expect("the device runs this program");
    }

    /// Forgets the most that was reserved before now.
    pub(crate) fn forget_peak(&self) {
        self.0.submit_blocking(DryServer::forget_peak).expect("the device runs this program");
    }

    /// What was measured up to now.
    pub(crate) fn usage(&self) -> Usage {
        self.0.submit_blocking(DryServer::usage).expect("the device runs this program")
    }
}

/// A device index.
struct Slot {
    id: DeviceId,
    properties: DeviceProperties,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    Idle,
    Lent,
    Broken,
}

/// CubeCL makes a server from a device's id alone, so that the properties have to be found by it.
static KNOWN: Mutex<Vec<Slot>> = Mutex::new(Vec::new());
static RETURNED: Condvar = Condvar::new();

fn known() -> MutexGuard<'static, Vec<Slot>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The properties of a device that was lent before.
pub(crate) fn properties_of(id: DeviceId) -> DeviceProperties {
    let known = known();
    let slot = known.iter().find(|slot| slot.id == id);
    slot.unwrap_or_else(|| panic!("{id} is no dry device; take one with `Lease::take`"))
        .properties
        .clone()
}

/// The devices of a type that have been made so far.
pub(crate) fn known_devices(type_id: u16) -> Vec<DeviceId> {
    known().iter().map(|slot| slot.id).filter(|id| id.type_id == type_id).collect()
}
