//! Models as large as users train them, for benches of speed and of the largest batch.

pub mod cnn;
pub mod encoder;
pub mod gpt;
pub mod resnet;
pub mod stack;
pub mod towers;
