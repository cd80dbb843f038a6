//! Optimizers that first do something to the gradient of the batch: [`clip_global_norm`], and
//! [`on_gradients`] for anything else. In a step, it would be done to the gradient of each
//! micro-batch.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};

/// What is done to the gradient of a batch before the optimizer steps.
///
/// A function of a model and its gradients is one.
pub trait GradientHook<M, B>: Send + Clone {
    /// The gradients for the optimizer. `model` has the parameters that they belong to.
    fn apply(&self, model: &M, grads: GradientsParams) -> GradientsParams;
}

impl<M, B, F> GradientHook<M, B> for F
where
    F: Fn(&M, GradientsParams) -> GradientsParams + Send + Clone,
{
    fn apply(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        self(model, grads)
    }
}

/// An optimizer that first does something to the gradients. Made by [`on_gradients`]. Its record is
/// that of the optimizer.
#[derive(Clone, Debug)]
pub struct OnGradients<O, H> {
    optimizer: O,
    hook: H,
}

/// Does something to the gradient of each batch before `optimizer` steps.
///
/// The gradient is that of the whole batch, over all of its micro-batches, accumulated loader
/// batches and ranks. Works with any loop.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::Linear;
/// use burn::optim::{AdamConfig, GradientsParams};
/// use firebox_train::on_gradients;
///
/// type B = Autodiff<Flex>;
///
/// let adam = AdamConfig::new().init::<B, Linear<B>>();
/// let optimizer = on_gradients(adam, |model: &Linear<B>, mut grads: GradientsParams| {
///     // The bias is not trained.
///     if let Some(bias) = &model.bias {
///         grads.remove::<Flex, 1>(bias.id);
///     }
///     grads
/// });
/// ```
pub fn on_gradients<O, H>(optimizer: O, hook: H) -> OnGradients<O, H> {
    OnGradients { optimizer, hook }
}

/// Clips the gradient of each batch by its global norm before `optimizer` steps: if the norm over
/// all parameters is larger than `limit`, all gradients are scaled by `limit / (norm + 1e-6)`, as
/// PyTorch's `clip_grad_norm_` does (Pascanu et al., "On the difficulty of training recurrent
/// neural networks", 2013).
///
/// burn's own `with_grad_clipping` clips each parameter alone.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::Linear;
/// use burn::optim::AdamConfig;
/// use firebox_train::clip_global_norm;
///
/// type B = Autodiff<Flex>;
///
/// let optimizer = clip_global_norm(AdamConfig::new().init::<B, Linear<B>>(), 1.0);
/// ```
///
/// # Panics
///
/// If `limit` is not a positive number.
pub fn clip_global_norm<O>(optimizer: O, limit: f64) -> OnGradients<O, ClipGlobalNorm> {
    on_gradients(optimizer, ClipGlobalNorm::new(limit))
}

/// Scales gradients so that their global norm has a limit. See [`clip_global_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipGlobalNorm {
    limit: f64,
}

impl ClipGlobalNorm {
    /// # Panics
    ///
    /// If `limit` is not a positive number.
    pub fn new(limit: f64) -> Self {
        assert!(
            limit > 0.0 && limit.is_finite(),
            "gradients cannot be clipped to a norm of {limit}"
        );
        Self { limit }
    }
}

impl<M, B> GradientHook<M, B> for ClipGlobalNorm
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    fn apply(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        let mut squares = Squares::<B> { grads: &grads, sum: None };
        model.visit(&mut squares);
        let Some(sum) = squares.sum else { return grads };
        let factor = (sum.sqrt() + 1e-6).recip().mul_scalar(self.limit).clamp_max(1.0);
        let mut scaled = Scaled::<B> { grads, factor, scaled: GradientsParams::new() };
        model.visit(&mut scaled);
        scaled.scaled
    }
}

/// Adds up the squares of all gradients, in 32 bit or more.
struct Squares<'a, B: AutodiffBackend> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) else { return };
        let wide = if grad.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let sum = if grad.dtype() == wide { grad } else { grad.cast(wide) }.square().sum();
        self.sum = Some(match self.sum.take() {
            Some(before) if before.dtype() == sum.dtype() => before + sum,
            Some(before) => before.cast(DType::F64) + sum.cast(DType::F64),
            None => sum,
        });
    }
}

struct Scaled<B: AutodiffBackend> {
    grads: GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
    scaled: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scaled<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        let factor = self.factor.clone().reshape([1; D]);
        let factor =
            if factor.dtype() == grad.dtype() { factor } else { factor.cast(grad.dtype()) };
        self.scaled.register::<B::InnerBackend, D>(param.id, grad * factor);
    }
}

impl<M, B, O, H> Optimizer<M, B> for OnGradients<O, H>
where
    M: AutodiffModule<B>,
    B: AutodiffBackend,
    O: Optimizer<M, B>,
    H: GradientHook<M, B>,
{
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        let grads = self.hook.apply(&module, grads);
        self.optimizer.step(lr, module, grads)
    }

    /// The gradients of several devices are not summed before the hook sees them.
    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        assert!(grads.grads.len() < 2, "gradients of several devices have no norm in common");
        let grads = grads.grads.into_iter().next().map(|(grads, _)| grads).unwrap_or_default();
        self.step(lr, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.optimizer.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self { optimizer: self.optimizer.load_record(record), hook: self.hook }
    }
}
