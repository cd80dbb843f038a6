//! Computes the gradients of a few items on the host when the batch is on a GPU. No kernel of the
//! model is compiled or tuned for the check, and it takes none of the device's memory. burn's
//! interpreter of recorded operations runs the recorded step.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use firebox_dry::{NotComputed, compute_values};
use firebox_lazy::{Input, LazyBackend, RecordError, Recording, StepRecorder, index_in_trace};
use firebox_trace::{Bytes, TensorIndex};

use super::given::Share;
use super::sketch::{of_zeros, sketch};
use super::verdict::Weighed;
use super::{Check, Failure, MOST, Rows};
use crate::components::{LazyComponents, TrainBatch};
use crate::planner::rehearsal::train_step;
use crate::splitter::Splitter;

/// The total time that the host may compute.
const TIME: Duration = Duration::from_secs(20);
/// The most time of the first gradient of the first check. It is one of at least five, and would
/// only be a delay if the others could not follow.
const FIRST: Duration = Duration::from_secs(4);

/// What all gradients of one check share.
pub(crate) struct Host {
    begin: Instant,
    /// Whether the next gradient is the first of the first check.
    is_first: Cell<bool>,
    /// The values of parameters and of all other tensors that do not belong to the batch.
    values: RefCell<HashMap<u64, TensorData>>,
}

impl Host {
    /// Starts the time limit, of the first check or of another one.
    pub(crate) fn new(is_first: bool) -> Self {
        let is_first = Cell::new(is_first);
        Self { begin: Instant::now(), is_first, values: RefCell::default() }
    }

    /// When the gradient that is computed from now on must be there.
    fn deadline(&self) -> Instant {
        let end = self.begin + TIME;
        if self.is_first.get() { end.min(Instant::now() + FIRST) } else { end }
    }

    /// The type in which the host computes what a device computes in `dtype`.
    pub(super) fn computes_in(dtype: DType) -> DType {
        if dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }

