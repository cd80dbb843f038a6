//! Adds the gradients of micro-batches by their weights.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, ExecutionError, Tensor};
#[cfg(feature = "cubecl")]
use firebox_trace::Category;

#[cfg(feature = "cubecl")]
use crate::recording;

/// How the losses of items combine into the loss of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReduction {
    /// A mean, by the weights of the items. The default.
    #[default]
    Mean,
    /// A sum.
    Sum,
}

/// The gradient of a batch, as the sum over its micro-batches. In 16 bit, gradients are summed in
/// 32 bit.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use firebox::WeightedGradients;
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(3, 1).init(&device);
/// let gradient = |items: Tensor<2>| {
///     GradientsParams::from_grads(model.forward(items).mean().backward(), &model)
/// };
/// // A batch of three items, in micro-batches of two and one.
/// let items = Tensor::<2>::from_floats([[1., 2., 3.], [4., 5., 6.], [7., 8., 9.]], &device);
/// let mut gradients = WeightedGradients::mean(3.0);
/// gradients.add(&model, gradient(items.clone().narrow(0, 0, 2)), 2.0);
/// gradients.add(&model, gradient(items.narrow(0, 2, 1)), 1.0);
///
/// let sum = gradients.finish(&model).get::<2>(model.weight.id).expect("it is trained");
/// let means: Vec<f32> = sum.into_data().try_to_vec()?;
/// assert!(means.iter().zip([4.0, 5.0, 6.0]).all(|(mean, is)| (mean - is).abs() < 1e-5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct WeightedGradients {
    sum: Option<GradientsParams>,
    /// Whether the sum is one gradient as it came.
    is_single: bool,
    reduction: LossReduction,
    /// What all summands weigh.
    total: f64,
    added: f64,
}

impl WeightedGradients {
    /// For a loss that is a mean, over a batch of weight `total`: its number of items, unless the
    /// batch says otherwise.
    ///
    /// # Panics
    ///
    /// If `total` is not a positive number.
    pub fn mean(total: f64) -> Self {
        assert!(total > 0.0 && total.is_finite(), "no mean is taken over a weight of {total}");
        Self::new(LossReduction::Mean, total)
    }

    /// For a loss that is a sum.
    pub fn sum() -> Self {
        Self::new(LossReduction::Sum, 1.0)
    }

    pub(crate) fn new(reduction: LossReduction, total: f64) -> Self {
        Self { sum: None, is_single: false, reduction, total, added: 0.0 }
    }

    /// Adds the gradient of a micro-batch. One that weighs nothing in a mean is left out: its mean
    /// is not a number. A single gradient with all the weight stays bit for bit what it is.
    pub fn add<M: Module>(&mut self, model: &M, grads: GradientsParams, weight: f64) {
        #[cfg(feature = "cubecl")]
        recording::gradients(model, Category::Gradient, &grads);
        self.add_weighted(model, grads, weight);
        #[cfg(feature = "cubecl")]
        if !self.is_single
            && let Some(sum) = &self.sum
        {
            recording::gradients(model, Category::AccumulatedGradient, sum);
        }
        #[cfg(feature = "cubecl")]
        recording::micro_step_ends();
    }

    fn add_weighted<M: Module>(&mut self, model: &M, grads: GradientsParams, weight: f64) {
        self.added += weight;
        let scale = match self.reduction {
            LossReduction::Mean if weight == 0.0 => return,
            LossReduction::Mean => weight / self.total,
            LossReduction::Sum => 1.0,
        };
        if self.sum.is_none() && scale == 1.0 {
            (self.sum, self.is_single) = (Some(grads), true);
            return;
        }
        self.is_single = false;
        let sum = self.sum.get_or_insert_default();
        model.visit(&mut Add { sum, grads, scale });
    }

    /// The same gradients, which are shared and not copied.
    pub(crate) fn shared<M: Module>(&self, model: &M) -> Self {
        let sum = self.sum.as_ref().map(|grads| {
            let mut shared = Shared { shared: GradientsParams::new(), grads };
            model.visit(&mut shared);
            shared.shared
        });
        Self { sum, ..*self }
    }

    /// What all summands weigh.
    pub(crate) fn total(&self) -> f64 {
        self.total
    }

    /// Whether something would be lost with a gradient that weighs nothing. The mean over nothing
    /// is not a number, and nothing is lost with it.
    ///
    /// # Errors
    ///
    /// If the gradient was not computed.
    pub(crate) fn is_left_out<M: Module>(
        &self,
        model: &M,
        grads: &GradientsParams,
    ) -> Result<bool, ExecutionError> {
        if self.reduction != LossReduction::Mean {
            return Ok(false);
        }
        let sum: f64 = largest_of(model, grads)?.into_iter().map(|(_, largest)| largest).sum();
        Ok(sum.is_finite() && sum > 0.0)
    }

    /// The sum so far.
    pub(crate) fn so_far(&self) -> Option<&GradientsParams> {
        self.sum.as_ref()
    }

    /// Whether a gradient was added.
    pub(crate) fn has_any(&self) -> bool {
        self.sum.is_some()
    }

