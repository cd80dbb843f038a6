//! Computes the gradient of a batch from the gradients of its micro-batches. The training loop adds
//! each micro-step's gradient here and gives the sum to the optimizer.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Int, Tensor};
use firebox_lazy::LazyBackend;
use firebox_trace::Bytes;

/// How the loss of a batch is computed from the losses of its items. It determines how gradients of
/// micro-batches add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The loss is a mean over the items, or over what the batch's weight counts.
    #[default]
    Mean,
    /// The loss is a sum over the items. Multiply a term that occurs once per batch, such as a
    /// penalty, by the [share of the batch](crate::batch_share).
    Sum,
}

/// A weighted sum of gradients. 16-bit gradients are summed in 32 bit: in 16 bit, a sum over some
/// hundred micro-batches loses what each adds.
pub(crate) struct GradientSum<M> {
    sum: Option<GradientsParams>,
    /// Whether `sum` is a single, unchanged summand.
    is_single: bool,
    module: PhantomData<fn() -> M>,
}

impl<M> GradientSum<M> {
    pub(crate) fn new() -> Self {
        Self { sum: None, is_single: false, module: PhantomData }
    }

    /// Adds `grads` times `scale`. A first summand with a scale of one is taken unchanged.
    pub(crate) fn add<B>(&mut self, model: &M, grads: GradientsParams, scale: f64)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        if self.sum.is_none() && scale == 1.0 {
            self.sum = Some(grads);
            self.is_single = true;
            return;
        }
        self.is_single = false;
        let sum = self.sum.get_or_insert_default();
        model.visit(&mut AddScaled { sum, grads, scale });
    }

    /// The sum so far.
    pub(crate) fn get(&self) -> Option<&GradientsParams> {
        self.sum.as_ref()
    }

    /// Finishes the sum and multiplies all of it by `scale`. Gradients get the types of their
    /// parameters back.
    pub(crate) fn finish<B>(&mut self, model: &M, scale: f64) -> GradientsParams
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let grads = self.sum.take().unwrap_or_default();
        if scale == 1.0 && self.is_single {
            return grads;
        }
        let mut finish = Finish { finished: GradientsParams::new(), grads, scale };
        model.visit(&mut finish);
        finish.finished
    }
}

/// The type in which gradients of type `dtype` are summed.
fn summed_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// The bytes of a sum of the gradients of all parameters.
pub(crate) fn summed_bytes<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Bytes {
    struct Count(u64);

    impl<B: Backend> ModuleVisitor<B> for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let tensor = param.val();
            let size = summed_in(tensor.dtype()).size();
            self.0 += (tensor.shape().num_elements() * size) as u64;
        }
    }

    let mut count = Count(0);
    model.visit(&mut count);
    Bytes::new(count.0)
}

/// Whether a module has untrained tensors. Its running statistics, if any, are among these.
pub(crate) fn has_untrained<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> bool {
    struct Untrained(bool);

    impl<B: Backend> ModuleVisitor<B> for Untrained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0 |= !param.is_require_grad();
        }

        fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<B, D, Int>>) {
            self.0 = true;
        }

        fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<B, D, Bool>>) {
            self.0 = true;
        }
    }

    let mut untrained = Untrained(false);
    model.visit(&mut untrained);
    untrained.0
}

/// Releases the graphs of parameters without a gradient: those of forward passes without a backward
/// pass.
pub(crate) fn forget_graphs_without<B, M>(model: &M, grads: &GradientsParams)
where
    B: AutodiffBackend + LazyBackend,
    M: AutodiffModule<B>,
{
    struct Without<'a, B: Backend> {
        grads: &'a GradientsParams,
        leaves: Vec<B::FloatTensorPrimitive>,
    }

    impl<B: AutodiffBackend> ModuleVisitor<B> for Without<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let has_none = || self.grads.get::<B::InnerBackend, D>(param.id).is_none();
            if param.is_require_grad() && has_none() {
                self.leaves.push(param.val().into_primitive().tensor());
            }
        }
    }

    let mut without = Without::<B> { grads, leaves: Vec::new() };
    model.visit(&mut without);
    if let (false, Some(device)) = (without.leaves.is_empty(), model.devices().first()) {
        B::forget_graphs(device, without.leaves);
    }
}

/// Casts a tensor to a type, unless it already has it.
fn in_type<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

fn scaled<B: Backend, const D: usize>(tensor: Tensor<B, D>, scale: f64) -> Tensor<B, D> {
    if scale == 1.0 { tensor } else { tensor.mul_scalar(scale) }
}

struct AddScaled<'a> {
    sum: &'a mut GradientsParams,
    grads: GradientsParams,
    scale: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for AddScaled<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        let wide = summed_in(grad.dtype());
        let grad = scaled(in_type(grad, wide), self.scale);
        let grad = match self.sum.remove::<B::InnerBackend, D>(param.id) {
            Some(sum) => in_type(sum, wide).add(grad),
            None => grad,
        };
        self.sum.register::<B::InnerBackend, D>(param.id, grad);
    }
}

struct Finish {
    finished: GradientsParams,
    grads: GradientsParams,
    scale: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Finish {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        let dtype = param.val().dtype();
        let is_wide = grad.dtype() == summed_in(dtype);
        let grad = scaled(grad, self.scale);
        let grad = if is_wide { in_type(grad, dtype) } else { grad };
        self.finished.register::<B::InnerBackend, D>(param.id, grad);
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::Module;

    use super::*;

    type B = Autodiff<Flex>;

    #[derive(Module, Debug)]
    struct One<B: Backend> {
        weight: Param<Tensor<B, 1>>,
    }

    fn summed(dtype: DType, count: usize) -> f32 {
        let device = Default::default();
        let tensor = Tensor::<B, 1>::zeros([1], &device).cast(dtype);
        let model = One { weight: Param::from_tensor(tensor) };
        let mut sum = GradientSum::new();
        for _ in 0..count {
            let mut grads = GradientsParams::new();
            let grad = Tensor::<Flex, 1>::full([1], 3.0, &device).cast(dtype);
            grads.register::<Flex, 1>(model.weight.id, grad);
            sum.add::<B>(&model, grads, 1.0 / count as f64);
        }
        let grads = sum.finish::<B>(&model, 1.0);
        let grad = grads.get::<Flex, 1>(model.weight.id).expect("it was added");
        assert_eq!(grad.dtype(), dtype);
        grad.cast(DType::F32).into_scalar()
    }

    #[test]
    fn many_summands_of_16_bit_lose_nothing() {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for count in [1, 512, 2048] {
                let sum = summed(dtype, count);
                assert!((sum - 3.0).abs() < 0.01, "{sum} over {count} of {dtype:?}");
            }
        }
    }
}
