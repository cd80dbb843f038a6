//! Computes the gradient of a batch from the gradients of its micro-batches. The training loop, and
//! loops of the user's own, add each micro-step's gradient here and give the sum to the optimizer.

use std::cell::RefCell;
use std::marker::PhantomData;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use firebox_lazy::{LazyBackend, is_rehearsal};
use firebox_trace::{Bytes, Category};

use crate::parameters::parameters;
use crate::planner::labels::label_gradients;
use crate::reduction::LossReduction;

thread_local! {
    /// How gradients were added in the rehearsal on this thread.
    static ADDED_AS: RefCell<Vec<LossReduction>> = const { RefCell::new(Vec::new()) };
}

/// How gradients were added on this thread since this was asked last, in rehearsals: each way once.
pub(crate) fn added_as() -> Vec<LossReduction> {
    ADDED_AS.take()
}

/// A weighted sum of gradients. 16-bit gradients are summed in 32 bit: in 16 bit, a sum over some
/// hundred micro-batches loses what each adds.
struct GradientSum<M> {
    sum: Option<GradientsParams>,
    /// Whether `sum` is a single, unchanged summand.
    is_single: bool,
    module: PhantomData<fn() -> M>,
}

impl<M> GradientSum<M> {
    fn new() -> Self {
        Self { sum: None, is_single: false, module: PhantomData }
    }

    /// Adds `grads` times `scale`. A first summand with a scale of one is taken unchanged.
    fn add<B>(&mut self, model: &M, grads: GradientsParams, scale: f64)
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
    fn get(&self) -> Option<&GradientsParams> {
        self.sum.as_ref()
    }

    /// Finishes the sum and multiplies all of it by `scale`. Gradients get the types of their
    /// parameters back.
    fn finish<B>(&mut self, model: &M, scale: f64) -> GradientsParams
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let grads = self.sum.take().unwrap_or_default();
        let mut finish = Finish { finished: GradientsParams::new(), grads, scale };
        model.visit(&mut finish);
        finish.finished
    }
}

/// The gradient of a batch, as the sum over its micro-batches by their weights in the loss.
///
/// For one optimizer step: [`add`](Self::add) the gradient of each micro-batch, then give what
/// [`finish`](Self::finish) returns to the optimizer. 16-bit gradients are summed in 32 bit.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::GradientsParams;
/// use burn::tensor::Tensor;
/// use firebox_lazy::Lazy;
/// use firebox_train::WeightedGradients;
///
/// type B = Autodiff<Lazy<Flex>>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(3, 1).init(&device);
/// let gradient = |items: [[f32; 3]; 2], count: usize| {
///     let items = Tensor::<B, 2>::from_floats(items, &device).narrow(0, 0, count);
///     GradientsParams::from_grads(model.forward(items).mean().backward(), &model)
/// };
///
/// // A batch of three items, in micro-batches of two and one.
/// let mut gradients = WeightedGradients::mean(3.0);
/// gradients.add(&model, gradient([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 2), 2.0);
/// gradients.add(&model, gradient([[7.0, 8.0, 9.0], [0.0; 3]], 1), 1.0);
///
/// let gradients = gradients.finish(&model);
/// let weight = gradients.get::<Lazy<Flex>, 2>(model.weight.id).expect("it is trained");
/// // The mean of the inputs.
/// let means: Vec<f32> = weight.into_data().to_vec()?;
/// assert!(means.iter().zip([4.0, 5.0, 6.0]).all(|(mean, is)| (mean - is).abs() < 1e-5));
/// # Ok::<(), burn::tensor::DataError>(())
/// ```
pub struct WeightedGradients<M> {
    sum: GradientSum<M>,
    reduction: LossReduction,
    /// The weight that the sum is relative to.
    reference: f64,
    weight: f64,
    /// The least that the mean is taken over.
    least: f64,
}

impl<M> WeightedGradients<M> {
    /// For a loss that is a mean, over a batch of weight `total`. The weight is the number of
    /// items, unless the batch [says otherwise](firebox_batch::MicroBatch::weight).
    ///
    /// If the weights that were added do not sum up to `total`, for example because the gradients
    /// of several batches are added, the gradient is the mean over what was added.
    ///
    /// # Panics
    ///
    /// If `total` is not a positive number.
    pub fn mean(total: f64) -> Self {
        assert!(total > 0.0 && total.is_finite(), "no mean is taken over a weight of {total}");
        Self::new(LossReduction::Mean, total)
    }

    /// For a loss that is a sum: gradients are added as they are.
    pub fn sum() -> Self {
        Self::new(LossReduction::Sum, 1.0)
    }

    pub(crate) fn new(reduction: LossReduction, reference: f64) -> Self {
        Self { sum: GradientSum::new(), reduction, reference, weight: 0.0, least: 0.0 }
    }

