//! The gradient of a batch from the gradients of its micro-batches.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

/// How the loss of a batch follows from the losses of its items, and so how gradients of micro-batches add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The loss is a mean over the items, or over what the batch's own weight counts.
    #[default]
    Mean,
    /// The loss is a sum over the items.
    Sum,
}

/// A weighted sum of gradients.
pub(crate) struct GradientSum<M> {
    sum: Option<GradientsParams>,
    module: PhantomData<fn() -> M>,
}

impl<M> GradientSum<M> {
    pub(crate) fn new() -> Self {
        Self { sum: None, module: PhantomData }
    }

    /// Adds `grads` times `scale`. A first summand with a scale of one is taken as it is.
    pub(crate) fn add<B>(&mut self, model: &M, grads: GradientsParams, scale: f64)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        if self.sum.is_none() && scale == 1.0 {
            self.sum = Some(grads);
            return;
        }
        let sum = self.sum.get_or_insert_default();
        model.visit(&mut AddScaled { sum, grads, scale });
    }

    /// The sum so far.
    pub(crate) fn get(&self) -> Option<&GradientsParams> {
        self.sum.as_ref()
    }

    /// Ends the sum; `scale` is applied to all of it.
    pub(crate) fn finish<B>(&mut self, model: &M, scale: f64) -> GradientsParams
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let sum = self.sum.take().unwrap_or_default();
        if scale == 1.0 {
            return sum;
        }
        let mut scaled = GradientsParams::new();
        model.visit(&mut AddScaled { sum: &mut scaled, grads: sum, scale });
        scaled
    }
}

struct AddScaled<'a> {
    sum: &'a mut GradientsParams,
    grads: GradientsParams,
    scale: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for AddScaled<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        let grad = if self.scale == 1.0 { grad } else { grad.mul_scalar(self.scale) };
        let grad = match self.sum.remove::<B::InnerBackend, D>(param.id) {
            Some(sum) => sum.add(grad),
            None => grad,
        };
        self.sum.register::<B::InnerBackend, D>(param.id, grad);
    }
}