    /// The total weight added so far.
    pub fn weight(&self) -> f64 {
        self.added
    }

    /// The gradient for the optimizer, in the types of the parameters. If the weights do not sum up
    /// to the total, it is the mean over what was added. Nothing is left.
    pub fn finish<M: Module>(&mut self, model: &M) -> GradientsParams {
        #[cfg(feature = "cubecl")]
        recording::optimizer_steps();
        let rest = match self.reduction {
            LossReduction::Mean if self.added > 0.0 => self.total / self.added,
            _ => 1.0,
        };
        self.added = 0.0;
        let grads = self.sum.take().unwrap_or_default();
        // Weights are added up in floats.
        let rest = if (rest - 1.0).abs() < 1e-6 { 1.0 } else { rest };
        if self.is_single && rest == 1.0 {
            return grads;
        }
        let mut finish = Finish { finished: GradientsParams::new(), grads, scale: rest };
        model.visit(&mut finish);
        finish.finished
    }
}

/// The type in which gradients of a type are summed.
fn summed_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

fn in_type<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

struct Add<'a> {
    sum: &'a mut GradientsParams,
    grads: GradientsParams,
    scale: f64,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.remove::<D>(param.id) else { return };
        let wide = summed_in(grad.dtype());
        let grad = in_type(grad, wide);
        let grad = if self.scale == 1.0 { grad } else { grad * self.scale };
        let grad = match self.sum.remove::<D>(param.id) {
            Some(sum) => in_type(sum, wide) + grad,
            None => grad,
        };
        self.sum.register::<D>(param.id, grad);
    }
}

struct Finish {
    finished: GradientsParams,
    grads: GradientsParams,
    scale: f64,
}

impl ModuleVisitor for Finish {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.remove::<D>(param.id) else { return };
        let grad = if self.scale == 1.0 { grad } else { grad * self.scale };
        self.finished.register::<D>(param.id, in_type(grad, param.val().dtype()));
    }
}

struct Shared<'a> {
    shared: GradientsParams,
    grads: &'a GradientsParams,
}

impl ModuleVisitor for Shared<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.shared.register::<D>(param.id, grad);
        }
    }
}

/// What `of` makes of the numbers of each gradient, by the path of its parameter, in the order of
/// the model.
///
/// # Errors
///
/// The first of `of`.
pub(crate) fn each_of<M: Module, T>(
    model: &M,
    grads: &GradientsParams,
    of: impl FnMut(Tensor<1>) -> Result<T, ExecutionError>,
) -> Result<Vec<(String, T)>, ExecutionError> {
    struct Each<'a, T, F> {
        path: Vec<String>,
        grads: &'a GradientsParams,
        of: F,
        found: Result<Vec<(String, T)>, ExecutionError>,
    }

    impl<T, F> ModuleVisitor for Each<'_, T, F>
    where
        F: FnMut(Tensor<1>) -> Result<T, ExecutionError>,
    {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(grad) = self.grads.get::<D>(param.id) else { return };
            let Ok(found) = &mut self.found else { return };
            let count = grad.shape().num_elements();
            match (self.of)(grad.reshape([count])) {
                Ok(made) => found.push((self.path.join("."), made)),
                Err(error) => self.found = Err(error),
            }
        }

        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }

    let mut each = Each { path: Vec::new(), grads, of, found: Ok(Vec::new()) };
    model.visit(&mut each);
    each.found
}

/// The largest number in each gradient, by the path of its parameter.
///
/// # Errors
///
/// If a gradient was not computed.
pub(crate) fn largest_of<M: Module>(
    model: &M,
    grads: &GradientsParams,
) -> Result<Vec<(String, f64)>, ExecutionError> {
    each_of(model, grads, |grad| {
        let largest = grad.abs().max().try_into_data()?;
        Ok(largest.iter::<f64>().next().unwrap_or_default())
    })
}

/// Waits for gradients and for tensors that are not trained, by reading a number of each.
///
/// # Errors
///
/// If one was not computed: a buffer that could not be made is told where a value is read that
/// depends on it, and nowhere else.
pub(crate) fn are_computed<M: Module>(
    model: &M,
    grads: &GradientsParams,
) -> Result<(), ExecutionError> {
    let mut firsts = Firsts { grads, found: Vec::new() };
    model.visit(&mut firsts);
    match firsts.found.is_empty() {
        true => Ok(()),
        false => Tensor::cat(firsts.found, 0).try_into_data().map(drop),
    }
}

/// The first number of each gradient and of each tensor that is not trained.
struct Firsts<'a> {
    grads: &'a GradientsParams,
    found: Vec<Tensor<1>>,
}

impl ModuleVisitor for Firsts<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match param.is_require_grad() {
            true => self.grads.get::<D>(param.id),
            false => Some(param.val().inner()),
        };
        if let Some(tensor) = tensor.filter(|tensor| tensor.shape().num_elements() > 0) {
            let first = tensor.slice([(); D].map(|()| 0..1)).reshape([1]);
            self.found.push(in_type(first, DType::F32));
        }
    }
}
