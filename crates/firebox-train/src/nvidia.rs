//! The memory of an NVIDIA GPU, as its driver tells it.
