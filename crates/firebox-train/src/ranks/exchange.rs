//! Sums gradients over all ranks: reads them in the order of the module's visit, and puts the sums
//! in their place while later ones are still exchanged.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData, f16};
use firebox_ranks::{RankError, Ranks, Summing, exchange_bytes};
use firebox_trace::Bytes;
use rustc_hash::FxHashSet;

use crate::device::panics::panic_message;
use crate::error::TrainError;
use crate::parameters::parameters;

/// Of which parameters there are gradients, in the order of the module's visit.
pub(crate) fn has_gradient<B, M>(model: &M, grads: Option<&GradientsParams>) -> Vec<bool>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    struct Has<'a>(Option<&'a GradientsParams>, Vec<bool>);

    impl<B: AutodiffBackend> ModuleVisitor<B> for Has<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let has = |grads: &GradientsParams| grads.get::<B::InnerBackend, D>(param.id).is_some();
            self.1.push(self.0.is_some_and(has));
        }
    }

    let mut has = Has(grads, Vec::new());
    model.visit(&mut has);
    has.1
}

/// The most host memory that an exchange of all gradients of a model takes.
pub(crate) fn exchanged_bytes<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Bytes {
    let floats = parameters(model).into_iter().filter(|parameter| parameter.dtype.is_float());
    let (total, largest) = floats.fold((0, 0), |(total, largest), parameter| {
        let bytes = parameter.bytes_in(DType::F32).get();
        (total + bytes, bytes.max(largest))
    });
    Bytes::new(exchange_bytes(total, largest))
}

/// What an exchange has made.
pub(crate) struct Exchanged {
    pub(crate) grads: GradientsParams,
    /// Made of the bits of all sums.
    pub(crate) fold: u64,
    /// Whether all sums are finite.
    pub(crate) is_finite: bool,
    /// The first parameter of which this rank's own gradient is not finite.
    pub(crate) not_finite: Option<String>,
}

/// Sums the gradients of all ranks, those of this rank times `scale`. `has` tells of which
/// parameters any rank has a gradient; a rank without one gives zeros. Sums are made in 32 bit and
/// have the types of their parameters then.
///
/// # Errors
///
/// If a sum does not end in time, or a gradient cannot be read or made. The other ranks have their
/// sums then, too.
pub(crate) fn exchange<B, M>(
    ranks: &Ranks,
    model: &M,
    grads: GradientsParams,
    scale: f64,
    has: &[bool],
) -> Result<Exchanged, TrainError>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    run(Summing::of(ranks), model, grads, has.iter().copied(), Some(scale))
}

/// What an exchange does to the device, for rehearsals: gradients go, and other tensors take their
/// place, in the same order.
pub(crate) fn rehearse_exchange<B, M>(model: &M, grads: GradientsParams) -> GradientsParams
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    // Of any parameter, another rank may have a gradient.
    let floats = parameters(model).into_iter().filter(|parameter| parameter.dtype.is_float());
    let has = floats.map(|parameter| parameter.is_trained);
    let exchanged = run(Summing::rehearsing(), model, grads, has, None);
    exchanged.expect("a rehearsal waits for nobody").grads
}

/// `scale` is `None` in a rehearsal, in which nothing is read.
fn run<B, M>(
    summing: Summing<'_>,
    model: &M,
    grads: GradientsParams,
    has: impl Iterator<Item = bool>,
    scale: Option<f64>,
) -> Result<Exchanged, TrainError>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut exchange = Exchange {
        grads,
        scale,
        has,
        summing,
        waiting: VecDeque::new(),
        summed: GradientsParams::new(),
        path: Vec::new(),
        seen: FxHashSet::default(),
        not_finite: None,
        overflows: false,
        stuck: None,
        panicked: None,
    };
    model.visit(&mut exchange);
    if exchange.stuck.is_none() {
        exchange.summing.flush()?;
        exchange.take();
    }
    let Exchange { summing, waiting, summed, not_finite, overflows, stuck, panicked, .. } =
        exchange;
    if let Some(error) = stuck {
        return Err(error.into());
    }
    if let Some(message) = panicked {
        return Err(TrainError::Panicked { message });
    }
    debug_assert!(waiting.is_empty(), "all sums have arrived");
    let (fold, is_finite) = (summing.fold(), summing.is_finite() && !overflows);
    Ok(Exchanged { grads: summed, fold, is_finite, not_finite })
}

