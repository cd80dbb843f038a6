//! Advice: what would need less memory.

use std::fmt;

use firebox_trace::Bytes;

/// Something that would need less memory. Displays as a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What to do.
    pub what: String,
    /// By how many bytes the peak is lower then, at most: another moment may need nearly as much.
    pub saves: Bytes,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {} less with {}", self.saves, self.what)
    }
}
