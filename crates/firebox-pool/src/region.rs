//! Regions: what buffers are for, and the pages that a plan gives to each kind. `pool.rs` keeps
//! pages per region.

/// What a buffer is used for. Each region has its own pages, so long-lived buffers do not fragment
/// the space between short-lived ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// Buffers that outlive steps: parameters, optimizer state, and everything created outside of
    /// training.
    Lasting,
    /// Buffers that the micro-steps of training create.
    Step,
    /// Small buffers of any use: losses, running statistics, biases.
    Small,
    /// Buffers that other threads create during training.
    Beside,
}

impl Region {
    /// All regions.
    pub const ALL: [Self; 4] = [Self::Lasting, Self::Step, Self::Small, Self::Beside];

    /// The region to which a buffer of `size` bytes belongs during training, if it is used for what
    /// this region is for.
    pub fn home(self, size: u64) -> Self {
        if size < SMALL { Self::Small } else { self }
    }
}

/// Buffers of fewer bytes than this are small: 64 KiB.
pub const SMALL: u64 = 64 * 1024;

/// The least size of a page for small buffers, and its size if no plan sets one: 2 MiB.
pub const SMALL_PAGE: u64 = 2 * 1024 * 1024;

/// The pages that training was planned with: bytes for each region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// For [`Region::Lasting`].
    pub lasting: u64,
    /// For [`Region::Step`].
    pub step: u64,
    /// For [`Region::Small`].
    pub small: u64,
    /// For [`Region::Beside`].
    pub beside: u64,
    /// The buffers on the page for [`Region::Step`] that fill it from its start: those of at least
    /// this many bytes. Zero if it is filled by best fit. See [`Fit`](crate::Fit).
    pub step_from: u64,
}

impl Pages {
    /// The total bytes over all regions.
    pub fn total(&self) -> u64 {
        Region::ALL.into_iter().map(|region| self.of(region)).sum()
    }

    /// The bytes of a region's page.
    pub fn of(&self, region: Region) -> u64 {
        match region {
            Region::Lasting => self.lasting,
            Region::Step => self.step,
            Region::Small => self.small,
            Region::Beside => self.beside,
        }
    }

    /// The bytes of a region's page, as a mutable reference.
    pub fn of_mut(&mut self, region: Region) -> &mut u64 {
        match region {
            Region::Lasting => &mut self.lasting,
            Region::Step => &mut self.step,
            Region::Small => &mut self.small,
            Region::Beside => &mut self.beside,
        }
    }

    /// The larger of both sizes, for each region. Keeps [`step_from`](Self::step_from).
    pub fn max(mut self, other: Self) -> Self {
        for region in Region::ALL {
            *self.of_mut(region) = self.of(region).max(other.of(region));
        }
        self
    }
}