/// Makes the gradient of a parameter from its elements. Whether all are finite in its type.
type Put = Box<dyn FnOnce(Vec<f32>, &mut GradientsParams) -> bool>;

/// A parameter whose sum has not arrived.
struct Waiting {
    elements: usize,
    put: Put,
}

struct Exchange<'a, H> {
    grads: GradientsParams,
    scale: Option<f64>,
    has: H,
    summing: Summing<'a>,
    waiting: VecDeque<Waiting>,
    summed: GradientsParams,
    path: Vec<String>,
    /// Parameters that were visited. A module may hold one twice.
    seen: FxHashSet<ParamId>,
    not_finite: Option<String>,
    /// Whether a sum is not finite in the type of its parameter.
    overflows: bool,
    /// Why sums do not go on.
    stuck: Option<RankError>,
    /// Why gradients cannot be read or made. The other ranks still get numbers.
    panicked: Option<String>,
}

impl<H> Exchange<'_, H> {
    /// Puts the sums that have arrived in their places.
    fn take(&mut self) {
        while let Some(first) = self.waiting.front()
            && let Some(sums) = self.summing.take(first.elements)
            && let Some(first) = self.waiting.pop_front()
        {
            let summed = &mut self.summed;
            match catch_unwind(AssertUnwindSafe(|| (first.put)(sums, summed))) {
                Ok(is_finite) => self.overflows |= !is_finite,
                Err(panic) => self.note(&*panic),
            }
        }
    }

    fn note(&mut self, panic: &(dyn Any + Send)) {
        self.panicked.get_or_insert_with(|| panic_message(panic));
    }
}

impl<B: AutodiffBackend, H: Iterator<Item = bool>> ModuleVisitor<B> for Exchange<'_, H> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let has = self.has.next().unwrap_or_default();
        if !has || self.stuck.is_some() || !self.seen.insert(param.id) {
            return;
        }
        let value = param.val();
        let (id, device) = (param.id, value.device());
        let (shape, dtype) = (value.shape(), value.dtype());
        let elements = shape.num_elements();
        let grad = self.grads.remove::<B::InnerBackend, D>(id);
        let rehearses = self.scale.is_none();
        let put = move |sums: Vec<f32>, summed: &mut GradientsParams| {
            let (grad, is_finite) = match rehearses {
                true => (Tensor::<B::InnerBackend, D>::empty(shape, (&device, dtype)), true),
                false => made(sums, shape.as_slice(), dtype, &device),
            };
            summed.register::<B::InnerBackend, D>(id, grad);
            is_finite
        };
        self.waiting.push_back(Waiting { elements, put: Box::new(put) });
        match self.scale {
            None => self.summing.rehearse(elements),
            Some(scale) => {
                let read = || grad.map(|grad| read(grad, scale));
                let read = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
                    self.note(&*panic);
                    None
                });
                let numbers = read.unwrap_or_else(|| vec![0.0; elements]);
                if self.not_finite.is_none()
                    && numbers.iter().fold(false, |found, number| found | !number.is_finite())
                {
                    self.not_finite = Some(self.path.join("."));
                }
                self.stuck = self.summing.give(&numbers).err();
            }
        }
        self.take();
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// The numbers of a gradient, scaled.
fn read<B: Backend, const D: usize>(grad: Tensor<B, D>, scale: f64) -> Vec<f32> {
    let data = grad.into_data().convert::<f32>();
    let mut numbers = data.into_vec::<f32>().expect("it was converted");
    if scale != 1.0 {
        numbers.iter_mut().for_each(|number| *number = (f64::from(*number) * scale) as f32);
    }
    numbers
}

