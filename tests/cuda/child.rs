//! The work of a child process: one training as a user writes it, and a line that says how it
//! ended.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::cuda::CudaDevice;
use burn::backend::{Autodiff, Cuda, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, LearningRate, SimpleOptimizer};
use burn::prelude::*;
use burn::record::CompactRecorder;
use burn::train::metric::{Adaptor, ItemLazy, LossInput, LossMetric};
use burn::train::renderer::TrainingProgress;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::memory::PersistentMemory;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use firebox::train::LastState;
use firebox::{
    Budget, Bytes, DeviceMemory, FitError, Lazy, Learner, Park, RecomputePolicy, TrainError,
};
use firebox_blank::Books;
use firebox_pool::Control;
use firebox_testing::bench::renderer::OnOutput;
use firebox_testing::lengths;
use firebox_testing::zoo::{self, Numbered, Zoo};
use serde::{Deserialize, Serialize};

use crate::{half, own_loop};

type B<C> = Autodiff<Lazy<C>>;
type Valid<C> = Lazy<C>;

/// Environment variable that holds a child's job.
const VARIABLE: &str = "FIREBOX_JOB";
/// Width of the model that trains on sequences of many lengths.
const LENGTHS_WIDTH: usize = 64;
/// Environment variable with a file for how the job ended, where ranks share their output.
pub const ENDED: &str = "FIREBOX_ENDED";
/// Environment variable that, if set, lets burn's backend begin on the device first.
pub const BESIDE: &str = "FIREBOX_BESIDE";
const MARK: &str = "ended:";
/// Size of each tensor that a program keeps on the device.
const PART: Bytes = Bytes::mib(4);

/// What to do with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Trains it.
    Train,
    /// Finds the largest batch planned to run unsplit, without loader threads. Trains nothing.
    FindLargest,
}

/// The pools that hold the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pools {
    Burns,
    Ours,
}

impl Pools {
    /// Suffix for the names of tests on firebox's pool.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Burns => "",
            Self::Ours => "_on_our_pool",
        }
    }
}

/// The job of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub pools: Pools,
    pub task: Task,
    pub model: String,
    pub items: usize,
    /// Bytes that training may use. `None` means what is free.
    pub memory: Option<Bytes>,
    pub micro_batch: Option<usize>,
    /// Whether tensors may be recomputed.
    pub recompute: bool,
    /// Whether the optimizer's state is in host memory between steps.
    pub parks: bool,
    pub epochs: usize,
    /// Batches per epoch. If `uneven`, one more item makes the last one a different size.
    pub batches: usize,
    pub uneven: bool,
    pub workers: usize,
    pub validates: bool,
    /// Folder for checkpoints. `None` writes none.
    pub folder: Option<PathBuf>,
    /// Epoch whose checkpoint training resumes from.
    pub goes_on_from: Option<usize>,
    /// Whether CubeCL is configured to make pages of exact size.
    pub exact_pages: bool,
    /// Bytes of the tensors that the program keeps on the device.
    pub keeps: Bytes,
    /// Folder for compiled kernels and the tuner's choices.
    pub kernels: PathBuf,
    /// Whether it trains together with the processes that `mpirun` has started.
    pub ranks: bool,
    /// Number of batches between two reports of what the driver holds.
    pub samples: Option<usize>,
}

impl Job {
    /// Two epochs of two batches, with two workers and nothing else.
    pub fn new(model: &str, items: usize, kernels: PathBuf) -> Self {
        Self {
            pools: Pools::Burns,
            task: Task::Train,
            model: model.to_owned(),
            items,
            memory: None,
            micro_batch: None,
            recompute: false,
            parks: false,
            epochs: 2,
            batches: 2,
            uneven: false,
            workers: 2,
            validates: false,
            folder: None,
            goes_on_from: None,
            exact_pages: true,
            keeps: Bytes::ZERO,
            kernels,
            ranks: false,
            samples: None,
        }
    }