    /// The value of a tensor. It is read from the device only once.
    fn value(&self, id: u64, read: impl FnOnce() -> Option<TensorData>) -> Option<TensorData> {
        if let Some(data) = self.values.borrow().get(&id) {
            return Some(data.clone());
        }
        let data = read()?;
        self.values.borrow_mut().insert(id, data.clone());
        Some(data)
    }
}

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Runs the chosen items in `range` on the host, with their `share` of the numbers of all.
    pub(super) fn run_on_host(
        &self,
        host: &Host,
        range: Range<usize>,
        rows: &Rows<'_>,
        share: Option<&Share>,
    ) -> Result<Weighed, Failure> {
        let weight = match self.gives {
            true => range.len() as f64,
            false => self.weight_on_device(range.clone(), rows)?,
        };
        let recorder = StepRecorder::new().fixed_draws().keep_uploads().refuse_reads();
        let model = self.learner.model();
        let recording = recorder.record::<LC::Base, _>(|| {
            let micro = self.of.splitter.range(self.of.batch, range.clone());
            let grads = train_step(self.learner, &model, micro).grads;
            let mut found = Found { grads: &grads, tensors: Vec::new() };
            model.visit(&mut found);
            (found.tensors, grads)
        });
        let recording = recording.map_err(|error| match error {
            RecordError::ReadTooLarge { .. } => {
                Failure::Impossible("the step reads values, which the host has not".to_owned())
            }
            error => error.into(),
        })?;
        let is_of_batch =
            |input: &Input| rows.tensors.iter().any(|tensor| tensor.input.id == input.id);
        may_read(recording.inputs().iter().filter(|input| !is_of_batch(input)))?;
        let given = share.map(|share| share.given(&recording)).transpose()?;
        let given = given.unwrap_or_default();
        let known: Vec<TensorIndex> = given.iter().map(|(tensor, _)| *tensor).collect();
        let mut own = self.values_for(&recording, Some(rows));
        let mut value = |tensor| match given.iter().find(|(of, _)| *of == tensor) {
            Some((_, data)) => Some(data.clone()),
            None => own(tensor),
        };
        let deadline = host.deadline();
        let (gradients, _) = recording.result();
        let wanted: Vec<TensorIndex> = gradients.iter().filter_map(|grad| grad.ok()).collect();
        let computed = compute_values(recording.trace(), &wanted, &known, &mut value, deadline);
        let computed = computed.map_err(|error| match error {
            NotComputed::Panicked(message) => Failure::Undefined(message),
            error => Failure::Impossible(error.to_string()),
        })?;
        host.is_first.set(false);
        let mut computed = computed.into_iter();
        let gradient = gradients.iter().map(|grad| match grad {
            Ok(_) => computed.next().map(|data| numbers(&data)).unwrap_or_default(),
            Err(elements) => of_zeros(*elements),
        });
        let gradient = gradient.collect();
        Ok(Weighed { gradient, weight })
    }

    /// The values of tensors that a recording began with or has uploaded, of these rows of the
    /// batch, or of the batch.
    pub(super) fn values_for<'r, T>(
        &'r self,
        recording: &'r Recording<LC::Base, T>,
        rows: Option<&'r Rows<'_>>,
    ) -> impl FnMut(TensorIndex) -> Option<TensorData> + 'r {
        let inputs: HashMap<TensorIndex, Input> =
            recording.inputs().into_iter().map(|input| (input.tensor, input)).collect();
        move |tensor| {
            let (Some(host), Some(rows), Some(input)) = (&self.host, rows, inputs.get(&tensor))
            else {
                return recording.value_of(tensor);
            };
            let Some(of_batch) = rows.tensors.iter().find(|it| it.input.id == input.id) else {
                return host.value(input.id, || recording.value_of(tensor));
            };
            let candidates = of_batch.candidates.as_ref()?;
            let rows = rows.of(of_batch);
            Some(rows.map_or_else(|| candidates.clone(), |rows| select(candidates, &rows)))
        }
    }

    /// The weight of items. It may be read from the batch; if it is the number of items, nothing is
    /// read.
    fn weight_on_device(&self, range: Range<usize>, rows: &Rows<'_>) -> Result<f64, Failure> {
        let recorder = StepRecorder::new().fixed_draws().with_rows(rows.selected());
        let recording = recorder.record::<LC::Base, _>(|| {
            self.of.splitter.weight(&self.of.splitter.range(self.of.batch, range))
        })?;
        Ok(*recording.result())
    }
}

/// Fails if the host would have to read too much.
fn may_read<'a>(inputs: impl Iterator<Item = &'a Input>) -> Result<(), Failure> {
    let size = |input: &Input| (input.shape.num_elements() * input.dtype.size()) as u64;
    let bytes = Bytes::new(inputs.map(size).sum());
    if bytes > MOST {
        let why = format!("the host would have to read {bytes}, and {MOST} is the limit");
        return Err(Failure::Impossible(why));
    }
    Ok(())
}

fn numbers(data: &TensorData) -> Vec<f64> {
    sketch(data.num_elements(), data.iter::<f64>())
}

/// Selects rows of a tensor.
fn select(data: &TensorData, rows: &[usize]) -> TensorData {
    let mut shape = data.shape.clone();
    let bytes = data.as_bytes();
    let size = bytes.len() / shape[0].max(1);
    let row = |row: &usize| &bytes[row * size..(row + 1) * size];
    let selected: Vec<u8> = rows.iter().flat_map(row).copied().collect();
    shape[0] = rows.len();
    TensorData::from_bytes_vec(selected, shape, data.dtype)
}

/// The gradients of a model's parameters by their index in the trace. For a parameter without a
/// gradient, its number of elements.
struct Found<'a> {
    grads: &'a GradientsParams,
    tensors: Vec<Result<TensorIndex, usize>>,
}

impl<B> ModuleVisitor<B> for Found<'_>
where
    B: AutodiffBackend,
    B::InnerBackend: LazyBackend,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = self.grads.get::<B::InnerBackend, D>(param.id).map(Tensor::into_primitive);
        let found = match grad {
            Some(TensorPrimitive::Float(grad)) => {
                index_in_trace(&<B::InnerBackend as LazyBackend>::lazy_float(&grad))
            }
            _ => None,
        };
        self.tensors.push(found.ok_or_else(|| param.val().shape().num_elements()));
    }
}