/// The tensor of a gradient with these numbers, and whether they are finite in its type.
fn made<B: Backend, const D: usize>(
    numbers: Vec<f32>,
    shape: &[usize],
    dtype: DType,
    device: &B::Device,
) -> (Tensor<B, D>, bool) {
    // Of the types of parameters, only this one holds less.
    let largest = f32::from(f16::MAX);
    let is_finite = dtype != DType::F16 || numbers.iter().all(|number| number.abs() <= largest);
    let data = TensorData::new(numbers, shape.to_vec()).convert_dtype(dtype);
    (Tensor::from_data(data, (device, dtype)), is_finite)
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::Module;

    use super::*;

    type B = Autodiff<Flex>;

    #[derive(Module, Debug)]
    struct Three<B: Backend> {
        first: Param<Tensor<B, 2>>,
        unused: Param<Tensor<B, 1>>,
        last: Param<Tensor<B, 1>>,
    }

    fn model() -> Three<B> {
        let device = Default::default();
        Three {
            first: Param::from_tensor(Tensor::zeros([1025, 1100], &device)),
            unused: Param::from_tensor(Tensor::zeros([3], &device)),
            last: Param::from_tensor(Tensor::zeros([2], &device)),
        }
    }

    fn gradients(model: &Three<B>, last: [f32; 2]) -> GradientsParams {
        let device = Default::default();
        let mut grads = GradientsParams::new();
        let first = Tensor::<Flex, 1>::arange_float(model.first.val().shape().num_elements());
        grads.register::<Flex, 2>(model.first.id, first.reshape([1025, 1100]));
        grads.register::<Flex, 1>(model.last.id, Tensor::from_floats(last, &device));
        grads
    }

    trait Arange {
        fn arange_float(count: usize) -> Self;
    }

    impl Arange for Tensor<Flex, 1> {
        fn arange_float(count: usize) -> Self {
            Tensor::<Flex, 1, burn::tensor::Int>::arange(0..count as i64, &Default::default())
                .float()
        }
    }

    #[test]
    fn gradients_come_back_scaled_and_in_their_shapes() {
        let model = model();
        let has = has_gradient(&model, Some(&gradients(&model, [4.0, 6.0])));
        assert_eq!(has, [true, false, true]);
        let grads = gradients(&model, [4.0, 6.0]);
        let exchanged = exchange(&Ranks::alone(), &model, grads, 0.5, &has).expect("it is alone");
        assert!(exchanged.is_finite && exchanged.not_finite.is_none());
        let last = exchanged.grads.get::<Flex, 1>(model.last.id).expect("it has one");
        assert_eq!(last.into_data().to_vec::<f32>().expect("floats"), [2.0, 3.0]);
        assert!(exchanged.grads.get::<Flex, 1>(model.unused.id).is_none());
        // More elements than one bucket holds.
        let first = exchanged.grads.get::<Flex, 2>(model.first.id).expect("it has one");
        assert_eq!(first.dims(), [1025, 1100]);
        let first = first.into_data().to_vec::<f32>().expect("floats");
        assert!(first.iter().enumerate().all(|(at, number)| *number == at as f32 / 2.0));
    }

    #[test]
    fn a_rank_without_a_gradient_gives_zeros() {
        let model = model();
        let has = [false, true, false];
        let none = GradientsParams::new();
        let exchanged = exchange(&Ranks::alone(), &model, none, 1.0, &has).expect("it is alone");
        let unused = exchanged.grads.get::<Flex, 1>(model.unused.id).expect("another has one");
        assert_eq!(unused.into_data().to_vec::<f32>().expect("floats"), [0.0; 3]);
        assert!(exchanged.grads.get::<Flex, 1>(model.last.id).is_none());
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_named() {
        let model = model();
        let grads = gradients(&model, [f32::NAN, 1.0]);
        let has = has_gradient(&model, Some(&grads));
        let exchanged = exchange(&Ranks::alone(), &model, grads, 1.0, &has).expect("it is alone");
        assert!(!exchanged.is_finite);
        assert_eq!(exchanged.not_finite.as_deref(), Some("last"));
    }
}