    /// The job of this process, if it is a child.
    pub fn of_this_process() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        Some(serde_json::from_str(&text).expect("the test writes jobs"))
    }

    /// The environment variable that hands the job to a child.
    pub fn variable(&self) -> (&'static str, String) {
        (VARIABLE, serde_json::to_string(self).expect("jobs are plain data"))
    }

    /// Does the job and prints how it ended.
    pub fn run(&self) -> ExitCode {
        let mut config = CubeClRuntimeConfig::from_current_dir();
        config.compilation.cache = Some(CacheConfig::File(self.kernels.clone()));
        config.autotune.cache = CacheConfig::File(self.kernels.clone());
        if !self.exact_pages {
            config.memory.persistent_memory = PersistentMemory::Disabled;
        }
        CubeClRuntimeConfig::set(config);
        SAMPLES.store(self.samples.unwrap_or(usize::MAX), Relaxed);
        let ended = match self.pools {
            Pools::Burns => self.perform_on::<Cuda>(),
            Pools::Ours => {
                if std::env::var_os(BESIDE).is_some() {
                    let device = Default::default();
                    drop(Tensor::<Cuda, 1>::ones([8], &device) + 1.0);
                }
                let mut ended = self.perform_on::<firebox::Cuda>();
                // A device that failed cannot be asked.
                ended.most_in_use = ended.error.is_none().then(|| {
                    let memory = Control::<CudaRuntime>::of(&Default::default()).memory();
                    Bytes::new(memory.most_in_use)
                });
                ended
            }
        };
        if let Ok(path) = std::env::var(ENDED) {
            let text = serde_json::to_string(&ended).expect("it is plain data");
            std::fs::write(path, text).expect("the test says where");
        }
        println!("{MARK} {}", serde_json::to_string(&ended).expect("it is plain data"));
        if ended.error.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn perform_on<C: Base>(&self) -> Ended {
        match self.model.as_str() {
            "mlp" => self.perform::<C, zoo::Mlp<B<C>>>(),
            "cnn" => self.perform::<C, zoo::Cnn<B<C>>>(),
            "resnet" => self.perform::<C, zoo::ResNet<B<C>>>(),
            "unet" => self.perform::<C, zoo::UNet<B<C>>>(),
            "encoder" => self.perform::<C, zoo::Encoder<B<C>>>(),
            "gpt" => self.perform::<C, zoo::Gpt<B<C>>>(),
            "lstm" => self.perform::<C, zoo::Recurrent<B<C>>>(),
            "wide" => self.perform::<C, zoo::Wide<B<C>>>(),
            "reader" => self.perform::<C, zoo::Reader<B<C>>>(),
            "gpt-in-16-bit" => half::train::<C>(self),
            "lengths" => self.train_lengths::<C>(),
            "own-loop" => own_loop::train::<C>(self).unwrap_or_else(|error| Ended {
                error: Some(("own loop".to_owned(), error.to_string())),
                ..Ended::default()
            }),
            other => panic!("there is no model `{other}`"),
        }
    }

    fn perform<C: Base, M: Subject<C>>(&self) -> Ended {
        match self.task {
            Task::Train => self.train::<C, M>(),
            Task::FindLargest => self.find_largest::<C, M>(),
        }
    }

    /// Doubles the batch while it is planned whole, then narrows the range by halving it.
    fn find_largest<C: Base, M: Subject<C>>(&self) -> Ended {
        let device = Default::default();
        let model = M::new(&device);
        let budget = self.memory.expect("a budget that sizes are found for");
        let fits = |items: usize| {
            let batch = M::batch(&(0..items).collect::<Vec<_>>(), &device);
            let builder = Learner::builder().auto_batch().memory(budget).micro_batch(items);
            let learner = builder.recompute(RecomputePolicy::never()).quiet();
            match learner.build(model.clone(), AdamConfig::new().init(), 1e-3).plan(&batch) {
                Ok(_) => true,
                Err(TrainError::Plan { .. }) => false,
                Err(error) => panic!("{items} items cannot be planned: {error}"),
            }
        };
        let mut fitting = M::ITEMS / 16;
        while fits(2 * fitting) {
            fitting *= 2;
        }
        let mut above = 2 * fitting;
        while above - fitting > 1 + fitting / 400 {
            let middle = fitting + (above - fitting) / 2;
            *(if fits(middle) { &mut fitting } else { &mut above }) = middle;
        }
        Ended { largest: Some(fitting), ..Ended::default() }
    }

    /// Trains on sequences of `batches` lengths, in a mixed order.
    fn train_lengths<C: Base>(&self) -> Ended {
        let lengths: Vec<usize> = (0..self.epochs)
            .flat_map(|epoch| (0..self.batches).map(move |at| (at * 17 + epoch * 7) % self.batches))
            .map(|at| 100 + 23 * at)
            .collect();
        let budget = self.memory.expect("a budget");
        let trained = lengths::trained::<B<C>>(
            LENGTHS_WIDTH,
            &lengths,
            budget,
            OnOutput(sample),
            &Default::default(),
        );
        Ended {
            predicted: Some(trained.predicted),
            measured: Some(trained.measured),
            plan: Some(format!("{} plans, {:?}", trained.steps.len(), trained.steps)),
            samples: samples(),
            ..Ended::default()
        }
    }

    fn train<C: Base, M: Subject<C>>(&self) -> Ended {
        let device = Default::default();
        // Several tensors, because a single large one would open a page of a quarter of the card.
        let kept = self.keeps.get() / PART.get();
        let numbers = [PART.get() as usize / size_of::<f32>()];
        let kept: Vec<_> = (0..kept).map(|_| Tensor::<C, 1>::zeros(numbers, &device)).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let artifacts = self.folder.clone().unwrap_or_else(|| folder.path().to_owned());
        let rest = if self.uneven { self.items / 2 + 1 } else { 0 };
        let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
        let train = DataLoaderBuilder::<B<C>, _, _>::new(Numbered::<M>::default())
            .batch_size(self.items)
            .num_workers(self.workers)
            .build(numbers(self.batches * self.items + rest));
        let valid = DataLoaderBuilder::<Valid<C>, _, _>::new(Numbered::<M::Valid>::default())
            .batch_size(self.items)
            .num_workers(self.workers)
            .build(numbers(if self.validates { self.items } else { 0 }));
        let mut training = SupervisedTraining::new(artifacts, train, valid)
            .metric_train_numeric(LossMetric::new())
            .with_application_logger(None)
            .renderer(OnOutput(sample))
            .num_epochs(self.epochs);
        if self.folder.is_some() {
            training = training.with_file_checkpointer(CompactRecorder::new());
        }
        if let Some(epoch) = self.goes_on_from {
            training = training.checkpoint(epoch);
        }
        let budget = self.memory.map_or(Budget::free(), Budget::Bytes);
        let mut builder = Learner::builder().auto_batch().memory(budget).quiet();
        if !self.recompute {
            builder = builder.recompute(RecomputePolicy::never());
        }
        if let Some(items) = self.micro_batch {
            builder = builder.micro_batch(items);
        }
        if self.parks {
            builder = builder.park_optimizer(Park::Host);
        }
        #[cfg(feature = "mpi")]
        if self.ranks {
            builder = builder.ranks(firebox::Ranks::mpi().expect("MPI starts"));
        }
        let optim = OptimizerAdaptor::from(Counted(AdamConfig::new().build()));
        let learner = builder.build(M::new(&device), optim, 1e-3);
        let ended = match learner.fit(training) {
            Ok(fitted) => Ended {
                predicted: fitted.memory.map(|memory| memory.predicted),
                measured: fitted.memory.and_then(|memory| memory.measured),
                again: fitted
                    .report
                    .as_ref()
                    .and_then(|report| report.recomputed)
                    .map(|r| r.repeats),
                plan: fitted.report.map(|report| report.plan.to_string()),
                ..Ended::default()
            },
            Err(error) => Ended::failed(error),
        };
        drop(kept);
        Ended { steps: STEPS.load(Relaxed), samples: samples(), ..ended }
    }
}

