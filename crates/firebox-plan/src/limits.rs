//! Limits that hold this process below the memory of the machine: control groups and the address
//! space.
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

/// The file names of one version of control groups.
struct Version {
    /// Files that may hold a limit. The lowest limit applies.
    limits: &'static [&'static str],
    used: &'static str,
    /// Key in `memory.stat` for cached files not used lately. They count as used, but the kernel
    /// drops them on demand.
    droppable: &'static str,
}

const V1: Version = Version {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};
/// `memory.high` counts as a limit: above it the kernel throttles a process until it hardly runs.
const V2: Version = Version {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    droppable: "inactive_file",
};

/// The limits of this process's control group and of all groups above it.
pub(crate) fn of_groups() -> Vec<Limit> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    of_groups_in(&groups, Path::new("/sys/fs/cgroup"))
}

/// The limit of the address space (`RLIMIT_AS`), if one is set.
pub(crate) fn of_address_space() -> Option<Limit> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    address_space(&limits, &status)
}

/// `groups` holds the lines of `/proc/self/cgroup`; `root` is where control groups are mounted.
fn of_groups_in(groups: &str, root: &Path) -> Vec<Limit> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (version, mounts) = if controllers.is_empty() {
            (V2, vec![root.to_owned(), root.join("unified")])
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (V1, vec![root.join("memory")])
        } else {
            continue;
        };
        // In a container the mount may begin at the container's group although the path is the
        // host's. Folders that do not exist are skipped.
        for mount in mounts {
            let group = Path::new(path.trim_start_matches('/'));
            let above = group.ancestors().map(|group| mount.join(group));
            found.extend(above.filter_map(|folder| limit(&folder, &version)));
        }
    }
    found
}

/// The limit of one group, if it has one and its usage can be read.
fn limit(folder: &Path, version: &Version) -> Option<Limit> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok();
    let total: u64 = version.limits.iter().filter_map(|file| number(file)).min()?;
    let used: u64 = number(version.used)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let droppable = counter(&stat, version.droppable).unwrap_or(0);
    Some(Limit::new(total, used.saturating_sub(droppable)))
}

/// The number that follows `key` in lines of the form `key number`.
fn counter(text: &str, key: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    let mut numbers = lines.filter(|(name, _)| *name == key);
    numbers.next().and_then(|(_, number)| number.trim().parse().ok())
}

fn address_space(limits: &str, status: &str) -> Option<Limit> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    // `unlimited` does not parse as a number.
    let total: u64 = line.split_whitespace().next()?.parse().ok()?;
    let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let used: u64 = used.split_whitespace().next()?.parse().ok()?;
    Some(Limit::new(total, used * 1024))
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
    fn the_first_version_is_known_too() {
        let (limit, used) = (format!("{}", 64 * MIB), format!("{}", 65 * MIB));
        let files = [("memory.limit_in_bytes", &limit[..]), ("memory.usage_in_bytes", &used)];
        let root = groups(&[("memory/docker/a", &files)]);
        let lines = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\nnonsense\n";
        assert_eq!(of_groups_in(lines, root.path()), [mib(64, 0)], "never below zero");
        assert_eq!(of_groups_in("5:cpu:/docker/a", root.path()), []);
    }

    #[test]
    fn the_address_space_is_a_limit_if_it_has_one() {
        let status = "Name:\tx\nVmSize:\t  2048 kB\n";
        let limits = |value| {
            format!("Max cpu time  unlimited\nMax address space  {value}  unlimited  bytes\n")
        };
        assert_eq!(address_space(&limits("10485760"), status), Some(mib(10, 8)));
        assert_eq!(address_space(&limits("unlimited"), status), None);
        assert_eq!(address_space("", status), None);
    }

    #[test]
    fn this_process_can_be_asked() {
        assert!(of_groups().iter().all(|limit| limit.free <= limit.total));
        assert!(of_address_space().is_none_or(|limit| limit.free <= limit.total));
    }
}
