//! A page of firebox's pool, and what lies on it.

/// One page.
#[derive(Debug)]
pub struct Page {
    /// What it is for.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// What lies on it, by offset.
    pub buffers: Vec<Placed>,
}

/// A buffer on a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Where it begins.
    pub offset: u64,
    /// Its bytes.
    pub size: u64,
    /// Its tensor, found by its size and by when it was requested. Of tensors of one size that one
    /// fused operation writes, the names may be interchanged.
    pub tensor: Option<String>,
}
