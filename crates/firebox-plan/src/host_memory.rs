//! The memory of this machine, for backends that compute on the host. The only file of the crate that looks at the
//! world; it hands plain data to [`Budget::resolve`](crate::Budget::resolve).

use std::fs;

use firebox_trace::Bytes;
use sysinfo::System;

use crate::budget::MemoryInfo;

/// Where the counters of a container's memory are found: the file and its key for cgroup v2, then for v1.
const CONTAINER_COUNTERS: [(&str, &str); 2] = [
    ("/sys/fs/cgroup/memory.stat", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
];

/// The memory of this machine as it is now, or of the container this program runs in where that may use less.
///
/// Free is what can be had without swapping: unused memory, and cached files that the system would drop. In a
/// container (cgroup v1 or v2) that is the limit less what the container uses, again not counting cached files that
/// were not used lately, as Kubernetes counts its
/// [working set](https://kubernetes.io/docs/reference/instrumentation/node-metrics/). Swap does not count. A limit is
/// seen where containers show it, at the root of `/sys/fs/cgroup`; that of a parent group outside is not.
///
/// # Errors
/// The operating system does not say how much memory there is.
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
    let machine = Amounts {
        total: Bytes::new(system.total_memory()),
        free: Bytes::new(system.available_memory()),
    };
    let container = system.cgroup_limits().map(|limits| Amounts {
        total: Bytes::new(limits.total_memory),
        free: Bytes::new(limits.free_memory) + droppable_in_container(),
    });
    within_container(machine, container)
}

/// The memory of this machine cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostMemoryError {
    /// The operating system does not say how much memory there is.
    #[error(
        "the operating system does not say how much memory there is: give the budget as an amount"
    )]
    Unknown,
}

/// All memory, and what can be had of it now.
#[derive(Clone, Copy)]
struct Amounts {
    total: Bytes,
    free: Bytes,
}

/// The tighter of the machine and the container, if there is one that limits.
fn within_container(
    machine: Amounts,
    container: Option<Amounts>,
) -> Result<MemoryInfo, HostMemoryError> {
    if machine.total == Bytes::ZERO {
        return Err(HostMemoryError::Unknown);
    }
    match container.filter(|container| container.total < machine.total) {
        Some(Amounts { total, free }) => Ok(MemoryInfo::new(
            total,
            free.min(machine.free).min(total),
            "host memory of this container",
        )),
        None => Ok(MemoryInfo::new(machine.total, machine.free.min(machine.total), "host memory")),
    }
}

/// Cached files that count as used by the container and would be dropped at need; zero if that is not known.
fn droppable_in_container() -> Bytes {
    CONTAINER_COUNTERS
        .iter()
        .find_map(|(path, key)| counter(&fs::read_to_string(path).ok()?, key))
        .unwrap_or(Bytes::ZERO)
}

/// The number of bytes behind `key` in lines of `key number`.
fn counter(text: &str, key: &str) -> Option<Bytes> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, number)| number.trim().parse().ok())
        .map(Bytes::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gib(total: u64, free: u64) -> Amounts {
        Amounts { total: Bytes::gib(total), free: Bytes::gib(free) }
    }

    #[track_caller]
    fn check(machine: Amounts, container: Option<Amounts>, expected: &str) {
        let found = within_container(machine, container);
        assert_eq!(
            found.map_or_else(|error| error.to_string(), |memory| memory.to_string()),
            expected
        );
    }

    #[test]
    fn the_tighter_of_machine_and_container_counts() {
        check(gib(64, 40), None, "host memory: 40.00 GiB of 64.00 GiB free");
        let limited =
            |free| format!("host memory of this container: {free}.00 GiB of 16.00 GiB free");
        check(gib(64, 40), Some(gib(16, 10)), &limited(10));
        check(gib(64, 3), Some(gib(16, 10)), &limited(3));
        check(gib(64, 40), Some(gib(16, 17)), &limited(16));
    }

    #[test]
    fn a_container_without_a_limit_does_not_count() {
        check(gib(64, 40), Some(gib(64, 5)), "host memory: 40.00 GiB of 64.00 GiB free");
    }

    #[test]
    fn a_silent_system_is_an_error() {
        check(
            gib(0, 0),
            None,
            "the operating system does not say how much memory there is: give the budget as an amount",
        );
    }

    #[test]
    fn counters_are_found_by_their_whole_name() {
        let text = "anon 5\ntotal_inactive_file 7\ninactive_file 4096\n";
        assert_eq!(counter(text, "inactive_file"), Some(Bytes::new(4096)));
        assert_eq!(counter(text, "file"), None);
        assert_eq!(counter("inactive_file many", "inactive_file"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = host_memory().expect("tests run where memory can be read");
        assert!(memory.total > Bytes::ZERO);
        assert!(memory.free <= memory.total);
    }
}
