//! The memory that this process has, as the system counts it.

use std::collections::HashMap;

use firebox_trace::Bytes;

/// The anonymous memory of a process that is in use: heap, stacks and what else is no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// What there is now.
    pub now: Bytes,
    /// The most that there ever was, files that it has mapped included.
    peak: Bytes,
    /// The files that it has mapped now.
    files: Bytes,
}

impl Resident {
    /// That of this process; `None` where the system does not tell, which is everywhere but on Linux.
    ///
    /// ```
    /// # #[cfg(target_os = "linux")] {
    /// let before = firebox_plan::Resident::of_this_process().expect("Linux tells");
    /// let mib = vec![1_u8; 1 << 24];
    /// let after = firebox_plan::Resident::of_this_process().expect("Linux tells");
    /// assert!(after.growth_since(before) >= firebox_trace::Bytes::mib(15));
    /// # drop(mib);
    /// # }
    /// ```
    pub fn of_this_process() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    /// From the [lines](https://man7.org/linux/man-pages/man5/proc_pid_status.5.html) of `/proc/self/status`.
    fn parse(status: &str) -> Option<Self> {
        let fields: HashMap<&str, &str> =
            status.lines().filter_map(|line| line.split_once(':')).collect();
        let bytes = |name| {
            let kib = fields.get(name)?.trim().strip_suffix(" kB")?;
            kib.parse().ok().map(Bytes::kib)
        };
        let files = bytes("RssFile")? + bytes("RssShmem")?;
        Some(Self { now: bytes("RssAnon")?, peak: bytes("VmHWM")?, files })
    }

    /// This, with the most files of it and `later`, which may be gone when it is looked at again.
    pub fn with_files_of(self, later: Self) -> Self {
        Self { files: self.files.max(later.files), ..self }
    }

    /// How much more there has been since `before`, at most. Where the process had its peak before, what it has now.
    pub fn growth_since(self, before: Self) -> Bytes {
        // Files that were let go of are no reason to take an old peak for a new one.
        let files = self.files.max(before.files);
        let most = if self.peak > before.peak { self.now.max(self.peak - files) } else { self.now };
        most - before.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\ttrain\nVmHWM:\t   9000 kB\nVmRSS:\t   8000 kB\nRssAnon:\t   5000 kB\nRssFile:\t   \
                          2900 kB\nRssShmem:\t    100 kB\n";

    #[test]
    fn files_do_not_count() {
        let found = Resident::parse(STATUS).expect("all lines are there");
        let kib = Bytes::kib;
        assert_eq!(found, Resident { now: kib(5000), peak: kib(9000), files: kib(3000) });
        assert_eq!(Resident::parse("VmHWM:\t 9000 kB\n"), None);
    }

    #[test]
    fn a_peak_before_is_none_of_what_grew() {
        let mib = Bytes::mib;
        let of = |now, peak, files| Resident { now: mib(now), peak: mib(peak), files: mib(files) };
        let before = of(20, 100, 5);
        assert_eq!(of(30, 100, 5).growth_since(before), mib(10));
        assert_eq!(of(30, 101, 5).growth_since(before), mib(76));
        assert_eq!(of(30, 100, 1).growth_since(before), mib(10), "files were let go of");
        assert_eq!(of(10, 100, 5).growth_since(before), Bytes::ZERO);
        let mapped = before.with_files_of(of(30, 150, 50));
        assert_eq!(of(30, 150, 5).growth_since(mapped), mib(80), "nor were they then");
    }
}
