//! The allocations of one device. The functions in `api/memory.rs` allocate and free here.

use std::collections::BTreeMap;
use std::time::Instant;

/// The alignment of addresses, in bytes.
const ALIGNMENT: u64 = 512;

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    /// The stream of a stream-ordered allocation.
    pub(crate) stream: Option<u64>,
}

/// The memory of a device.
#[derive(Debug)]
pub(crate) struct Memory {
    next: u64,
    alive: BTreeMap<u64, Allocation>,
    held: u64,
    /// Stream-ordered frees that have not taken effect: the time they do, the stream, and the
    /// bytes.
    freed: Vec<(Instant, u64, u64)>,
}

/// The address to free is not allocated.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotAllocated;

impl Memory {
    /// The memory of the device with this number. Each device has its own range of addresses.
    pub(crate) fn new(device: usize) -> Self {
        let next = 0x7000_0000_0000 + ((device as u64) << 40);
        Self { next, alive: BTreeMap::new(), held: 0, freed: Vec::new() }
    }

    /// Bytes held.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// Sizes of the live allocations, in bytes.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.alive.values().map(|allocation| allocation.bytes)
    }

    /// Allocates `bytes` at an address never used before.
    pub(crate) fn allocate(&mut self, bytes: u64, stream: Option<u64>) -> u64 {
        let address = self.next;
        // The gap after each allocation keeps an overrun from reaching the next one.
        self.next += bytes.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        self.held += bytes;
        self.alive.insert(address, Allocation { bytes, stream });
        address
    }

    /// Frees an allocation and returns its bytes. With `until`, the bytes stay held until that
    /// time.
    pub(crate) fn free(
        &mut self,
        address: u64,
        until: Option<(Instant, u64)>,
    ) -> Result<u64, NotAllocated> {
        let Allocation { bytes, .. } = self.alive.remove(&address).ok_or(NotAllocated)?;
        match until {
            None => self.held -= bytes,
            Some((at, stream)) => self.freed.push((at, stream, bytes)),
        }
        Ok(bytes)
    }

    /// Applies the frees that have taken effect by `now`, and all frees ordered on `stream`.
    pub(crate) fn settle(&mut self, now: Instant, stream: Option<u64>) {
        let held = &mut self.held;
        self.freed.retain(|(at, of, bytes)| {
            let is_free = *at <= now || Some(*of) == stream;
            if is_free {
                *held -= bytes;
            }
            !is_free
        });
    }

    /// The allocation that contains this range, with its start address.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<(u64, Allocation)> {
        let (start, allocation) = self.alive.range(..=address).next_back()?;
        let end = address.checked_add(bytes)?;
        // The address one past the end is valid if no byte is accessed.
        (end <= start + allocation.bytes).then_some((*start, *allocation))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn bytes_lie_in_an_allocation_or_in_none() {
        let mut memory = Memory::new(0);
        let (first, second) = (memory.allocate(100, None), memory.allocate(1000, Some(3)));
        assert_ne!(first + 100, second);
        assert_eq!(memory.held(), 1100);
        assert_eq!(memory.find(first + 90, 10).map(|(start, _)| start), Some(first));
        assert_eq!(memory.find(first + 90, 11), None);
        assert_eq!(memory.find(second + 999, 1).map(|(_, found)| found.stream), Some(Some(3)));
        assert_eq!(memory.find(first - 1, 1), None);
        assert_eq!(memory.free(first, None), Ok(100));
        assert_eq!(memory.free(first, None), Err(NotAllocated));
        assert_eq!(memory.find(first, 1), None);
        assert_eq!(memory.held(), 1000);
        assert_ne!(memory.allocate(100, None), first, "addresses are not used twice");
    }

    #[test]
    fn what_is_freed_in_a_streams_order_is_held_until_the_stream_gets_there() {
        let mut memory = Memory::new(1);
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let address = memory.allocate(64, Some(1));
        memory.free(address, Some((later, 1))).unwrap();
        memory.settle(now, Some(2));
        assert_eq!((memory.held(), memory.find(address, 1)), (64, None));
        memory.settle(now, Some(1));
        assert_eq!(memory.held(), 0, "the stream itself may have it at once");
        let address = memory.allocate(64, Some(1));
        memory.free(address, Some((later, 1))).unwrap();
        memory.settle(later, None);
        assert_eq!(memory.held(), 0);
    }
}