/// How a child ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ended {
    /// Kind and text of the error, if training ended with one.
    pub error: Option<(String, String)>,
    pub predicted: Option<Bytes>,
    pub measured: Option<Bytes>,
    /// The most bytes that buffers took at once, if they lay on firebox's pool.
    pub most_in_use: Option<Bytes>,
    pub plan: Option<String>,
    /// How many operations the plan repeats, if it computes tensors again.
    pub again: Option<usize>,
    /// The largest batch planned to run unsplit, if asked for.
    pub largest: Option<usize>,
    /// Number of optimizer steps of a single parameter.
    pub steps: usize,
    /// Epoch and iteration of the last whole state, if the error has one.
    pub state: Option<(usize, usize)>,
    /// Bytes that the driver has given out and pinned, over time.
    pub samples: Vec<(u64, u64)>,
}

impl Ended {
    pub fn failed<M, R, S>(error: FitError<M, R, S>) -> Self {
        let words = error.to_string();
        let (cause, state) = error.into_parts();
        let kind = match cause {
            TrainError::DeviceFailed(_) => "DeviceFailed",
            TrainError::NotReady { .. } => "NotReady",
            TrainError::Nvidia(_) => "Nvidia",
            TrainError::Plan { .. } => "Plan",
            TrainError::NoPlace { .. } => "NoPlace",
            TrainError::NoExactPages => "NoExactPages",
            _ => "other",
        };
        let state = state.map(|LastState { epoch, iteration, .. }| (epoch, iteration));
        Self { error: Some((kind.to_owned(), words)), state, ..Self::default() }
    }

