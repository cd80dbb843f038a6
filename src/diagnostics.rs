//! The compiler's message to a user who forgets [`Lazy`](crate::Lazy). Compiled by documentation
//! tests only.
//!
//! This compiles:
//!
//! ```
//! # use burn::backend::{Autodiff, Flex};
//! # use burn::module::AutodiffModule;
//! # use burn::optim::AdamConfig;
//! # use burn::train::{InferenceStep, TrainStep};
//! # use firebox::{Lazy, Learner, MicroBatch};
//! type B = Autodiff<Lazy<Flex>>;
//!
//! fn train<M>(model: M)
//! where
//!     M: TrainStep<Input: MicroBatch> + AutodiffModule<B> + core::fmt::Display + 'static,
//!     M::InnerModule: InferenceStep<Input: MicroBatch>,
//! {
//!     Learner::builder().auto_batch().build(model, AdamConfig::new().init(), 1e-3);
//! }
//! ```
//!
//! and this does not:
//!
//! ```compile_fail,E0277
//! # use burn::backend::{Autodiff, Flex};
//! # use burn::module::AutodiffModule;
//! # use burn::optim::AdamConfig;
//! # use burn::train::{InferenceStep, TrainStep};
//! # use firebox::{Lazy, Learner, MicroBatch};
//! type B = Autodiff<Flex>;
//!
//! fn train<M>(model: M)
//! where
//!     M: TrainStep<Input: MicroBatch> + AutodiffModule<B> + core::fmt::Display + 'static,
//!     M::InnerModule: InferenceStep<Input: MicroBatch>,
//! {
//!     Learner::builder().auto_batch().build(model, AdamConfig::new().init(), 1e-3);
//! }
//! ```
//!
//! because, in the compiler's words,
//!
//! ```text
//! error[E0277]: `Autodiff<Flex>` cannot record its operations
//!     |
//!     |     Learner::builder().auto_batch().build(model, AdamConfig::new().init(), 1e-3);
//!     |                                     ^^^^^ not a lazy backend
//!     |
//!     = help: the trait `LazyBackend` is not implemented for `Autodiff<Flex>`
//!     = note: put `Lazy` around the innermost backend: `Autodiff<Lazy<Flex>>` instead of `Autodiff<Flex>`
//! ```
