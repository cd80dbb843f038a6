//! Which dry devices exist: a fixed number of device indices, each bound to the properties of one
//! card and lent to one user at a time.
//!
//! CubeCL starts a thread for a device index and never ends it, and burn's fusion keeps its plans
//! with the index. So indices form a pool: an index is made when a card needs one, kept, and lent
//! again. `device.rs` lends them out; `server.rs` looks up the properties of its own.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cubecl::ir::DeviceProperties;
use cubecl_common::device::DeviceId;

/// The maximum number of dry devices in a process, over all cards and targets.
pub const MAX_DEVICES: usize = 64;

/// The maximum number of dry devices of one card, and so of footprints computed for it at the same
/// time.
pub const MAX_DEVICES_PER_CARD: usize = 4;

/// Why there is no dry device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// All device indices belong to other cards.
    #[error(
        "all {MAX_DEVICES} dry devices of this process belong to other cards; ask about fewer cards in one process"
    )]
    TooManyCards,
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

/// The device indices made so far. CubeCL makes a server from a device's id alone, so the
/// properties must be found by id.
static KNOWN: Mutex<Vec<Slot>> = Mutex::new(Vec::new());
static RETURNED: Condvar = Condvar::new();

fn known() -> MutexGuard<'static, Vec<Slot>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lends the index of a device with these properties. Waits while all devices that the card may
/// have are lent.
pub(crate) fn lend(type_id: u16, properties: &DeviceProperties) -> Result<u16, LeaseError> {
    let mut known = known();
    loop {
        let is_ours = |slot: &Slot| {
            slot.id.type_id == type_id
                && slot.state != State::Broken
                && slot.properties == *properties
        };
        if let Some(slot) = known.iter_mut().find(|slot| is_ours(slot) && slot.state == State::Idle)
        {
            slot.state = State::Lent;
            return Ok(slot.id.index_id);
        }
        let ours = known.iter().filter(|slot| is_ours(slot)).count();
        if ours < MAX_DEVICES_PER_CARD && known.len() < MAX_DEVICES {
            let id = DeviceId::new(type_id, known.len() as u16);
            known.push(Slot { id, properties: properties.clone(), state: State::Lent });
            return Ok(id.index_id);
        }
        if ours == 0 {
            return Err(LeaseError::TooManyCards);
        }
        known = RETURNED.wait(known).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Takes a device back. One that `is_broken` is never lent again.
pub(crate) fn take_back(id: DeviceId, is_broken: bool) {
    if let Some(slot) = known().iter_mut().find(|slot| slot.id == id) {
        slot.state = if is_broken { State::Broken } else { State::Idle };
    }
    RETURNED.notify_all();
}

/// The properties of a device that has been lent.
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
