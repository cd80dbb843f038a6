//! The start of a training on several ranks: they find out whether they train the same thing, and
//! take over the state of rank 0.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use burn::train::Learner;
use burn::train::metric::store::EventStoreClient;
use firebox_ranks::{RankError, Ranks};
use serde::{Deserialize, Serialize};

use super::{Team, Word};
use crate::components::LazyComponents;
use crate::device::panics::panic_message;
use crate::error::TrainError;
use crate::parameters::{Parameter, parameters};
use crate::reduction::LossReduction;
use crate::run::capture::records;

/// What all ranks must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// The version of firebox.
    version: String,
    /// The paths, types and shapes of the model's tensors, hashed.
    model: [u8; 32],
    /// How many loader batches one optimizer step takes.
    accumulation: usize,
    /// The last epoch.
    epochs: usize,
    /// Whether losses are means.
    takes_means: bool,
    /// The first epoch. That of rank 0 counts.
    epoch: usize,
}

impl Begin {
    pub(crate) fn new<B: AutodiffBackend, M: AutodiffModule<B>>(
        model: &M,
        accumulation: usize,
        (epoch, epochs): (usize, usize),
        reduction: LossReduction,
    ) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: shapes(model),
            accumulation,
            epochs,
            takes_means: reduction == LossReduction::Mean,
            epoch,
        }
    }

    /// How this differs from what rank 0 has.
    fn difference(&self, root: &Self) -> Option<&'static str> {
        [
            (self.version != root.version, "another version of firebox"),
            (self.model != root.model, "another model"),
            (self.accumulation != root.accumulation, "another number of accumulated batches"),
            (self.epochs != root.epochs, "another number of epochs"),
            (self.takes_means != root.takes_means, "another reduction of losses"),
        ]
        .into_iter()
        .find_map(|(differs, what)| differs.then_some(what))
    }
}

/// Gives all ranks the state of rank 0: the model, and the records of the optimizer and the
/// scheduler. Returns the first epoch.
///
/// # Errors
///
/// If a rank trains something else, or the state cannot be sent.
pub(crate) fn start<LC: LazyComponents>(
    team: &mut Team,
    learner: &mut Learner<LC>,
    store: &EventStoreClient,
    begin: Begin,
) -> Result<usize, TrainError> {
    // Before the round, in which an error of it shows.
    let records = match team.is_root() {
        true => records_of(learner, store)?,
        false => Records::default(),
    };
    let words = team.round(Word::Begin(begin), None, |_, _| {})?;
    let begins: Vec<&Begin> = words
        .iter()
        .filter_map(|word| match word {
            Word::Begin(begin) => Some(begin),
            _ => None,
        })
        .collect();
    for (rank, begin) in begins.iter().enumerate() {
        if let Some(what) = begin.difference(begins[0]) {
            let message = format!("it has {what} than rank 0");
            return Err(TrainError::Ranks(RankError::Unexpected { rank, message }));
        }
    }
    let epoch = begins[0].epoch;
    // An error of this rank alone waits until all have sent and received as often.
    let shared = share_model(team, learner);
    if let Err(error @ TrainError::Ranks(_)) = shared {
        return Err(error);
    }
    let optimizer = team.ranks.broadcast(records.optimizer)?;
    let scheduler = team.ranks.broadcast(records.scheduler)?;
    shared?;
    if !team.is_root() {
        let device = learner.model().devices()[0].clone();
        learner.load_optim(unpack::<LC::Backend, _>(optimizer, &device)?);
        learner.load_scheduler(unpack::<LC::Backend, _>(scheduler, &device)?);
    }
    // Whoever could not take it over says so here.
    team.round(Word::Begun, None, |_, _| {})?;
    Ok(epoch)
}

/// Gives all ranks the tensors of rank 0's model, with its ids of parameters.
fn share_model<LC: LazyComponents>(
    team: &Team,
    learner: &mut Learner<LC>,
) -> Result<(), TrainError> {
    let mut sharing = Sharing { ranks: &team.ranks, failed: None };
    let model = learner.model();
    match team.is_root() {
        true => model.visit(&mut sharing),
        false => learner.load_model(model.map(&mut sharing).into_record()),
    }
    sharing.failed.map_or(Ok(()), Err)
}

/// Sends tensors, or takes them over. After an error it goes on, so that all ranks send and receive
/// equally often.
struct Sharing<'a> {
    ranks: &'a Ranks,
    failed: Option<TrainError>,
}

