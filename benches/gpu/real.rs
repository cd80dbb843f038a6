//! The backend that is measured, and burn's backend that it is compared with.

#[cfg(feature = "cuda")]
mod backend {
    pub const NAME: &str = "cuda";
    pub type Plain = burn::backend::Cuda;
    pub type Real = firebox::Cuda;
}

#[cfg(all(feature = "vulkan", not(feature = "cuda")))]
mod backend {
    pub const NAME: &str = "vulkan";
    pub type Plain = burn::backend::Vulkan;
    pub type Real = firebox::Vulkan;
}

#[cfg(not(any(feature = "cuda", feature = "vulkan")))]
mod backend {
    pub const NAME: &str = "flex";
    pub type Plain = burn::backend::Flex;
    pub type Real = burn::backend::Flex;
}

pub use backend::{NAME, Plain, Real};

/// Device of both backends.
pub type Device = burn::tensor::Device<Real>;
