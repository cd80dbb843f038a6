//! Why a buffer found no place.

/// A buffer found no place on any page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no place for a buffer of {size} bytes: the longest piece that is free on the pages for it has {largest_gap} bytes, \
     {in_use} of {reserved} bytes are in use, and {why}"
)]
pub struct NoPlace {
    /// Bytes asked for.
    pub size: u64,
    /// Longest free piece on the pages of the region, in bytes.
    pub largest_gap: u64,
    /// Bytes in use, over all buffers.
    pub in_use: u64,
    /// Bytes reserved, over all pages.
    pub reserved: u64,
    /// Why no page was opened for it.
    pub why: Why,
}

/// Why no page was opened, or why a moved buffer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// All pages together would exceed the limit.
    #[error("another page would exceed {limit} bytes")]
    Limit {
        /// Limit on the bytes of all pages.
        limit: u64,
    },
    /// The device has too little free memory for the page.
    #[error("the device refused a page of {page} bytes")]
    Refused {
        /// Size of the page in bytes.
        page: u64,
    },
    /// The device has too little free memory to put a moved buffer back. Its contents are lost.
    #[error(
        "the device refused a page of {page} bytes for a tensor that it had before, which is lost"
    )]
    Lost {
        /// Size of the page in bytes.
        page: u64,
    },
    /// The buffer has a place, but its contents could not be read from the device when it was
    /// moved. They are lost.
    #[error("what a tensor held could not be read from the device when it was moved, and is lost")]
    Unread,
}
