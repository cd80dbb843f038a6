//! The start of a training on several ranks: they find out whether they train the same thing, and
//! take over the state of rank 0.

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Int, Tensor};
use burn::train::Learner;
use burn::train::metric::store::EventStoreClient;
use firebox_ranks::RankError;
use serde::{Deserialize, Serialize};

use super::{Team, Word};
use crate::components::LazyComponents;
use crate::error::TrainError;
use crate::reduction::Reduction;
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
    /// Whether rank 0 sends records of the optimizer and the scheduler, too.
    resumes: bool,
}

impl Begin {
    pub(crate) fn new<B: AutodiffBackend, M: AutodiffModule<B>>(
        model: &M,
        accumulation: usize,
        (epoch, epochs): (usize, usize),
        reduction: Reduction,
    ) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: shapes(model),
            accumulation,
            epochs,
            takes_means: reduction == Reduction::Mean,
            epoch,
            resumes: epoch > 1,
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

/// The state that rank 0 sends to the others. Numbers are in 64 bit, which holds any type exactly.
#[derive(Default, Serialize, Deserialize)]
struct State {
    model: Vec<u8>,
    optimizer: Option<Vec<u8>>,
    scheduler: Option<Vec<u8>>,
}

/// Gives all ranks the state of rank 0: the model, and where training resumes, the records of the
/// optimizer and the scheduler. Returns the first epoch.
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
    let state = match team.is_root() {
        true => encode(&state(learner, store, begin.resumes)?)?,
        false => Vec::new(),
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
    let state = team.ranks.broadcast(state)?;
    if !team.is_root() {
        take_over(learner, &state)?;
    }
    Ok(epoch)
}

fn state<LC: LazyComponents>(
    learner: &Learner<LC>,
    store: &EventStoreClient,
    resumes: bool,
) -> Result<State, TrainError> {
    let model = pack::<LC::Backend, _>(learner.model().into_record())?;
    if !resumes {
        return Ok(State { model, ..State::default() });
    }
    let records = records(learner, store);
    let optimizer = records.optimizer.map(pack::<LC::Backend, _>).transpose()?;
    let scheduler = records.scheduler.map(pack::<LC::Backend, _>).transpose()?;
    Ok(State { model, optimizer, scheduler })
}

fn take_over<LC: LazyComponents>(
    learner: &mut Learner<LC>,
    state: &[u8],
) -> Result<(), TrainError> {
    let damaged = |error: bincode::error::DecodeError| failed(&error.to_string());
    let (state, _): (State, usize) =
        bincode::serde::decode_from_slice(state, bincode::config::standard()).map_err(damaged)?;
    let device = learner.model().devices()[0].clone();
    learner.load_model(unpack::<LC::Backend, _>(state.model, &device)?);
    if let Some(optimizer) = state.optimizer {
        learner.load_optim(unpack::<LC::Backend, _>(optimizer, &device)?);
    }
    if let Some(scheduler) = state.scheduler {
        learner.load_scheduler(unpack::<LC::Backend, _>(scheduler, &device)?);
    }
    Ok(())
}

fn recorder() -> BinBytesRecorder<DoublePrecisionSettings> {
    BinBytesRecorder::default()
}

fn pack<B: Backend, R: Record<B>>(record: R) -> Result<Vec<u8>, TrainError> {
    Recorder::<B>::record(&recorder(), record, ()).map_err(|error| failed(&error.to_string()))
}

fn unpack<B: Backend, R: Record<B>>(bytes: Vec<u8>, device: &B::Device) -> Result<R, TrainError> {
    Recorder::<B>::load(&recorder(), bytes, device).map_err(|error| failed(&error.to_string()))
}

fn encode(state: &State) -> Result<Vec<u8>, TrainError> {
    bincode::serde::encode_to_vec(state, bincode::config::standard())
        .map_err(|error| failed(&error.to_string()))
}

fn failed(message: &str) -> TrainError {
    TrainError::Ranks(RankError::Unexpected {
        rank: 0,
        message: format!(
            "its model, optimizer or scheduler cannot be had by the others: {message}"
        ),
    })
}

/// A hash of the paths, types and shapes of a model's tensors.
fn shapes<B: Backend, M: Module<B>>(model: &M) -> [u8; 32] {
    struct Shapes(blake3::Hasher);

    impl Shapes {
        fn add(&mut self, dtype: &str, shape: &[usize]) {
            self.0.update(format!("{dtype} {shape:?};").as_bytes());
        }
    }

    impl<B: Backend> ModuleVisitor<B> for Shapes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let tensor = param.val();
            self.add(&format!("{:?}", tensor.dtype()), tensor.shape().as_slice());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            self.add("int", param.val().shape().as_slice());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            self.add("bool", param.val().shape().as_slice());
        }

        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.update(format!("{name}(").as_bytes());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.update(b")");
        }
    }

    let mut shapes = Shapes(blake3::Hasher::new());
    model.visit(&mut shapes);
    *shapes.0.finalize().as_bytes()
}
