//! The memory models of cards without type parameters: whole stacks of burn and CubeCL, compiled
//! once in this crate instead of in each program that plans for a card.

use std::sync::Arc;

use burn_backend::DType;
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use firebox_pool::Pooled;
use firebox_trace::{MemoryModel, Trace};

use crate::card::Card;
use crate::replay::model::{Dry, ReplayError};
use crate::replay::pooled::Lifetimes;
use crate::runtime::DryRuntime;
use crate::target::Cuda;
use crate::twin::DryTwin;

type Fused<R> = Fusion<CubeBackend<R, f32, i32, u8>>;

/// The memory model of a card. See [`Dry`].
pub trait CardModel: MemoryModel {
    /// See [`Dry::lifetimes`].
    ///
    /// # Errors
    ///
    /// As [`Dry::replay`].
    fn lifetimes(&self, trace: &Trace) -> Result<Lifetimes, ReplayError>;
}

impl<B: DryTwin> CardModel for Dry<B> {
    fn lifetimes(&self, trace: &Trace) -> Result<Lifetimes, ReplayError> {
        self.lifetimes(trace)
    }
}

impl Card {
    /// What traces reserve on this card with burn's CUDA backend, its fusion, and firebox's pool.
    /// `int` is the default integer type of the backend that the traces come from.
    pub fn model(&self, int: DType) -> Arc<dyn CardModel> {
        let model = Dry::<Fused<Pooled<DryRuntime<Cuda>>>>::new(self.properties());
        Arc::new(model.with_traces_of_ints(int))
    }

    /// What traces reserve on this card with burn's CUDA backend, its fusion, and burn's own pools.
    /// `int` is the default integer type of the backend that the traces come from.
    pub fn model_of_burns_pools(&self, int: DType) -> Arc<dyn CardModel> {
        let model = Dry::<Fused<DryRuntime<Cuda>>>::new(self.properties());
        Arc::new(model.with_traces_of_ints(int))
    }
}
