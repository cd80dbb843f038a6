//! The memory this process occupies, as the operating system counts it.
//!
//! The Learner compares two readings to see how much the process has grown since training began.

use std::collections::HashMap;

use firebox_trace::Bytes;

/// The anonymous memory this process occupies: heap, stacks and everything else not backed by a
/// file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Anonymous memory now.
    pub now: Bytes,
    /// The highest resident memory so far, mapped files included.
    peak: Bytes,
    /// Mapped files and shared memory that are resident now.
    files: Bytes,
}

impl Resident {
    /// Reads the memory of this process. `None` where the system does not report it, which is
    /// everywhere except on Linux.
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

    /// Parses the [lines](https://man7.org/linux/man-pages/man5/proc_pid_status.5.html) of
    /// `/proc/self/status`.
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

    /// This reading, with the larger file size of the two.
    ///
    /// Files mapped at `later` may be unmapped by the next reading.
    pub fn with_files_of(self, later: Self) -> Self {
        Self { files: self.files.max(later.files), ..self }
    }

    /// An upper bound on the growth since `before`.
    ///
    /// If the process has set a new peak since then, the bound is that peak minus the files. If its
    /// peak dates from before, the bound uses the current memory.
    pub fn growth_since(self, before: Self) -> Bytes {
        // Uses the larger file size. Otherwise unmapping files would turn an old peak into a new
        // one.
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