    /// Adds the gradient of a micro-batch, of the mean or sum of its loss. A micro-batch that
    /// weighs nothing in a mean is left out: its mean is not a number.
    ///
    /// A single gradient that has all the weight stays bit for bit what it is.
    pub fn add<B>(&mut self, model: &M, grads: GradientsParams, weight: f64)
    where
        B: AutodiffBackend<InnerBackend: LazyBackend> + LazyBackend,
        M: AutodiffModule<B>,
    {
        self.add_times(model, grads, weight, 1.0);
    }

    /// The same with the gradient times `factor`.
    pub(crate) fn add_times<B>(
        &mut self,
        model: &M,
        grads: GradientsParams,
        weight: f64,
        factor: f64,
    ) where
        B: AutodiffBackend<InnerBackend: LazyBackend> + LazyBackend,
        M: AutodiffModule<B>,
    {
        self.weight += weight;
        let Some(scale) = self.reduction.scale(weight, self.reference) else { return };
        let scale = scale * factor;
        if is_rehearsal() {
            ADDED_AS.with_borrow_mut(|added| {
                if !added.contains(&self.reduction) {
                    added.push(self.reduction);
                }
            });
            label_gradients(model, &grads, Category::Gradient);
        }
        self.sum.add(model, grads, scale);
        if let (true, false, Some(sum)) = (is_rehearsal(), self.sum.is_single, self.sum.get()) {
            label_gradients(model, sum, Category::AccumulatedGradient);
        }
    }

    /// The weights that were added.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Counts a batch as `counted` whose gradients are added by `divisor`, because it divides by
    /// that: all batches together divide by what they count, and at least by what one divides by.
    pub(crate) fn count(&mut self, counted: f64, divisor: f64) {
        self.weight += counted - divisor;
        self.least = self.least.max(divisor);
    }

    /// The least that the mean is taken over.
    pub(crate) fn least(&self) -> f64 {
        self.least
    }

    /// The sum so far, not finished, and the factor that makes it the share of this sum in a
    /// gradient whose summands weigh `total` in all. Nothing is left.
    pub(crate) fn take(&mut self, total: f64) -> (GradientsParams, f64) {
        (self.weight, self.least) = (0.0, 0.0);
        let scale = match self.reduction {
            LossReduction::Mean => self.reference / total,
            LossReduction::Sum => 1.0,
        };
        (self.sum.sum.take().unwrap_or_default(), scale)
    }

    /// The gradients so far.
    pub(crate) fn so_far(&self) -> Option<&GradientsParams> {
        self.sum.get()
    }

    /// The gradients for the optimizer, in the types of the parameters. Nothing is left.
    pub fn finish<B>(&mut self, model: &M) -> GradientsParams
    where
        B: AutodiffBackend<InnerBackend: LazyBackend> + LazyBackend,
        M: AutodiffModule<B>,
    {
        // A rehearsal runs some of the micro-batches and stands for all.
        let rest = match is_rehearsal() {
            true => 1.0,
            false => self.reduction.rest(self.reference, self.weight.max(self.least)),
        };
        (self.weight, self.least) = (0.0, 0.0);
        // Only `Half` gives gradients of another type.
        if rest == 1.0 && self.sum.is_single && B::narrow().is_none() {
            return self.sum.sum.take().unwrap_or_default();
        }
        self.sum.finish(model, rest)
    }
}

impl<M> std::fmt::Debug for WeightedGradients<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reduction, reference, weight, .. } = self;
        f.debug_struct("WeightedGradients")
            .field("reduction", reduction)
            .field("reference", reference)
            .field("weight", weight)
            .finish_non_exhaustive()
    }
}

/// The type in which gradients of type `dtype` are summed.
fn summed_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// The bytes of a sum of the gradients of all parameters.
pub(crate) fn summed_bytes<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Bytes {
    let floats = parameters(model).into_iter().filter(|parameter| parameter.dtype.is_float());
    floats.map(|parameter| parameter.bytes_in(summed_in(parameter.dtype))).sum()
}

/// The model with leaves of its own, for a rehearsal: a backward pass removes the leaves that it
/// reaches from burn's graph. Unlike with burn's `fork`, nothing of it hangs on the model's leaves,
/// where it would stay until a backward pass reaches those.
pub(crate) fn with_own_leaves<B: AutodiffBackend, M: Module<B>>(model: M) -> M {
    struct Detach;

    impl<B: AutodiffBackend> ModuleMapper<B> for Detach {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let is_trained = param.is_require_grad();
            param.map(|tensor| Tensor::from_inner(tensor.inner()).set_require_grad(is_trained))
        }
    }

    model.map(&mut Detach)
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
        let wide = summed_in(grad.dtype());
        let grad = scaled(in_type(grad, wide), self.scale);
        let grad = in_type(grad, param.val().dtype());
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
