//! Limits that hold this process below the memory of the machine: control groups, version 2.
//!
//! `host_memory.rs` combines them with the memory of the machine.

use std::fs;
use std::path::Path;

use firebox_trace::Bytes;

/// A memory limit, and how much of it is still free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) total: Bytes,
    pub(crate) free: Bytes,
}

impl Limit {
    fn new(total: u64, used: u64) -> Self {
        Self { total: Bytes::new(total), free: Bytes::new(total.saturating_sub(used)) }
    }
}

/// Files that may hold a limit. The lowest limit applies: above `memory.high` the kernel throttles
/// a process until it hardly runs.
const LIMITS: [&str; 2] = ["memory.max", "memory.high"];

/// The limits of this process's control group and of all groups above it.
pub(crate) fn of_groups() -> Vec<Limit> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    of_groups_in(&groups, Path::new("/sys/fs/cgroup"))
}

/// `groups` holds the lines of `/proc/self/cgroup`; `root` is where control groups are mounted.
fn of_groups_in(groups: &str, root: &Path) -> Vec<Limit> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let Some(path) = line.strip_prefix("0::") else { continue };
        // In a container the mount may begin at the container's group although the path is the
        // host's. Folders that do not exist are skipped.
        for mount in [root.to_owned(), root.join("unified")] {
            let group = Path::new(path.trim_start_matches('/'));
            let above = group.ancestors().map(|group| mount.join(group));
            found.extend(above.filter_map(|folder| limit(&folder)));
        }
    }
    found
}

/// The limit of one group, if it has one and its usage can be read.
fn limit(folder: &Path) -> Option<Limit> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok();
    let total: u64 = LIMITS.iter().filter_map(|file| number(file)).min()?;
    let used: u64 = number("memory.current")?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    // Cached files not used lately count as used, but the kernel drops them on demand.
    let droppable = counter(&stat, "inactive_file").unwrap_or(0);
    Some(Limit::new(total, used.saturating_sub(droppable)))
}

/// The number that follows `key` in lines of the form `key number`.
fn counter(text: &str, key: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    let mut numbers = lines.filter(|(name, _)| *name == key);
    numbers.next().and_then(|(_, number)| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Creates control groups as folders, each with its files.
    fn groups(groups: &[(&str, &[(&str, &str)])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (group, files) in groups {
            let folder = root.path().join(group);
            fs::create_dir_all(&folder).expect("a folder");
            for (file, text) in *files {
                fs::write(folder.join(file), text).expect("a file");
            }
        }
        root
    }

    fn mib(total: u64, free: u64) -> Limit {
        Limit { total: Bytes::mib(total), free: Bytes::mib(free) }
    }

    #[test]
    fn every_group_above_counts_and_the_lower_of_its_limits() {
        let (m700, m500, m300, m100, m40) = (700 * MIB, 500 * MIB, 300 * MIB, 100 * MIB, 40 * MIB);
        let text = |bytes: u64| format!("{bytes}\n");
        let (m700, m500, m300, m100, m40) =
            (text(m700), text(m500), text(m300), text(m100), text(m40));
        let stat = format!("anon 5\ninactive_file {m40}file 7\n");
        let root = groups(&[
            ("", &[("memory.stat", "anon 1\n")]),
            ("user", &[("memory.max", &m700), ("memory.high", "max"), ("memory.current", &m300)]),
            (
                "user/job",
                &[
                    ("memory.max", "max"),
                    ("memory.high", &m500),
                    ("memory.current", &m100),
                    ("memory.stat", &stat),
                ],
            ),
            ("other", &[("memory.max", "1"), ("memory.current", "1")]),
        ]);
        let found = of_groups_in("0::/user/job\n", root.path());
        assert_eq!(found, [mib(500, 440), mib(700, 400)]);
        assert_eq!(of_groups_in("0::/\n", root.path()), [], "the machine has no limit");
        assert_eq!(of_groups_in("0::/gone/below\n", root.path()), []);
    }

    #[test]
    fn this_process_can_be_asked() {
        assert!(of_groups().iter().all(|limit| limit.free <= limit.total));
    }
}
