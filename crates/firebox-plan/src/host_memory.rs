//! The memory of this machine, for backends that compute on the host.
//!
//! Combines what the operating system reports with the limits of `limits.rs`, and hands plain data
//! to [`Budget::resolve`](crate::Budget::resolve).

use firebox_trace::Bytes;
use sysinfo::System;

use crate::budget::MemoryInfo;
use crate::limits::{Limit, of_groups};

/// The current memory of this machine, or of the container this program runs in if that may use
/// less.
///
/// Free memory is what is available without swapping: unused memory plus cached files the system
/// would drop. Swap does not count. In a container (cgroup v2), free is the limit minus what
/// the container uses. Cached files that were not used lately do not count as used, as in the
/// [working set](https://kubernetes.io/docs/reference/instrumentation/node-metrics/) of Kubernetes.
///
/// On Linux the limits are `memory.max` and `memory.high` of the control group of this process and
/// of all groups above it, as far as they are mounted at `/sys/fs/cgroup`. Groups outside a
/// container are not.
///
/// # Errors
/// The operating system does not report how much memory there is.
///
/// ```
/// let memory = firebox_plan::host_memory()?;
/// assert!(memory.free <= memory.total);
/// # Ok::<(), firebox_plan::HostMemoryError>(())
/// ```
pub fn host_memory() -> Result<MemoryInfo, HostMemoryError> {
    if !sysinfo::IS_SUPPORTED_SYSTEM {
        return Err(HostMemoryError::Unknown);
    }
    let mut system = System::new();
    system.refresh_memory();
    let machine = Limit {
        total: Bytes::new(system.total_memory()),
        free: Bytes::new(system.available_memory()),
    };
    within(machine, &of_groups())
}

/// The memory of this machine cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostMemoryError {
    /// The operating system does not report how much memory there is.
    #[error(
        "the operating system does not say how much memory there is: give the budget as an amount"
    )]
    Unknown,
}

/// The tightest of the machine and the groups that limit it further.
fn within(machine: Limit, groups: &[Limit]) -> Result<MemoryInfo, HostMemoryError> {
    if machine.total == Bytes::ZERO {
        return Err(HostMemoryError::Unknown);
    }
    let mut tightest = (machine, "host memory");
    // A group with as much memory as the machine imposes no limit.
    for group in groups.iter().filter(|group| group.total < machine.total) {
        let (so_far, _) = tightest;
        let (total, free) = (group.total.min(so_far.total), group.free.min(so_far.free));
        tightest = (Limit { total, free }, "host memory of this container");
    }
    let (Limit { total, free }, name) = tightest;
    Ok(MemoryInfo::new(total, free.min(total), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gib(total: u64, free: u64) -> Limit {
        Limit { total: Bytes::gib(total), free: Bytes::gib(free) }
    }

    #[track_caller]
    fn check(machine: Limit, groups: &[Limit], expected: &str) {
        let found = within(machine, groups);
        assert_eq!(
            found.map_or_else(|error| error.to_string(), |memory| memory.to_string()),
            expected
        );
    }

    #[test]
    fn the_tightest_of_machine_and_groups_counts() {
        check(gib(64, 40), &[], "host memory: 40.00 GiB of 64.00 GiB free");
        let limited =
            |free| format!("host memory of this container: {free}.00 GiB of 16.00 GiB free");
        check(gib(64, 40), &[gib(16, 10)], &limited(10));
        check(gib(64, 3), &[gib(16, 10)], &limited(3));
        check(gib(64, 40), &[gib(16, 17)], &limited(16));
        // A group higher up may have less free than a smaller group below it.
        check(gib(64, 40), &[gib(16, 10), gib(32, 7)], &limited(7));
        check(gib(64, 40), &[gib(32, 7), gib(16, 10)], &limited(7));
    }

    #[test]
    fn a_group_without_a_limit_does_not_count() {
        check(gib(64, 40), &[gib(64, 5)], "host memory: 40.00 GiB of 64.00 GiB free");
    }

    #[test]
    fn a_silent_system_is_an_error() {
        check(
            gib(0, 0),
            &[],
            "the operating system does not say how much memory there is: give the budget as an amount",
        );
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = host_memory().expect("tests run where memory can be read");
        assert!(memory.total > Bytes::ZERO);
        assert!(memory.free <= memory.total);
    }
}