impl Sharing<'_> {
    fn send(&mut self, id: ParamId, read: impl FnOnce() -> TensorData) {
        let read = catch_unwind(AssertUnwindSafe(read));
        let bytes = match read {
            Ok(data) => [&id.val().to_le_bytes(), data.as_bytes()].concat(),
            Err(panic) => {
                self.failed.get_or_insert(not_shared(&panic_message(&*panic)));
                Vec::new()
            }
        };
        if let Err(error) = self.ranks.broadcast(bytes) {
            self.failed = Some(error.into());
        }
    }

    /// What `make` makes of the next tensor, which has this shape and type, and the id of its
    /// parameter.
    fn take_over<T>(
        &mut self,
        (shape, dtype): (Shape, DType),
        make: impl FnOnce(TensorData) -> T,
    ) -> Option<(ParamId, T)> {
        if !self.goes_on() {
            return None;
        }
        let mut bytes = match self.ranks.broadcast(Vec::new()) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.failed = Some(error.into());
                return None;
            }
        };
        let expected = size_of::<u64>() + shape.num_elements() * dtype.size();
        if bytes.len() != expected {
            self.failed.get_or_insert(not_shared("a tensor of another size arrived"));
            return None;
        }
        let id: Vec<u8> = bytes.drain(..size_of::<u64>()).collect();
        let id = ParamId::from(u64::from_le_bytes(id.try_into().ok()?));
        let data = TensorData::from_bytes_vec(bytes, shape, dtype);
        match catch_unwind(AssertUnwindSafe(|| make(data))) {
            Ok(made) => Some((id, made)),
            Err(panic) => {
                self.failed.get_or_insert(not_shared(&panic_message(&*panic)));
                None
            }
        }
    }

    /// Whether the ranks still talk to each other.
    fn goes_on(&self) -> bool {
        !matches!(self.failed, Some(TrainError::Ranks(_)))
    }
}

impl<B: Backend> ModuleVisitor<B> for Sharing<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.goes_on() {
            self.send(param.id, || param.val().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        if self.goes_on() {
            self.send(param.id, || param.val().into_data());
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        if self.goes_on() {
            self.send(param.id, || param.val().into_data());
        }
    }
}

impl<B: Backend> ModuleMapper<B> for Sharing<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, old, mapper) = param.consume();
        let (dtype, device) = (old.dtype(), old.device());
        let make = |data| {
            let tensor = Tensor::from_data(data, (&device, dtype));
            tensor.set_require_grad(old.is_require_grad())
        };
        let made = self.take_over((old.shape(), dtype), make);
        let (id, tensor) = made.unwrap_or((id, old));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, old, mapper) = param.consume();
        let (dtype, device) = (old.dtype(), old.device());
        let make = |data| Tensor::from_data(data, (&device, dtype));
        let made = self.take_over((old.shape(), dtype), make);
        let (id, tensor) = made.unwrap_or((id, old));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, old, mapper) = param.consume();
        let (dtype, device) = (old.dtype(), old.device());
        let make = |data| Tensor::from_data(data, &device);
        let made = self.take_over((old.shape(), dtype), make);
        let (id, tensor) = made.unwrap_or((id, old));
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The records of rank 0's optimizer and scheduler. Numbers are in 64 bit, which holds others
/// exactly.
#[derive(Default)]
struct Records {
    optimizer: Vec<u8>,
    scheduler: Vec<u8>,
}

fn records_of<LC: LazyComponents>(
    learner: &Learner<LC>,
    store: &EventStoreClient,
) -> Result<Records, TrainError> {
    let records = records(learner, store);
    let missing = || not_shared("the records of rank 0 cannot be had");
    Ok(Records {
        optimizer: pack::<LC::Backend, _>(records.optimizer.ok_or_else(missing)?)?,
        scheduler: pack::<LC::Backend, _>(records.scheduler.ok_or_else(missing)?)?,
    })
}

fn recorder() -> BinBytesRecorder<DoublePrecisionSettings> {
    BinBytesRecorder::default()
}

fn pack<B: Backend, R: Record<B>>(record: R) -> Result<Vec<u8>, TrainError> {
    Recorder::<B>::record(&recorder(), record, ()).map_err(|error| not_shared(&error.to_string()))
}

fn unpack<B: Backend, R: Record<B>>(bytes: Vec<u8>, device: &B::Device) -> Result<R, TrainError> {
    let loaded = Recorder::<B>::load(&recorder(), bytes, device);
    loaded.map_err(|error| not_shared(&error.to_string()))
}

fn not_shared(message: &str) -> TrainError {
    TrainError::NotShared { message: message.to_owned() }
}

/// A hash of the paths, types and shapes of a model's tensors.
fn shapes<B: Backend, M: Module<B>>(model: &M) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for Parameter { path, shape, dtype, .. } in parameters(model) {
        hasher.update(format!("{path} {dtype:?} {shape:?};").as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// A hash of a model's parameters, bit for bit. Running statistics do not count: they are each
/// rank's own.
pub(crate) fn parameter_hash<B: Backend, M: Module<B>>(model: &M) -> [u8; 32] {
    struct Bits(blake3::Hasher);

    impl<B: Backend> ModuleVisitor<B> for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if param.is_require_grad() {
                self.0.update(param.val().into_data().as_bytes());
            }
        }
    }

    let mut bits = Bits(blake3::Hasher::new());
    model.visit(&mut bits);
    *bits.0.finalize().as_bytes()
}