    /// Parses the line that a child printed.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.split(MARK).nth(1))?;
        serde_json::from_str(line).ok()
    }
}

/// A backend on the device of these tests.
pub trait Base: DeviceMemory + Backend<Device = CudaDevice> {}

impl<C: DeviceMemory + Backend<Device = CudaDevice>> Base for C {}

/// A model that can be trained here.
trait Subject<C: Base>:
    Zoo<B<C>>
    + TrainStep<Input = <Self as Zoo<B<C>>>::Batch, Output: HasLoss>
    + AutodiffModule<B<C>, InnerModule = Self::Valid>
    + Display
    + 'static
{
    type Valid: Zoo<Valid<C>>
        + InferenceStep<Input = <Self::Valid as Zoo<Valid<C>>>::Batch, Output: HasLoss>;
}

/// An output that a loss can be read from.
trait HasLoss: ItemLazy<ItemSync: Adaptor<LossInput<Flex>>> {}

impl<T: ItemLazy<ItemSync: Adaptor<LossInput<Flex>>>> HasLoss for T {}

macro_rules! subjects {
    ($($model:ident)*) => {
        $(impl<C: Base> Subject<C> for zoo::$model<B<C>> {
            type Valid = zoo::$model<Valid<C>>;
        })*
    };
}

subjects!(Mlp Cnn ResNet UNet Encoder Gpt Recurrent Reader Wide);

static STEPS: AtomicUsize = AtomicUsize::new(0);

/// Adam that counts its steps.
#[derive(Clone)]
struct Counted(Adam);

impl<I: Backend> SimpleOptimizer<I> for Counted {
    type State<const D: usize> = <Adam as SimpleOptimizer<I>>::State<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<I, D>,
        grad: Tensor<I, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<I, D>, Option<Self::State<D>>) {
        // A rehearsed step is recorded but never runs.
        if !firebox::is_recording() {
            STEPS.fetch_add(1, Relaxed);
        }
        self.0.step(lr, tensor, grad, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device<I>) -> Self::State<D> {
        Adam::to_device(state, device)
    }
}

static SAMPLES: AtomicUsize = AtomicUsize::new(usize::MAX);
static SEEN: AtomicUsize = AtomicUsize::new(0);
static TAKEN: std::sync::Mutex<Vec<(u64, u64)>> = std::sync::Mutex::new(Vec::new());

fn samples() -> Vec<(u64, u64)> {
    TAKEN.lock().expect("no renderer panics").clone()
}

/// Samples the driver's books.
fn sample(_: &TrainingProgress) {
    let seen = SEEN.fetch_add(1, Relaxed);
    if seen.is_multiple_of(SAMPLES.load(Relaxed))
        && let Some(books) = Books::own()
    {
        let sample = (books.device(0).held(), books.pinned());
        TAKEN.lock().expect("no renderer panics").push(sample);
    }
}
